"""Open a run's caches and read teacher signals from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ds_distill.cache.format import Fingerprint, check_fingerprint, weights_fingerprint
from ds_distill.cache.reader import CacheReader
from ds_distill.data.batches import CachedSignals, Units
from ds_distill.engine.precision import dtype_name
from ds_distill.files import checksum
from ds_distill.models.configuration import load_config, pools_all_tokens
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.lineage import caches, steps
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import TASKS
from ds_distill.run.run import Run
from ds_distill.types import Signals


def cache_folder(run: Run, phase: Cache, number: int) -> Path:
    """The folder of the cache of phase `number`."""
    return phase.shared or run.folder.cache(number, run.recipe.phase_names()[number])


def fingerprint(run: Run, reference: ModelReference) -> Fingerprint:
    """Everything that a teacher's cached signals depend on, except the attention implementation,
    which a build adds."""
    if reference.predictions is not None:
        weights = f"predictions {checksum(reference.predictions)}"
        return {"weights": weights, **run.kind.fingerprint(None)}
    config = load_config(reference.model, reference.revision)
    commit = getattr(config, "_commit_hash", None)
    # Not in all: caches of other teachers are as they were before states were pooled.
    of_texts = TASKS[run.task.type].heads[0] == "ForSequenceClassification"
    pooling = {"pooling": "mean"} if of_texts and pools_all_tokens(config) else {}
    return {
        **pooling,
        "weights": weights_fingerprint(reference.model, commit),
        "tokenizer": run.data.tokenizer_fingerprint(reference),
        "max_length": run.task.max_length,
        **run.kind.fingerprint(reference.label_map),
        "dtype": dtype_name(run.deepspeed()),
    }


def open_cache(run: Run, split: str, number: int) -> CacheReader | None:
    """The cache of the last cache phase before phase `number` that holds a split, of the teachers
    that it has, or None.

    Raises UserError when the teachers have changed since, or another build has stored other signals
    of them there.
    """
    teachers = run.teachers(number)
    for step, phase in caches(steps(run.recipe)[:number], run.task_name, split, teachers):
        reader = CacheReader(cache_folder(run, phase, step.number))
        for teacher in teachers:
            reader.check(teacher, fingerprint(run, run.reference(teacher, number)))
            _check_stored(reader, teacher, phase)
        return reader
    return None


def _check_stored(reader: CacheReader, teacher: str, phase: Cache) -> None:
    """Raises UserError unless the signals are stored as the cache phase has it. It looks itself
    when it runs, but the folder may be another run's by now."""
    stored = reader.manifest.teachers[teacher].signals
    found: dict[str, Any] = {"states of layers": sorted(stored.hidden)}
    wanted: dict[str, Any] = {"states of layers": sorted({*phase.hidden})}
    if stored.codec is not None:
        found |= {"codec": stored.codec_name, "temperature": stored.temperature}
        wanted |= {"codec": phase.codec.name, "temperature": phase.codec.temperature}
    check_fingerprint(reader.path, teacher, found, wanted)


def cached_signals(run: Run, split: str, number: int, examples: Units) -> CachedSignals:
    """A function that reads the signals of the phase's teachers on a split's examples. Their keys
    are looked up here, once.

    Raises UserError when the cache lacks an example.
    """
    reader = open_cache(run, split, number)
    assert reader is not None, "check_recipe requires a cache phase before cached teachers"
    indices, teachers = reader.indices(examples.keys), run.teachers(number)

    def read(numbers: np.ndarray, epoch: int) -> dict[str, Signals]:
        variant = epoch % reader.mask_variants if reader.mask_variants else 0
        at = indices[numbers]
        return {name: reader.read(name, at, variant, as_stored=True) for name in teachers}

    return read
