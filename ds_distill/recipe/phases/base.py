"""What the settings of all phases have, and of those that train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from ds_distill.recipe.context import Context
from ds_distill.recipe.entry import ConfiguredEntry, TaskEntry
from ds_distill.recipe.section import Count, Name, Section, Several, Share
from ds_distill.recipe.terms import TERMS, Losses


class PhaseSettings(Section):
    """Settings of a phase. What other code asks of a phase it asks here, and not of its kind."""

    kind: str
    name: Name | None = None
    """Name of the phase, in the run's folder and in overrides. Default: its kind, numbered where
    that repeats."""
    task: Name | None = None
    """The task that it works on, by its name in `tasks`. Default: the only one."""

    def of_task(self, task: TaskEntry) -> Self:
        """The settings with what is by default otherwise in another kind of task; the recipe says
        of which kind theirs is, once it has been read."""
        return self

    @property
    def starts(self) -> list[str]:
        """Names of the models that it starts from: teachers', `student`, or those of models that
        earlier phases trained."""
        return []

    @property
    def outputs(self) -> list[str]:
        """Names of the models that it trains."""
        return []

    def start_of(self, output: str) -> str:
        """The model that one of its outputs starts from."""
        each = len(self.starts) == len(self.outputs)
        return self.starts[self.outputs.index(output) if each else 0]

    @property
    def learns_from(self) -> list[str]:
        """Splits that it trains on or fits to: figures on them say nothing of its outputs."""
        return []

    @property
    def reads(self) -> list[tuple[str, bool]]:
        """Splits that it reads, and of each whether it needs labels."""
        return []

    @property
    def runs_teachers(self) -> bool:
        """Whether it runs the recipe's teachers as they are."""
        return False

    @property
    def vocabulary(self) -> int | None:
        """Tokens of its outputs, where these have more than what they start from."""
        return None

    @property
    def followed(self) -> list[str] | None:
        """Names of the models that teach in it; None for the recipe's teachers."""
        return None

    @property
    def leaves_out_teachers(self) -> bool:
        """Whether its record names the only `teachers` that the phases after it have."""
        return False

    @property
    def cached_split(self) -> str | None:
        """The split whose teacher signals it reads from an earlier cache phase, if it does."""
        return None

    def parts(self) -> Iterator[tuple[str, ConfiguredEntry, Section]]:
        """(key within the phase, entry, settings) of the parts that it uses, such as its terms."""
        yield from ()

    def lists(self) -> dict[str, list[str]]:
        """By key: lists that must hold something, and nothing twice."""
        return {}

    def labels_named(self) -> dict[str, list[str]]:
        """By key: labels that must be the task's."""
        return {}


class FollowingPhase(PhaseSettings):
    """Settings of a phase that can have other teachers than the recipe's."""

    follow: Several[Name] | None = None
    """The models that teach in it, in this order: teachers' names, or those of models that earlier
    phases trained, as they are by then. Default: the recipe's teachers."""

    @property
    def runs_teachers(self) -> bool:
        return True

    @property
    def followed(self) -> list[str] | None:
        return self.follow

    def lists(self) -> dict[str, list[str]]:
        return {**super().lists(), **({} if self.follow is None else {"follow": self.follow})}


class Training(Section):
    """How a phase trains. The recipe's `training` section sets it for all phases; a phase
    may differ."""

    epochs: Count = 3
    """Passes over the split."""
    steps: Count | None = None
    """Optimizer steps to train for, in place of `epochs`; the last epoch ends where they do. Of
    `training` and a phase, the phase's own word holds, be it steps or epochs."""
    patience: Count | None = None
    """Epochs without a better validation score than the best so far, after which training ends; the
    learning rate follows the whole plan all the same. Needs keep=best: the last weights would be
    those that the patience was lost with."""
    batch_size: Count = 32
    """Examples per optimizer step, all ranks and micro-steps together."""
    micro_batch_size: Count | None = None
    """Examples per rank and forward pass. Default: batch_size divided by the ranks."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    """The highest one, of AdamW."""
    warmup: Share = 0.1
    """Share of all steps in which the learning rate rises linearly; then it falls linearly
    to 0. Steps that fp16 skips count."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Of AdamW, on matrices alone."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients whose norm is larger are scaled down to it."""
    freeze_embeddings: bool = False
    """Do not train the embeddings of words, positions and types, and their layer norm."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Dropout of the trained model, everywhere in it. Default: the model's own."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of storing them: less
    memory, about a third more time. `ds-distill plan` shows both."""
    not_finite: Literal["stop", "skip"] = "stop"
    """Where a loss is NaN or infinite: end the run, naming the term, the step and its examples, or
    leave that micro-batch out and go on, up to ten in a row. `skip` looks at every loss and so
    waits for the device in each micro-step; where an optimizer step has several, their losses are
    computed once more, before the first backward pass, so that each is divided by the rows that
    are kept."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: the epoch with the best validation accuracy, or the last."""
    save_every: Count | None = None
    """Optimizer steps between checkpoints. Default: one at the end of each epoch."""

    def inherited(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """What a phase with keys of its own takes of this section."""
        replaced = {"steps"} if "epochs" in own and "steps" not in own else set()
        return {key: getattr(self, key) for key in self.model_fields_set - replaced}


class TrainingPhase(Training, PhaseSettings):
    """Settings of a phase that trains models on one split."""

    split: Name = "train"
    """The split that it trains on; its labels are read where something needs them."""
    losses: Losses

    @property
    def trainings(self) -> list[list[str]]:
        """Its outputs, those together that one engine trains."""
        return [[output] for output in self.outputs]

    @property
    def learns_from(self) -> list[str]:
        return [self.split]

    def parts(self) -> Iterator[tuple[str, ConfiguredEntry, Section]]:
        for name, settings in self.losses.items():
            yield f"losses.{name}", TERMS[name], settings

    def labels_named(self) -> dict[str, list[str]]:
        return {
            f"losses.{name}.{key}": named
            for name, settings in self.losses.items()
            for key, named in settings.labels_named().items()
        }


def training_name(outputs: Iterable[str]) -> str:
    """The name of the training of models: of one its own, of several in one engine `A+B`."""
    return "+".join(outputs)


def follow_mistakes(settings: FollowingPhase, context: Context) -> Iterator[str]:
    """Models to follow that are not there, or cannot teach."""
    at = f"{context.location}.follow"
    for name in settings.follow or ():
        if name == "student":
            yield (
                f"{at}: `student` is what is trained here. Save the model that is to teach under a "
                "name of its own (save_as), and follow that."
            )
        elif name not in context.models:
            there = ", ".join(sorted(context.models - {"student"})) or "none"
            yield f"{at}: no model {name!r} before this phase. There are: {there}."


def training_mistakes(settings: TrainingPhase, context: Context) -> Iterator[str]:
    """Steps without a term, an epoch that could be kept from before a term starts, and patience
    with weights that are not the best."""
    location, losses = context.location, settings.losses
    if settings.patience is not None and settings.keep != "best":
        yield (
            f"{location}.patience={settings.patience}: training would end after epochs without a "
            f"better score, and keep={settings.keep} keep the last of them. Set "
            f"{location}.keep=best, or take patience out."
        )
    late = {name: term.start for name, term in losses.items() if term.start > 0}
    if late and settings.keep == "best":
        name = max(late, key=lambda name: late[name])
        yield (
            f"{location}.losses.{name}.from={late[name]:g}: keep=best could keep an epoch from "
            f"before the term is active. Set {location}.keep=last."
        )
    moving = [term for name, term in losses.items() if TERMS[name].moves_student]
    if not moving:
        yield (
            f"{location}.losses: {', '.join(losses)} has no gradient for the student, which would "
            "learn nothing. Add a term that has one, such as cross_entropy."
        )
        return
    covered = 0.0
    for start, until in sorted((term.start, term.until) for term in moving):
        if start > covered:
            break
        covered = max(covered, until)
    if covered < 1:
        later = (term.start for term in moving if term.start > covered)
        yield (
            f"{location}.losses: no term is active from {covered:g} to {min(later, default=1):g} "
            "of the phase's steps. Let `from` and `until` of the terms meet."
        )
