"""What a run asks of its task; and the task's data: its splits, and their tokens for each model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import datasets
import numpy as np
import torch
import xxhash
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_distill.cache.schema import SignalSchema
from ds_distill.data.batches import Collator, RowsOf, Units, label_rows
from ds_distill.data.columns import example_keys, flat_lists, labels_of
from ds_distill.data.groups import CHOOSING_SPLIT
from ds_distill.data.masking import HiddenWordsCollator
from ds_distill.data.predictions import FilePredictions, open_predictions
from ds_distill.data.sources import Source
from ds_distill.data.tokenise import VERSION, TokenTable, tokenise
from ds_distill.data.tokenizer import (
    load_tokenizer,
    token_count,
    tokenizer_fingerprint,
    tokens_fingerprint,
)
from ds_distill.data.word_tokens import NO_TOKEN
from ds_distill.engine.predict import Bar, ModelRunner
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.evaluation.label_order import LabelDoubt, NumberDoubt
from ds_distill.evaluation.scores import build_metrics, model_report
from ds_distill.files import write_json
from ds_distill.models.configuration import load_config
from ds_distill.models.labels import LabelMap
from ds_distill.models.load import load_model
from ds_distill.models.reference import ModelReference
from ds_distill.process.activity import counted_by
from ds_distill.recipe.metrics.metric import Metric
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.tasks import TASKS, TaskSettings
from ds_distill.records import read_object

Settings = TypeVar("Settings", bound=TaskSettings)
Vocabulary = Callable[[], tuple[PreTrainedTokenizerBase, int]]
"""Gives the tokenizer of all models, where they have the same tokens, and below which id all know a
token."""

Codec = Callable[[int], dict[str, Any] | None]
"""Of so many entries a codec, as JSON."""

Predictions = TypeVar("Predictions")
"""A model's predictions for the N examples of a split, as far as metrics need them."""


@dataclass(frozen=True)
class PredictInputs:
    """What a runner's models are asked, and how."""

    collate: Collator
    examples: Units
    models: Sequence[str]
    batch_size: int
    """Examples per rank and forward pass."""
    bar: AbstractContextManager[Bar] | None = None
    words: Mapping[str, HiddenWordsCollator] = field(default_factory=dict)
    """By model those that it is asked for besides, see `TaskKind.hidden_words`."""


class TaskKind(ABC, Generic[Settings, Predictions]):
    """One kind of task: its head, its batches, its predictions and their scores. To add a kind,
    write these, its section and its entry (`ds_distill.recipe.tasks`). Other code asks its section
    for `rows` and `predicts`: values that no other kind has are to be added where these are
    compared."""

    def __init__(self, settings: Settings, labels: list[str]) -> None:
        """labels: names of the classes, in the order of the class ids; none where it has none."""
        self.settings, self.labels = settings, labels
        self.metrics = build_metrics(TASKS[settings.type].over, labels, settings.metric)
        """What evaluations report, by name: the task's own metric first."""

    @property
    def metric(self) -> Metric[Any]:
        """The task's metric, by which its models are compared and chosen."""
        return self.metrics[self.settings.metric.name]

    # ---------------------------------------------------------------------- models and batches

    def prepare(
        self, examples: datasets.Dataset, tokenizers: Tokenizers, file: Path
    ) -> datasets.Dataset:
        """A split's units: the examples that the source has, or where `TaskSettings.cuts` is false
        windows of them, written to a file.

        tokenizers: of all models, each once.
        """
        return examples

    def load(
        self, data: TaskData, model: str, labels: list[str], **options: Any
    ) -> PreTrainedModel:
        """A model with the task's head. Every rank must call this.

        labels: of the head's outputs, the checkpoint's own where they are not the task's; none
            where it has none.
        options: as of `load_model`.
        """
        return load_model(TASKS[self.settings.type].heads[0], model, labels or None, **options)

    def rows(self, vocabulary: Vocabulary, every_token: bool) -> RowsOf:
        """What the rows of a batch are.

        every_token: see `masked_rows`; `check` refuses terms that want it for others.
        """
        return label_rows

    def label_rows(self, vocabulary: Vocabulary) -> RowsOf:
        """The rows of a training on labels alone."""
        return self.rows(vocabulary, False)

    def examples(self, examples: Units) -> Units:
        """A split's units with labels in the task's shape."""
        return examples

    # --------------------------------------------------------------------------------- caches

    @abstractmethod
    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        """What cached signals depend on, beside model, tokenizer and length: JSON values.

        label_map: the teacher's outputs that are the task's labels; None: all, in the same order.
        """

    @abstractmethod
    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        """How a cache holds a teacher's logits: fields of `SignalSchema`.

        vocabulary: tokens that the teacher knows. codec: makes the codec of distributions over so
            many entries. Every rank calls it, or none.
        """

    def signal_schema(
        self, phase: Cache, config: PreTrainedConfig, codec: Codec, label_map: LabelMap | None
    ) -> SignalSchema:
        """How a cache phase stores a teacher's signals. config: the teacher's."""
        logits = self.stored(config.vocab_size, codec, label_map)
        return SignalSchema(
            dtype=phase.dtype,
            hidden=dict.fromkeys(phase.hidden, config.hidden_size),
            temperature=phase.codec.temperature if logits.get("codec") else None,
            **logits,
        )

    # ---------------------------------------------------------------------- predictions, scores

    @abstractmethod
    def predict(self, runner: ModelRunner, inputs: PredictInputs) -> dict[str, Predictions]:
        """Predictions of a runner's models for all examples, on every rank."""

    def hidden_words(
        self,
        data: TaskData,
        examples: Units,
        tables: Mapping[str, TokenTable],
        references: Sequence[ModelReference],
        packed: Collection[str] = (),
    ) -> dict[str, HiddenWordsCollator]:
        """The words that each model is asked for besides, where the task's metric reads them or
        models of several vocabularies are compared.

        tables: by model, the examples as its own tokenizer cuts them; references: of the same.
        packed: the models that get packed views.
        """
        return {}

    @abstractmethod
    def finite(self, predictions: Predictions) -> torch.Tensor:
        """Whether a model's outputs for each row are finite: bool [R]; see `Units`."""

    def counted(self, examples: Units) -> np.ndarray:
        """Which examples metrics count: those that are labelled, once where they are several
        windows; bool [N]."""
        return examples.is_first & examples.labelled

    def labels_of(self, examples: Units) -> np.ndarray:
        """The labels of examples, by which evaluations tell whether they are of the same ones."""
        return examples.labels

    def scored_words(self, examples: Units) -> Any:
        """Which words of a split are scored, where keys and labels of the examples that count say
        not all: JSON values."""
        return None

    @abstractmethod
    def scored(self, predictions: Predictions, examples: Units) -> Any:
        """Predictions for the examples that count, as the task's metrics read them; see
        `ds_distill.evaluation.predictions`."""

    def report(self, scored: Any) -> dict[str, Any]:
        """See `ds_distill.evaluation.scores.model_report`: JSON values."""
        return model_report(scored, self.metrics, self.labels)

    @abstractmethod
    def baseline(
        self, data: TaskData, split: str, examples: Units, references: list[ModelReference]
    ) -> tuple[Predictions, dict[str, Any]]:
        """What is right without reading a text, as predictions for a split, and its description:
        `answer`, by which `rule`, and the `split` that it comes from. Every rank must call this.

        references: the models that are evaluated.
        """

    def label_doubt(
        self, predictions: Predictions, examples: Units, classes: Sequence[int] | None = None
    ) -> LabelDoubt | NumberDoubt | None:
        """Whether a model's labels may be in another order than the task's, or its numbers on
        another scale.

        classes: class ids that a partial teacher knows, on whose examples alone it is judged. What
            is returned is of them: `LabelDoubt.order` numbers them from 0.
        """
        return None


# -------------------------------------------------------------------------------------------- data

Tokenizers = Callable[[], list[PreTrainedTokenizerBase]]
"""Gives those of all models, each once."""


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
        kind: TaskKind[Any, Any],
        models: Callable[[], Iterable[ModelReference]],
        bar: Callable[[str, int], AbstractContextManager[Bar]],
    ) -> None:
        """folder: of the files that are made here. models: of the recipe, before its first phase.
        bar: shows progress, by a label and the total."""
        self.source, self.folder = source, folder
        self._task = recipe.tasks_by_name[task_name]
        self._world, self._bar = world, bar
        self._kind, self._models = kind, models
        trainings = (phase for phase in recipe.phases_of(task_name) if phase.outputs)
        self.training_split = next((one for phase in trainings for one in phase.learns_from), None)
        """The first that a training of the task learns from; None where none does."""
        used = (split for phase in recipe.phases_of(task_name) for split, _ in phase.reads)
        self._used = [
            split for split in dict.fromkeys([*used, CHOOSING_SPLIT]) if self.has_split(split)
        ]
        self._predictions: dict[Path, FilePredictions] = {}
        self._cuts = self._task.cuts
        self._splits: dict[str, datasets.Dataset] = {}
        self._tables: dict[tuple[str, str], TokenTable] = {}
        self._tokenizers: dict[tuple[str, str | None], PreTrainedTokenizerBase] = {}

    # ----------------------------------------------------------------------- splits

    def has_split(self, split: str) -> bool:
        return split in self.source.splits

    def table(self, split: str) -> datasets.Dataset:
        """A split's units as they are stored, where they have been made: windows are in a file,
        texts where the source has them."""
        if split not in self._splits:
            file = self._file(split)
            found = self.source.read(split) if self._cuts else datasets.Dataset.from_file(str(file))
            if self._cuts and self._world.is_main:
                check_same(found, split, file)
            self._splits[split] = found
        return self._splits[split]

    def _file(self, split: str) -> Path:
        return self.folder / split / ("examples.json" if self._cuts else f"units-{VERSION}.arrow")

    def _made(self, split: str) -> datasets.Dataset:
        """The same, made once by the main process. Every rank must call this."""
        if self._world.is_main and self._cuts:
            self.table(split)
        elif self._world.is_main and not self._file(split).is_file():
            given = self.source.read(split)
            with self._bar(f"prepares {split}", len(given)) as bar, counted_by(bar.advance):
                self._kind.prepare(given, self._tokenizers_of_all, self._file(split))
        self._world.barrier()
        return self.table(split)

    def texts(self, split: str) -> Iterable[str]:
        """All texts of a split, to be gone through any number of times. Every rank must call
        this."""
        stored = self._made(split)
        names = [name for name in ("text", "text_b") if name in stored.features]
        parts = [stored.select_columns(name).rename_columns({name: "text"}) for name in names]
        found: Iterable[str] = datasets.concatenate_datasets(parts)["text"]
        return found

    def locations(self, split: str, keys: torch.Tensor) -> dict[tuple[int, int], str]:
        """See `Source.locations`; keys: int64 [n, 2]."""
        return self.source.locations(split, {(hi, lo) for hi, lo in keys.tolist()})

    def examples(self, split: str) -> Units:
        """A split's units. Every rank must call this."""
        return self._kind.examples(Units.of(self._made(split)))

    def tables(self, split: str, references: Iterable[ModelReference]) -> dict[str, TokenTable]:
        """A split's tokens for each model; models with the same tokenizer share a table, and those
        that take other inputs with the same tokens its file. Where a row is the same token for all
        models, the tokens are those of `largest_vocabulary`. Every rank must call this."""
        units, references = self._made(split), [*references]
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
                stored = units
                if f"{tokens}:input_ids" not in units.column_names:
                    stored = self._tokenised(split, reference, cuts)
                self._tables[split, fingerprint] = TokenTable(stored, tokenizer, tokens)
            tables[reference.name] = self._tables[split, fingerprint]
        return tables

    def _tokenised(
        self, split: str, reference: ModelReference, cuts: PreTrainedTokenizerBase
    ) -> datasets.Dataset:
        """The tokens of a split's units, of a model that is none of `_models` or reads whole
        texts. Raises UserError where they have not the units' rows."""
        fingerprint, units = tokens_fingerprint(cuts), self.table(split)
        file = self.folder / split / f"tokens-{VERSION}-{fingerprint}.arrow"
        if self._world.is_main and not file.is_file():
            label = f"tokenises {split} for {reference.name}"
            with self._bar(label, len(units)) as bar, counted_by(bar.advance):
                tokenise(units, cuts, self._task.max_length, file)
        self._world.barrier()
        found = datasets.Dataset.from_file(str(file))
        lacks = any(name.endswith(":candidates") for name in units.column_names)
        if (places := f"{fingerprint}:places") in found.column_names:
            there = flat_lists(found, places)[1] != NO_TOKEN
            lacks = bool((Units.of(units).counted & ~there).any())
        if lacks:
            raise UserError(
                f"{reference.name} cuts texts into other tokens than the models with which split "
                f"{split!r} was read, and some of its labels have no token. Start from one of them."
            )
        return found

    def predictions(self, path: Path) -> FilePredictions:
        """What a teacher's file has of the task's examples. Every rank must call this. Raises as
        `open_predictions`."""
        if path not in self._predictions:
            found = open_predictions(path, self.source, self._used)
            if self._task.of_words:
                found = found.with_windows(map(self._made, self._used))
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


def check_same(units: datasets.Dataset, split: str, file: Path) -> None:
    """Write which units a split has, or raise UserError where a file says others: what is done of a
    run goes by their numbers."""
    digest = xxhash.xxh3_128_hexdigest(
        example_keys(units).tobytes() + labels_of(units)[0].tobytes()
    )
    now = {"examples": len(units), "digest": digest}
    if not file.is_file():
        write_json(file, now)
    elif (then := read_object(file, "Remove it: it is written again.")) != now:
        raise UserError(
            f"--resume: split {split} is not what the run began with: {len(units):,} examples, and "
            f"{then['examples']:,} then, or others of them. Give the data back what they had, or "
            "start a new run with --folder."
        )
