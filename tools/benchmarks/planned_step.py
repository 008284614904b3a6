"""What `ds-distill plan` says of a distillation step, for benchmarks that measure one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ds_distill.planning.gpus import Device
from ds_distill.planning.models import shipped_configs
from ds_distill.planning.placements import Placement
from ds_distill.planning.planner import Planner
from ds_distill.recipe import load_recipe


def planned_steps(
    teachers: Iterable[str],
    student: str,
    classes: int | None,
    length: int,
    micro_batch: int,
    micro_steps: int,
    ranks: int,
    device: Device,
    config: str,
) -> dict[tuple[int, str], Placement]:
    """By ZeRO stage and whether teachers are `live` or `cached`, without activation checkpointing.

    teachers, student: names of the hub whose configurations come with ds_distill.
    classes: None for a masked-LM, of which 15% of the tokens are rows.
    micro_batch: examples of `length` tokens per rank. config: a DeepSpeed config's name.
    """
    configs = shipped_configs()
    batch = {"batch_size": ranks * micro_batch * micro_steps, "micro_batch_size": micro_batch}
    task = {"type": "masked-lm", "masking": {"rate": 0.15, "variants": 2}}
    if classes is not None:
        task = {"labels": [str(label) for label in range(classes)]}
    data = {"path": "/not/there"}  # no name of the hub, which is not asked then
    recipe: dict[str, Any] = {
        "task": {**task, "data": data, "max_length": length},
        "teachers": {
            f"teacher{number}": {"model": str(configs[name])}
            for number, name in enumerate(teachers)
        },
        "student": {"model": str(configs[student])},
        "training": {**batch, "epochs": 1},
        "phases": [{"distil": {"teachers": "live", "losses": {"kl": {"temperature": 2.0}}}}],
        "deepspeed": config,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.yaml"
        file.write_text(yaml.safe_dump(recipe))
        [job] = Planner(load_recipe(file), device, ranks).plan().jobs
    return {
        (one.choice.stage, str(one.choice.teachers)): one
        for one in job.others
        if not one.choice.checkpointing
    }
