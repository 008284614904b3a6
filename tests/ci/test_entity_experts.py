"""Experts of different entity types, each trained on data that annotate its own type alone, and one
student of all of them."""

import random
import shutil

import pytest
from kinds import write
from runs import losses, results, run_here
from toys import TOY_FILLERS, TOY_WORDS, break_word, recipe_of
from transformers import AutoModelForTokenClassification

from ds_distill.errors import UserError

KINDS = ("animal", "food")


def write_data(folder):
    """By kind a folder whose sentences have entities of both, and tags of that kind alone."""
    draw = random.Random(0)
    for kind in KINDS:
        for split, size in {"train": 200, "test": 80}.items():
            rows = []
            for _ in range(size):
                words = draw.choices(TOY_FILLERS.split(), k=3)
                tags = ["O"] * 3
                for other in draw.sample(KINDS, k=draw.randint(0, 2)):
                    words += [draw.choice(TOY_WORDS[other].split()), "and"]
                    tags += [f"B-{kind}" if other == kind else "O", "O"]
                rows.append({"tokens": words, "tags": tags})
            write(folder / kind / f"{split}.jsonl", rows)


@pytest.fixture
def settings(tmp_path, tiny_models):
    write_data(tmp_path / "data")
    return recipe_of("experts", data=tmp_path / "data", toy=tiny_models["toy"])


def test_one_student_learns_the_types_of_all_experts(settings, in_this_process, tmp_path):
    """An expert's O is no evidence against what it does not know: the student finds each type, in
    sentences that hold both and were tagged with one."""
    run = run_here(settings, tmp_path)
    records = [r for r in results(run)["phases"] if r["kind"] == "evaluate"]
    assert [record["task"] for record in records] == list(KINDS)
    for kind, record in zip(KINDS, records, strict=True):
        models = record["models"]
        assert set(models) == {kind, "cached", "live"}, "the other expert knows nothing of it"
        assert set(models["cached"]["per_class"]) == {kind}
        assert models[kind]["entity_f1"] > 0.9
        assert models["cached"]["entity_f1"] > 0.9, "also where a word of the other type stands"
    cached, live = losses(run, "cached"), losses(run, "live")
    assert live == pytest.approx(cached, rel=1e-4) and len(live) > 10
    page, verdict = (run / "report.html").read_text(), results(run)["verdict"]
    assert "Entity F1 on animal, test" in page and "Entity F1 on food, test" in page
    assert "on animal, entity F1" in verdict and "on food, entity F1" in verdict


def test_an_expert_whose_numbers_are_not_finite_is_named_with_the_words(
    settings, in_this_process, tmp_path
):
    names = {0: "O", 1: "B-animal"}
    labels = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    expert = AutoModelForTokenClassification.from_pretrained(
        settings["teachers"]["animal"]["model"], **labels
    )
    shutil.copytree(settings["teachers"]["animal"]["model"], tmp_path / "expert")
    expert.save_pretrained(tmp_path / "expert")
    break_word(tmp_path / "expert", AutoModelForTokenClassification, "tiger")
    settings["task"] = settings.pop("tasks")["animal"]
    settings["teachers"] = {"animal": {"model": str(tmp_path / "expert")}}
    settings["phases"] = [{"evaluate": {"split": "test"}}]
    with pytest.raises(UserError, match=r"not finite .*test\.jsonl:\d+.*tiger"):
        run_here(settings, tmp_path)
