"""What routing learns from a labelled split: the expertise phase, and `ds-distill route`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ds_distill.cache.format import MANIFEST
from ds_distill.cache.reader import CacheReader
from ds_distill.caching.cached_signals import cache_folder, open_cache
from ds_distill.data.batches import Units
from ds_distill.data.groups import few_groups, fitting_part
from ds_distill.data.labels import is_labelled
from ds_distill.data.open_source import open_source
from ds_distill.engine.world import World
from ds_distill.errors import UserError, located
from ds_distill.files import write_json
from ds_distill.process.terminal import say
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import caches, steps
from ds_distill.recipe.phases import Expertise
from ds_distill.recipe.policies import Routing
from ds_distill.records import ExpertiseRecord
from ds_distill.reporting.report import routing_table
from ds_distill.routing import fit
from ds_distill.routing.comparison import Comparison, Disagreement, compare
from ds_distill.routing.fitting import STATES, Fitted
from ds_distill.routing.gate import FOLDS
from ds_distill.routing.held_out import at
from ds_distill.routing.multi_label import FittedByLabel, fit_by_label
from ds_distill.routing.partial_teachers import classes_of
from ds_distill.routing.selection import unqualified
from ds_distill.run.doubts import score_of_signals, warn_of_few_groups, warn_of_one_expert
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.inference import predict_split, rows_of
from ds_distill.run.run import Run
from ds_distill.types import Signals

MOST_CHARACTERS = 400
"""Of a text in a report."""


def expertise(phase: Expertise, number: int, name: str, run: Run) -> ExpertiseRecord | None:
    """Fit what routing learns from a split, compare the policies on it and choose one."""
    held = steps(run.recipe)[number].held(phase.split)  # of the teachers as they are now
    reader = None if held is None else open_cache(run, phase.split, number)
    examples, signals = _fitting_signals(phase, number, run, reader)
    logits = {teacher: of.over_all(len(run.labels)).numpy() for teacher, of in signals.items()}
    left_out = _left_out(phase, signals, logits, examples, run)
    teach = [run.reference(teacher, number) for teacher in signals if teacher not in left_out]
    score_of_signals(number, name, run, phase.split, teach, logits, examples)
    if not run.world.is_main:
        run.world.barrier()
        return None
    where = f"phase {name}, split {phase.split}"
    for teacher, why in left_out.items():
        run.log.info(f"  Left out of the phases after this: {teacher}, which {why}.")
    signals = {name: of for name, of in signals.items() if name not in left_out}
    rows = np.flatnonzero(is_labelled(examples.counted_labels))
    owners = examples.of_rows[torch.from_numpy(rows)]
    given = at(signals, torch.from_numpy(rows)), examples.labels[rows], examples.keys[owners]
    how: dict[str, Any] = {"seed": run.recipe.seed, "group_keys": examples.group_keys[owners]}
    fitted: Fitted | FittedByLabel
    if examples.labels.ndim > 1:
        with run.log.bar("fits routing", len(run.labels)) as bar:
            fitted = fit_by_label(*given, run.labels, **how, advance=bar.advance)
    else:
        fitted = fit(*given, run.labels, **how)
    followed = _followed(number, run)
    comparison = _compare(where, signals, examples, run, phase.show_examples, followed)
    fitted.save(run.fitted)
    write_json(run.comparison, comparison.to_json())
    run.log.info(routing_table(comparison.to_json(), phase.split).text())
    warnings = warn_of_few_groups(run, name, phase.split, examples.group_keys.numpy())
    warnings += warn_of_one_expert(run, name, phase.split, fitted.experts)
    run.world.barrier()
    record: dict[str, Any] = {
        "split": phase.split,
        **examples.counts,
        "teachers": list(signals),
        "left_out": left_out,
        **fitted.to_record(),
        "comparison": comparison.to_json(),
        "warnings": warnings,
    }
    if phase.show_examples:
        record["texts"] = _texts(phase.split, run, comparison.disagreements, examples)
    return cast(ExpertiseRecord, record)


def _texts(split: str, run: Run, shown: Sequence[Disagreement], examples: Units) -> list[str]:
    """Of examples on which teachers disagree, shortened to MOST_CHARACTERS; of a pair both."""
    found = []
    for row in rows_of(run, split, examples.keys[[one.row for one in shown]]):
        assert row is not None, "they are of the split"
        text = "\n".join(row[name] for name in ("text", "text_b") if name in row)
        found.append(text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…")
    return found


def _left_out(
    phase: Expertise,
    signals: Mapping[str, Signals],
    logits: Mapping[str, np.ndarray],
    examples: Units,
    run: Run,
) -> dict[str, str]:
    """The teachers that the phases after this do without, and why."""
    if not phase.leaves_out_teachers:
        return {}
    return unqualified(logits, examples.counted_labels, run.labels, classes_of(signals))


def _followed(number: int, run: Run) -> list[str]:
    """The policies that students of the task follow in the phases after `number`."""
    later = [phase for at, phase in run.phases.items() if at > number]
    parts = (part for phase in later for _, part in phase.parts())
    return [part.policy for part in parts if isinstance(part, Routing)]


def _compare(
    where: str,
    signals: dict[str, Signals],
    examples: Units,
    run: Run,
    kept: int = 0,
    followed: Sequence[str] = (),
) -> Comparison:
    """where: phase and split, for messages. kept: how many disagreements to keep. followed: see
    `compare`."""
    fits = FOLDS * (len(run.labels) if examples.labels.ndim > 1 else 1)
    with located(where), run.log.bar("compares the policies", fits) as bar:
        return compare(
            signals,
            examples.labels,
            examples.keys,
            run.labels,
            task_metric=run.task.metric,
            seed=run.recipe.seed,
            group_keys=examples.group_keys,
            words=examples if run.task.of_words else None,
            examples=kept,
            followed=followed,
            advance=bar.advance,
        )


def route(recipe: Recipe, path: Path) -> Comparison:
    """Compare the policies from a run's cache and print the table. Loads no model, writes
    nothing that the run reads.

    Raises UserError when no cache phase holds the split, or its cache is not built.
    """
    settings = next((phase for phase in recipe.phases if isinstance(phase, Expertise)), Expertise())
    split, task = settings.split, recipe.task_name(settings)
    cached = next(caches(steps(recipe), task, split), None)
    if cached is None:
        raise UserError(
            f"phases: no cache phase holds split {split!r}, on which policies are compared. Add - "
            f"cache: {{splits: [{split}, transfer], hidden: [-1]}} after the last fine-tuning of a "
            "teacher."
        )
    run = Run(
        recipe,
        RunFolder(path),
        World.start(),
        RunLog(path, recipe, enabled=False, resumed=True),
        open_source(recipe.tasks_by_name[task], data_folder=recipe.data_folder),
        task,
    )
    step, phase = cached
    if not (cache_folder(run, phase, step.number) / MANIFEST).is_file():
        raise UserError(
            f"--folder {path}: the cache of split {split!r} is not built there. Run `ds-distill "
            f"cache build` with the same recipe, overrides and folder first, then this again."
        )
    reader = open_cache(run, split, step.number + 1)
    examples, signals = _fitting_signals(settings, step.number + 1, run, reader)
    logits = {teacher: of.over_all(len(run.labels)).numpy() for teacher, of in signals.items()}
    left_out = _left_out(settings, signals, logits, examples, run)
    for teacher, why in left_out.items():
        say(f"Left out: {teacher}, which {why}.")
    signals = {name: of for name, of in signals.items() if name not in left_out}
    if (note := few_groups(split, examples.group_keys.numpy())) is not None:
        say(f"WARNING: {note}")
    comparison = _compare(f"split {split}", signals, examples, run)
    say(routing_table(comparison.to_json(), split).text())
    return comparison


def _fitting_signals(
    phase: Expertise, number: int, run: Run, reader: CacheReader | None
) -> tuple[Units, dict[str, Signals]]:
    """The examples that may be fitted on, and the teachers' signals on them: from a cache, else by
    running the teachers."""
    examples, names = run.data.examples(phase.split), run.teachers(number)
    if reader is None:
        references = [run.reference(teacher, number) for teacher in names]
        layers = (STATES,) if phase.states else ()
        _, signals = predict_split(run, references, phase.split, layers)
    else:
        signals = {name: _cached(phase, name, examples, reader) for name in names}
    part = fitting_part(examples.strata, examples.groups, phase.split, run.recipe.seed)
    return examples.at(part), at(signals, torch.from_numpy(examples.rows_of(part)))


def _cached(phase: Expertise, teacher: str, examples: Units, reader: CacheReader) -> Signals:
    found = reader.read(teacher, reader.indices(examples.keys))
    if found.reported is not None and not found.reported.all():
        lacks = len(examples.of_rows[~found.reported].unique())
        raise UserError(
            f"teachers.{teacher}.predictions: says nothing of {lacks:,} of the {len(examples):,} "
            f"examples of split {phase.split!r}, on which policies are compared. Add them to the "
            "file, or take the teacher out."
        )
    return replace(found, reported=None, hidden=found.hidden if phase.states else {})
