"""What a recipe's models are before any training, without their weights. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from transformers import PreTrainedConfig

from ds_distill.errors import UserError
from ds_distill.models.configuration import load_config
from ds_distill.models.layers import check_layers, cut_to_layers
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.schema import Recipe, Student

RESIZED = (
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra"),
    *("modernbert", "mpnet", "roberta", "xlm-roberta"),
)
"""Model types of which a student may have sizes of its own."""

OF_ANY_DEPTH = ("mobilebert",)
"""Those of which it may have another number of layers alone: their widths hang together in more
ways."""

TRUNCATED = tuple(kind for kind in RESIZED if kind not in ("deberta", "modernbert"))
"""Those that may begin with parts of a larger one's weights: each projection is a weight of its
own, of which the first rows are the first heads."""

_WITH = {"embedding_size": "hidden_size", "pooler_hidden_size": "hidden_size"}
"""Keys that go with another where they were equal: ELECTRA's, DeBERTa's."""

_OTHERWISE = {("distilbert", "intermediate_size"): "hidden_dim"}
"""What a model type calls a key where transformers has no common name."""


def config_of(recipe: Recipe, name: str) -> PreTrainedConfig:
    """The configuration of `student` or of a teacher; of one whose predictions are in a file the
    student's, as whose tokens its batches come. Raises as `student_config`."""
    model = recipe.encoders.get(name)
    if model is None:
        return student_config(recipe)
    return load_config(resolve_model(model, recipe.models_folder), recipe.teachers[name].revision)


def student_config(recipe: Recipe) -> PreTrainedConfig:
    """The student's configuration. Raises UserError where it cannot be read, or no such student
    can be made."""
    student = recipe.student
    given = load_config(resolve_model(student.model, recipe.models_folder), student.revision)
    return student_of(given, student)


def student_of(given: PreTrainedConfig, student: Student) -> PreTrainedConfig:
    """The student's configuration, from that of its `model`, which stays as it is.

    Raises UserError where no such student can be made.
    """
    config = copy.deepcopy(given)
    if student.layers is not None:
        check_layers(given, student.layers)
        cut_to_layers(config, student.layers)
    if student.config is not None:
        sizes = student.config.model_dump(exclude_none=True)
        if student.start == "truncated":
            _check_truncated(given, sizes)
        _resize(config, sizes)
    return config


def _check_truncated(given: PreTrainedConfig, sizes: Mapping[str, int]) -> None:
    """Raises UserError for a student that cannot begin with parts of a model's weights."""
    kind = given.model_type
    if kind not in TRUNCATED:
        raise UserError(
            f"a model of type {kind} has several projections in one "
            f"weight. Use one of these types: {', '.join(TRUNCATED)}; or start=random.",
            at="student.start=truncated",
        )
    for key, size in sizes.items():
        if size > (most := int(getattr(given, _OTHERWISE.get((kind, key), key)))):
            raise UserError(
                "with start=truncated the weights are parts of "
                f"`model`'s, which has {most}. Set it to that or less, or start=random.",
                at=f"student.config.{key}={size}",
            )


def _resize(config: PreTrainedConfig, sizes: Mapping[str, int]) -> None:
    """Give a configuration other sizes, in place. Raises UserError where it cannot have them."""
    kind, depth = config.model_type, sizes.get("num_hidden_layers")
    at = f"student.config={dict(sizes)}"
    if kind in OF_ANY_DEPTH and sizes.keys() - {"num_hidden_layers"}:
        raise UserError(
            f"a model of type {kind} may have another num_hidden_layers alone. Take the "
            f"others out, or use one of these types: {', '.join(RESIZED)}.",
            at=at,
        )
    if kind not in (*RESIZED, *OF_ANY_DEPTH):
        raise UserError(
            f"of which sizes a model of type {kind} can be is not known here. Use one of "
            f"these types: {', '.join(RESIZED)}.",
            at=at,
        )
    if depth is not None and hasattr(config, "layer_types"):
        most = len(config.layer_types or range(depth))
        if depth > most:
            raise UserError(
                f"{kind} says of each layer what it attends to, and that of `model` of "
                f"{most} layers. Set num_hidden_layers={most} or less.",
                at=at,
            )
        cut_to_layers(config, list(range(depth)))
    along = {k: of for k, of in _WITH.items() if getattr(config, k, None) == getattr(config, of)}
    for key, size in sizes.items():
        setattr(config, _OTHERWISE.get((kind, key), key), size)
    for key, of in along.items():
        setattr(config, key, getattr(config, of))
    width, heads = config.hidden_size, config.num_attention_heads
    unit = heads * (2 if kind == "modernbert" else 1)  # rotary positions turn pairs
    if width % unit:
        even = " by an even number" if unit > heads else " evenly"
        raise UserError(
            f"{heads} heads do not divide a width of {width}{even}. Set hidden_size and "
            "num_attention_heads so that they do.",
            at=at,
        )
