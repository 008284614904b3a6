"""The one module that DeepSpeed wraps: student, loss terms, frozen teachers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_distill.losses import Seen, Term
from ds_distill.losses.term import NamedModules
from ds_distill.models.encoder import read_signals, read_weights
from ds_distill.models.file_teacher import FileTeacher
from ds_distill.models.labels import LabelMap
from ds_distill.process.timers import timed
from ds_distill.reads import TAUGHT, TOKENS, Reads
from ds_distill.routing import Router
from ds_distill.types import Batch, Signals
from ds_distill.views import View, join


class Bundle(nn.Module):
    """Student and teachers side by side, in one engine.

    Everything that reads a weight happens inside `forward`: under ZeRO stage 3 a weight is
    whole only while the engine runs the module.

    The student is registered first: DeepSpeed keeps parameters resident in the order of
    registration until its threshold is used up, which is how the student stays whole while
    teachers are sharded.
    """

    def __init__(
        self,
        student: PreTrainedModel | None,
        teachers: Mapping[str, PreTrainedModel | FileTeacher],
        terms: Mapping[str, Term] | None = None,
        router: Router | None = None,
        *,
        label_maps: Mapping[str, LabelMap] | None = None,
        tokens: Mapping[str, int] | None = None,
        teacher_autocast: bool = False,
    ) -> None:
        """
        student: the model to train, of transformers with a head for sequence or token
            classification, questions or masked-LM; None only to run teachers.
        teachers: by name, likewise, or what is in files; frozen here. They run in this order on
            every rank. Empty where the batches bring cached signals.
        terms: by name; the loss is their sum.
        router: turns several teachers into one target. None with one teacher, whose outputs are
            the target then, or without teachers.
        label_maps: of teachers whose classes are not the task's in the same order, by name: which
            of their outputs stand for which label.
        tokens: of teachers that are masked-LMs, by name: how many of the first entries of their
            vocabulary are tokens, which alone are signals.
        teacher_autocast: run fp32 teachers in bf16.
        """
        super().__init__()
        self.student = student
        self.terms = nn.ModuleDict(terms or {})
        self.teachers = NamedModules(teachers)
        self.teachers.requires_grad_(False)
        self._router = router
        of_terms = [*(terms or {}).values()]
        # The student's head always runs: its gradient is there in each step, and at times 0.
        self._reads = Reads.union([*(term.reads for term in of_terms), Reads()])
        of_router = [Reads(router.layers if router else ())] if router or not terms else []
        self._teacher_reads = {
            name: Reads.union(
                [*of_router, *(t.teacher_reads(name) for t in of_terms if t.needs_teachers)]
            )
            for name in teachers
        }
        self._teacher_autocast = teacher_autocast
        self._tokens = dict(tokens or {})
        for name, of_teacher in (label_maps or {}).items():
            # Their outputs are put in order, not their weights, which may be sharded.
            self.register_buffer(_outputs_of(name), _padded(of_teacher.outputs), persistent=False)
            if of_teacher.classes is not None:
                classes = torch.tensor(of_teacher.classes)
                self.register_buffer(_classes_of(name), classes, persistent=False)
        self.train(self.training)

    @property
    def students(self) -> dict[str, PreTrainedModel]:
        """The models that it trains, by the names that `predict` has for them."""
        return {} if self.student is None else {"student": self.student}

    @property
    def trained(self) -> list[nn.Module]:
        """The modules with all weights to train, in the order of registration."""
        return [*self.students.values(), self.terms]

    @property
    def every_token(self) -> bool:
        """Whether a term counts the rows of all tokens, which batches then must have."""
        return any(term.rows == TOKENS for term in self._terms().values())

    def signal_bytes(self, rows: int, tokens: int) -> int:
        """Bytes at most of what live teachers say of so many rows and tokens; 0 without any that is
        a model."""
        return sum(
            self._teacher_reads[name].most_bytes(teacher.config.hidden_size, rows, tokens)
            for name, teacher in self.teachers.items()
            if isinstance(teacher, PreTrainedModel)
        )

    def readers(self) -> dict[nn.Parameter, list[Term]]:
        """Of each weight that is trained, in the order of registration, the terms that read it."""
        assert self.student is not None
        read = {}
        for term in self._terms().values():
            own, student = set(term.parameters()), self.student
            whole = set(student.parameters())
            read[term] = own | (whole if term.reads.logits else read_weights(student, term.reads))
        trained = (weight for weight in self.parameters() if weight.requires_grad)
        return {weight: [term for term in read if weight in read[term]] for weight in trained}

    def train(self, mode: bool = True) -> Bundle:
        """As usual, except that teachers stay in eval mode."""
        super().train(mode)
        self.teachers.eval()
        return self

    def forward(
        self,
        batch: Batch | list[Batch],
        predict: tuple[str, ...] | None = None,
        layers: tuple[int, ...] = (),
    ) -> Any:
        """One micro-step's loss, or the outputs of the models in `predict`; of several batches,
        their live teachers' signals.

        Training (`predict` is None) returns `loss`, each active term's weighted share of it, and
        what it measures as `TERM.NAME`, detached: float32 scalars that add up, over ranks and
        micro-steps, to the mean over the optimizer step's rows. With `predict` it returns {model:
        Signals with logits [n, C] and the states of `layers`} and computes no loss; `student` is
        the student's name. Of a list it returns for each batch what its `signals` would be: each
        teacher reads all of them at once, so that its weights are gathered once.

        Raises ValueError when the batch lacks what a model, a term or the router needs.
        """
        if isinstance(batch, list):
            return self._signals_of_each(batch)
        if predict is not None:
            answers = {
                name: self._signals_of(name, view_of(name, batch), batch.keys, Reads(layers))
                for name in predict
            }
            return {
                name: replace(outputs, output=outputs.logits) for name, outputs in answers.items()
            }
        if self.student is None or not self.terms:
            lacking = "terms" if self.student is not None else "a student"
            raise ValueError(f"a bundle without {lacking} has no loss: name models in `predict`")
        for name, term in self._terms().items():
            _check_rows(name, term, batch)
        active = self._active(batch.progress)
        if not active:
            raise ValueError(
                f"no term is active at progress {batch.progress:g}: their `from` and `until` leave "
                "it out"
            )
        teachers: dict[str, Signals] = {}
        target = None
        if any(term.needs_teachers for term in active.values()):
            teachers = dict(batch.signals) or self._signals_of_each([batch])[0]
            with timed("routing"):
                target = self._router(teachers, batch) if self._router else None
        with timed("student"):
            student = read_signals(self.student, view_of("student", batch), self._reads)
        with timed("loss"):
            return self._loss(active, Seen(student, batch, teachers, target))

    def _signals_of_each(self, batches: list[Batch]) -> list[dict[str, Signals]]:
        found: list[dict[str, Signals]] = [{} for _ in batches]
        keys = torch.cat([batch.keys for batch in batches])
        for name in self.teachers:
            views = [view_of(name, batch) for batch in batches]
            with timed(f"teacher {name}"):
                outputs = self._signals_of(name, join(views), keys, self._teacher_reads[name])
            if len(batches) == 1:
                found[0][name] = outputs
                continue
            counts = [len(view.example_indices) for view in views]
            rows = torch.arange(sum(counts), device=views[0].input_ids.device).split(counts)
            start = 0
            for signals, view, own in zip(found, views, rows, strict=True):
                end = start + view.num_examples
                attention = {
                    layer: one.of_examples(start, end, view.length)
                    for layer, one in outputs.attention.items()
                }
                here, start = replace(outputs.at(own), attention=attention), end
                if view.candidates is not None and here.output is not None:
                    # Another batch may have longer contexts.
                    classes = view.candidates.shape[1]
                    here = replace(here, output=here.logits[:, :classes])
                signals[name] = here
        return found

    def _loss(self, active: Mapping[str, Term], seen: Seen) -> dict[str, torch.Tensor]:
        """The sum of the active terms, their shares and what they measure; see `forward`."""
        parts, measured = {}, {}
        # Backward passes run in the opposite order. Those over a teacher's head and the student's
        # need most memory, and come before there are gradients of others; that of labels adds to
        # their gradient of the student's head.
        for name, term in sorted(active.items(), key=_position):
            own = replace(seen, batch=_counted_by(term, seen.batch))
            if seen.batch.labels.ndim > 1 and term.label_rows is not None:
                # Each label is a row of a loss on logits; states have one row for each example.
                own = own.by_label(term.label_rows == "two classes")
            parts[name] = _share(name, term, term(own), own.batch)
            with torch.no_grad():
                for what, values in term.measures(own).items():
                    measured[f"{name}.{what}"] = _share(name, term, values, own.batch)
        parts = {name: parts[name] for name in active}
        loss = torch.stack(list(parts.values())).sum()
        idle = [term for name, term in self._terms().items() if name not in active]
        if idle or not any(term.reads.logits for term in active.values()):
            # A gradient of 0 for the weights that no active term reads, the head's among them:
            # stage 3 would take that of the step before for one that is not there.
            nothing = seen.student.at(seen.batch.row_sets["all"][:0])
            loss = loss + nothing.logits.sum()
            for term in idle:
                loss = loss + term.idle(nothing)
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}, **measured}

    def _terms(self) -> Mapping[str, Term]:
        return cast(Mapping[str, Term], self.terms)

    def _active(self, progress: float) -> dict[str, Term]:
        """The terms that add to the loss at a point of the phase; see `Batch.progress`."""
        return {name: term for name, term in self._terms().items() if term.is_active(progress)}

    def needs_teachers(self, progress: float) -> bool:
        """Whether a term that is active then needs what teachers predict."""
        return any(term.needs_teachers for term in self._active(progress).values())

    def _signals_of(self, name: str, view: View, keys: torch.Tensor, reads: Reads) -> Signals:
        # Without a student to train, a trained student may stand among the models to run.
        if name == "student" and self.student is not None:
            return read_signals(self.student, view, reads)
        if name not in self.teachers:
            names = [*(["student"] if self.student is not None else []), *self.teachers]
            raise ValueError(f"the bundle has no model {name!r}: it has {', '.join(names)}")
        teacher = self.teachers[name]
        if isinstance(teacher, FileTeacher):
            return cast(Signals, teacher(keys, view.example_indices))
        # Not inference_mode: ZeRO-3 may prefetch a student's weight inside this block, and a
        # tensor made in inference mode cannot be part of the backward pass.
        with (
            torch.no_grad(),
            torch.autocast(view.input_ids.device.type, torch.bfloat16, self._teacher_autocast),
        ):
            outputs = read_signals(teacher, view, reads)
            if outputs.head is not None:
                head = replace(outputs.head, tokens=self._tokens.get(name))
                return replace(outputs, output=head)
            numbers: torch.Tensor | None = getattr(self, _outputs_of(name), None)
            if numbers is None or not reads.logits:
                return outputs
            classes: torch.Tensor | None = getattr(self, _classes_of(name), None)
            return replace(outputs, output=_mapped(outputs.logits, numbers), classes=classes)


def view_of(name: str, batch: Batch) -> View:
    """A model's view of a batch. Raises ValueError where it has none."""
    if name not in batch.views:
        raise ValueError(
            f"the batch has no view for model {name!r}, only for {', '.join(batch.views)}: every "
            "model that runs needs one, made by its own tokenizer"
        )
    return batch.views[name]


def _check_rows(name: str, term: Term, batch: Batch) -> None:
    """Raises ValueError unless the batch has the rows that a term counts, and their number."""
    if term.rows not in batch.row_sets:
        why = "no labels were given" if term.rows == "labelled" else "add it to `row_sets`"
        raise ValueError(
            f"term {name!r} counts the rows {term.rows!r}, and the batch has no row set of that "
            f"name, only {', '.join(batch.row_sets)}: {why}"
        )
    counted = {term.rows} | ({TAUGHT} & batch.row_sets.keys() if term.needs_teachers else set())
    for rows in sorted(counted - batch.counts.keys()):
        raise ValueError(
            f"the batch does not say how many rows {rows!r} has in the whole optimizer step "
            f"(`counts`), by which term {name!r} divides its loss: Batch.from_views does"
        )


def _counted_by(term: Term, batch: Batch) -> Batch:
    """The batch with the rows that a term counts: of one that compares with the teachers those of
    which one says something."""
    if not term.needs_teachers or TAUGHT not in batch.row_sets:
        return batch
    return replace(
        batch,
        row_sets={**batch.row_sets, "all": batch.row_sets[TAUGHT]},
        counts={**batch.counts, "all": batch.counts[TAUGHT]},
    )


def _position(named: tuple[str, Term]) -> tuple[bool, bool]:
    """Where a term stands in a step's forward pass."""
    return named[1].needs_teachers, named[1].reads.logits


def _share(name: str, term: Term, values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """What a batch's rows add to the mean over the optimizer step's. Raises ValueError unless
    there is one value for each row that the term counts."""
    rows = batch.row_sets[term.rows]
    if values.shape != rows.shape:
        raise ValueError(
            f"term {name!r} returned {list(values.shape)} values; its row set {term.rows!r} has "
            f"{len(rows)} rows, one value each"
        )
    return values.sum() / batch.counts[term.rows].clamp(min=1)


def _padded(outputs: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """int64 [K, most outputs of a label], -1 where a label has fewer."""
    most = max(map(len, outputs))
    return torch.tensor([[*one, *[-1] * (most - len(one))] for one in outputs])


def _mapped(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """A teacher's logits of K labels, from those of its own classes: float [n, K].

    The probabilities of several outputs of one label add: their logits' logsumexp, in float32. What
    belongs to no label is left out, so that the softmax is over the others.
    """
    if numbers.shape[1] == 1:
        return logits[:, numbers[:, 0]]
    each = logits.float()[:, numbers]
    return each.masked_fill(numbers < 0, -torch.inf).logsumexp(dim=-1)


def _outputs_of(teacher: str) -> str:
    return f"_outputs_{teacher}"


def _classes_of(teacher: str) -> str:
    return f"_classes_{teacher}"
