"""What routing learns from a labelled split: the expertise phase, and `ds-distill route`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_distill.cache.format import MANIFEST
from ds_distill.data.batches import Examples
from ds_distill.data.parts import fitting_part
from ds_distill.data.sources import open_source
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.events import RunLog, open_console
from ds_distill.files import write_json
from ds_distill.phases.ask_teachers import ask_models
from ds_distill.phases.cached import cache_folder, open_cache
from ds_distill.phases.folder import RunFolder
from ds_distill.phases.label_order import warn_of_teachers
from ds_distill.phases.run import Run
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, Expertise
from ds_distill.reporting.routing_table import routing_table
from ds_distill.routing import fit
from ds_distill.routing.comparison import Comparison, at, compare
from ds_distill.routing.fitted import STATES
from ds_distill.types import Signals


def expertise(phase: Expertise, number: int, name: str, run: Run) -> dict[str, Any]:
    """Fit what routing learns from a split, compare the policies on it and choose one."""
    examples, words = _fitting_words(phase, number, run)
    if not run.world.is_main:
        run.world.barrier()
        return {}
    places = [run.place(teacher, number) for teacher in words]
    warnings = warn_of_teachers(run, name, phase.split, places, words, examples.labels)
    given = (words, examples.labels, examples.keys, run.labels)
    how: dict[str, Any] = {"seed": run.recipe.seed, "dealt_by": examples.dealt_by}
    fitted = fit(*given, **how)
    comparison = compare(*given, **how)
    fitted.save(run.folder.fitted)
    write_json(run.folder.comparison, comparison.to_json())
    run.log.show(routing_table(comparison, phase.split))
    run.world.barrier()
    table = fitted.table
    return {
        "split": phase.split,
        "examples": len(examples),
        "overall": dict(zip(table.teachers, table.overall.tolist(), strict=True)),
        "experts": {
            label: table.teachers[t] for label, t in zip(run.labels, table.experts, strict=True)
        },
        "temperatures": fitted.temperatures,
        "comparison": comparison.to_json(),
        "warnings": warnings,
    }


def route(recipe: Recipe, path: Path) -> Comparison:
    """Compare the policies from a run's cache and print the table. Loads no model, writes
    nothing that the run reads.

    Raises UserError when no cache phase holds the split, or its cache is not built.
    """
    settings = next((phase for phase in recipe.phases if isinstance(phase, Expertise)), Expertise())
    split = settings.split
    after = [
        number + 1
        for number, phase in enumerate(recipe.phases)
        if isinstance(phase, Cache) and split in phase.splits
    ]
    if not after:
        raise UserError(
            f"phases: no cache phase holds split {split!r}, on which policies are compared. Add - "
            f"cache: {{splits: [{split}, transfer], hidden: [-1]}} after the last fine-tuning of a "
            "teacher."
        )
    run = Run(
        recipe,
        RunFolder(path),
        World.start(),
        RunLog(path, recipe, speaks=False, resumed=True),
        open_source(recipe.task),
    )
    phase = recipe.phases[after[-1] - 1]
    assert isinstance(phase, Cache)
    if not (cache_folder(run, phase, after[-1] - 1) / MANIFEST).is_file():
        raise UserError(
            f"--folder {path}: the cache of split {split!r} is not built there. Run `ds-distill "
            f"cache build` with the same recipe, overrides and folder first, then this again."
        )
    examples, words = _fitting_words(settings, after[-1], run)
    comparison = compare(
        words,
        examples.labels,
        examples.keys,
        run.labels,
        seed=recipe.seed,
        dealt_by=examples.dealt_by,
    )
    open_console().print(routing_table(comparison, split), soft_wrap=False)
    return comparison


def _fitting_words(phase: Expertise, number: int, run: Run) -> tuple[Examples, dict[str, Signals]]:
    """The examples that may be fitted on, and what the teachers say about them."""
    examples, words = _words(phase, number, run)
    check_words(phase.split, examples, words)
    part = fitting_part(examples.labels, examples.dealt_by.numpy(), phase.split, run.recipe.seed)
    return examples.at(part), at(words, torch.from_numpy(part))


def _words(phase: Expertise, number: int, run: Run) -> tuple[Examples, dict[str, Signals]]:
    """What the teachers say about the split: from a cache before phase `number` that holds it,
    else by asking them."""
    reader = open_cache(run, phase.split, number)
    if reader is None:
        places = [run.place(teacher, number) for teacher in run.recipe.teachers]
        layers = (STATES,) if phase.states else ()
        return ask_models(run, places, phase.split, batch_size=64, layers=layers)
    examples = run.examples(phase.split)
    rows = reader.rows(examples.keys)
    words = {teacher: reader.read(teacher, rows) for teacher in run.recipe.teachers}
    if not phase.states:
        words = {teacher: Signals(said.logits) for teacher, said in words.items()}
    return examples, words


def check_words(split: str, examples: Examples, words: dict[str, Signals]) -> None:
    for teacher, said in words.items():
        bad = torch.isnan(said.logits).any(dim=1)
        if bad.any():
            raise UserError(
                f"teachers.{teacher}: {int(bad.sum())} of {len(bad)} examples of split {split!r} "
                f"have a NaN logit, e.g. row {int(bad.nonzero()[0])}. Its training went astray: "
                "train it again with a lower learning_rate."
            )
