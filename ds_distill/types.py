"""The few types that every part speaks in.

Shapes: B examples, S tokens of a view, n rows (B for a sequence-level task, else the chosen
token positions of all examples), C classes or V vocabulary entries, H hidden width.

The row is the unit of a loss. A sequence-level task has one row per example; masked-LM has
one per chosen position. Routing and loss terms only ever see rows, so they know no task.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class PaddedView:
    """One model's inputs for a batch, padded to the longest example."""

    input_ids: torch.Tensor
    """int64 [B, S]."""
    attention_mask: torch.Tensor
    """int64 [B, S], 0 at padding."""
    token_type_ids: torch.Tensor | None = None
    """int64 [B, S], for models that have them."""
    rows: torch.Tensor | None = None
    """int64 [n]: flattened positions b * S + s that are rows. None: each example is a row."""

    def model_inputs(self) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.token_type_ids is not None:
            inputs["token_type_ids"] = self.token_type_ids
        return inputs

    def to(self, device: torch.device) -> PaddedView:
        return PaddedView(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
            _to(self.token_type_ids, device),
            _to(self.rows, device),
        )


@dataclass(frozen=True)
class Signals:
    """What a model says about a batch. A student's carry gradients, a teacher's do not; a
    cached teacher's are the same type as a live one's."""

    logits: torch.Tensor
    """[n, C], float."""
    hidden: torch.Tensor | None = None
    """[n, H], float: the last layer's state at each row (the first token of a sequence-level
    task). None where no term asks for it."""

    def to(self, device: torch.device) -> Signals:
        return Signals(self.logits.to(device, non_blocking=True), _to(self.hidden, device))


@dataclass(frozen=True)
class Batch:
    """The examples of one forward pass on one rank."""

    keys: torch.Tensor
    """int64 [n, 2]: the content key of each row's example."""
    views: dict[str, PaddedView]
    """By model name; `student` is the student's. Models with the same tokenizer share one."""
    labels: torch.Tensor
    """int64 [n]: class or token id; -100 where unknown."""
    row_sets: dict[str, torch.Tensor]
    """Named sets of rows that losses count: bool [n]. `all` leaves out filler, which keeps
    ranks in step when there are too few examples; `labelled` has the labelled rows."""
    epoch: int = 0
    signals: dict[str, Signals] = field(default_factory=dict)
    """Cached teachers' words, by teacher; empty when teachers are live."""
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Rows of each set in the whole optimizer step, over all ranks and micro-steps: float
    scalars, on the device so that dividing by them waits for nothing."""

    def to(self, device: torch.device) -> Batch:
        moved: dict[int, PaddedView] = {}  # views are shared between models: move each once
        for view in self.views.values():
            if id(view) not in moved:
                moved[id(view)] = view.to(device)
        return replace(
            self,
            keys=self.keys.to(device, non_blocking=True),
            views={name: moved[id(view)] for name, view in self.views.items()},
            labels=self.labels.to(device, non_blocking=True),
            row_sets={k: mask.to(device, non_blocking=True) for k, mask in self.row_sets.items()},
            signals={name: signals.to(device) for name, signals in self.signals.items()},
            counts={name: count.to(device) for name, count in self.counts.items()},
        )


def _to(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)
