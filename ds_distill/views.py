"""What a model reads of a batch: padded, or its examples end to end.

Shapes: B examples, S tokens of a padded view, T of a packed one, n rows (B for a sequence-level
task, else the masked tokens of all examples, or of each example two: an answer's start and end).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import numpy as np
import torch


@dataclass(frozen=True)
class _Tensors:
    """What both kinds of views do."""

    def to(self, device: torch.device | str) -> Self:
        """A copy on a device."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """With what `of` makes of each tensor."""
        found = vars(self).items()
        return replace(self, **{name: of(one) for name, one in found if torch.is_tensor(one)})


@dataclass(frozen=True)
class PaddedView(_Tensors):
    """One model's inputs for a batch, padded to the longest example."""

    input_ids: torch.Tensor
    """int64 [B, S]."""
    attention_mask: torch.Tensor
    """int64 [B, S], 0 at padding."""
    token_type_ids: torch.Tensor | None = None
    """int64 [B, S], for models that have them."""
    positions: torch.Tensor | None = None
    """int64 [n]: flattened positions b * S + s of the rows. None: each example is a row."""
    candidates: torch.Tensor | None = None
    """int64 [B, K]: positions in its example of the tokens where an answer may start and end, -1
    where an example has fewer. Each example then has two rows, whose classes are these tokens."""
    is_full: bool = False
    """Whether it is known to have no padding: a Python bool, so that no pass waits for a device to
    tell."""

    def __post_init__(self) -> None:
        """Raises ValueError when the shapes do not fit each other."""
        shape = self.input_ids.shape
        if len(shape) != 2 or self.attention_mask.shape != shape:
            raise ValueError(
                f"input_ids and attention_mask of a padded view are both [B, S]; they are "
                f"{list(shape)} and {list(self.attention_mask.shape)}"
            )

    @property
    def num_examples(self) -> int:
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Positions of an example, padding included."""
        return self.input_ids.shape[1]

    @property
    def example_indices(self) -> torch.Tensor:
        """int64 [n]: the example of each row."""
        if self.positions is None:
            every = torch.arange(self.num_examples, device=self.input_ids.device)
            return every if self.candidates is None else every.repeat_interleave(2)
        return self.positions // self.input_ids.shape[1]

    def tokens(self) -> list[np.ndarray]:
        """The token ids of each of the B examples, without padding: int64 [length]."""
        real = self.attention_mask.cpu().bool()
        return [ids[mask].numpy() for ids, mask in zip(self.input_ids.cpu(), real, strict=True)]

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a transformers model's forward."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        if self.token_type_ids is not None:
            inputs["token_type_ids"] = self.token_type_ids
        return inputs

    def first_token(self) -> PaddedView:
        """The first token of each example, at which all rows and candidates are."""
        types, places, candidates = self.token_type_ids, self.positions, self.candidates
        return replace(
            self,
            input_ids=self.input_ids[:, :1],
            attention_mask=self.attention_mask[:, :1],
            token_type_ids=None if types is None else types[:, :1],
            positions=None if places is None else places // self.length,
            candidates=None if candidates is None else candidates.clamp(max=0),
        )


@dataclass(frozen=True)
class PackedView(_Tensors):
    """One model's inputs for a batch, its examples end to end without padding.

    Only for a model that was loaded for packed views (`models/packed.py`): any other model's
    attention would silently mix the examples.
    """

    input_ids: torch.Tensor
    """int64 [T]."""
    position_ids: torch.Tensor
    """int64 [T]: each token's position in its example, from 0."""
    cu_seqlens: torch.Tensor
    """int32 [B + 1]: the first token of each example, and T."""
    max_seqlen: int
    """Tokens of the longest example: a Python int, so that no kernel waits for a device sync."""
    token_type_ids: torch.Tensor | None = None
    """int64 [T], for models that have them."""
    positions: torch.Tensor | None = None
    """int64 [n]: positions in [0, T) of the rows. None: each example is a row."""
    candidates: torch.Tensor | None = None
    """int64 [B, K]: as of a padded view."""
    host_cu_seqlens: tuple[int, ...] | None = None
    """cu_seqlens as Python ints, for who would else wait for a device to tell. None: not known."""

    @staticmethod
    def of(view: PaddedView) -> PackedView:
        """The same examples and rows; no row may be at padding."""
        real = view.attention_mask.bool()
        lengths = real.sum(1)
        on_host = lengths.tolist()
        positions = None
        if view.positions is not None:
            positions = (real.flatten().cumsum(0) - 1)[view.positions]
        types = view.token_type_ids
        return PackedView(
            input_ids=view.input_ids[real],
            position_ids=(real.cumsum(1) - 1)[real],
            cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
            max_seqlen=max(on_host),
            token_type_ids=None if types is None else types[real],
            positions=positions,
            candidates=view.candidates,
            host_cu_seqlens=(0, *accumulate(on_host)),
        )

    @property
    def num_examples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def length(self) -> int:
        """Tokens of the longest example."""
        return self.max_seqlen

    def tokens(self) -> list[np.ndarray]:
        """The token ids of each of the B examples: int64 [length]."""
        ends = self.cu_seqlens[1:-1].cpu().long()
        return [ids.numpy() for ids in self.input_ids.cpu().tensor_split(ends)]

    @property
    def example_indices(self) -> torch.Tensor:
        """int64 [n]: the example of each row."""
        if self.positions is None:
            every = torch.arange(self.num_examples, device=self.input_ids.device)
            return every if self.candidates is None else every.repeat_interleave(2)
        return torch.searchsorted(self.cu_seqlens[1:].long(), self.positions, right=True)


View = PaddedView | PackedView


def check_views(views: Mapping[str, View]) -> None:
    """Raises TypeError or ValueError unless all views have the same number of rows."""
    if not views:
        raise ValueError("views is empty: give one view for each model, e.g. {'student': view}")
    for name, view in views.items():
        if not isinstance(view, PaddedView | PackedView):
            raise TypeError(
                f"views[{name!r}] is a {type(view).__name__}, not a view: give PaddedView(**inputs)"
            )
    rows = {name: len(view.example_indices) for name, view in views.items()}
    examples = {name: view.num_examples for name, view in views.items()}
    if len(set(rows.values())) > 1 or len(set(examples.values())) > 1:
        raise ValueError(
            "all views must have the same examples and rows; they have "
            + ", ".join(f"{name}: {examples[name]} and {rows[name]}" for name in views)
        )


def join(views: Sequence[View]) -> View:
    """One model's views of several batches as one: their examples, and rows, one batch's after the
    other's.

    views: all padded, or all packed.
    """
    if len(views) == 1:
        return views[0]
    packed = [view for view in views if isinstance(view, PackedView)]
    if packed:
        assert len(packed) == len(views)
        return _join_packed(packed)
    return _join_padded([view for view in views if isinstance(view, PaddedView)])


def _join_padded(views: list[PaddedView]) -> PaddedView:
    length = max(view.input_ids.shape[1] for view in views)
    positions, before = [], 0
    for view in views:
        if view.positions is not None:
            own = view.input_ids.shape[1]
            example, position = view.positions // own, view.positions % own
            positions.append((before + example) * length + position)
        before += view.num_examples
    input_ids = _padded([view.input_ids for view in views], 0)  # the mask hides them
    mask = _padded([view.attention_mask for view in views], 0)
    assert input_ids is not None and mask is not None
    return PaddedView(
        input_ids,
        mask,
        _padded([view.token_type_ids for view in views], 0),
        torch.cat(positions) if positions else None,
        _padded([view.candidates for view in views], -1),
    )


def _join_packed(views: list[PackedView]) -> PackedView:
    positions, ends, before = [], [views[0].cu_seqlens[:1]], 0
    on_host: tuple[int, ...] | None = (0,)
    for view in views:
        if view.positions is not None:
            positions.append(view.positions + before)
        ends.append(view.cu_seqlens[1:] + before)
        own = view.host_cu_seqlens
        if on_host is not None:
            on_host = None if own is None else (*on_host, *(end + before for end in own[1:]))
        before += len(view.input_ids)
    types = [view.token_type_ids for view in views if view.token_type_ids is not None]
    return PackedView(
        torch.cat([view.input_ids for view in views]),
        torch.cat([view.position_ids for view in views]),
        torch.cat(ends),
        max(view.max_seqlen for view in views),
        torch.cat(types) if types else None,
        torch.cat(positions) if positions else None,
        _padded([view.candidates for view in views], -1),
        on_host,
    )


def _padded(tensors: Sequence[torch.Tensor | None], value: int) -> torch.Tensor | None:
    """Tensors [B, S] end to end, as wide as the widest of them. None where there are none."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    width = max(tensor.shape[1] for tensor in present)
    pad = torch.nn.functional.pad
    return torch.cat([pad(each, (0, width - each.shape[1]), value=value) for each in present])
