"""What terms need of the models and of a cache: `check` finds it out. The cases are in
term_needs.yaml."""

from pathlib import Path

import pytest
import yaml
from runs import loaded
from toys import make_tiny_bert, toy_vocabulary

from ds_distill.check.models import Models
from ds_distill.check.phases import phase_mistakes
from ds_distill.errors import UserError

READ = yaml.safe_load(Path(__file__).with_name("term_needs.yaml").read_text(encoding="utf-8"))


def mistakes(case, folder):
    sizes = {"t": {}, **case.get("models", {}), "student": {}}
    models = {
        name: {"model": str(make_tiny_bert(folder / name, toy_vocabulary(), **of))}
        for name, of in sizes.items()
    }
    distil = {"distil": {**case.get("distil", {}), "losses": case["losses"]}}
    content = {"task": case.get("task", READ["tasks"]["texts"]), "student": models.pop("student")}
    phases = [*([case["before"]] if "before" in case else []), distil]
    try:
        recipe = loaded({**content, "teachers": models, "phases": phases}, folder)
    except UserError as refusal:
        return [*map(str, refusal.mistakes)]
    found = [*Models(recipe, on_gpu=False).mistakes(), *phase_mistakes(recipe)]
    return [*map(str, found)]


@pytest.mark.parametrize("name", READ["cases"])
def test_what_a_term_lacks_is_told(name, tmp_path):
    case = READ["cases"][name]
    found, says = mistakes(case, tmp_path), case.get("says", [])
    assert len(found) == len(says), found
    for parts in says:
        assert [one for one in found if all(part in one for part in parts)], (parts, found)
