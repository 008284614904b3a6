"""What a masked-LM recipe must not ask for. Each rule yields its mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from ds_distill.models.configuration import same_tokens
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, Codec, Distil, Expertise, FineTune
from ds_distill.recipe.schema import MaskedLM


def masked_lm_mistakes(recipe: Recipe, phase: object, location: str) -> Iterator[str]:
    """What a phase of task.type=masked-lm cannot do: all that needs classes."""
    task = recipe.task
    assert isinstance(task, MaskedLM)
    if isinstance(phase, Expertise):
        yield (
            f"{location}: the expertise table counts right answers per class, and "
            "task.type=masked-lm has no classes. Take the phase out."
        )
    elif isinstance(phase, Cache) and task.masking.variants is None:
        yield (
            f"{location}: a cache keeps a number of ways of masking each example. Set "
            "task.masking.variants, e.g. to the number of epochs: epoch e takes number e mod "
            "variants."
        )
    elif isinstance(phase, FineTune):
        for key in ("focus", "per_class"):
            if getattr(phase, key):
                yield (
                    f"{location}.{key}: chooses examples by class, and task.type=masked-lm has no "
                    "classes. Take the key out."
                )
    elif isinstance(phase, Distil):
        for routing in phase.routing:
            if routing.needs_expertise:
                yield (
                    f"{location}.routing: {routing.policy} follows the teacher that knows a class "
                    "best, and task.type=masked-lm has no classes. Choose average, random, "
                    "ca-mkd or mt-bert."
                )


def codec_mistakes(recipe: Recipe, phase: Distil, location: str, codec: Codec) -> Iterator[str]:
    """What terms and policies cannot do with packed distributions."""
    if codec.name == "dense":
        return
    kept = f"the cache keeps distributions with codec {codec.name!r}"
    if phase.losses.kl and phase.losses.kl.temperature != codec.temperature:
        yield (
            f"{location}.losses.kl.temperature={phase.losses.kl.temperature}: {kept} at "
            f"temperature {codec.temperature}. Set codec.temperature in the cache phase to the "
            "same."
        )
    if phase.losses.logit_mse:
        yield (
            f"{location}.losses.logit_mse: needs the teacher's logits, and {kept}. Set codec: "
            "{name: dense} in the cache phase, or teachers=live."
        )
    if codec.name == "topk" and len(recipe.teachers) > 1:
        yield (
            f"{location}: {kept}, and {len(recipe.teachers)} teachers' cannot be mixed. Set codec: "
            "{name: compact} or {name: dense} in the cache phase, or teachers=live."
        )


def vocabulary_mistakes(
    models: dict[str, tuple[PreTrainedTokenizerBase, int]],
) -> Iterator[str]:
    """Models whose vocabulary is not the student's.

    models: place in the recipe -> tokenizer and size of the model's vocabulary.
    """
    if "student" not in models:
        return
    student, size = models["student"]
    for location, (tokenizer, other_size) in models.items():
        same = same_tokens(student, tokenizer)
        if same and size == other_size:
            continue
        what = (
            f"the vocabulary of its model has {other_size} entries and the student's {size}"
            if same
            else f"its tokenizer ({len(tokenizer)} tokens) splits or numbers text in another way "
            f"than the student's ({len(student)})"
        )
        yield (
            f"{location}.model: {what}. With task.type=masked-lm all models must have the same "
            "vocabulary, because they are compared token by token (a student that only adds "
            "tokens is not supported yet). Choose models of one family, e.g. all of BERT's."
        )
