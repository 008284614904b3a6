"""What a loss term is, and modules by the names that a recipe gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from ds_distill.reads import TOKENS, Reads
from ds_distill.recipe.terms import DistillationTerm, RowTerm, TermSettings
from ds_distill.seen import Seen
from ds_distill.types import Signals


class NamedModules(nn.ModuleDict):
    """A ModuleDict whose keys may be names of a module's own attributes, such as `half` or
    `training`: a teacher may be called so, and torch would refuse it. These are registered under
    another name, which no recipe can have; all others as in a ModuleDict."""

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(_registered(key))

    def __setitem__(self, key: str, module: nn.Module) -> None:
        super().__setitem__(_registered(key), module)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and super().__contains__(_registered(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> KeysView[str]:
        return dict(self.items()).keys()

    def items(self) -> ItemsView[str, nn.Module]:
        return {name.removeprefix(_MARK): module for name, module in super().items()}.items()


_MARK = "="

_TAKEN = frozenset(dir(nn.ModuleDict()))


def _registered(name: str) -> str:
    return _MARK + name if name in _TAKEN else name


DEFAULTS: Mapping[str, Any] = {}
"""Settings of which none is given."""


@dataclass(frozen=True)
class TermInputs:
    """What a term may be made of, beside its settings."""

    student_width: int = 0
    """Hidden size."""
    teacher_widths: Mapping[str, int] = field(default_factory=dict)
    """Hidden sizes, by teacher."""
    student_depth: int = 0
    """Number of layers."""
    teacher_depths: Mapping[str, int] = field(default_factory=dict)
    """Numbers of layers, by teacher."""
    labels: Sequence[str] = ()
    """Names of the C classes; none for masked-LM."""
    class_counts: Sequence[int] = ()
    """Training examples of each class: C numbers."""
    seed: int = 0
    """The recipe's, of what a term draws at random and does not train."""

    @staticmethod
    def of(
        student: PreTrainedConfig,
        teachers: Mapping[str, PreTrainedConfig],
        labels: Sequence[str],
        class_counts: Sequence[int] = (),
        seed: int = 0,
    ) -> TermInputs:
        """Of models of these configurations."""
        widths = {name: config.hidden_size for name, config in teachers.items()}
        depths = {name: config.num_hidden_layers for name, config in teachers.items()}
        own = student.hidden_size, student.num_hidden_layers
        return TermInputs(own[0], widths, own[1], depths, labels, class_counts, seed)


NO_INPUTS = TermInputs()


class Term(nn.Module, ABC):
    """A weighted loss per row of a row set. A module, because some terms have weights of their own.

    Terms run inside the bundle's forward. A term that reads a weight reads it there, as a
    module's attribute: under ZeRO stage 3 it is empty everywhere else.
    """

    kind: type[TermSettings] = TermSettings
    """The class of its settings."""
    rows: str = "all"
    """The batch's row set that is counted: the loss is the mean over it."""
    reads: Reads = Reads()
    """What it asks of the student. Where no active term asks for logits, the head rests."""
    label_rows: Literal["two classes", "logit"] | None = "two classes"
    """Where an example has any number of labels: whether each label is a row of two classes, with
    the logits [0, z], or of its logit alone. None: rows are examples, as of a term on states."""
    needs_teachers: bool = True
    """Whether it reads what teachers predict. Where no active term does, they do not run."""

    def __init__(
        self,
        settings: TermSettings | Mapping[str, Any] = DEFAULTS,
        inputs: TermInputs = NO_INPUTS,
    ) -> None:
        """settings: as a recipe has them, e.g. {"weight": 0.5}. A term that needs to know more,
        such as hidden sizes, overrides this and reads `inputs`."""
        super().__init__()
        self.settings: Any = self.kind.model_validate(settings)
        self.weight = self.settings.weight
        if isinstance(self.settings, RowTerm) and self.settings.rows == TOKENS:
            self.rows = TOKENS

    def teacher_reads(self, teacher: str) -> Reads:
        """What it asks of a teacher: what it asks of the student. A term that compares one layer
        with another overrides this."""
        return self.reads

    def is_active(self, progress: float) -> bool:
        """Whether it adds to the loss at a point of the phase; see `Batch.progress`."""
        return bool(self.settings.start <= progress < self.settings.until)

    def counted(self, seen: Seen) -> torch.Tensor | None:
        """The rows of its row set as the kernels take them, which read them where they lie, without
        a copy: int64 [k]; None where these are all."""
        rows = seen.batch.row_sets[self.rows]
        return None if len(rows) == len(seen.student) else rows

    def tolerated(self, losses: torch.Tensor) -> torch.Tensor:
        """Losses of the rows, less what the settings let pass (VE-KD): float [k] both.

        Per row max(loss - tolerance, 0). On the mean, rows whose sum is k * max(mean - tolerance,
        0): 0 each where the mean over these rows, which are those of one micro-batch and rank, is
        no more than the tolerance.
        """
        settings = self.settings
        if not isinstance(settings, DistillationTerm) or not settings.tolerance or not len(losses):
            return losses
        if settings.tolerance_on == "row":
            return (losses - settings.tolerance).clamp(min=0)
        opened = losses.detach().mean() > settings.tolerance
        return torch.where(opened, losses - settings.tolerance, 0.0 * losses)

    @abstractmethod
    def forward(self, seen: Seen) -> torch.Tensor:
        """Losses of the k rows of the term's row set, weight included: float32 [k].

        seen: of all n rows; `seen.at(self.rows)` is of those of the row set, which may be empty.
        """

    def measures(self, seen: Seen) -> dict[str, torch.Tensor]:
        """Numbers of the k rows of the term's row set that are logged as means beside the losses,
        without gradients: float32 [k] by name."""
        return {}

    def idle(self, student: Signals) -> torch.Tensor:
        """A loss of 0.0 while the term is not active, with a gradient of 0 for each weight of its
        own: ranks average the gradients of all weights in each step. A term with trained weights
        overrides this, and runs its modules on no rows.

        student: of no rows.
        """
        if any(weight.requires_grad for weight in self.parameters()):
            raise NotImplementedError(f"{type(self).__name__} has weights to train and no `idle`")
        return student.logits.sum()


def target_loss(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], seen: Seen
) -> torch.Tensor:
    """A logit loss against the routed target, [k]. Against a partial teacher it is over its K
    classes alone: of the student's logits those are taken, so that a softmax of them is normalised
    over these classes, and no other class moves it.

    loss: (student's logits, target's logits), [k, C] each -> loss per row [k]. Where the policy
        mixes losses instead of targets, the sum over teachers of weight * loss against that
        teacher. Without a router there is one teacher.
    seen: of k rows.
    """
    student, teachers, target = seen.student.logits, seen.teachers, seen.target

    def against(wanted: torch.Tensor, known: torch.Tensor | None = None) -> torch.Tensor:
        own = student if known is None else student.index_select(-1, known)
        return loss(own[..., : wanted.shape[-1]], wanted)  # a student may know more tokens

    if target is not None and target.logits is not None:
        return against(target.logits)

    if target is None:
        teacher = only_teacher(teachers)
        return against(teacher.logits, teacher.classes)
    losses = [against(teacher.logits, teacher.classes) for teacher in teachers.values()]
    return (target.weights * torch.stack(losses)).sum(dim=0)


def only_teacher(teachers: Mapping[str, Signals]) -> Signals:
    """The teacher of a bundle without a router. Raises ValueError unless it is one."""
    if not teachers:
        raise ValueError(
            "a loss against teachers needs one: give the bundle a teacher, or the batch cached "
            "signals"
        )
    if len(teachers) > 1:
        raise ValueError(
            f"a bundle without a router has one teacher, and here are {', '.join(teachers)}: give "
            'it a router, e.g. Router("average")'
        )
    [teacher] = teachers.values()
    return teacher
