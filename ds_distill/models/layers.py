"""Which layers can be taken out of a model, as far as its configuration tells. Imports no torch."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ds_distill.errors import UserError

NOT_CUT = {
    "albert": "share weights",
    "esm": "are all read by its contact head",
    "esmc": "are scaled by how many there are",
    **dict.fromkeys(("flaubert", "xlm"), "are spread over several stacks"),
}
"""Model types of which no layers can be taken out, and why: of the layers."""

PER_LAYER = ("attention_window", "layer_types")
"""Keys of configurations that may hold a value for each layer: Longformer's, ModernBERT's."""


def check_layers(config: PreTrainedConfig, layers: list[int]) -> None:
    """Raises UserError where a model with these of its layers, counted from 0, could not be made,
    or not be loaded again."""
    total, kind = config.num_hidden_layers, config.model_type
    inside = all(0 <= index < total for index in layers)
    if not layers or not inside or len(set(layers)) < len(layers):
        raise UserError(
            f"the model ({kind}) has layers 0 to {total - 1}. Name at "
            "least one of them, each once.",
            at=f"student.layers={layers}",
        )
    why = NOT_CUT.get(kind)
    if len(set(getattr(config, "layer_types", None) or [])) > 1 and kind != "modernbert":
        why = "are of different kinds"
    if why is not None:
        raise UserError(
            f"the layers of the model ({kind}) {why}, so a model with "
            "some of them could not be loaded again. Use all layers, or a checkpoint with fewer.",
            at=f"student.layers={layers}",
        )
    if kind == "modernbert" and layers[0] != 0:
        raise UserError(
            "the first layer of a ModernBERT has no norm before its "
            "attention, and no other can take its place. Begin with layer 0.",
            at=f"student.layers={layers}",
        )


def cut_to_layers(config: PreTrainedConfig, layers: list[int]) -> None:
    """Make a configuration that of a model with these of its layers, in this order, in place."""
    for key in PER_LAYER:
        if isinstance(values := getattr(config, key, None), list):
            setattr(config, key, [values[index] for index in layers])
    config.num_hidden_layers = len(layers)
