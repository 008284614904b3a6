"""The ZeRO stage and micro-batch of a first recipe, by the plan for some GPUs."""

from __future__ import annotations

from dataclasses import replace

import yaml

from ds_distill.errors import UserError
from ds_distill.init.recipe import Planned
from ds_distill.planning.gpus import GIB, find_device
from ds_distill.planning.plan import JobPlan, Placement
from ds_distill.planning.planner import Planner
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import validate


def planned(recipe: str, gpu: str | None, gpus: int) -> Planned:
    """The lowest ZeRO stage from 1 on at which each training of a recipe fits, with the largest
    micro-batch that divides a GPU's share of a step.

    recipe: YAML. gpu: as `plan` takes it.

    Raises UserError where nothing fits.
    """
    device = find_device(gpu, gpus)
    dtype = "auto" if device.has_bf16 or not device.is_gpu else "fp16"
    given = {"name": "init", "deepspeed": f"zero1_{dtype}", **yaml.safe_load(recipe)}
    jobs = Planner(validate(Recipe, given), device, gpus).plan().jobs
    share = max(job.micro_batch for job in jobs)
    for stage in (1, 2, 3):
        found = [_at(job, stage) for job in jobs]
        most = min(one.largest_micro_batch for one in found)
        if most == 0:
            continue
        micro = max(number for number in range(1, most + 1) if share % number == 0)
        whole = max(one.total for one in found) / GIB
        why = f"by plan for {gpus} {device.name}: {whole:.1f} of {device.usable / GIB:.1f} GiB"
        if micro < share:
            why = f"by plan for {gpus} {device.name}: a GPU's {share} examples do not fit at once"
        return Planned(f"zero{stage}_{dtype}", micro if micro < share else None, why)
    raise UserError(
        f"--gpu {device.name} --gpus {gpus}: nothing fits, at no ZeRO stage. Name larger GPUs, or "
        "more of them."
    )


def _at(job: JobPlan, stage: int) -> Placement:
    """The recipe's own choice, at another stage."""
    wanted = replace(job.chosen.choice, stage=stage)
    return next(one for one in job.others if one.choice == wanted)
