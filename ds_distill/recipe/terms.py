"""The loss terms: `losses` of a recipe, name -> settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, GetCoreSchemaHandler, model_validator
from pydantic_core import core_schema

from ds_distill.errors import Mistake
from ds_distill.recipe.context import Context
from ds_distill.recipe.part import Needs, Part, a_key_each
from ds_distill.recipe.section import BY_FORM, PLAIN, SECTION, Share, keyed

TERMS: dict[str, type[TermSettings]] = {}


class TermSettings(Part):
    """What the settings of all terms have. It runs a `ds_distill.losses.term.Term`."""

    kind_of_part, key, table = "term", "term", TERMS

    term: ClassVar[str]
    """Its name in `losses`."""
    moves_student: ClassVar[bool] = True
    """Whether it has a gradient for the student. In each step another term must have one, where it
    has none."""
    reads_logits: ClassVar[Literal["student", "both", "teachers"] | None] = None
    """Whose logits of a row it reads, for the plan of a vocabulary's: `both` are the student's and
    the target's."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the term in the phase's loss."""
    start: Share = Field(default=0.0, alias="from")
    """Share of the phase's optimizer steps after which the term is active."""
    until: Share = 1.0
    """Share of the phase's optimizer steps after which it is active no more. Where no active term
    compares with the teachers, they do not run."""

    @property
    def logits_in_chunks(self) -> bool:
        """Of one that reads both, whether with one live teacher a kernel makes the logits piece by
        piece, so that they are never whole."""
        return False

    def without_examples(self) -> Self:
        """As a plan needs it, which counts no examples of a class."""
        return self

    def labels_named(self) -> dict[str, list[str]]:
        """By key: labels that must be the task's."""
        return {}

    @model_validator(mode="after")
    def _starts_before_it_ends(self) -> Self:
        if self.start >= self.until:
            raise ValueError(f"`from` ({self.start}) must be below `until` ({self.until})")
        return self


class DistillationTerm(TermSettings):
    """Settings of a term that compares with the teachers."""

    tolerance: Annotated[float, Field(ge=0)] = 0.0
    """What of the loss, its weight included, is let pass: max(loss - tolerance, 0) (VE-KD)."""
    tolerance_on: Literal["row", "mean"] = "row"
    """Whether each row's loss is held against the tolerance, or the mean over the rows of a
    micro-batch on one rank, as VE-KD's code does: the loss then depends on the micro-batch size and
    the number of ranks."""


class RowTerm(DistillationTerm):
    """Settings of a distillation term on rows of its choice."""

    rows: Literal["masked", "tokens"] = "masked"
    """Of masked-LM: `masked` tokens, or all `tokens` of a text, special ones too, of live teachers.
    Of other tasks rows are what their labels are of, and the key is left out."""

    def all_needs(self) -> Needs:
        needs = super().all_needs()
        if self.rows == "tokens":
            needs = replace(needs, every_token=True, live_teachers=True)
        return needs


class SoftenedTerm(RowTerm):
    """Settings of a term on softened distributions, softmax(logits / temperature)."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """T: logits are divided by it before the softmax."""


ClassWeights = Annotated[
    Annotated[Literal["balanced"], PLAIN]
    | Annotated[dict[str, Annotated[float, Field(gt=0)]], SECTION],
    BY_FORM,
]


class CrossEntropyLoss(TermSettings):
    """Cross-entropy between the student and the label, on labelled rows. In masked-LM a row is a
    masked token, and its label the token itself."""

    term, runs = "cross_entropy", "ds_distill.losses.logits:CrossEntropy"
    needs = Needs(labels=True, distributions=True)
    reads_logits = "student"

    class_weights: ClassWeights | None = None
    """What the classes count: `balanced`, each class as much as any other however few examples it
    has, or a number by label, 1 for those that are not named. They are scaled to a mean of 1 over
    the examples that the phase trains on, so that the loss keeps its scale. Default: all alike."""

    def without_examples(self) -> Self:
        return self.model_copy(update={"class_weights": None})

    def labels_named(self) -> dict[str, list[str]]:
        named = self.class_weights
        return {"class_weights": list(named)} if isinstance(named, dict) else {}

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        task = context.task
        if self.class_weights is not None and (task.many_labels or not task.has_classes):
            yield Mistake(
                f"{context.location}.class_weights",
                f"weighs examples by their one class, and with "
                f"{task.location}.type={task.type} they do not have one. Take the key out.",
            )


class MSELoss(TermSettings):
    """Squared error between the student's number and the label, on labelled rows."""

    term, runs = "mse", "ds_distill.losses.logits:MSE"
    needs = Needs(labels=True, numbers=True)


class TeacherCrossEntropyLoss(TermSettings):
    """Mean over the teachers of each one's own cross-entropy with the label, on labelled rows (the
    teacher loss of the thesis's clinical experiment 3, which does not say how several are put
    together). Teachers are frozen while a student learns: the term has no gradient and moves the
    reported loss alone. It would matter where teachers train along with the student."""

    term, runs = "teacher_cross_entropy", "ds_distill.losses.logits:TeacherCrossEntropy"
    needs = Needs(labels=True, teachers=1, distributions=True, logits=True)
    moves_student, reads_logits = False, "teachers"


Layers = Annotated[
    Annotated[Literal["last", "uniform", "every"], PLAIN]
    | Annotated[dict[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]], SECTION],
    BY_FORM,
]


class LayeredTerm(DistillationTerm):
    """Settings of a term that compares layers of the student with layers of the teachers."""

    layers: Layers = "last"
    """Which layer of the student with which of the teacher. `last`: the last ones. `uniform`: layer
    m of M with layer m * N / M of the teacher's N. `every`: each with its own number, of models of
    equal depth. Or pairs, {STUDENT: TEACHER}: 1 is the first layer, 0 the embeddings."""

    def all_needs(self) -> Needs:
        return replace(super().all_needs(), states=tuple(self.cached_layers() or ()))

    @model_validator(mode="after")
    def _has_layers(self) -> Self:
        if not self.layers:
            raise ValueError("`layers` is empty: name at least one pair, {STUDENT: TEACHER}")
        return self

    def pairs(self, student_depth: int, teacher_depth: int) -> list[tuple[int, int]]:
        """(student's layer, teacher's layer), as `Signals.hidden` numbers them, of models of so
        many layers. Raises ValueError for models that the setting does not fit."""
        if self.layers == "last":
            return [(-1, -1)]
        depths = f"the student has {student_depth} layers and the teacher {teacher_depth}"
        if isinstance(self.layers, dict):
            pairs = list(self.layers.items())
            if any(own > student_depth or other > teacher_depth for own, other in pairs):
                raise ValueError(f"{depths}. Name layers that there are")
            return pairs
        if self.layers == "every" and student_depth != teacher_depth:
            raise ValueError(f"{depths}. Take uniform, or name pairs, {{STUDENT: TEACHER}}")
        if teacher_depth % student_depth:
            raise ValueError(
                f"{depths}, which is no multiple of it. Name pairs, {{STUDENT: TEACHER}}"
            )
        step = teacher_depth // student_depth
        return [(layer, layer * step) for layer in range(1, student_depth + 1)]

    def cached_layers(self) -> list[int] | None:
        """The layers that it reads of teachers that a cache stands for; None where they are told by
        the teachers' depths, which a cache does not know."""
        if isinstance(self.layers, dict):
            return sorted(set(self.layers.values()))
        return [-1] if self.layers == "last" else None


class KLLoss(SoftenedTerm):
    """T^2 * KL(teacher || student) at temperature T, against the routed target; or another
    divergence of the two."""

    term, runs = "kl", "ds_distill.losses.logits:KL"
    needs = Needs(teachers=1, distributions=True)
    reads_logits = "both"

    divergence: Literal["kl", "reverse_kl", "js", "tv"] = "kl"
    """Of the teacher's distribution p and the student's q. `kl`: KL(p || q). `reverse_kl`:
    KL(q || p). `js`, Jensen-Shannon: (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2. `tv`, total
    variation: sum |p - q| / 2 (the f-divergences of Wen et al. 2023)."""

    @property
    def logits_in_chunks(self) -> bool:
        return self.divergence == "kl"

    def all_needs(self) -> Needs:
        return replace(super().all_needs(), logits=self.divergence != "kl")


class LogitMSELoss(RowTerm):
    """Mean squared error between student and routed teacher logits. In a task of numbers the logit
    is the number."""

    term, runs = "logit_mse", "ds_distill.losses.logits:LogitMSE"
    needs = Needs(teachers=1, logits=True)
    reads_logits = "both"

    @property
    def logits_in_chunks(self) -> bool:
        return True

    def mistakes(self, context: Context) -> Iterator[Mistake]:
        task = context.task
        if task.ragged:
            yield Mistake(
                f"{context.location}",
                f"takes a mean over classes, and with {task.location}.type={task.type} these are "
                "the tokens of a window, of which each row has another number. Take kl.",
            )


class HiddenMSELoss(LayeredTerm, RowTerm):
    """Sum over teachers and pairs of layers of MSE(H_t, W H_s) on each row's states; a W for each
    pair, trained (MT-BERT's hidden loss; TinyBERT's, and its loss on embeddings)."""

    term, runs = "hidden_mse", "ds_distill.losses.hidden:HiddenMSE"
    needs = Needs(teachers=1)

    map: bool = True
    """`false`: without W, of states of one width (MobileBERT)."""


class CosineLoss(LayeredTerm, RowTerm):
    """Sum over pairs of layers of 1 - cos(H_t, H_s) of each row's states (DistilBERT, of the last
    ones), of one teacher; to one of another width a trained map of each pair brings the student's
    (VE-KD). Twice that is Patient KD's loss, the squared distance of normalised states."""

    term, runs = "cosine", "ds_distill.losses.hidden:Cosine"
    needs = Needs(teachers=1, at_most=1)


class AttentionSettings(LayeredTerm):
    """Settings of a term that compares attention, of every token of a text."""

    needs = Needs(teachers=1, at_most=1, every_token=True, live_teachers=True, same_tokens=True)

    def all_needs(self) -> Needs:
        return self.needs

    @model_validator(mode="after")
    def _of_layers_with_attention(self) -> Self:
        if isinstance(self.layers, dict) and 0 in {*self.layers, *self.layers.values()}:
            raise ValueError("layer 0 is the embeddings, which have no attention: 1 is the first")
        return self


class AttentionKLLoss(AttentionSettings):
    """Sum over pairs of layers of KL(A_t || A_s) of each token's attention, the mean over heads, of
    one live teacher (MiniLM, of the last layers; CompactBioBERT; MobileBERT)."""

    term, runs = "attention_kl", "ds_distill.losses.attention:AttentionKL"


class RelationKLLoss(AttentionSettings):
    """Sum over pairs of layers of the KL of relations, softmax(X X^T / sqrt(d)) with X queries,
    keys or values, in a number of relation heads, of one live teacher (MiniLMv2; of values
    MiniLM)."""

    term, runs = "relation_kl", "ds_distill.losses.attention:RelationKL"

    of: tuple[Literal["queries", "keys", "values"], ...] = ("queries", "keys", "values")
    """Which relations."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """Relation heads, into which each model's vectors are split anew. Default: those of attention,
    which both models must then have as many of."""

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if not self.of or len({*self.of}) < len(self.of):
            raise ValueError(f"`of` ({self.of}) must name some of queries, keys, values, each once")
        return self


class AttentionMSELoss(AttentionSettings):
    """Sum over pairs of layers of the squared difference of attention at each token, the mean over
    heads and keys, of one live teacher (TinyBERT)."""

    term, runs = "attention_mse", "ds_distill.losses.attention:AttentionMSE"

    of: Literal["scores", "maps"] = "scores"
    """Attention before the softmax (TinyBERT), or behind it (TinyBioBERT)."""


class ConfidencePenaltyLoss(TermSettings):
    """-weight * H(softmax(z_s)), H the entropy: predictions that are too sure cost more (Pereyra et
    al. 2017). Beside cross_entropy; without teachers."""

    term, runs = "confidence_penalty", "ds_distill.losses.logits:ConfidencePenalty"
    needs = Needs(distributions=True)
    reads_logits = "student"


class ActivationBoundaryLoss(DistillationTerm):
    """Squared distance of each neuron of a row's last state to the margin, on the side of 0 on
    which the one teacher has it (DoKTra; Heo et al. 2019), summed over neurons. Where widths
    differ, a random map that is not trained brings the teacher's state to the student's width. The
    share of neurons on the other side is logged beside the losses."""

    term, runs = "activation_boundary", "ds_distill.losses.hidden:ActivationBoundary"
    needs = Needs(teachers=1, at_most=1, states=(-1,))

    margin: Annotated[float, Field(gt=0)] = 1.0
    """Distance from 0 from which on a neuron of the student adds no loss."""


class _Losses:
    """Reads the section `losses`, with a key for each term, into the dict of those that are set."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _some,
            json_schema_input_schema=a_key_each(TERMS, handler),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda losses: {name: term.as_written() for name, term in losses.items()}
            ),
        )


def _some(given: Any) -> dict[str, TermSettings]:
    if found := keyed("term", TERMS, given):
        return found
    raise ValueError("needs at least one term, e.g. kl: {temperature: 2.0}")


Losses = Annotated[dict[str, TermSettings], _Losses()]
"""The terms that a recipe sets, by name."""


def losses_of(terms: Mapping[str, Mapping[str, Any]]) -> dict[str, TermSettings]:
    """Terms' settings, as a recipe's `losses: {kl: {temperature: 2.0}}` gives them, in that
    order."""
    return {name: TERMS[name].model_validate(settings) for name, settings in terms.items()}
