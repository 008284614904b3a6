"""Run by each rank of a launch: a step of engines of all stages, and what DeepSpeed's communication
log has of it. Rank 0 writes that to a JSON file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
from small_engines import batch_of, engine_of

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.world import World
from ds_distill.recipe.training import Training

world = World.start()
ROWS, TEACHERS = 2, ("one", "two")


def logged(folder: Path, case: dict[str, Any]) -> dict[str, dict[int, int]]:
    """How often a window of steps sent each size, by collective."""
    stage, live, micro_steps = case["stage"], case["live"], case["micro_steps"]
    ahead = case["ahead"]
    training = Training(batch_size=ROWS * world.size * micro_steps, micro_batch_size=ROWS)
    config = deepspeed_config(f"zero{stage}_{case['precision']}", training, world.size)
    teachers = TEACHERS if live else ()
    options = {"student_resident": case["resident"], "together": ahead * micro_steps}
    engine = engine_of(world, folder, config, teachers, **options)
    batches = [[batch_of(ROWS, TEACHERS, live)] * micro_steps] * ahead

    def window() -> None:
        for step in engine.read_ahead(batches):
            engine.train_step(step)

    for _ in range(2):  # DeepSpeed's prefetch follows what it has seen
        window()
    log = dist.comms_logger
    log.reset_data()
    dist.configure(enabled=True, prof_all=True)
    window()
    dist.configure(enabled=False)
    sent = {
        name: {size: times for size, (times, *_) in sizes.items()}
        for name, sizes in log.get_raw_data().items()
    }
    engine.close()
    return sent


def main(folder: Path) -> None:
    cases = json.loads((folder / "cases.json").read_text())
    results = [logged(folder, case) for case in cases]
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    world.barrier()
    world.stop()


main(Path(sys.argv[1]))
