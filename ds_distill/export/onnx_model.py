"""A model as an ONNX file: transformers' exporter makes it, onnxruntime runs it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ds_distill.errors import UserError, first_line
from ds_distill.models.encoder import logits_at_rows
from ds_distill.views import PaddedView

_MOST_BYTES = 2**31 - 2**20
"""Of one file: protobuf's limit, less the graph."""


def check_installed() -> None:
    """Raises UserError where what makes and runs ONNX files is not installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
        from transformers.exporters import OnnxExporter  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--onnx: {first_line(error)}. Install what it needs: pip install 'ds-distill[onnx]'"
        ) from error


def make_program(model: PreTrainedModel, inputs: list[str]) -> Any:
    """A model in eval mode on the CPU as an `onnx_ir.Model`; batch and length are free.

    inputs: names of its forward's arguments, each int64 [B, S].

    Raises UserError for a model that the exporter cannot make a graph of.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter

    # Sizes that differ: those that are equal would be taken for one size.
    sample = {name: torch.ones(2, 9, dtype=torch.int64) for name in inputs}
    sample["attention_mask"][1, 6:] = 0
    try:
        with _quiet():
            return OnnxExporter().export(model, sample, config=OnnxConfig(dynamic=True)).program
    except Exception as error:  # of the exporter and of torch, each with its own types
        raise UserError(
            f"{type(model).__name__} cannot be exported to ONNX by transformers' exporter: "
            f"{first_line(error)}"
        ) from error


def quantised(program: Any) -> Any:
    """With weights in int8, by onnxruntime; activations are quantised as the model runs.

    The weights of a matrix have a scale for each output. They take 7 bits: with 8, processors
    without VNNI add pairs of products in 16 bits, which overflow, and a model that was right on one
    machine would be wrong on another.
    """
    from transformers.exporters import ExportFormat, OnnxRuntimeDynamicConfig, OnnxRuntimeQuantizer

    config = OnnxRuntimeDynamicConfig(per_channel=True, reduce_range=True)
    with _quiet():
        return OnnxRuntimeQuantizer(config).quantize(program, {}, ExportFormat.ONNX)


def save(program: Any, file: Path) -> None:
    """Write one file; of a model above protobuf's limit the weights go to FILE.data."""
    import onnx_ir

    weights = sum(
        value.const_value.nbytes
        for value in program.graph.initializers.values()
        if value.const_value is not None
    )
    large = weights > _MOST_BYTES
    onnx_ir.save(program, str(file), external_data=f"{file.name}.data" if large else None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters print and log, which is for their authors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class OnnxModel:
    """An exported model in onnxruntime, on the CPU, with as many threads as torch has."""

    def __init__(self, file: Path, config: PreTrainedConfig) -> None:
        """config: of the model that it was made of."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.config = config
        self._session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [one.name for one in self._session.get_inputs()]
        self._outputs = [one.name for one in self._session.get_outputs()]

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """int64 [B, S] each; what the model reads beside them is 0. Outputs by name, float32."""
        zeros = torch.zeros_like(inputs["input_ids"])
        given = {name: inputs.get(name, zeros).cpu().numpy() for name in self._inputs}
        found = self._session.run(self._outputs, given)
        return {
            name: torch.from_numpy(value) for name, value in zip(self._outputs, found, strict=True)
        }

    def logits(self, view: PaddedView) -> torch.Tensor:
        """At the rows of a view, on the CPU: float32 [n, C]."""
        view = view.to("cpu")
        return logits_at_rows(self(**view.model_inputs()), view)
