"""A masked-LM's losses go through linear ops: the same values, and no logits of a model."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_distill.losses import KL, Cosine, CrossEntropy, LogitMSE, Seen, TermInputs
from ds_distill.losses import logits as logits_of
from ds_distill.recipe.terms import KLLoss, LogitMSELoss
from ds_distill.seen import Target
from ds_distill.types import Batch, Signals, VocabularyHead
from ds_kernels import _projections

ROWS, VOCABULARY = 7, 50
MORE = 9
"""Tokens that a grown student has more than its teacher."""


def head(width, seed, *, trained):
    torch.manual_seed(seed)
    decoder = nn.Linear(width, VOCABULARY).requires_grad_(trained)
    return VocabularyHead(torch.randn(ROWS, width, requires_grad=trained), decoder, decoder)


def batch():
    counted = torch.tensor([row for row in range(ROWS) if row != 2])
    return Batch(
        keys=torch.zeros(ROWS, 2, dtype=torch.int64),
        views={},
        labels=torch.arange(ROWS),
        row_sets={"all": counted, "labelled": counted},
    )


TERMS = {
    "kl": KL(KLLoss(temperature=2.0, weight=0.5)),
    "logit_mse": LogitMSE(LogitMSELoss(weight=0.5)),
}


@pytest.mark.parametrize("name", TERMS)
def test_the_same_loss_and_gradients_without_logits(name):
    term = TERMS[name]
    results = []
    for linear in (True, False):
        student, teacher = head(8, 0, trained=True), head(16, 1, trained=False)
        outputs = Signals(student if linear else student.logits())
        taught = Signals(teacher if linear else teacher.logits())
        losses = term(Seen(outputs, batch(), {"only": taught}))
        assert losses.shape == (ROWS - 1,)
        losses.sum().backward()
        if linear:
            assert not outputs.has_made_logits and not taught.has_made_logits
        gradients = [student.features.grad, student.weight.grad, student.bias.grad]
        results.append((losses, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", [*TERMS, "cross_entropy"])
@pytest.mark.parametrize("rows", [[], [2], [0, 3, 5]])
def test_a_term_projects_the_rows_of_its_own_set(name, rows):
    """No other row reaches a head: its features are NaN, its gradient is 0."""
    term = {**TERMS, "cross_entropy": CrossEntropy()}[name]
    student, teacher = head(8, 0, trained=True), head(16, 1, trained=False)
    others = [row for row in range(ROWS) if row not in rows]
    with torch.no_grad():
        student.features[others] = torch.nan
        teacher.features[others] = torch.nan
    own = replace(batch(), row_sets=dict.fromkeys(("all", "labelled"), torch.tensor(rows).long()))
    losses = term(Seen(Signals(student), own, {"only": Signals(teacher)}))
    assert losses.shape == (len(rows),) and losses.isfinite().all()
    losses.sum().backward()
    gradient = student.features.grad
    assert (gradient[others] == 0).all()
    assert bool((gradient[rows] != 0).all())
    for parameter in student.weight_of.parameters():
        assert parameter.grad.isfinite().all()
        assert bool((parameter.grad != 0).any()) == bool(rows)


class Operations(TorchDispatchMode):
    """The names of operations, not of those within an op of ds_kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [*TERMS, "cosine"])
def test_rows_that_count_are_read_where_they_lie(name):
    """Without a copy; others may hold anything, and have a gradient of 0."""
    term = {**TERMS, "cosine": Cosine()}[name]
    models = [head(8, 0, trained=True), head(8, 1, trained=False)]
    for made in models:
        with torch.no_grad():
            made.features[2] = torch.nan
    student, teacher = (Signals(made, {-1: made.features}) for made in models)
    with Operations() as forward:
        losses = term(Seen(student, batch(), {"only": teacher}))
    assert losses.shape == (ROWS - 1,) and losses.isfinite().all()
    assert not {"aten.index_select", "aten.index"} & {*forward.names}, forward.names
    losses.sum().backward()
    gradient = models[0].features.grad
    assert gradient.any(dim=1).tolist() == [row != 2 for row in range(7)]


def test_a_map_reads_the_rows_that_count_alone():
    """Else its gradient had theirs, of 0 times anything."""
    torch.manual_seed(0)
    student, teacher = torch.randn(ROWS, 8), torch.randn(ROWS, 16)
    student[2] = torch.nan
    term = Cosine({}, TermInputs(8, {"only": 16}))
    seen = Seen(Signals(None, {-1: student}), batch(), {"only": Signals(None, {-1: teacher})})
    term(seen).sum().backward()
    [weight] = term.parameters()
    assert weight.grad.isfinite().all() and weight.grad.any()


LIVE, LOGITS = (True, True), (False, False)
RUNS = {
    "kl of live masked-LMs": (KL(), LIVE, False, {"linear_kl"}),
    "logit_mse of live masked-LMs": (LogitMSE(), LIVE, False, {"linear_kl"}),
    "js of live masked-LMs": (KL(KLLoss(divergence="js")), LIVE, False, {"masked_kl"}),
    "kl of a cached vocabulary": (KL(), (True, False), False, {"masked_kl"}),
    "logit_mse of a cached vocabulary": (LogitMSE(), (True, False), False, set()),
    "kl of several masked-LMs": (KL(), LIVE, True, {"masked_kl"}),
    "kl of classes": (KL(), LOGITS, False, {"masked_kl"}),
    "cosine": (Cosine(), LOGITS, False, {"masked_cosine"}),
    "cross_entropy": (CrossEntropy(), LIVE, False, set()),
}
"""The term, whether the student's and the teacher's words are heads, whether a policy mixes
teachers, and what runs of ds_kernels; as kernels/README.md has it."""


@pytest.mark.parametrize("what", RUNS)
def test_which_kernel_a_term_runs(what):
    term, heads, mixed, wanted = RUNS[what]
    models = [head(8, 0, trained=True), head(8, 1, trained=False)]
    student, teacher = (
        Signals(made if is_head else made.logits(), {-1: made.features})
        for made, is_head in zip(models, heads, strict=True)
    )
    target = Target(teacher.logits, torch.ones(1, ROWS)) if mixed else None
    with Operations() as forward:
        term(Seen(student, batch(), {"only": teacher}, target))
    ours = "ds_kernels."
    assert {name.removeprefix(ours) for name in forward.names if name.startswith(ours)} == wanted


def plain_cross_entropy(made, labels, weights, factors):
    """Losses [k] and gradients in float64: -w[y] * log softmax(h W' + b)[y], term by term."""
    copies = [t.detach().double().requires_grad_() for t in (made.features, made.weight, made.bias)]
    features, weight, bias = copies
    logits = features @ weight.T + bias
    chosen = logits.gather(1, labels[:, None])[:, 0]
    losses = logits.exp().sum(dim=1).log() - chosen
    if weights is not None:
        losses = losses * weights.double()[labels]
    (losses * factors).sum().backward()
    return [losses.detach(), *(copy.grad for copy in copies if copy.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows_at_a_time", [2, 100])
def test_cross_entropy_without_logits(dtype, weighted, rows_at_a_time, monkeypatch):
    """Equal to the equation, gradients too, of rows with factors of their own."""
    monkeypatch.setattr(logits_of, "LOGIT_BYTES", {"cpu": rows_at_a_time * 4 * VOCABULARY})
    monkeypatch.setattr(_projections, "LOGIT_BYTES", {"cpu": rows_at_a_time * 8 * VOCABULARY})
    student = head(8, 0, trained=True)
    decoder = student.weight_of.to(dtype)
    student = VocabularyHead(student.features.detach().to(dtype).requires_grad_(), decoder, decoder)
    term = CrossEntropy()
    if weighted:
        term._class_weights = torch.rand(VOCABULARY) + 0.5
    made = Signals(student)
    own = replace(batch(), row_sets=dict.fromkeys(("all", "labelled"), torch.arange(ROWS)))
    losses = term(Seen(made, own))
    factors = torch.rand(ROWS)
    (losses * factors).sum().backward()
    assert losses.dtype == torch.float32
    assert made.has_made_logits != (rows_at_a_time < ROWS)
    found = [losses, student.features.grad, student.weight.grad, student.bias.grad]
    wanted = plain_cross_entropy(student, own.labels, term._class_weights, factors)
    for ours, theirs in zip(found, wanted, strict=True):
        scale = theirs.abs().max()
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        assert (ours.double() - theirs).abs().max() < tolerance * scale


@pytest.mark.parametrize("kl_first", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_labels_and_a_teacher_over_one_head(name, kl_first, monkeypatch):
    """The gradients of both terms, at rows of their own, are added wherever they are made; of a
    teacher that knows fewer tokens."""
    results = []
    for kept in (1 << 25, 1):
        monkeypatch.setattr(logits_of, "LOGIT_BYTES", {"cpu": kept})
        student, teacher = head(8, 0, trained=True), head(16, 1, trained=False)
        decoder = nn.Linear(16, VOCABULARY - MORE).requires_grad_(False)
        teacher = VocabularyHead(teacher.features, decoder, decoder)
        signals = Signals(student)
        own = replace(batch(), row_sets={"all": torch.arange(5), "labelled": torch.tensor([1, 6])})
        terms = [CrossEntropy(), TERMS[name]]
        losses = [
            term(Seen(signals, own, {"only": Signals(teacher)}))
            for term in (terms[::-1] if kl_first else terms)
        ]
        assert bool(student.slots) == (kept == 1)
        torch.cat(losses).sum().backward()
        results.append([student.features.grad, student.weight.grad, student.bias.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_cross_entropy_shares_the_logits_that_another_term_makes():
    """Beside cached teachers, whose terms read logits of the student."""
    made, cached = Signals(head(8, 0, trained=True)), Signals(torch.randn(ROWS, VOCABULARY))
    own = replace(batch(), row_sets=dict.fromkeys(("all", "labelled"), torch.arange(ROWS)))
    CrossEntropy()(Seen(made, own, {"only": cached}))
    assert made.has_made_logits
    shared = made.logits
    KL()(Seen(made, own, {"only": cached}))
    assert made.logits is shared


def test_logits_are_made_once_when_a_term_asks():
    signals = Signals(head(8, 0, trained=True))
    assert signals.logits is signals.logits
    assert signals.logits.shape == (ROWS, VOCABULARY)


GROWN = {
    "kl": KL(KLLoss(temperature=2.0, rows="tokens", tolerance=0.01, tolerance_on="mean")),
    "logit_mse": LogitMSE(LogitMSELoss(weight=0.5, rows="tokens")),
    "cosine": Cosine({"rows": "tokens"}),
}


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("name", GROWN)
def test_what_a_teacher_does_not_know_leaks_nowhere(name, linear):
    """NaN in the teacher's outputs at a new token, and in the student's entries of new ones: these
    where no logits are made, of which a gradient of 0 times such an entry is NaN."""
    found = []
    for odd in (0.0, torch.nan):
        student, teacher = head(8, 0, trained=True), head(8, 1, trained=False)
        decoder = nn.Linear(8, VOCABULARY + MORE)
        with torch.no_grad():
            decoder.weight[:VOCABULARY] = student.weight
            decoder.bias[:VOCABULARY] = student.bias
            decoder.weight[VOCABULARY:] = decoder.bias[VOCABULARY:] = odd if linear else 0.0
            teacher.features[2] = odd
        grown = VocabularyHead(student.features, decoder, decoder)
        own = Signals(grown if linear else grown.logits(), {-1: student.features})
        taught = Signals(teacher if linear else teacher.logits(), {-1: teacher.features})
        given = batch()
        given.row_sets["tokens"] = given.row_sets["all"]
        losses = GROWN[name](Seen(own, given, {"only": taught}))
        assert losses.shape == (ROWS - 1,)
        losses.sum().backward()
        assert not student.features.grad[2].any()
        found.append([losses.detach(), student.features.grad])
        if name != "cosine":
            found[-1] += [decoder.weight.grad, decoder.bias.grad]
            assert not decoder.weight.grad[VOCABULARY:].any()
    for clean, odd in zip(*found, strict=True):
        assert odd.isfinite().all() and torch.equal(odd, clean)


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("more", [-2, 0, 4])
@pytest.mark.parametrize("name", TERMS)
def test_rows_that_pad_a_teachers_vocabulary_are_not_compared(name, more, linear):
    """The student has fewer rows, as many, or more. NaN shows what reads them."""
    student, teacher = head(8, 0, trained=True), head(8, 1, trained=False)
    tokens, found = VOCABULARY - 4, []
    own = student.weight_of
    wide = nn.Linear(8, VOCABULARY + more)
    with torch.no_grad():
        for weight, given in ((wide.weight, own.weight), (wide.bias, own.bias)):
            weight.fill_(torch.nan if linear else 0.0)[:tokens] = given[:tokens]
        teacher.weight_of.weight[tokens:] = torch.nan
    for rows, of_teacher in ((wide, replace(teacher, tokens=tokens)), (own, teacher)):
        if rows is own:  # what both would be without padding
            taught = Signals(teacher.logits()[:, :tokens])
            mine = student.logits()[:, :tokens]
        else:
            taught = Signals(of_teacher if linear else of_teacher.logits())
            mine = VocabularyHead(student.features, wide, wide)
            mine = mine if linear else mine.logits()
        losses = TERMS[name](Seen(Signals(mine), batch(), {"only": taught}))
        [gradient] = torch.autograd.grad(losses.sum(), [student.features])
        found.append((losses.detach(), gradient))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)  # in other blocks, rounded in another order
