"""A task's data: its splits, and their tokens for each model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.batches import Examples
from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.data.predictions import FilePredictions, open_predictions
from ds_distill.data.sources import Source
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import (
    load_tokenizer,
    token_count,
    tokenizer_fingerprint,
    tokens_fingerprint,
)
from ds_distill.engine.predict import Bar
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.models.configuration import load_config
from ds_distill.models.reference import ModelReference
from ds_distill.process.activity import counted_by
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.tasks import TASKS

Tokenizers = Callable[[], list[PreTrainedTokenizerBase]]
"""Gives those of all models, each once."""

Prepare = Callable[[datasets.Dataset, Tokenizers, Path], object]


class TaskData:
    """The splits of one of a recipe's tasks, as they are on disk, and their tokens."""

    def __init__(
        self,
        recipe: Recipe,
        task_name: str,
        source: Source,
        folder: Path,
        world: World,
        *,
        prepare: Prepare,
        labelled: Callable[[Examples], Examples],
        models: Callable[[], Iterable[ModelReference]],
        bar: Callable[[str, int], AbstractContextManager[Bar]],
    ) -> None:
        """folder: of the files that are made here. prepare, labelled: `TaskKind.prepare` and
        `TaskKind.examples` of the task. models: of the recipe, before its first phase. bar: shows
        progress, by a label and the total."""
        self.source, self.folder = source, folder
        self._task = recipe.tasks_by_name[task_name]
        self._world, self._bar = world, bar
        self._prepare, self._labelled, self._models = prepare, labelled, models
        trainings = (phase for phase in recipe.phases_of(task_name) if phase.outputs)
        self.training_split = next((one for phase in trainings for one in phase.learns_from), None)
        """The first that a training of the task learns from; None where none does."""
        used = (split for phase in recipe.phases_of(task_name) for split, _ in phase.reads)
        self._used = [
            split for split in dict.fromkeys([*used, CHOOSING_SPLIT]) if self.has_split(split)
        ]
        self._predictions: dict[Path, FilePredictions] = {}
        self._tables: dict[tuple[str, str], TokenTable] = {}
        self._tokenizers: dict[tuple[str, str | None], PreTrainedTokenizerBase] = {}

    # ----------------------------------------------------------------------- splits

    def has_split(self, split: str) -> bool:
        return split in self.source.splits

    def _examples_file(self, split: str) -> Path:
        """A split's examples on disk, read once by the main process."""
        file = self.folder / split / "examples.arrow"
        if self._world.is_main and not file.is_file():
            given = self.source.read(split)
            with self._bar(f"prepares {split}", len(given)) as bar, counted_by(bar.advance):
                self._prepare(given, self._tokenizers_of_all, file)
        self._world.barrier()
        return file

    def table(self, split: str) -> datasets.Dataset:
        """A split's examples as `TaskKind.prepare` has made them, where they have been read."""
        return datasets.Dataset.from_file(str(self.folder / split / "examples.arrow"))

    def texts(self, split: str) -> Iterable[str]:
        """All texts of a split, to be gone through any number of times. Every rank must call
        this."""
        saved = datasets.Dataset.from_file(str(self._examples_file(split)))
        parts = [
            saved.select_columns(name) for name in ("text", "text_b") if name in saved.features
        ]
        alike = [part.rename_columns({name: "text" for name in part.features}) for part in parts]
        found: Iterable[str] = datasets.concatenate_datasets(alike)["text"]
        return found

    def locations(self, split: str, keys: torch.Tensor) -> dict[tuple[int, int], str]:
        """See `Source.locations`; keys: int64 [n, 2]."""
        return self.source.locations(split, {(hi, lo) for hi, lo in keys.tolist()})

    def examples(self, split: str) -> Examples:
        """Keys and labels of a split. Every rank must call this."""
        file = self._examples_file(split)
        return self._labelled(Examples.of(datasets.Dataset.from_file(str(file))))

    def tables(self, split: str, references: Iterable[ModelReference]) -> dict[str, TokenTable]:
        """A split's tokens for each model; models with the same tokenizer share a table, and those
        that take other inputs with the same tokens its file. Where a row is the same token for all
        models, the tokens are those of `largest_vocabulary`. Every rank must call this."""
        file, references = self._examples_file(split), [*references]
        there = {*datasets.Dataset.from_file(str(file)).column_names}
        largest = (
            self.largest_vocabulary(references)
            if TASKS[self._task.type].needs.same_tokens
            else None
        )
        tables = {}
        for reference in references:
            tokenizer = self.tokenizer(reference)
            cuts = self.tokenizer(largest) if largest else tokenizer
            tokens = tokens_fingerprint(cuts)
            fingerprint = f"{self.tokenizer_fingerprint(reference)} {tokens}"
            if (split, fingerprint) not in self._tables:
                found = file
                if f"{tokens}:input_ids" not in there:
                    found = file.with_name(f"tokens-{tokens}.arrow")
                    self._tokenise(split, reference, cuts, found)
                self._tables[split, fingerprint] = TokenTable(found, tokenizer, tokens)
            tables[reference.name] = self._tables[split, fingerprint]
        return tables

    def _tokenise(
        self, split: str, reference: ModelReference, cuts: PreTrainedTokenizerBase, file: Path
    ) -> None:
        if self._world.is_main and not file.is_file():
            examples = self.table(split)
            label = f"tokenises {split} for {reference.name}"
            with self._bar(label, len(examples)) as bar, counted_by(bar.advance):
                tokenise(examples, cuts, self._task.max_length, file)
        self._world.barrier()

    def predictions(self, path: Path) -> FilePredictions:
        """What a teacher's file has of the task's examples. Every rank must call this. Raises as
        `open_predictions`."""
        if path not in self._predictions:
            found = open_predictions(path, self.source, self._used)
            if self._task.of_words:
                files = map(self._examples_file, self._used)
                found = found.with_windows(datasets.Dataset.from_file(str(one)) for one in files)
            self._predictions[path] = found
        return self._predictions[path]

    # ------------------------------------------------------------------- tokenizers

    def tokenizer(self, reference: ModelReference) -> PreTrainedTokenizerBase:
        """A model's tokenizer, read once and shared. It keeps the settings of its last call, so
        load another one to save it."""
        key = reference.model, reference.revision
        if key not in self._tokenizers:
            of_words = self._task.of_words
            self._tokenizers[key] = load_tokenizer(*key, of_words=of_words)
        return self._tokenizers[key]

    def rows(self, reference: ModelReference) -> int:
        """Rows of a model's embeddings: its tokens, and more where it has rows of none."""
        config = reference.config or load_config(reference.model, reference.revision)
        return int(config.vocab_size)

    def vocabulary(self, reference: ModelReference) -> int:
        """How many of the first rows of a model's embeddings are tokens."""
        return token_count(self.tokenizer(reference))

    def taught_tokens(self, references: Iterable[ModelReference]) -> dict[str, int]:
        """Of teachers that are masked-LMs, how many tokens each knows, as `Bundle` takes it."""
        if not self._task.of_vocabulary:
            return {}
        return {reference.name: self.vocabulary(reference) for reference in references}

    def tokenizer_fingerprint(self, reference: ModelReference) -> str:
        return tokenizer_fingerprint(self.tokenizer(reference))

    def _tokenizers_of_all(self) -> list[PreTrainedTokenizerBase]:
        """The tokenizers of the recipe's models; of several that are the same, one."""
        found = {self.tokenizer_fingerprint(r): self.tokenizer(r) for r in self._models()}
        return [found[fingerprint] for fingerprint in sorted(found)]

    def largest_vocabulary(self, references: Sequence[ModelReference]) -> ModelReference:
        """Of models of which each knows the first tokens of another: the one that knows most.

        Raises UserError where one of them has other tokens.
        """
        largest = max(references, key=self.vocabulary)
        known = self.tokenizer(largest).get_vocab()
        for other in references:
            if not self.tokenizer(other).get_vocab().items() <= known.items():
                raise UserError(
                    f"models {largest.name!r} and {other.name!r} are asked for the same tokens, "
                    f"and {other.name!r} has some that {largest.name!r} lacks or numbers in "
                    "another way. "
                    "Expand the vocabulary once, and let all students start from that."
                )
        return largest

    def shared_tokens(
        self, references: Sequence[ModelReference]
    ) -> tuple[PreTrainedTokenizerBase, int]:
        """The tokenizer of models that have the same tokens, and below which id all of them know a
        token. Raises as `largest_vocabulary` does."""
        tokenizer = self.tokenizer(self.largest_vocabulary(references))
        return tokenizer, min(len(tokenizer), *map(self.vocabulary, references))
