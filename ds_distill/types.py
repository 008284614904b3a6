"""The types that all parts share: batches, teacher signals. Views are in `ds_distill.views`.

Shapes: B examples, S tokens of a padded view, T of a packed one, n rows, C classes or V vocabulary
entries, H hidden width.

A row is one prediction that a loss counts. A sequence-level task has one row per example, token
classification one per word, masked-LM one per masked token, and extractive QA two per example:
where an answer starts and where it ends, with K candidates among the tokens as classes. Routing and
loss terms only see rows, so they are independent of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

from ds_distill.keys import name_id, token_keys
from ds_distill.reads import TAUGHT, AttentionInputs
from ds_distill.views import View, check_views


@dataclass(frozen=True)
class VocabularyHead:
    """The last step of a masked-LM, not yet computed: logits = features @ weight.T + bias.

    It holds modules, not weights: under ZeRO stage 3 a weight is only complete while it is read
    from its module in the engine's forward.
    """

    features: torch.Tensor
    """[n, D], float: the head's input at each row."""
    weight_of: nn.Module
    """Its `weight` is [V, D], often tied to the embeddings; [V, E] where there are more columns."""
    bias_of: nn.Module
    """Its `bias` is [V], or None."""
    columns_of: nn.Module | None = None
    """Its `weight`, [D - E, V], are the weight's other columns: MobileBERT's, whose embeddings are
    narrower than its states."""
    slots: list[torch.Tensor] = field(default_factory=list)
    """The weight's slot of `ds_kernels.linear_cross_entropy`, once that ran on some of the rows:
    what reads the head after it, at any rows, puts its gradient of the weight in there."""
    tokens: int | None = None
    """V, where the modules have more rows than there are tokens: padding to a multiple of 64, as of
    each ModernBERT, which is no word."""

    @property
    def entries(self) -> int:
        """V."""
        return self.tokens or len(cast(torch.Tensor, self.weight_of.weight))

    @property
    def weight(self) -> torch.Tensor:
        weight = cast(torch.Tensor, self.weight_of.weight)
        if self.columns_of is not None:
            weight = torch.cat([weight, cast(torch.Tensor, self.columns_of.weight).T], dim=1)
        return weight if self.tokens is None else weight[: self.tokens]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = cast(torch.Tensor | None, self.bias_of.bias)
        return bias if bias is None or self.tokens is None else bias[: self.tokens]

    def logits(self) -> torch.Tensor:
        """[n, V]: for a large V the largest tensor of a step."""
        return nn.functional.linear(self.features, self.weight, self.bias)


class EncodedLogits(Protocol):
    """Encoded distributions of a cache, decoded on the device where they are needed."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> torch.Tensor:
        """Decoded."""

    def moved(self, device: torch.device) -> EncodedLogits:
        """Still encoded; what is large as it is may stay until `to`."""

    def pin_memory(self) -> EncodedLogits: ...


LACKING = -1e30
"""The logit of a class that a model does not know, where one of each class is needed: finite, and
below all others by more than any two of them differ."""


@dataclass(frozen=True, eq=False)
class Signals:
    """A model's outputs on a batch: logits, and hidden states. A student's carry gradients, a
    teacher's do not; a cached teacher's are the same type as a live one's.

    A partial teacher knows K of the task's C classes: its logits are [n, K], over `classes`.
    Raises ValueError when there is not one column for each of `classes`."""

    output: torch.Tensor | VocabularyHead | EncodedLogits | None
    """float [n, C], or [n, K] over `classes`; or the head that computes them, so that terms that do
    not need the full [n, V] can avoid it. A cached masked-LM teacher's are encoded until `to`. None
    where nobody asked for them."""
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> float [n, H], the state at each row, for the requested layers. For a sequence-level
    task it is that of the first token, or the mean of all tokens' where the model's head reads
    that. Layers are numbered as in transformers' `hidden_states`: 0 is the embeddings, -1 the last
    layer."""
    classes: torch.Tensor | None = None
    """int64 [K], ascending: of a partial teacher, the class ids of its logits' columns. None: all
    of the task's, in their order."""
    attention: Mapping[int, AttentionInputs] = field(default_factory=dict)
    """Layer -> the inputs of its attention, of every token of the batch's examples."""
    reported: torch.Tensor | None = None
    """bool [n]: the rows of which it says something, of a teacher whose predictions are in a file
    that may lack some; of the others its logits are read as 0. None: all."""

    def __post_init__(self) -> None:
        output, classes = self.output, self.classes
        if classes is not None and (
            not isinstance(output, torch.Tensor) or output.shape[1:] != classes.shape
        ):
            shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output)
            raise ValueError(
                f"logits over {len(classes)} classes must be [n, {len(classes)}], and are {shape}"
            )

    @property
    def head(self) -> VocabularyHead | None:
        return self.output if isinstance(self.output, VocabularyHead) else None

    @cached_property
    def logits(self) -> torch.Tensor:
        """float [n, C], or [n, K] over `classes`; computed once where a head gives them, in the
        engine's forward."""
        if self.head is not None:
            return self.head.logits()
        if self.output is None:
            raise ValueError("the model was not asked for logits")
        if not isinstance(self.output, torch.Tensor):
            raise ValueError(
                "these signals are as a cache stores them: decode them with to(device)"
            )
        if self.reported is not None:
            return torch.where(self.reported[:, None], self.output, 0.0)  # 0 times NaN would be NaN
        return self.output

    @property
    def is_encoded(self) -> bool:
        """Whether they are as a cache stores them."""
        known = torch.Tensor | VocabularyHead
        return self.output is not None and not isinstance(self.output, known)

    @property
    def has_made_logits(self) -> bool:
        """Whether a head has computed them."""
        return self.head is not None and "logits" in vars(self)

    def over_all(self, count: int, lacking: float = LACKING) -> torch.Tensor:
        """float [n, C]: logits of all `count` classes of the task. Those that a partial teacher
        does not know have `lacking`: it never predicts them."""
        if self.classes is None:
            return self.logits
        spread = self.logits.new_full((len(self), count), lacking)
        return spread.index_copy(1, self.classes, self.logits)

    def __len__(self) -> int:
        """n. Raises ValueError where there is nothing by row."""
        output = self.output
        if output is None:
            if not self.hidden:
                raise ValueError("these signals have attention alone, which is not of rows")
            return len(next(iter(self.hidden.values())))
        return len(output.features if isinstance(output, VocabularyHead) else output)

    def at(self, rows: torch.Tensor) -> Signals:
        """These signals at rows of a batch's row set, int64 [k]: a head then projects these rows
        alone."""
        if self.output is None and not self.hidden:
            return self
        if len(rows) == len(self):  # all rows: terms share the logits, and nothing is copied
            return self
        states = {layer: state.index_select(0, rows) for layer, state in self.hidden.items()}
        if self.output is None:
            return replace(self, hidden=states)
        if self.reported is not None:
            logits, reported = (
                self.logits.index_select(0, rows),
                self.reported.index_select(0, rows),
            )
            return replace(self, output=logits, hidden=states, reported=reported)
        if self.head is not None and not self.has_made_logits:
            features = self.head.features.index_select(0, rows)
            return replace(self, output=replace(self.head, features=features), hidden=states)
        return replace(self, output=self.logits.index_select(0, rows), hidden=states)

    def to(self, device: torch.device | str) -> Signals:
        """For cached signals; a live model's are where the model is."""
        return self.moved(device).decoded(device)

    def moved(self, device: torch.device | str) -> Signals:
        """As `to`, but not decoded yet: see `decoded`."""
        output = self.output
        if output is None or isinstance(output, VocabularyHead):
            return self  # a live model's
        if isinstance(output, torch.Tensor):
            output = output.to(device, non_blocking=True)
        else:
            output = output.moved(torch.device(device))
        return self._each(lambda tensor: tensor.to(device, non_blocking=True), output)

    def decoded(self, device: torch.device | str) -> Signals:
        """After `moved` to the same device; a live model's as they are."""
        if not self.is_encoded:
            return self
        return replace(self, output=cast(EncodedLogits, self.output).to(torch.device(device)))

    def pin_memory(self) -> Signals:
        """For cached signals: a copy in pinned memory."""
        assert self.output is not None and not isinstance(self.output, VocabularyHead)
        return self._each(torch.Tensor.pin_memory, self.output.pin_memory())

    def _each(
        self,
        of: Callable[[torch.Tensor], torch.Tensor],
        output: torch.Tensor | EncodedLogits,
    ) -> Signals:
        """With another output, and with what `of` makes of each other tensor."""
        return replace(
            self,
            output=output,
            hidden={layer: of(state) for layer, state in self.hidden.items()},
            classes=None if self.classes is None else of(self.classes),
            reported=None if self.reported is None else of(self.reported),
        )

    def dummy(self) -> Signals:
        """One dummy row like these cached signals, for a batch in which no row counts."""
        decoded = self.to(torch.device("cpu"))
        states = {
            layer: state.new_zeros(1, state.shape[1]) for layer, state in decoded.hidden.items()
        }
        zeros = decoded.logits.new_zeros(1, decoded.logits.shape[1])
        reported = None if decoded.reported is None else torch.zeros(1, dtype=torch.bool)
        return replace(decoded, output=zeros, hidden=states, reported=reported)


@dataclass(frozen=True)
class Batch:
    """The examples of one forward pass on one rank."""

    keys: torch.Tensor
    """int64 [n, 2]: the content key of each row's example."""
    views: dict[str, View]
    """By model name; `student` is the student's. Models with the same tokenizer share one."""
    labels: torch.Tensor
    """int64 [n]: class or token id; -100 where unknown. Where an example has any number of L
    labels, int64 [n, L]: of each label whether it has it; losses on logits then see n * L rows of
    two classes (`Seen.by_label`). Where labels are numbers, float32 [n]; NaN where
    unknown."""
    row_sets: dict[str, torch.Tensor]
    """Named sets of rows that losses count: int64 [k], ascending indices into the n rows. `all`
    leaves out dummy rows, which keep ranks in step when there are too few examples; `labelled` has
    the labelled rows, and is not there where no labels were given. A set may be empty."""
    epoch: int = 0
    progress: float = 0.0
    """Share of the phase's optimizer steps that were done before this one, in [0, 1) and alike on
    all ranks: it decides which terms are active."""
    signals: dict[str, Signals] = field(default_factory=dict)
    """Cached teachers' signals, by teacher; empty when teachers are live."""
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Number of rows of each set in the optimizer step, over all ranks and micro-steps: float
    scalars on the device, so that a division needs no sync."""
    teacher_ids: torch.Tensor | None = None
    """int64 [n]: the teacher that the data name for each row, which the policy `column` follows:
    `name_id` of its name, 0 where they name none. None where nothing names teachers."""

    def __post_init__(self) -> None:
        """Raises ValueError for a row set that is not indices, such as a mask."""
        for name, rows in self.row_sets.items():
            if rows.dtype != torch.int64 or rows.ndim != 1:
                fix = ": give mask.nonzero()[:, 0]" if rows.dtype == torch.bool else ""
                raise ValueError(
                    f"row_sets[{name!r}] must be row indices, int64 [k]; it is {rows.dtype} "
                    f"{list(rows.shape)}{fix}"
                )

    @staticmethod
    def from_views(
        views: Mapping[str, View],
        labels: torch.Tensor | None = None,
        *,
        keys: torch.Tensor | np.ndarray | None = None,
        signals: Mapping[str, Signals] | None = None,
        row_sets: Mapping[str, torch.Tensor] | None = None,
        epoch: int = 0,
        progress: float = 0.0,
        teacher_names: Sequence[str | None] | None = None,
    ) -> Batch:
        """A batch of data of your own, on which `Bundle.forward` gives the mean loss of its rows.

        views: by model name, of the same B examples with n rows in each; `student` is the
            student's. What a tokenizer returns is a view: `PaddedView(**inputs)`.
        labels: int [n], the class or token id of each row; or int [n, L] of 0 and 1, of each label
            whether a row has it. Negative where unknown. Or float [n], numbers, NaN where unknown.
            None: no row has one; a term or policy that needs labels raises ValueError.
        keys: int64 [B, 2], as `content_keys` makes them of the texts. None: of the tokens.
        signals: cached teachers' signals by teacher, n rows each; without them teachers run. Terms
            that compare with teachers leave out rows of which none says something (`reported`).
        row_sets: int64 [k] by name, ascending indices of rows, for terms that count their own. Else
            `all` (which may be given, to leave rows out) has every row, `labelled` the labelled.
        epoch, progress: the number that random policies depend on; the share of the training that
            is done, for terms with `from` or `until`.
        teacher_names: of each of B examples whom the policy `column` follows; None: all alike.

        The loss is divided by the rows of this batch: over several, replace `counts` by their sums.

        Raises TypeError or ValueError that names the argument and the shape it must have.
        """
        check_views(views)
        first = next(iter(views.values()))
        example = first.example_indices
        n, device = len(example), first.input_ids.device
        found = token_keys(first.tokens()) if keys is None else keys
        keys = torch.as_tensor(found).to(device)
        _check("keys", keys, torch.int64, (first.num_examples, 2))
        sets = {"all": torch.arange(n, device=device)}
        if labels is None:
            labels = torch.full((n,), -100, device=device)
        else:
            labels, sets["labelled"] = _checked_labels(labels, n)
        sets |= row_sets or {}
        _check_signals(signals or {}, n)
        batch = Batch(
            keys=keys[example],
            views=dict(views),
            labels=labels,
            row_sets=sets,
            epoch=epoch,
            progress=progress,
            signals=dict(signals or {}),
            teacher_ids=None if teacher_names is None else _teacher_ids(teacher_names, first),
        )
        for name in row_sets or {}:
            _check_rows(name, batch.row_sets[name], n)
        sets = with_taught(sets, batch.signals)
        counts = {name: torch.tensor(float(len(of)), device=device) for name, of in sets.items()}
        return replace(batch, row_sets=sets, counts=counts)

    def to(self, device: torch.device | str) -> Batch:
        """A copy on a device, with decoded signals; models that shared a view still do."""
        return self.moved(device, self.counts).decoded(device)

    def moved(self, device: torch.device | str, counts: dict[str, torch.Tensor]) -> Batch:
        """As `to`, with these counts, and with signals as a cache stores them, until `decoded`:
        those of all batches of a step would not fit together."""
        return self._each(
            lambda tensor: tensor.to(device, non_blocking=True),
            lambda signals: signals.moved(device),
            counts,
        )

    def decoded(self, device: torch.device | str) -> Batch:
        """With decoded signals, after `moved` to the same device."""
        if not any(signals.is_encoded for signals in self.signals.values()):
            return self
        signals = {name: signals.decoded(device) for name, signals in self.signals.items()}
        return replace(self, signals=signals)

    def pin_memory(self) -> Batch:
        """A copy in pinned memory, from which `to` a GPU does not wait."""
        return self._each(torch.Tensor.pin_memory, Signals.pin_memory, self.counts)

    def _each(
        self,
        of: Callable[[torch.Tensor], torch.Tensor],
        of_signals: Callable[[Signals], Signals],
        counts: dict[str, torch.Tensor],
    ) -> Batch:
        views: dict[int, View] = {}  # shared between models: each once
        for view in self.views.values():
            if id(view) not in views:
                views[id(view)] = view.each(of)
        return replace(
            self,
            keys=of(self.keys),
            views={name: views[id(view)] for name, view in self.views.items()},
            labels=of(self.labels),
            row_sets={name: of(rows) for name, rows in self.row_sets.items()},
            signals={name: of_signals(signals) for name, signals in self.signals.items()},
            teacher_ids=None if self.teacher_ids is None else of(self.teacher_ids),
            counts={name: of(count) for name, count in counts.items()},
        )


def with_taught(
    sets: Mapping[str, torch.Tensor], signals: Mapping[str, Signals]
) -> dict[str, torch.Tensor]:
    """A batch's row sets, with `TAUGHT` where a cached teacher may say nothing of some rows: those
    of `all` of which one says something."""
    reported = [of.reported for of in signals.values() if of.reported is not None]
    if not reported:
        return dict(sets)
    rows = sets["all"]
    if len(reported) == len(signals):
        rows = rows[torch.stack(reported).any(dim=0)[rows]]
    return {**sets, TAUGHT: rows}


def _check_signals(signals: Mapping[str, Signals], n: int) -> None:
    """Raises ValueError unless each teacher's are of n rows."""
    for name, outputs in signals.items():
        if len(outputs) != n:
            raise ValueError(f"signals[{name!r}] has {len(outputs)} rows, and the views {n}")


def _teacher_ids(names: Sequence[str | None], view: View) -> torch.Tensor:
    """See `Batch.teacher_ids`. Raises ValueError unless there is a name for each of B examples."""
    device = view.input_ids.device
    ids = torch.tensor([name_id(name) if name else 0 for name in names], device=device)
    _check("teacher_names", ids, torch.int64, (view.num_examples,))
    return ids[view.example_indices]


def _checked_labels(labels: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of n rows as a batch has them, and which rows are labelled: int64 [k]. Raises
    ValueError for another shape or dtype."""
    _check("labels", labels, labels.dtype, (n, *labels.shape[1:2]))
    if labels.dtype == torch.bool or (labels.is_floating_point() and labels.ndim > 1):
        raise ValueError(f"labels must be class or token ids, or numbers; they are {labels.dtype}")
    if labels.is_floating_point():
        return labels.float(), (~labels.isnan()).nonzero()[:, 0]
    known = labels >= 0
    labelled = (known if labels.ndim == 1 else known.all(dim=1)).nonzero()[:, 0]
    return torch.where(known, labels, -100).long(), labelled


def _check_rows(name: str, rows: torch.Tensor, n: int) -> None:
    """Raises ValueError unless `rows` are ascending indices into n rows."""
    edges = torch.tensor([-1, n], device=rows.device)
    if not bool((torch.cat([edges[:1], rows, edges[1:]]).diff() > 0).all()):
        raise ValueError(
            f"row_sets[{name!r}] must be ascending row indices in [0, {n}); it is {rows.tolist()}"
        )


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}; it is {tensor.dtype} {list(tensor.shape)}"
        )
