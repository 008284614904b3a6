"""Terms on hidden states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from ds_distill.losses.term import DEFAULTS, NO_INPUTS, NamedModules, Term, TermInputs
from ds_distill.reads import Reads
from ds_distill.recipe.terms import ActivationBoundaryLoss, CosineLoss, HiddenMSELoss
from ds_distill.recipe.terms import LayeredTerm as LayeredSettings
from ds_distill.seen import Seen
from ds_distill.types import Signals
from ds_kernels import masked_cosine

Pairs = Sequence[tuple[int, int]]
"""(student's layer, teacher's layer), as `Signals.hidden` numbers them."""


class LayeredTerm(Term):
    """A term that compares layers of the student with layers of each teacher."""

    label_rows = None

    def __init__(
        self,
        settings: LayeredSettings,
        pairs: Mapping[str, Pairs],
        widths: Mapping[str, tuple[int, int]] = DEFAULTS,
    ) -> None:
        """pairs: by teacher. widths: of the student's states and of the teacher's, of those to
        which a trained map brings the student's, one for each pair."""
        super().__init__(settings)
        self.pairs = pairs
        self.reads = self.of_layers({own for each in pairs.values() for own, _ in each})
        self.projections = NamedModules(
            {
                _of_pair(name, pair): nn.Linear(own, other, bias=False)
                for name, (own, other) in widths.items()
                for pair in pairs[name]
            }
        )

    def student_state(self, student: Signals, teacher: str, pair: tuple[int, int]) -> torch.Tensor:
        """The student's states of a pair, [k, H], as wide as the teacher's."""
        state, name = student.hidden[pair[0]], _of_pair(teacher, pair)
        return self.projections[name](state) if name in self.projections else state

    def idle(self, student: Signals) -> torch.Tensor:
        if not len(self.projections):
            return super().idle(student)
        every = [(name, pair) for name, pairs in self.pairs.items() for pair in pairs]
        return torch.stack([self.student_state(student, *one).sum() for one in every]).sum()

    def of_layers(self, layers: Collection[int]) -> Reads:
        """What it asks of a model, of some of its layers."""
        return Reads(layers, logits=False)

    def teacher_reads(self, teacher: str) -> Reads:
        pairs = self.pairs.get(teacher, self.pairs.get("", ()))  # "": of a term of one teacher
        return self.of_layers({other for _, other in pairs})


class HiddenMSE(LayeredTerm):
    """sum over teachers t and pairs (i, j) of MSE(H_t[j], W H_s[i]) on the states of each row, a W
    for each teacher and pair, trained; with `map: false` of MSE(H_t[j], H_s[i]), of one width.

    MT-BERT's multi-teacher hidden loss (Wu et al. 2021), of the last layer or of inner ones; with
    one teacher TinyBERT's loss on hidden states (Jiao et al. 2020, equation 8, where one W serves
    all layers) and, of the pair (0, 0), on embeddings (equation 9), on rows. Without maps, of all
    layers, MobileBERT's (Sun et al. 2020).
    """

    kind = HiddenMSELoss

    def __init__(
        self,
        settings: HiddenMSELoss | Mapping[str, Any] = DEFAULTS,
        inputs: TermInputs = NO_INPUTS,
    ) -> None:
        """
        settings: as a recipe has them, e.g. {"weight": 0.5}.
        inputs: hidden sizes, and numbers of layers, which `layers: last` does not need.
        """
        settings, own = self.kind.model_validate(settings), inputs.student_width
        pairs = {
            name: settings.pairs(inputs.student_depth, inputs.teacher_depths.get(name, 0))
            for name in inputs.teacher_widths
        }
        widths = {name: (own, width) for name, width in inputs.teacher_widths.items()}
        super().__init__(settings, pairs, widths if settings.map else {})

    def forward(self, seen: Seen) -> torch.Tensor:
        seen = seen.at(self.rows)
        student, teachers = seen.student, seen.teachers
        total = torch.zeros(len(student), device=seen.batch.labels.device)
        for name, pairs in self.pairs.items():
            if name not in teachers:
                raise ValueError(f"hidden_mse projects to teacher {name!r}, which the batch lacks")
            for own, other in pairs:
                projected = self.student_state(student, name, (own, other))
                wanted = _state("hidden_mse", name, teachers[name], other).float()
                total = total + (projected.float() - wanted).square().mean(dim=-1)
        return self.tolerated(self.weight * total)


def _of_pair(teacher: str, pair: tuple[int, int]) -> str:
    """The name of a projection: no recipe has a teacher of such a name."""
    of_last = teacher or "lone"
    return of_last if pair == (-1, -1) else f"{teacher}={pair[0]}-{pair[1]}"


class Cosine(LayeredTerm):
    """sum over pairs (i, j) of 1 - cos(H_t[j], H_s[i]) on the states of each row, with one teacher:
    of the last layers DistilBERT's (Sanh et al. 2019). To a teacher of another width a trained map
    W of each pair brings them, 1 - cos(H_t[j], W H_s[i]) (VE-KD, Gao et al. 2024, appendix D).

    Twice this is Patient KD's loss (Sun et al. 2019, equation 7), the sum over pairs of
    ||H_s[i] / ||H_s[i]|| - H_t[j] / ||H_t[j]||||^2, of [CLS] states where rows are examples.
    """

    kind = CosineLoss

    def __init__(
        self,
        settings: CosineLoss | Mapping[str, Any] = DEFAULTS,
        inputs: TermInputs = NO_INPUTS,
    ) -> None:
        """
        settings: as a recipe has them, e.g. {"weight": 0.5}.
        inputs: hidden sizes, where they differ, and numbers of layers, which `layers: last` does
            not need.
        """
        settings, own = self.kind.model_validate(settings), inputs.student_width
        [depth] = inputs.teacher_depths.values() or [0]
        [width] = inputs.teacher_widths.values() or [own]
        pairs = {"": settings.pairs(inputs.student_depth, depth)}
        super().__init__(settings, pairs, {"": (own, width)} if width != own else {})

    def forward(self, seen: Seen) -> torch.Tensor:
        rows = self.counted(seen)
        if len(self.projections):  # of the rows that count alone
            seen, rows = seen.at(self.rows), None
        states = [self.student_state(seen.student, "", pair) for pair in self.pairs[""]]
        wanted = [_lone_state("cosine", seen.teachers, other) for _, other in self.pairs[""]]
        losses = masked_cosine(states, wanted, rows, weight=self.weight, reduction="none")
        return self.tolerated(losses.sum(dim=0))


class ActivationBoundary(Term):
    """||rho(t) * relu(mu - s) + (1 - rho(t)) * relu(mu + s)||^2 with rho(x) = 1 where x > 0, on the
    last layer's state of each row, with one teacher (DoKTra, equation 5; Heo et al. 2019).

    t is the teacher's state, or where widths differ its image under a map that is drawn from the
    seed and not trained.
    """

    kind = ActivationBoundaryLoss
    reads = Reads({-1}, logits=False)
    label_rows = None
    map: torch.Tensor | None
    """float32 [student's width, teacher's width]; None between equal widths."""

    def __init__(
        self,
        settings: ActivationBoundaryLoss | Mapping[str, Any] = DEFAULTS,
        inputs: TermInputs = NO_INPUTS,
    ) -> None:
        """
        settings: as a recipe has them, e.g. {"weight": 0.001}.
        inputs: hidden sizes, where they differ, and the map's seed.
        """
        super().__init__(settings)
        own, drawn = inputs.student_width, None
        [width] = inputs.teacher_widths.values() or [own]
        if width != own:
            seed = xxhash.xxh64_intdigest(b"activation_boundary %d" % inputs.seed) >> 1
            generator = torch.Generator("cpu").manual_seed(seed)
            drawn = torch.randn(own, width, generator=generator, device="cpu")
            drawn /= width**0.5
        self.register_buffer("map", drawn)

    def forward(self, seen: Seen) -> torch.Tensor:
        state, above = self._sides(seen)
        distance = self.settings.margin - torch.where(above, state, -state)
        return self.tolerated(self.weight * distance.relu().square().sum(dim=-1))

    def measures(self, seen: Seen) -> dict[str, torch.Tensor]:
        """`other_sign`: the share of neurons on the other side of 0 than the teacher's (equation 4
        counts them)."""
        state, above = self._sides(seen)
        return {"other_sign": ((state > 0) != above).float().mean(dim=-1)}

    def _sides(self, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """The student's state, float32 [k, H], and where the teacher's is above 0, bool [k, H]."""
        seen = seen.at(self.rows)
        state = _lone_state("activation_boundary", seen.teachers, -1).float()
        if self.map is not None:
            state = nn.functional.linear(state, self.map.float())
        return seen.student.hidden[-1].float(), state > 0


def _lone_state(term: str, teachers: Mapping[str, Signals], layer: int) -> torch.Tensor:
    """A layer's states of the one teacher. Raises ValueError where it is not one, or has none."""
    if len(teachers) != 1:
        raise ValueError(f"{term} takes one teacher, and here are {len(teachers)}")
    [(name, signals)] = teachers.items()
    return _state(term, name, signals, layer)


def _state(term: str, name: str, signals: Signals, layer: int) -> torch.Tensor:
    if layer not in signals.hidden:
        which = "the last layer's states" if layer == -1 else f"the states of layer {layer}"
        raise ValueError(
            f"{term} reads {which} of teacher {name!r}, and the batch has none: "
            f"cache them (hidden: [{layer}]), or give the bundle the teacher"
        )
    return signals.hidden[layer]
