"""Wrong input: one paragraph that names the place, the value, the rule and the fix; exit code 2;
nothing left behind. The mistakes are in bad_input.yaml."""

import json

import pytest
from disks import grow
from safetensors.torch import load_file
from unit.test_bad_input import check_paragraph, desk, own_process_group  # noqa: F401


# At these sizes the disk is full while the data are written, and in a checkpoint.
@pytest.mark.parametrize("kib", [60, 300])
def test_no_space_left_is_reported_and_can_be_fixed(kib, desk, ds_distill, small_disk):
    place = small_disk(kib)
    arguments = ["run", "toy.yaml", "training.epochs=2", "--folder", place / "run"]
    done = ds_distill(*arguments, cwd=desk.root, code=2)
    check_paragraph(done.stderr, ["no space left", str(place / "run"), "--resume"])
    half = [str(p) for p in place.rglob("*") if p.suffix == ".tmp" or p.name.endswith(".old")]
    assert half == []
    for weights in place.rglob("*.safetensors"):
        load_file(weights)
    for record in place.rglob("*.json"):
        json.loads(record.read_text(encoding="utf-8"))
    grow(place, 20_000)
    ds_distill(*arguments, "--resume", cwd=desk.root)
    assert (place / "run" / "student" / "model.safetensors").is_file()
