"""A step of our engine with two live teachers against one of TextBrewer.

    pip install textbrewer
    python tools/benchmarks/textbrewer_speed.py --output docs/results/textbrewer-speed.json

The models, weights and batches are those of `distillation_step --size small`. The two train in one
process and take turns step by step, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from distillation_paths import DISTINCT, Setting, live, live_batch, make_batch, prepare
from distillation_step import WARM_UP
from training_speed import ratio

from ds_distill.engine.precision import resolved_name
from ds_distill.engine.world import World
from ds_distill.files import write_json
from ds_distill.run.inputs import describe_environment


def measure(setting: Setting, world: World) -> dict[str, Any]:
    """Both on `setting.steps` steps, after the warm-up."""
    from textbrewer_rival import text_brewer  # may not be installed

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(setting, folder, world)
        run_ours = live(setting, folder, world)
        batches = itertools.cycle([live_batch(setting, one, world) for one in range(DISTINCT)])
        ours = []
        run_theirs = text_brewer(
            setting, folder, world, between=lambda: ours.append(run_ours([next(batches)]))
        )
        count = WARM_UP + setting.steps
        theirs = run_theirs([make_batch(setting, one % DISTINCT) for one in range(count)])
    seconds = {"ours": [step.seconds[0] for step in ours], "textbrewer": theirs.seconds}
    seconds = {name: each[WARM_UP:] for name, each in seconds.items()}
    return {
        "deepspeed": resolved_name(setting.config),
        "batch": setting.batch,
        "length": setting.length,
        "steps": setting.steps,
        "first_loss": {"ours": ours[0].first_loss, "textbrewer": theirs.first_loss},
        "seconds_per_step": {name: sum(each) / len(each) for name, each in seconds.items()},
        "ours_of_textbrewer": ratio(seconds["ours"], seconds["textbrewer"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--configs", nargs="+", default=["zero0_fp32", "zero0_auto"])
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    given = parser.parse_args()
    world = World.start()
    environment = describe_environment(1, str(world.device))
    environment["packages"]["textbrewer"] = version("textbrewer")
    rows = []
    for config in given.configs:
        for batch, length in ((32, 64), (16, 16)):
            setting = Setting("classification", "small", batch, length, given.steps, config)
            rows.append(measure(setting, world))
            print(rows[-1], flush=True)
    measured = {"environment": environment, "threads": torch.get_num_threads(), "settings": rows}
    world.stop()
    if given.output:
        write_json(given.output, measured)


if __name__ == "__main__":
    main()
