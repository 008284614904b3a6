"""What is wrong with the vocabularies that a recipe's phases expand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ds_distill.data.word_pieces import rules_of_word_pieces
from ds_distill.errors import Mistake, collecting
from ds_distill.recipe import Recipe
from ds_distill.recipe.context import Model
from ds_distill.recipe.lineage import Step, steps
from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.policies import Routing
from ds_distill.recipe.tasks import TASKS

EXPANDED = ("bert", "distilbert", "electra")
"""Model types whose vocabulary may grow: new rows were found right in their input and output."""


def expanded_mistakes(
    recipe: Recipe,
    configs: Mapping[str, PreTrainedConfig],
    vocabularies: Mapping[str, tuple[PreTrainedTokenizerBase, int]],
) -> Iterator[Mistake]:
    """Vocabularies that cannot grow, and what cannot be done with a model of which one has, where
    models are compared token by token.

    configs, vocabularies: of the recipe's models that could be read, by location; of a vocabulary
        the tokenizer, and the rows of the model's embeddings.
    """
    for step in steps(recipe):
        if step.phase.vocabulary is not None:
            start = step.model(step.phase.starts[0])
            at = "student" if start.origin == "student" else f"teachers.{start.origin}"
            if at in vocabularies:
                tokenizer, rows = vocabularies[at]
                rows = start.vocabulary or rows
                size = step.phase.vocabulary
                yield from expansion_mistakes(
                    f"phases.{step.name}", configs[at], tokenizer, rows, size
                )
        if not TASKS[recipe.tasks_by_name[step.task_name].type].needs.same_tokens:
            continue
        if PHASES[step.phase.kind].makes == "student":
            yield from _of_teachers(step)
        elif PHASES[step.phase.kind].makes == "evaluation":
            yield from _of_evaluated(step)


def expansion_mistakes(
    location: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    size: int,
) -> Iterator[Mistake]:
    """A student whose vocabulary cannot grow to `size`, from `rows` of its embeddings."""
    if config.model_type not in EXPANDED:
        yield Mistake(
            location,
            f"the vocabulary of a model of type {config.model_type} cannot be expanded "
            f"here. Choose a student of one of these types: {', '.join(EXPANDED)}.",
        )
    found: list[Mistake] = []
    with collecting(found, location):
        rules_of_word_pieces(tokenizer)
    yield from found
    if not config.tie_word_embeddings:
        yield Mistake(
            location,
            "the student's input and output embeddings are not tied, and new rows of "
            "its input would learn nothing: new words are always masked, so that they are never "
            "read. Choose a student with tie_word_embeddings.",
        )
    if size <= rows:
        yield Mistake(
            f"{location}.size={size}", f"the student has {rows} tokens already. Set more than that."
        )


def _of_teachers(step: Step) -> Iterator[Mistake]:
    """Of a phase that distils: teachers of tokens that its start lacks, and what of the start's
    cannot be learnt from those that it has."""
    phase, location = step.phase, f"phases.{step.name}"
    start = step.model(phase.starts[0])
    teachers = [step.model(name) for name in step.teachers]
    names = ", ".join(step.teachers)
    more = [one for one in teachers if not _begins_with(start, one)]
    if more:
        yield Mistake(
            location,
            f"teacher {more[0].name!r} predicts tokens that {_by(step, more[0])} has "
            f"added, and {start.name} does not have them. Start from a model of that expansion "
            "(start: NAME), or follow other teachers.",
        )
        return
    if not start.expanded:
        return
    if phase.cached_split is not None:
        yield Mistake(
            f"{location}.teachers=cached",
            "what a cache holds is of the teachers' own tokens, and "
            f"those of {start.name} are others since its vocabulary was expanded. Set "
            "teachers=live.",
        )
    if len(teachers) > 1:
        yield Mistake(
            location,
            f"{start.name}, whose vocabulary was expanded, learns from one teacher, "
            f"and here are {names}. Name one with follow.",
        )
    if all(one.expanded == start.expanded for one in teachers):
        return
    for key, part in phase.parts():
        needs = part.all_needs()
        if needs.labels and (needs.teachers or isinstance(part, Routing)):
            yield Mistake(
                f"{location}.{key}",
                "asks the teacher about each masked token, also about words "
                f"that {start.name} has since its vocabulary was expanded, and {names} does not "
                f"know them. Take {part.part_name} out.",
            )


def _of_evaluated(step: Step) -> Iterator[Mistake]:
    """Models of vocabularies that were expanded apart: no tokens are the same for all."""
    recipe = step.recipe
    given = [step.model(name) for name in recipe.teachers if name not in step.found]
    trained = [
        model
        for model in step.found.values()
        if model.made_by is not None and PHASES[recipe.phases[model.made_by].kind].makes != "start"
    ]
    models = [one for one in (*given, *trained) if one.head in (None, step.task_name)]
    if not models:
        return
    largest = max(models, key=lambda one: len(one.expanded))
    apart = next((one for one in models if not _begins_with(largest, one)), None)
    if apart is not None:
        first, second = sorted((largest, apart), key=models.index)
        yield Mistake(
            f"phases.{step.name}",
            "models are compared on the same tokens, and those of "
            f"{first.name}, {second.name} were added apart from each other, by {_by(step, first)} "
            f"and {_by(step, second)}. Expand once, and let all students start from that.",
        )


def _begins_with(model: Model, other: Model) -> bool:
    """Whether the first tokens of a model's vocabulary are all that another one has."""
    return model.expanded[: len(other.expanded)] == other.expanded


def _by(step: Step, model: Model) -> str:
    """The phase that has expanded a model's vocabulary."""
    return f"phases.{step.recipe.phase_names()[model.expanded[-1]]}"
