"""The models of a recipe on torch's meta device: their sizes, and what a pass through them
costs."""

from __future__ import annotations

import copy
import importlib.resources
import json
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds_distill.errors import UserError, did_you_mean
from ds_distill.models.configuration import check_encoder, load_config
from ds_distill.models.encoder import read_signals
from ds_distill.models.layers import cut_to_layers
from ds_distill.models.load import (
    ANSWERER,
    checkpoint_activations,
    freeze_embeddings,
    layers_of,
    set_dropout,
)
from ds_distill.planning.trace import Cost, Trace
from ds_distill.recipe.references import resolve_model
from ds_distill.views import PaddedView

FUSED = "ds_distill_planned"
"""The `attn_implementation` name of `_fused`."""

_WHOLE = 4
"""Layers up to which a model is traced whole. Of a deeper one two depths are traced, and the other
layers, which are alike, add the same each."""


def shipped_configs() -> dict[str, Path]:
    """Hub ids of the models whose configuration comes with the package, and its folder."""
    root = Path(str(importlib.resources.files("ds_configs"))) / "models"
    return {
        str(file.parent.relative_to(root)): file.parent
        for file in sorted(root.glob("*/*/config.json"))
    }


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model that a recipe names, before it is loaded. Equal to those that cost the same: a plan
    traces and measures two teachers of one size once."""

    name: str
    reference: str
    """As in the recipe."""
    config: PreTrainedConfig
    """With as many layers as the model has in the recipe."""
    shipped: bool
    """Whether the configuration is the one that comes with ds_distill, because the model's own
    could not be read."""
    head: str
    """As of `load_model`."""
    classes: int | None
    """Outputs of a classifier; None for others."""

    @cached_property
    def _size(self) -> tuple[str, str, int | None]:
        config = self.config.to_dict() | {"_name_or_path": None}
        return json.dumps(config, sort_keys=True, default=str), self.head, self.classes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlannedModel) and other._size == self._size

    def __hash__(self) -> int:
        return hash(self._size)

    def build(
        self,
        *,
        layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        fused: bool = False,
        device: str = "meta",
    ) -> PreTrainedModel:
        """The model, by default without memory.

        fused: with attention that holds no map of S x S scores, where transformers has one for it.
        """
        config = copy.deepcopy(self.config)
        if layers is not None:
            cut_to_layers(config, list(range(layers)))
        if self.classes is not None:
            config.num_labels = self.classes
        kind = getattr(transformers, f"AutoModel{self.head}")
        attention = FUSED if fused else "eager"
        with torch.device(device):
            try:
                model = kind.from_config(config, attn_implementation=attention)
            except ValueError:
                if not fused:
                    raise
                model = kind.from_config(config)  # DeBERTa has no other attention
            return model.to(dtype)

    @cache  # noqa: B019  (a plan's few models)
    def _whole(self) -> PreTrainedModel:
        return self.build()

    @cache  # noqa: B019  (likewise)
    def numels(self) -> list[int]:
        """The elements of each of its parameters."""
        return [parameter.numel() for parameter in self._whole().parameters()]

    def parts(self) -> dict[str, int]:
        """Parameters by part: embeddings, layers (with what belongs to all), head."""
        model = self._whole()
        body = model.base_model
        block = getattr(body, "embeddings", model.get_input_embeddings())
        counts = {"embeddings": _numel(block), "layers": _numel(body) - _numel(block)}
        return {**counts, "head": _numel(model) - _numel(body)}

    @cache  # noqa: B019  (likewise)
    def layer_numel(self) -> int:
        """Elements of its largest layer."""
        return max(map(_numel, layers_of(self._whole())), default=0)

    @property
    def width(self) -> int:
        """Of its states."""
        return int(self.config.hidden_size)

    @property
    def depth(self) -> int:
        """Number of its layers."""
        return int(self.config.num_hidden_layers)

    @property
    def parameters(self) -> int:
        return _numel(self._whole())

    @property
    def can_checkpoint(self) -> bool:
        """Whether transformers can compute its activations again."""
        return bool(self._whole().supports_gradient_checkpointing)


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch through a model."""

    examples: int
    length: int
    """Tokens of each example, padding included."""
    row_share: float | None
    """See `TaskSettings.row_share`."""
    dtype: torch.dtype
    on_gpu: bool
    fused: bool
    """Whether attention holds no map of scores; see `PlannedModel.build`."""
    trains: bool = False
    """Forward and backward, with the weights' gradients; else forward alone."""
    checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass."""
    freeze: bool = False
    """Whether the embeddings are frozen."""
    dropout: float | None = None
    """Of the trained model; None: its own."""
    logits: bool = True
    """Whether a masked-LM's logits [rows, V] are made; else its head's features alone."""
    flashdeberta: bool = False
    """Whether DeBERTa's attention is flashdeberta's, which makes no maps either."""

    @property
    def device(self) -> str:
        """As torch calls it."""
        return "cuda" if self.on_gpu else "cpu"

    @property
    def rows(self) -> int:
        """Masked tokens, or words, of all examples; else these."""
        if self.row_share is None:
            return self.examples
        return max(1, round(self.row_share * self.examples * self.length))


def known_config(
    reference: str, revision: str | None, models_folder: str | None
) -> tuple[PreTrainedConfig, bool]:
    """(the configuration of a recipe's model, whether it is the one that comes with ds_distill),
    as where the model's own cannot be read: a hub model's without a network.

    Raises UserError where there is none, and for what is no encoder.
    """
    try:
        config, shipped = load_config(resolve_model(reference, models_folder), revision), False
    except UserError as error:
        folders = shipped_configs()
        if reference not in folders:
            raise UserError(
                f"model {reference!r} cannot be planned: its configuration can neither be read "
                f"({error}) nor is it one of those that come with ds_distill."
                f"{did_you_mean(reference, folders)} Give a folder with its config.json (no "
                f"weights are needed), or one of: {', '.join(folders)}."
            ) from error
        config, shipped = load_config(str(folders[reference])), True
    check_encoder(reference, config)
    return config, shipped


def cost(model: PlannedModel, of: Pass) -> Cost:
    """What a pass costs; its peak is without weights and their gradients."""
    if model.depth <= _WHOLE:
        return _traced(model, model.depth, of)
    short, longer = (_traced(model, layers, of) for layers in (2, 3))
    return short.extended(longer, model.depth - 2)


@lru_cache(maxsize=256)
def _traced(model: PlannedModel, layers: int, of: Pass) -> Cost:
    built = model.build(layers=layers, dtype=of.dtype, fused=of.fused)
    built.train(of.trains).requires_grad_(of.trains)
    if of.flashdeberta:
        for layer in layers_of(built):
            attention: Any = layer.attention
            attention.self.forward = partial(_flashdeberta, attention.self)
    if of.freeze:
        freeze_embeddings(built)
    if of.dropout is not None:
        set_dropout(built, of.dropout)
    if of.checkpointing:
        checkpoint_activations(built, random_state=False)  # meta tensors have none
    for parameter in built.parameters():  # gradients are counted elsewhere
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with torch.device("meta"):
        ids = torch.ones(of.examples, of.length, dtype=torch.int64)
        positions = None if of.row_share is None else torch.ones(of.rows, dtype=torch.int64)
        view = PaddedView(ids, torch.ones_like(ids), positions=positions)
        with Trace(mask_bytes=1 if of.on_gpu else None) as trace, torch.set_grad_enabled(of.trains):
            trace.ignore(*built.parameters(), *built.buffers())
            if model.head == ANSWERER:
                candidates = torch.arange(of.length).expand(of.examples, -1)
                view = replace(view, candidates=candidates)
            _run(built, view, of)
    return trace.cost


def _run(built: PreTrainedModel, view: PaddedView, of: Pass) -> None:
    signals = read_signals(built, view)
    head = signals.head
    outputs = head.features if head is not None and not of.logits else signals.logits
    if of.trains:
        loss = outputs.float()
        if of.logits:
            loss = loss.log_softmax(-1)
        loss.sum().backward()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _fused(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention in one kernel, which keeps its inputs, output and a number per row for the backward
    pass. That of torch for a CPU stands for all of this kind: shapes are all that counts here."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value)[0].transpose(1, 2), None


def _flashdeberta(
    module: Any, hidden: Tensor, *others: Any, rel_embeddings: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """The same for what `ds_distill.models.packed_deberta` computes."""
    heads = module.num_attention_heads

    def split(projection: nn.Module, x: Tensor) -> Tensor:
        return projection(x).unflatten(-1, (heads, -1)).transpose(-2, -3)

    query, key = split(module.query_proj, hidden), split(module.key_proj, hidden)
    value = split(module.value_proj, hidden)
    table = rel_embeddings[: 2 * module.pos_ebd_size]
    # Kept, as a frozen teacher's are.
    module.positions = split(module.query_proj, table), split(module.key_proj, table)
    return _fused(module, query, key, value)[0].flatten(2), None


def _no_mask(*arguments: Any, **options: Any) -> None:
    return None


transformers.AttentionInterface.register(FUSED, _fused)
transformers.AttentionMaskInterface.register(FUSED, _no_mask)
