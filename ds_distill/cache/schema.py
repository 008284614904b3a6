"""Which signals of a teacher a cache stores, and their Arrow columns.

A sequence-level teacher has one row per example. A masked-LM teacher has, for each of the K mask
variants of an example, one row per masked token; other teachers with several rows per example have
them as of one variant. A block of n examples is one record batch of n
Arrow rows, or of K * n: first variant 0 of all examples, then variant 1 ...
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

from ds_distill.cache.codecs import (
    Encoded,
    StoredLogits,
    StoredNumbers,
    VocabularyCodec,
    codec_from_json,
)
from ds_distill.types import LACKING, Signals

Dtype = Literal["float16", "bfloat16", "float32"]

_ARROW = {"float16": pa.float16(), "float32": pa.float32(), "bfloat16": pa.uint16()}
"""Arrow has no bfloat16: its bits are stored."""

Width = Annotated[int, Field(ge=1, strict=True)]


class NotFinite(ValueError):
    """Signals with NaN or infinity, which a cache must not store."""

    def __init__(self, rows: np.ndarray, overflow: bool) -> None:
        """
        rows: int64, positions of the rows in question.
        overflow: whether they were finite before the conversion to the stored dtype.
        """
        super().__init__(f"{len(rows)} rows are not finite")
        self.rows, self.overflow = rows, overflow


@dataclass(frozen=True)
class EncodedSignals:
    """The signals of n rows in their stored form, still on the model's device."""

    columns: dict[str, Encoded]
    """By column name."""
    model_finite: torch.Tensor
    """bool [n]: whether the model's own numbers are finite."""
    finite: torch.Tensor
    """bool [n]: whether the stored numbers are finite, too."""


class SignalSchema(BaseModel):
    """Which signals of a teacher are stored, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Dtype
    """Stored dtype of hidden states, and of logits without a codec."""
    classes: Width
    """Width of the logits: classes, or entries of the vocabulary."""
    ragged: bool = False
    """Whether rows have unlike numbers of classes, `classes` at most; LACKING behind their own."""
    known: tuple[int, ...] | None = None
    """Class ids of the logits, of a teacher that knows some of the task's classes; see
    `Signals.classes`."""
    codec: dict[str, Any] | None = None
    """The codec of distributions over a vocabulary, for `codec_from_json`. None: logits are stored
    as they are."""
    temperature: float | None = None
    """The temperature of the codec's distributions."""
    hidden: dict[int, Width] = {}
    """Layer -> width of its states, for the stored layers (see `Signals.hidden`)."""
    lacks_rows: bool = False
    """Whether there may be rows of which the teacher says nothing: a column `given` says which."""
    mask_variants: Width | None = None
    """Mask variants of each example; None for a sequence-level teacher."""

    @cached_property
    def _codec(self) -> VocabularyCodec | None:
        return codec_from_json(self.codec) if self.codec is not None else None

    @cached_property
    def _torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def codec_name(self) -> str:
        """The codec's name in recipes."""
        return self._codec.name if self._codec else "dense"

    @property
    def items(self) -> dict[str, int | None]:
        """Bytes per row, by column; None where rows differ in length."""
        size = _ARROW[self.dtype].byte_width
        items: dict[str, int | None] = {name: width * size for name, width in self._widths.items()}
        return items | ({"logits": self._codec.width} if self._codec else {})

    @property
    def _widths(self) -> dict[str, int]:
        given = {"given": 1} if self.lacks_rows else {}
        states = {f"hidden{layer}": width for layer, width in self.hidden.items()}
        return {"logits": self.classes, **states, **given}

    def arrow_schema(self) -> pa.Schema:
        """A list of numbers or a codec's bytes per row; with `mask_variants`, lists of rows."""
        fields = []
        for name, width in self._widths.items():
            row = pa.list_(_ARROW[self.dtype], width)
            if name == "logits" and self._codec is not None:
                row = pa.binary() if self._codec.width is None else pa.binary(self._codec.width)
            fields.append(pa.field(name, row if self.mask_variants is None else pa.list_(row)))
        return pa.schema(fields)

    def encode(self, signals: Signals) -> EncodedSignals:
        """Signals in their stored form, on the same device, without a device sync."""
        logits = self._padded(signals.logits)
        model_finite = finite = torch.isfinite(logits).all(dim=-1)
        values = {f"hidden{layer}": signals.hidden[layer] for layer in self.hidden}
        columns = {}
        if self._codec is not None:
            assert self.temperature is not None
            scaled = logits.float() / self.temperature
            # What is not finite is reported with its example when the block is written.
            scaled = torch.where(model_finite[:, None], scaled, 0.0)
            columns["logits"] = self._codec.encode(scaled, finite=True)
        else:
            values = {"logits": logits, **values}
        if self.lacks_rows:
            assert signals.reported is not None
            values["given"] = signals.reported[:, None].float()
        for name, numbers in values.items():
            stored = numbers.to(self._torch_dtype)
            if self.ragged and name == "logits":
                stored = stored.masked_fill(numbers == LACKING, self._lacking)
            model_finite = model_finite & torch.isfinite(numbers).all(dim=-1)
            finite = finite & torch.isfinite(stored).all(dim=-1)
            columns[name] = Encoded(stored.contiguous().view(torch.uint8))
        return EncodedSignals(columns, model_finite, finite)

    def record_batch(
        self, parts: Sequence[EncodedSignals], counts: np.ndarray | None = None
    ) -> pa.RecordBatch:
        """One block, from the encoded signals of consecutive batches.

        counts: int [Arrow rows], rows of each example and variant, under `mask_variants`.
        Raises NotFinite.
        """
        finite = torch.cat([torch.ones(0, dtype=torch.bool), *(p.finite.cpu() for p in parts)])
        if not finite.all():
            model_finite = torch.cat([part.model_finite for part in parts]).cpu()
            raise NotFinite((~finite).nonzero()[:, 0].numpy(), overflow=bool(model_finite.all()))
        columns = []
        for field in self.arrow_schema():
            rows = self._array(field, [part.columns[field.name] for part in parts])
            if counts is not None:
                offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
                rows = pa.ListArray.from_arrays(pa.array(offsets), rows)
            columns.append(rows)
        return pa.RecordBatch.from_arrays(columns, schema=self.arrow_schema())

    def _array(self, field: pa.Field, parts: list[Encoded]) -> pa.Array:
        """The rows of a column, part after part; no parts where no token is masked."""
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

    def decode(self, columns: dict[str, Encoded], *, as_stored: bool = False) -> Signals:
        """Signals from their stored form; see `CacheReader.read`."""
        hidden = {layer: self._numbers(columns[f"hidden{layer}"]) for layer in self.hidden}
        if self._codec is None:
            classes = None if self.known is None else torch.tensor(self.known)
            reported = self._numbers(columns["given"])[:, 0] > 0 if self.lacks_rows else None
            if as_stored and self.mask_variants and not self.ragged and classes is None:
                numbers = StoredNumbers(self._stored(columns["logits"]))
                return Signals(numbers, hidden, reported=reported)
            return Signals(self._logits(columns["logits"]), hidden, classes, reported=reported)
        assert self.temperature is not None
        return Signals(StoredLogits(columns["logits"], self._codec, self.temperature), hidden)

    def log_probs(self, columns: dict[str, Encoded]) -> torch.Tensor:
        """Full distributions, with the tail spread as the codec spreads it: float32 [n, C], at the
        codec's temperature, or at 1 without a codec."""
        if self._codec is None:
            return torch.log_softmax(self._logits(columns["logits"]), 1)
        return self._codec.log_probs(columns["logits"])

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.ragged:
            return logits
        return torch.nn.functional.pad(logits, (0, self.classes - logits.shape[1]), value=LACKING)

    @property
    def _lacking(self) -> float:
        """What is stored for LACKING: the lowest finite number."""
        return torch.finfo(self._torch_dtype).min

    def _logits(self, stored: Encoded) -> torch.Tensor:
        logits = self._numbers(stored)
        return logits.masked_fill_(logits == self._lacking, LACKING) if self.ragged else logits

    def _numbers(self, stored: Encoded) -> torch.Tensor:
        """float32 [n, width]."""
        return self._stored(stored).float()

    def _stored(self, stored: Encoded) -> torch.Tensor:
        """[n, width], of the stored dtype."""
        rows, size = stored.payload.shape
        # Flat: the strides of an array with 0 rows may not allow a view as another dtype.
        numbers = stored.payload.flatten().view(self._torch_dtype)
        return numbers.view(rows, size // self._torch_dtype.itemsize)
