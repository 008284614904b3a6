"""Memory ran out: which part of the run it was, and what to change."""

from __future__ import annotations

from ds_distill.data.schedule import PADDED_BATCH
from ds_distill.engine.config import batch_shape, zero_stage
from ds_distill.errors import UserError, first_line
from ds_distill.process.activity import activity
from ds_distill.recipe.phases import Cache, Distil, Evaluate, PhaseSettings, TrainingPhase
from ds_distill.run.run import Run


def memory_refusal(error: BaseException, phase: PhaseSettings, name: str, run: Run) -> UserError:
    """The error for the user, raised where memory ran out in a phase."""
    now = activity()
    step = f"at step {now.step}, " if now.step is not None else ""
    return UserError(
        f"phases.{name}: memory ran out on rank {run.world.rank} ({run.world.device}), {step}where "
        f"it {now.what}: {first_line(error)} Finished work is saved. {_advice(phase, name, run)} "
        "micro_batch_size and batch_size of a phase that trains nothing may change with --resume; "
        "for the others begin a new run."
    )


def _advice(phase: PhaseSettings, name: str, run: Run) -> str:
    """What takes less memory, the mildest change first."""
    at, ways = f"phases.{name}", []
    if isinstance(phase, TrainingPhase):
        micro, _ = batch_shape(phase, run.world.size)
        if micro > 1:
            ways.append(
                f"set {at}.micro_batch_size={max(1, micro // 2)} (now {micro}; the steps stay "
                "those of batch_size)"
            )
    elif isinstance(phase, Evaluate):
        ways.append(f"set {at}.batch_size={max(1, phase.batch_size // 2)} (now {phase.batch_size})")
    elif isinstance(phase, Cache):
        ways.append(f"set {at}.batch_size={max(1, (phase.batch_size or PADDED_BATCH) // 2)}")
    if isinstance(phase, Distil) and phase.teachers == "live":
        ways.append(f"train from a cache ({at}.teachers=cached)")
    if run.world.size > 1 and zero_stage(run.deepspeed()) < 3:
        ways.append("shard the models (deepspeed=zero3_bf16)")
    ways.append(f"set a shorter {run.task.location}.max_length than {run.task.max_length}")
    listed = "; or ".join(ways)
    return f"{listed[0].upper()}{listed[1:]}."
