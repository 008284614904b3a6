"""A run: the object that every phase receives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ds_distill.data.batches import CachedSignals, Collator, Examples
from ds_distill.data.cutting import without_tokens, write_tokens
from ds_distill.data.groups import MARKS
from ds_distill.data.sources import Source
from ds_distill.data.tokenise import TokenTable, tokenise
from ds_distill.data.tokenizer import load_tokenizer, tokenizer_fingerprint, tokens_fingerprint
from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.files import new_folder
from ds_distill.models.configuration import load_config
from ds_distill.models.labels import LabelMap, class_names, label_map, tag_map
from ds_distill.models.packed import packed_attention, packed_backend
from ds_distill.models.student import student_config
from ds_distill.progress import counted_by
from ds_distill.recipe import LONE_TASK, Recipe
from ds_distill.recipe.phases import Training
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.schema import Teacher
from ds_distill.recipe.tasks import TASKS
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.profiler import Profiler
from ds_distill.tasks import TaskKind


@dataclass(frozen=True)
class ModelReference:
    """A model's name and files at the start of a phase."""

    name: str
    model: str
    """Local folder or hub id."""
    revision: str | None = None
    layers: list[int] | None = None
    config: PreTrainedConfig | None = None
    """Of a model that begins with random weights; `model` has its tokenizer."""
    head: str | None = None
    """The task whose head its files have, where an earlier phase of this run trained it."""
    label_map: LabelMap | None = None
    """Its outputs that are the task's labels, where they are not all, in the same order."""

    new_head: bool = False
    """Whether it may get a new head, though it will not be trained."""

    @property
    def trained(self) -> bool:
        """Whether an earlier phase of this run trained it."""
        return self.head is not None


def label_maps_of(references: Iterable[ModelReference]) -> dict[str, LabelMap]:
    """The label maps of the models that have one, as `Bundle` takes them."""
    return {
        reference.name: reference.label_map
        for reference in references
        if reference.label_map is not None
    }


class Run:
    """Recipe, folder, processes, log, data and models of a run, as the phases of one of its tasks
    find them."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        world: World,
        log: RunLog,
        source: Source,
        task_name: str = LONE_TASK,
        profiler: Profiler | None = None,
    ) -> None:
        """source: of the task's data. profiler: observes the trainings."""
        self.recipe, self.folder, self.world, self.log = recipe, folder, world, log
        self.profiler = profiler
        self.task_name, self.task = task_name, recipe.tasks_by_name[task_name]
        self._source = source
        self.labels: list[str] = source.labels
        self.kind: TaskKind[Any, Any] = TASKS[self.task.type].load()(self.task, self.labels)
        self._tables: dict[tuple[str, str], TokenTable] = {}
        self._tokenizers: dict[tuple[str, str | None], tuple[PreTrainedTokenizerBase, str]] = {}

    # ------------------------------------------------------------------------- files

    @property
    def _part(self) -> str | None:
        """The task's part of the run's folder; the only task has no part of its own."""
        return None if self.recipe.task is not None else self.task_name

    @property
    def data_folder(self) -> Path:
        return self.folder.data(self._part)

    @property
    def fitted(self) -> Path:
        """The file of what the task's expertise phase has fitted."""
        return self.folder.fitted(self._part)

    @property
    def comparison(self) -> Path:
        """The file of that phase's comparison of policies."""
        return self.folder.comparison(self._part)

    # ------------------------------------------------------------------------- data

    def has_split(self, split: str) -> bool:
        return split in self._source.splits

    def _examples_folder(self, split: str) -> Path:
        """The split's text on disk, read once by the main process."""
        folder = self.data_folder / split / "examples"
        if self.world.is_main and not folder.is_dir():
            given = self._source.read(split)
            with self.log.bar(f"prepares {split}", len(given)) as bar, counted_by(bar.advance):
                examples = self.kind.prepare(given, self._tokenizers_of_all)
            write_tokens(examples, lambda tokens: self._tokens_file(split, tokens))
            with new_folder(folder) as temporary:
                without_tokens(examples).save_to_disk(temporary)
        self.world.barrier()
        return folder

    def texts(self, split: str) -> Iterable[str]:
        """All texts of a split, to be gone through any number of times. Every rank must call
        this."""
        saved = datasets.load_from_disk(self._examples_folder(split))
        parts = [
            saved.select_columns(name) for name in ("text", "text_b") if name in saved.features
        ]
        alike = [part.rename_columns({name: "text" for name in part.features}) for part in parts]
        found: Iterable[str] = datasets.concatenate_datasets(alike)["text"]
        return found

    def _tokens_file(self, split: str, fingerprint: str) -> Path:
        return self.data_folder / split / f"tokens-{fingerprint}.arrow"

    def locations(self, split: str, keys: torch.Tensor) -> dict[tuple[int, int], str]:
        """See `Source.locations`; keys: int64 [n, 2]."""
        return self._source.locations(split, {(hi, lo) for hi, lo in keys.tolist()})

    def examples(self, split: str) -> Examples:
        """Keys and labels of a split. Every rank must call this.

        Raises UserError where an earlier version has written them, and has parted them otherwise.
        """
        folder = self._examples_folder(split)
        saved = datasets.load_from_disk(folder)
        if not {*MARKS} <= {*saved.column_names}:
            raise UserError(
                f"{folder}: an earlier version of ds_distill wrote these examples. It had others "
                "of them fit routing, choose and stand in folds, so the run cannot go on. Begin "
                "anew, in another folder (--folder)."
            )
        return self.kind.examples(Examples.of(saved))

    def tables(self, split: str, references: Iterable[ModelReference]) -> dict[str, TokenTable]:
        """A split's tokens for each model; models with the same tokenizer share a table, and those
        that take other inputs with the same tokens its file. Where a row is the same token for all
        models, the tokens are those of `largest_vocabulary`. Every rank must call this."""
        folder, references = self._examples_folder(split), [*references]
        largest = (
            self.largest_vocabulary(references) if TASKS[self.task.type].needs.same_tokens else None
        )
        tables = {}
        for reference in references:
            tokenizer = self.tokenizer(reference)
            cuts = self.tokenizer(largest) if largest else tokenizer
            tokens = tokens_fingerprint(cuts)
            fingerprint = f"{self.tokenizer_fingerprint(reference)} {tokens}"
            if (split, fingerprint) not in self._tables:
                file = self._tokens_file(split, tokens)
                if self.world.is_main and not file.is_file():
                    examples = datasets.load_from_disk(folder)
                    label = f"tokenises {split} for {reference.name}"
                    with self.log.bar(label, len(examples)) as bar, counted_by(bar.advance):
                        tokenise(examples, cuts, self.task.max_length, file)
                self.world.barrier()
                self._tables[split, fingerprint] = TokenTable(file, tokenizer)
            tables[reference.name] = self._tables[split, fingerprint]
        return tables

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

    def collator(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        references: Sequence[ModelReference],
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
        every_token: bool = False,
    ) -> Collator:
        """The task's batches of a split for models; see `TaskKind.collator`.

        references: those that the tables are of.
        """

        def vocabulary() -> tuple[PreTrainedTokenizerBase, int]:
            tokenizer = self.tokenizer(self.largest_vocabulary(references))
            return tokenizer, min(len(tokenizer), *map(self.vocabulary, references))

        return self.kind.collator(examples, tables, vocabulary, cached, packed, every_token)

    # ----------------------------------------------------------------------- models

    def teachers(self, number: int) -> list[str]:
        """Names of the teachers that phase `number` has: those that it follows, or the recipe's,
        less those that an earlier phase of the task has left out. Every rank reads it from that
        phase's record."""
        if (followed := self.recipe.phases[number].followed) is not None:
            return followed
        names = self.recipe.phase_names()
        for earlier, phase in reversed(list(enumerate(self.recipe.phases[:number]))):
            if phase.leaves_out_teachers and self.recipe.task_name(phase) == self.task_name:
                record = self.folder.read_record(earlier, names[earlier])
                assert record is not None, "phases run in order"
                remaining: list[str] = record["teachers"]
                return remaining
        return list(self.recipe.teachers)

    def reference(self, name: str, number: int) -> ModelReference:
        """The model `name` at the start of phase `number`: from the last earlier phase that trained
        it, else from the recipe."""
        for earlier, output in reversed(list(self.recipe.trained_models())):
            if earlier < number and output == name:
                model = str(self.folder.model(earlier, output))
                head = self.recipe.task_name(self.recipe.phases[earlier])
                return ModelReference(name, model, head=head, label_map=self._tags_of(model, head))
        given = self.recipe.student if name == "student" else self.recipe.teachers[name]
        model = resolve_model(given.model, self.recipe.models_folder)
        if not isinstance(given, Teacher):
            config = student_config(self.recipe) if given.config is not None else None
            return ModelReference(name, model, given.revision, given.layers, config)
        found = None
        if given.labels is not None and self.task.has_classes:
            config = load_config(model, given.revision)
            many = self.task.many_labels
            found = label_map(model, config, self.labels, given.labels, many_labels=many)
        return ModelReference(name, model, given.revision, label_map=found)

    def _tags_of(self, model: str, head: str) -> LabelMap | None:
        """Which tags of a model that was trained on another task of words are this task's."""
        of_words = self.task.of_words and self.recipe.tasks_by_name[head].of_words
        if head == self.task_name or not of_words:
            return None
        return tag_map(class_names(load_config(model)), self.labels)

    def tokenizer(self, reference: ModelReference) -> PreTrainedTokenizerBase:
        """A model's tokenizer, read once and shared. It keeps the settings of its last call, so
        load another one to save it."""
        return self._tokenizer(reference)[0]

    def _tokenizers_of_all(self) -> list[PreTrainedTokenizerBase]:
        """The tokenizers of the recipe's models; of several that are the same, one."""
        references = (self.reference(name, 0) for name in (*self.recipe.teachers, "student"))
        found = {self.tokenizer_fingerprint(r): self.tokenizer(r) for r in references}
        return [found[fingerprint] for fingerprint in sorted(found)]

    def vocabulary(self, reference: ModelReference) -> int:
        """Rows of a model's embeddings: its tokens, and more where it has rows of none."""
        config = reference.config or load_config(reference.model, reference.revision)
        return int(config.vocab_size)

    def tokenizer_fingerprint(self, reference: ModelReference) -> str:
        return self._tokenizer(reference)[1]

    def _tokenizer(self, reference: ModelReference) -> tuple[PreTrainedTokenizerBase, str]:
        key = reference.model, reference.revision
        if key not in self._tokenizers:  # a large vocabulary takes a second each time
            tokenizer = load_tokenizer(*key, of_words=self.task.of_words)
            self._tokenizers[key] = tokenizer, tokenizer_fingerprint(tokenizer)
        return self._tokenizers[key]

    def packed(self, reference: ModelReference, *, half: bool) -> str | None:
        """The attention backend of a model that runs without padding; None for one that runs with
        padding.

        half: whether the model computes in bf16 or fp16.
        """
        by_default = half and self.world.device.type == "cuda"
        padding = self.recipe.padding
        if padding == "always" or (padding is None and not by_default):
            return None
        return packed_backend(load_config(reference.model, reference.revision), self.world.device)

    def model(
        self, reference: ModelReference, *, new_head: bool = False, packed: bool = False
    ) -> PreTrainedModel:
        """Load a model with the task's head; see `TaskKind.load`.

        new_head: the model will be trained; if it has no head of the task, it gets a new one.
        packed: the model will take packed views.
        """
        # On CPU the backward pass of torch's fused attention takes twice as long as the plain
        # one's (bf16, MiniLM at 40 tokens: 348 against 200 ms a step). A model that only runs
        # forward has the attention that transformers chooses, as when its user loads it.
        attention = "eager" if new_head and self.world.device.type == "cpu" else None
        if packed:
            config = load_config(reference.model, reference.revision)
            attention = packed_attention(config) or attention
        options: dict[str, Any] = {
            "revision": reference.revision,
            "layers": reference.layers,
            "config": reference.config,
            "new_head": (new_head or reference.new_head) and reference.head != self.task_name,
            "seed": self.recipe.seed,
            "attention": attention,
        }
        labels = self.labels
        if reference.label_map is not None and not options["new_head"]:
            # All classes of the checkpoint, in its order.
            labels = class_names(load_config(reference.model, reference.revision))
        return self.kind.load(self, reference.model, labels, **options)

    # ----------------------------------------------------------------------- engine

    def deepspeed(self, training: Training | None = None) -> dict[str, Any]:
        """The DeepSpeed config of a phase."""
        return deepspeed_config(self.recipe.deepspeed, training, self.world.size)
