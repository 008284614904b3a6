"""What a masked-LM recipe must not ask for."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from ds_distill.data.tokenise import same_tokens
from ds_distill.errors import UserError
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, Codec, Distil, Expertise, FineTune
from ds_distill.recipe.schema import MaskedLM


def check_masked_lm_phases(recipe: Recipe) -> None:
    """What task.type=masked-lm cannot do: all that needs classes."""
    task = recipe.task
    assert isinstance(task, MaskedLM)
    for name, phase in zip(recipe.phase_names(), recipe.phases, strict=True):
        place = f"phases.{name}"
        if isinstance(phase, Expertise):
            raise UserError(
                f"{place}: the expertise table counts right answers per class, and "
                "task.type=masked-lm has no classes. Take the phase out."
            )
        if isinstance(phase, Cache) and task.masking.draws is None:
            raise UserError(
                f"{place}: a cache keeps a number of ways of masking each example. Set "
                "task.masking.draws, e.g. to the number of epochs: epoch e takes number e mod "
                "draws."
            )
        if isinstance(phase, FineTune) and (phase.focus or phase.per_class):
            key = "focus" if phase.focus else "per_class"
            raise UserError(
                f"{place}.{key}: chooses examples by class, and task.type=masked-lm has no "
                "classes. Take the key out."
            )
        if isinstance(phase, Distil):
            for routing in phase.routing:
                if routing.needs_expertise:
                    raise UserError(
                        f"{place}.routing: {routing.policy} follows the teacher that knows a class "
                        "best, and task.type=masked-lm has no classes. Choose average, random, "
                        "ca-mkd or mt-bert."
                    )


def check_codec(recipe: Recipe, phase: Distil, place: str, codec: Codec) -> None:
    """What terms and policies cannot do with packed distributions."""
    if codec.name == "dense":
        return
    kept = f"the cache keeps distributions with codec {codec.name!r}"
    if phase.losses.kl and phase.losses.kl.temperature != codec.temperature:
        raise UserError(
            f"{place}.losses.kl.temperature={phase.losses.kl.temperature}: {kept} at temperature "
            f"{codec.temperature}. Set codec.temperature in the cache phase to the same."
        )
    if phase.losses.logit_mse:
        raise UserError(
            f"{place}.losses.logit_mse: needs the teacher's logits, and {kept}. Set codec: "
            "{name: dense} in the cache phase, or teachers=live."
        )
    if codec.name == "topk" and len(recipe.teachers) > 1:
        raise UserError(
            f"{place}: {kept}, and {len(recipe.teachers)} teachers' cannot be mixed. Set codec: "
            "{name: compact} or {name: dense} in the cache phase, or teachers=live."
        )


def check_one_vocabulary(models: dict[str, tuple[PreTrainedTokenizerBase, int]]) -> None:
    """models: place in the recipe -> tokenizer and size of the model's vocabulary."""
    student, size = models["student"]
    for place, (tokenizer, other_size) in models.items():
        same = same_tokens(student, tokenizer)
        if same and size == other_size:
            continue
        what = (
            f"the vocabulary of its model has {other_size} entries and the student's {size}"
            if same
            else f"its tokenizer ({len(tokenizer)} tokens) splits or numbers text in another way "
            f"than the student's ({len(student)})"
        )
        raise UserError(
            f"{place}.model: {what}. With task.type=masked-lm all models must have the same "
            "vocabulary, because they are compared token by token (a student that only adds "
            "tokens is not supported yet). Choose models of one family, e.g. all of BERT's."
        )
