"""`ds-distill quickstart`: the built-in recipe, in the size that suits the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_distill.cli.loading import execute_recipe, load
from ds_distill.cli.options import FolderOption, Overrides, ResumeOption
from ds_distill.process.terminal import say

SMALL_BELOW = 0.3e12
"""Operations a second of matrix products below which the small form is taken. Two cores with
AVX-512 do 0.6e12 to 1.0e12 in bf16, two without it about 0.15e12 in fp32."""


def quickstart(
    overrides: Overrides = None,
    folder: FolderOption = None,
    resume: ResumeOption = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="All examples, on a slow machine, too.")
    ] = False,
) -> None:
    """Two teachers, a small student of each routing, and a control; real text, no GPU needed.

    Minutes on two cores. A CPU whose matrix products are slow gets half of the examples.
    """
    small = _was_small(folder) if resume else not whole and _is_slow()
    loaded = load("quickstart", overrides, small)
    execute_recipe(loaded, folder or Path("runs") / loaded.name, resume=resume)


def _was_small(folder: Path | None) -> bool:
    """Whether the run to go on with is of the small form."""
    from ds_distill.recipe import load_recipe

    if folder is None:
        return not Path("runs/quickstart").is_dir() and Path("runs/quickstart-small").is_dir()
    written = folder / "recipe.yaml"
    return written.is_file() and load_recipe(str(written)).name.endswith("-small")


def _is_slow() -> bool:
    """Measures for a second; says what it found where it is slow."""
    import torch

    from ds_distill.engine.precision import resolved_name
    from ds_distill.planning.gpus import measured_cpu

    if torch.cuda.is_available():
        return False
    device, half = measured_cpu(1), resolved_name("zero0_auto").endswith("bf16")
    flops = device.half_flops if half else device.full_flops
    if flops >= SMALL_BELOW:
        return False
    kind = "bf16" if half else "fp32"
    say(
        f"This CPU does {flops / 1e12:.2f} TFLOP/s in {kind}: the quickstart's small form, with "
        "half of the examples, about ten minutes on two cores. --whole takes all."
    )
    return True
