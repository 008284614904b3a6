"""What a cache keeps of a teacher, and its form in Arrow.

A sequence-level teacher has one row per example. A masked-LM teacher has, for each of K mask
draws of an example, one row per chosen token. A block of n examples is one record batch of n
Arrow rows, or of K * n: first all examples' first draw, then their second ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel, ConfigDict, Field

from ds_distill.cache.codecs import Encoded, StoredLogits, VocabularyCodec, codec_from_json
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
class EncodedSignals:
    """Words of n rows in the form in which they are stored, still on the model's device."""

    columns: dict[str, Encoded]
    """By column."""
    sound: torch.Tensor
    """bool [n]: whether the model's own numbers are finite."""
    finite: torch.Tensor
    """bool [n]: whether they are as they are stored."""


class SignalSchema(BaseModel):
    """What is kept of a teacher."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype
    """Of what is kept as numbers: hidden states, and logits without a codec."""
    classes: Width
    """Width of the logits: classes, or entries of the vocabulary."""
    codec: dict[str, Any] | None = None
    """How distributions over a vocabulary are kept, as `codec_from_json` reads it. None: as
    logits."""
    temperature: float | None = None
    """That the codec's distributions were taken at."""
    hidden: dict[int, Width] = {}
    """Layer -> width of its states, for the layers that are kept (see `Signals.hidden`)."""
    mask_variants: Width | None = None
    """Mask draws of each example; None for a sequence-level teacher."""

    @cached_property
    def _codec(self) -> VocabularyCodec | None:
        return codec_from_json(self.codec) if self.codec is not None else None

    @cached_property
    def _torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def codec_name(self) -> str:
        """As a recipe calls it."""
        return self._codec.name if self._codec else "dense"

    @property
    def items(self) -> dict[str, int | None]:
        """Bytes of a row, by column; None where they differ from row to row."""
        size = _ARROW[self.dtype].byte_width
        items: dict[str, int | None] = {name: width * size for name, width in self._widths.items()}
        return items | ({"logits": self._codec.width} if self._codec else {})

    @property
    def _widths(self) -> dict[str, int]:
        return {"logits": self.classes} | {
            f"hidden{layer}": width for layer, width in self.hidden.items()
        }

    def arrow_schema(self) -> pa.Schema:
        """Lists of numbers per row, or a codec's bytes; with `mask_variants` lists of such rows."""
        fields = []
        for name, width in self._widths.items():
            row = pa.list_(_ARROW[self.dtype], width)
            if name == "logits" and self._codec is not None:
                row = pa.binary() if self._codec.width is None else pa.binary(self._codec.width)
            fields.append(pa.field(name, row if self.mask_variants is None else pa.list_(row)))
        return pa.schema(fields)

    def encode(self, signals: Signals) -> EncodedSignals:
        """Words in the form in which they are stored. Waits for nothing on the device."""
        logits = signals.logits
        sound = finite = torch.isfinite(logits).all(dim=-1)
        values = {f"hidden{layer}": signals.hidden[layer] for layer in self.hidden}
        columns = {}
        if self._codec is not None:
            assert self.temperature is not None
            scaled = logits.float() / self.temperature
            # What is not finite is reported with its example when the block is written.
            columns["logits"] = self._codec.encode(torch.where(sound[:, None], scaled, 0.0))
        else:
            values = {"logits": logits, **values}
        for name, numbers in values.items():
            stored = numbers.to(self._torch_dtype)
            sound = sound & torch.isfinite(numbers).all(dim=-1)
            finite = finite & torch.isfinite(stored).all(dim=-1)
            columns[name] = Encoded(stored.contiguous().view(torch.uint8))
        return EncodedSignals(columns, sound, finite)

    def record_batch(
        self, kept: Sequence[EncodedSignals], counts: np.ndarray | None = None
    ) -> pa.RecordBatch:
        """A block of words, from consecutive batches of them.

        counts: int [Arrow rows], rows of each example and draw, under `mask_variants`.
        Raises NotFinite.
        """
        finite = torch.cat([torch.ones(0, dtype=torch.bool), *(p.finite.cpu() for p in kept)])
        if not finite.all():
            sound = torch.cat([part.sound for part in kept]).cpu()
            raise NotFinite((~finite).nonzero()[:, 0].numpy(), overflow=bool(sound.all()))
        columns = []
        for field in self.arrow_schema():
            rows = self._array(field, [part.columns[field.name] for part in kept])
            if counts is not None:
                offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
                rows = pa.ListArray.from_arrays(pa.array(offsets), rows)
            columns.append(rows)
        return pa.RecordBatch.from_arrays(columns, schema=self.arrow_schema())

    def _array(self, field: pa.Field, parts: list[Encoded]) -> pa.Array:
        """Rows of a column, one part after the other; no parts where no token was chosen."""
        row = field.type.value_type if self.mask_variants is not None else field.type
        item = self.items[field.name]
        if not parts:
            return pa.array([], row)
        stored = torch.cat([part.payload for part in parts]).cpu().numpy()
        data = pa.py_buffer(np.ascontiguousarray(stored))
        if item is None:
            lengths = torch.cat([part.lengths for part in parts if part.lengths is not None])
            ends = np.concatenate([[0], np.cumsum(lengths.cpu().numpy())]).astype(np.int32)
            return pa.Array.from_buffers(row, len(lengths), [None, pa.py_buffer(ends), data])
        if pa.types.is_fixed_size_binary(row):
            return pa.Array.from_buffers(row, len(stored), [None, data])
        numbers = pa.Array.from_buffers(row.value_type, len(stored) * row.list_size, [None, data])
        return pa.FixedSizeListArray.from_arrays(numbers, row.list_size)

    def decode(self, columns: dict[str, Encoded]) -> Signals:
        """Words from their stored form."""
        hidden = {layer: self._numbers(columns[f"hidden{layer}"]) for layer in self.hidden}
        if self._codec is None:
            return Signals(self._numbers(columns["logits"]), hidden)
        assert self.temperature is not None
        return Signals(StoredLogits(columns["logits"], self._codec, self.temperature), hidden)

    def log_probs(self, columns: dict[str, Encoded]) -> torch.Tensor:
        """Whole distributions as they are kept, the tail spread as the codec spreads it: float32
        [n, C], at the codec's temperature, or without a codec at 1."""
        if self._codec is None:
            return torch.log_softmax(self._numbers(columns["logits"]), 1)
        return self._codec.log_probs(columns["logits"])

    def _numbers(self, stored: Encoded) -> torch.Tensor:
        rows, size = stored.payload.shape
        # Flat: an array of no rows may have strides that no view to another dtype takes.
        numbers = stored.payload.flatten().view(self._torch_dtype)
        return numbers.view(rows, size // self._torch_dtype.itemsize).float()
