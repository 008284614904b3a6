"""What a cache keeps of a teacher, and its form in Arrow.

A sequence-level teacher has one row per example. A masked-LM teacher has, for each of K mask
draws of an example, one row per chosen token. A block of n examples is one record batch of n
Arrow rows, or of K * n: first all examples' first draw, then their second ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict, Field

from ds_distill.types import Signals

Dtype = Literal["float16", "bfloat16", "float32"]

_ARROW = {"float16": pa.float16(), "float32": pa.float32(), "bfloat16": pa.uint16()}
"""Arrow has no bfloat16: its bits are stored."""

Width = Annotated[int, Field(ge=1, strict=True)]


class NotFinite(ValueError):
    """Words that a cache must not keep."""

    def __init__(self, rows: np.ndarray, overflow: bool) -> None:
        """
        rows: int64, of the words given.
        overflow: whether they were finite before they were stored in a smaller type.
        """
        super().__init__(f"{len(rows)} rows are not finite")
        self.rows, self.overflow = rows, overflow


@dataclass(frozen=True)
class Kept:
    """Words of n rows in the form in which they are stored, still on the model's device."""

    columns: dict[str, torch.Tensor]
    """uint8 [n, bytes of a row] by column."""
    sound: torch.Tensor
    """bool [n]: whether the model's own numbers are finite."""
    finite: torch.Tensor
    """bool [n]: whether they are as they are stored."""


class Words(BaseModel):
    """What is kept of a teacher."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype
    """Of logits and hidden states."""
    classes: Width
    """Width of the logits: classes, or entries of the vocabulary."""
    hidden: dict[int, Width] = {}
    """Layer -> width of its states, for the layers that are kept (see `Signals.hidden`)."""
    draws: Width | None = None
    """Mask draws of each example; None for a sequence-level teacher."""

    @property
    def items(self) -> dict[str, int]:
        """Bytes of a row, by column."""
        size = _ARROW[self.dtype].byte_width
        return {name: width * size for name, width in self._widths.items()}

    @property
    def _widths(self) -> dict[str, int]:
        return {"logits": self.classes} | {
            f"hidden{layer}": width for layer, width in self.hidden.items()
        }

    def arrow_schema(self) -> pa.Schema:
        """Lists of numbers per row; under `draws` lists of such rows."""
        fields = []
        for name, width in self._widths.items():
            row = pa.list_(_ARROW[self.dtype], width)
            fields.append(pa.field(name, row if self.draws is None else pa.list_(row)))
        return pa.schema(fields)

    def keep(self, signals: Signals) -> Kept:
        """Words in the form in which they are stored. Waits for nothing on the device."""
        values = {"logits": signals.logits}
        values |= {f"hidden{layer}": signals.hidden[layer] for layer in self.hidden}
        columns = {}
        sound = finite = torch.ones(
            len(signals.logits), dtype=torch.bool, device=signals.logits.device
        )
        for name, numbers in values.items():
            stored = numbers.to(getattr(torch, self.dtype))
            sound = sound & torch.isfinite(numbers).all(dim=-1)
            finite = finite & torch.isfinite(stored).all(dim=-1)
            columns[name] = stored.contiguous().view(torch.uint8)
        return Kept(columns, sound, finite)

    def record_batch(
        self, kept: Sequence[Kept], counts: np.ndarray | None = None
    ) -> pa.RecordBatch:
        """A block of words, from consecutive batches of them.

        counts: int [Arrow rows], rows of each example and draw, under `draws`.
        Raises NotFinite.
        """
        finite = torch.cat([torch.ones(0, dtype=torch.bool), *(p.finite.cpu() for p in kept)])
        if not finite.all():
            sound = torch.cat([part.sound for part in kept]).cpu()
            raise NotFinite((~finite).nonzero()[:, 0].numpy(), overflow=bool(sound.all()))
        columns = []
        for name, width in self._widths.items():
            parts = [part.columns[name] for part in kept]  # none where no token was chosen
            none = torch.empty(0, self.items[name], dtype=torch.uint8)
            stored = (torch.cat(parts).cpu() if parts else none).numpy()
            numbers = pa.Array.from_buffers(
                _ARROW[self.dtype], len(stored) * width, [None, pa.py_buffer(stored)]
            )
            rows = pa.FixedSizeListArray.from_arrays(numbers, width)
            if counts is not None:
                offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
                rows = pa.ListArray.from_arrays(pa.array(offsets), rows)
            columns.append(rows)
        return pa.RecordBatch.from_arrays(columns, schema=self.arrow_schema())

    def signals(self, columns: dict[str, np.ndarray]) -> Signals:
        """Words from their stored form: uint8 [n, bytes of a row] by column."""
        numbers = {
            name: torch.from_numpy(stored).view(getattr(torch, self.dtype)).float()
            for name, stored in columns.items()
        }
        hidden = {layer: numbers[f"hidden{layer}"] for layer in self.hidden}
        return Signals(numbers["logits"], hidden)
