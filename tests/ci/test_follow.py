"""Models that an earlier phase made teach a later one, live and from a cache: the four phases of
Adapt-and-Distill, on the toy task."""

import pytest
from runs import evaluation, interrupted, loaded, losses, run_here
from toys import recipe_of

from ds_distill import run_recipe
from ds_distill.check.check import check_all
from ds_distill.files import read_json
from ds_distill.planning.gpus import GPUS
from ds_distill.planning.planner import Planner
from ds_distill.run.run import Run


@pytest.fixture(scope="module")
def followed(materials, tmp_path_factory):
    """The recipe with a teacher that is a masked-LM already."""
    run = run_here(recipe_of("bert", materials=materials), tmp_path_factory.mktemp("teacher"))
    return recipe_of("followed", materials=materials, bert=run / "models" / "00-bert")


@pytest.fixture(scope="module")
def folder(followed, tmp_path_factory):
    """Of a run that was stopped in the phase that follows, and resumed."""
    root = tmp_path_factory.mktemp("follow")
    recipe = loaded(followed, root)
    check_all(recipe)

    def follows(run, reference, **options):
        return reference.name == "domain" and not options.get("new_head")

    with interrupted(Run, "model", follows):
        run_recipe(recipe, root / "run")
    run_recipe(recipe, root / "run", resume=True)
    return root / "run"


def test_a_followed_model_teaches_as_if_the_recipe_named_its_files(followed, folder, tmp_path):
    models, general = folder / "models", followed["phases"][0]["distil"]
    plain = {
        **followed,
        "teachers": {"domain": {"model": str(models / "01-domain")}},
        "student": {"model": str(models / "02-adapted")},
        "phases": [{"distil": {"save_as": "live", "losses": general["losses"]}}],
    }
    run_recipe(loaded(plain, tmp_path), tmp_path / "run")
    assert losses(folder, "live") == losses(tmp_path / "run", "live")
    weights = "models/{}-live/model.safetensors"
    made = tmp_path / "run" / weights.format("00")
    assert made.read_bytes() == (folder / weights.format("03")).read_bytes()


def test_a_cache_is_of_the_model_that_is_followed_and_each_has_its_role(folder):
    manifest = read_json(folder / "cache" / "04-cache" / "manifest.json")
    assert list(manifest["teachers"]) == ["domain"]
    assert losses(folder, "from-cache") == pytest.approx(losses(folder, "live"), rel=1e-3)
    roles = {name: model["role"] for name, model in evaluation(folder)["models"].items()}
    # `adapted` is a student: a teacher had taught what it goes on from.
    students = dict.fromkeys(("small", "adapted", "live", "from-cache"), "student")
    assert roles == {"bert": "teacher", "domain": "teacher", **students}
    card = (folder / "student" / "README.md").read_text()
    assert "Trained on the way, and teachers then: " in card


def test_a_plan_counts_the_models_that_are_followed(followed, tmp_path):
    recipe = loaded(followed, tmp_path)
    planner = Planner(recipe, GPUS["l4"], 1)
    assert planner.model("domain", 3) is planner.model("bert", 3)
    jobs = {job.phase: job for job in planner.plan().jobs}
    general, live = (jobs[name].chosen.states for name in ("general", "live"))
    assert list(live.teachers) == ["domain"] and list(general.teachers) == ["bert"]
    assert live.teachers["domain"] == general.teachers["bert"]
