"""Docstrings as a source of examples."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import datasets
import numpy as np

from ds_distill.data import docstrings
from ds_distill.data.columns import as_numpy
from ds_distill.data.sources import Source
from ds_distill.data.splits import wrong_split
from ds_distill.errors import UserError
from ds_distill.recipe.tasks import Task


class DocstringSource(Source):
    """Paragraphs of docstrings, labelled with their package."""

    def __init__(
        self, task: Task, cache_folder: Path | None, progress: docstrings.Progress | None
    ) -> None:
        super().__init__(task, cache_folder)
        data = task.data
        packages = docstrings.parse_packages(data.path)
        if task.rows != "text" or task.predicts in ("labels", "number"):
            raise UserError(
                "a docstring has one label, its package. Take "
                "task.type=single-label, or other data.",
                at=f"task.type={task.type}",
            )
        labels = task.given_labels
        if labels and set(labels) != set(packages):
            odd = sorted(set(labels) ^ set(packages))[0]
            raise UserError(
                f"{odd!r} must stand both in task.labels and in "
                f"task.data.path={data.path}: the labels are the packages. Leave task.labels out "
                "or list the same names.",
                at="task.labels",
            )
        columns = data.columns
        settings = {"config": data.config}
        settings |= {
            f"columns.{key}": getattr(columns, key) for key in ("text_b", "group", "teacher")
        }
        for key, value in settings.items():
            if value is not None:
                raise UserError(
                    "docstrings have none. Take the key out.", at=f"task.data.{key}={value}"
                )
        self._packages = labels or packages
        self._progress = progress
        self._names = data.own_splits() or {name: name for name in docstrings.SHARES}
        for split, name in self._names.items():
            if name not in docstrings.SHARES:
                raise wrong_split(split, name, list(docstrings.SHARES))
        self.splits = list(self._names)
        self._check_named_splits()

    def _label_names(self) -> list[str]:
        return list(self._packages)

    @cached_property
    def _corpus(self) -> Path:
        """Found once: it looks at every file of the packages, a tenth of a second each time."""
        return docstrings.docstring_corpus(self._packages, self.cache_folder, self._progress)

    def _examples(self, split: str) -> datasets.Dataset:
        data = datasets.Dataset.from_file(str(self._corpus))
        number = list(docstrings.SHARES).index(self._names[split])
        rows = np.flatnonzero(as_numpy(data, "split") == number)
        if len(rows) == 0:
            raise UserError(
                f"split {split!r} got no files; the packages "
                "are too small for four splits. Add larger ones.",
                at=f"task.data.path={self.task.data.path}",
            )
        # The split's rows stand together, so this is a slice without an index.
        data = data.select(range(rows[0], rows[-1] + 1)).remove_columns("split")
        if self._names[split] in docstrings.UNLABELLED or not self.labels:
            data = data.rename_column("label", "class")
            data = data.add_column("label", np.full(len(data), -1, dtype=np.int64))
        return data

    def _no_labels(self, split: str) -> UserError:
        labelled = [s for s, name in self._names.items() if name not in docstrings.UNLABELLED]
        return UserError(
            f"split {split!r} has no labels, and they are "
            f"needed here. With labels: {', '.join(labelled)}.",
            at=f"task.data.path={self.task.data.path}",
        )
