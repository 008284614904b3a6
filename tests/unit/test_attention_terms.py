"""Terms on attention against slow transcriptions of their equations, rows of every token, and
an engine that trains on them: in bf16, and with activations that are computed again."""

from dataclasses import replace

import pytest
import torch
from engines import engine_of, terms_of
from families import NO_DROPOUT, built
from passes import allocated_peak
from transformers import AutoModelForMaskedLM

from ds_distill.data.masking import _with_every_token
from ds_distill.losses import Seen, TermInputs, attention, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.packed import ATTENTION
from ds_distill.reads import TOKENS, AttentionInputs, Reads
from ds_distill.recipe.terms import losses_of
from ds_distill.types import Batch, Signals
from ds_distill.views import PackedView, PaddedView

LENGTHS = [7, 3, 10]
HEADS = 4
MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
PARTS = ("queries", "keys", "values")


def inputs(width, seed, *, heads=HEADS, longer=0):
    """Of examples padded by `longer` positions more; NaN at padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.nn.functional.pad(MASK, (0, longer))
    shape = (len(LENGTHS), heads, mask.shape[1], width)
    hidden = ~mask[:, None, :, None]
    parts = [torch.randn(shape, generator=generator).masked_fill(hidden, torch.nan) for _ in PARTS]
    return AttentionInputs(*parts, 1.5 / width**0.5, mask)


def every_token():
    view = PaddedView(MASK.long(), MASK.long(), positions=MASK.flatten().nonzero()[:, 0])
    rows = torch.arange(sum(LENGTHS))
    return Batch.from_views({"student": view}, row_sets={TOKENS: rows})


def each_text(of, name):
    """By example: float64 [A, length, D], without padding."""
    part = getattr(of, name).double()
    return [part[example, :, :length] for example, length in enumerate(LENGTHS)]


def softened(x, y, scale):
    return (scale * x @ y.mT).softmax(-1)


def divergence(taught, own):
    """KL of each row of maps, the mean over heads."""
    return (taught * (taught.log() - own.log())).sum(-1).mean(0)


def slow(name, settings, own, other):
    """The loss of each token, text after text, of one pair of layers."""
    rows = []
    texts = {x: [*zip(each_text(own, x), each_text(other, x), strict=True)] for x in PARTS}
    for number in range(len(LENGTHS)):
        q_s, q_t = texts["queries"][number]
        k_s, k_t = texts["keys"][number]
        if name == "relation_kl":
            total = 0.0
            for what in settings.get("of", ["queries", "keys", "values"]):
                split = []
                for x in texts[what][number]:
                    flat = x.transpose(0, 1).flatten(1)
                    heads = settings.get("heads") or HEADS
                    split.append(flat.unflatten(1, (heads, -1)).transpose(0, 1))
                r_s, r_t = (softened(x, x, x.shape[-1] ** -0.5) for x in split)
                total = total + divergence(r_t, r_s)
            rows.append(total)
            continue
        maps = settings.get("of") == "maps" or name == "attention_kl"
        a_s, a_t = own.scale * q_s @ k_s.mT, other.scale * q_t @ k_t.mT
        if maps:
            a_s, a_t = a_s.softmax(-1), a_t.softmax(-1)
        if name == "attention_kl":
            rows.append(divergence(a_t, a_s))
        else:
            rows.append((a_s - a_t).square().mean(-1).mean(0))
    return torch.cat(rows)


CASES = [
    ("attention_kl", {}),
    ("attention_kl", {"layers": {1: 2, 2: 4}, "weight": 0.5, "tolerance": 0.1}),
    ("relation_kl", {"of": ["values"]}),
    ("relation_kl", {"heads": 8, "layers": "uniform"}),
    ("relation_kl", {"heads": 2, "of": ["queries", "keys"], "layers": {2: 3}}),
    ("attention_mse", {"layers": "uniform"}),
    ("attention_mse", {"of": "maps", "layers": {1: 1}}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("longer", [0, 3])
def test_the_equation_and_its_gradients(name, settings, longer):
    [term] = build_terms(
        losses_of({name: settings}),
        TermInputs(32, {"t": 64}, student_depth=2, teacher_depths={"t": 4}),
    ).values()
    layers = settings.get("layers", "last")
    pairs = {"last": {-1: -1}, "uniform": {1: 2, 2: 4}}.get(str(layers), layers)
    own = {layer: inputs(8, layer % 10, longer=0) for layer in pairs}
    taught = {layer: inputs(16, 20 + layer, longer=longer) for layer in pairs.values()}
    parts = {"relation_kl": settings.get("of", ["queries", "keys", "values"])}
    read = parts.get(name, ["queries", "keys"])
    assert term.reads == Reads(logits=False, **dict.fromkeys(read, pairs))
    assert term.teacher_reads("t") == Reads(logits=False, **dict.fromkeys(read, pairs.values()))
    for of in own.values():
        for part in read:
            getattr(of, part).requires_grad_()
    rows = term(
        Seen(Signals(None, attention=own), every_token(), {"t": Signals(None, attention=taught)})
    )
    exact = {
        layer: replace(of, **{p: getattr(of, p).detach().double().requires_grad_() for p in read})
        for layer, of in own.items()
    }
    wanted = sum(slow(name, settings, exact[one], taught[two]) for one, two in pairs.items())
    tolerance = settings.get("tolerance", 0.0)
    wanted = (settings.get("weight", 1.0) * wanted - tolerance).clamp(min=0)
    torch.testing.assert_close(rows, wanted.float(), rtol=2e-5, atol=2e-6)
    factors = torch.rand(len(rows))
    (rows * factors).sum().backward()
    (wanted * factors).sum().backward()
    for layer, of in own.items():
        for part in read:
            found, should = getattr(of, part).grad, getattr(exact[layer], part).grad
            should = should.masked_fill(~of.mask[:, None, :, None], 0.0)
            torch.testing.assert_close(found, should.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["attention_kl", "attention_mse", "maps"])
def test_no_loss_has_all_maps_in_memory(name):
    """Peak of forward and backward, against a KL of maps that are all there."""
    shape = (8, 16, 256, 16)
    own, other = (
        AttentionInputs(
            *(torch.randn(shape, requires_grad=trains) for _ in range(2)),
            None,
            0.3,
            torch.ones(shape[0], shape[2], dtype=torch.bool),
        )
        for trains in (True, False)
    )
    settings = {"maps": ("attention_mse", {"of": "maps"})}.get(name, (name, {}))
    [term] = build_terms(losses_of(dict([settings])), TermInputs(32, {"t": 64})).values()

    def all_maps():
        scores = [of.scale * of.queries @ of.keys.mT for of in (own, other)]
        logs = [score.log_softmax(-1) for score in scores]
        torch.nn.functional.kl_div(*logs, log_target=True).backward()

    maps = 4 * shape[0] * shape[1] * shape[2] ** 2
    whole = allocated_peak(all_maps)
    peak = allocated_peak(lambda: term.of_pair(own, other).mean().backward())
    assert peak < 2 * maps < whole / 2


def test_maps_are_compared_some_at_a_time(monkeypatch):
    found = []
    for at_once in (1, 5 * 4 * max(LENGTHS) ** 2, 1 << 22):  # 1, 5 and all 12 maps
        monkeypatch.setattr(attention, "_MAP_BYTES", at_once)
        own, other = inputs(8, 0), inputs(16, 1)
        own = replace(own, queries=own.queries.requires_grad_())
        [term] = build_terms(losses_of({"attention_mse": {"of": "maps"}}), TermInputs(32)).values()
        losses = term.of_pair(own, other)
        losses[MASK].sum().backward()
        found.append((losses[MASK], own.queries.grad))
    for losses, gradient in found[:2]:
        torch.testing.assert_close((losses, gradient), found[2])


def test_equal_attention_costs_nothing_and_unlike_heads_are_refused():
    same, few = inputs(8, 0), inputs(8, 0, heads=2)
    for name in ("attention_kl", "attention_mse", "relation_kl"):
        [term] = build_terms(losses_of({name: {}}), TermInputs(32, {"t": 32})).values()

        def loss(other, term=term):
            taught = {"t": Signals(None, attention={-1: other})}
            return term(Seen(Signals(None, attention={-1: same}), every_token(), taught))

        assert loss(same).abs().max() < 1e-5
        with pytest.raises(ValueError, match="heads"):
            loss(few)


# ------------------------------------------------------------------------------ whole models


def masked_lm(layers, seed, attention="eager"):
    sizes = {"num_hidden_layers": layers, "hidden_size": 16}
    return built("bert", AutoModelForMaskedLM, attention, seed, **sizes, **NO_DROPOUT)


def batch_of(every, *, packed=False, dummy=False):
    torch.manual_seed(5)
    ids = torch.randint(5, 30, MASK.shape)
    chosen = torch.tensor([1, 4, 12, 24])
    view, labels = PaddedView(ids, MASK.long(), positions=chosen), ids.flatten()[chosen]
    sets = {"all": torch.arange(4)}
    if every:
        view, labels, masked = _with_every_token(view, labels)
        sets = {"all": masked, TOKENS: torch.arange(len(labels))}
    if dummy:
        sets = {name: rows[:0] for name, rows in sets.items()}
    taught = PackedView.of(view) if packed else view
    made = Batch.from_views({"student": view, "t": taught}, labels, row_sets=sets)
    labelled = made.row_sets["labelled"][:0] if dummy else made.row_sets["labelled"]
    return replace(made, row_sets={**made.row_sets, "labelled": labelled})


def trained(losses, batch, teacher=None):
    """The parts of the loss, and the student's gradients."""
    student = masked_lm(2, 0)
    terms = build_terms(losses_of(losses), TermInputs(16, {"t": 16}, 2, {"t": 4}))
    bundle = Bundle(student, {"t": teacher or masked_lm(4, 1)}, terms)
    parts = bundle(batch)
    parts["loss"].backward()
    gradients = {name: weight.grad for name, weight in student.named_parameters()}
    return {name: float(part) for name, part in parts.items()}, gradients


MASKED = {"cross_entropy": {}, "kl": {"temperature": 2.0}, "cosine": {}}
ATTENTION_TERMS = {
    "attention_kl": {"layers": {2: 3}},
    "relation_kl": {"layers": {1: 2}},
    "attention_mse": {"layers": {1: 1}},
}


def test_terms_of_masked_tokens_do_not_see_the_others():
    alone, gradients = trained(MASKED, batch_of(False))
    beside, same = trained(MASKED, batch_of(True))
    assert beside == pytest.approx(alone, rel=1e-6)
    for name, gradient in gradients.items():
        if gradient is not None:
            torch.testing.assert_close(same[name], gradient, rtol=1e-5, atol=1e-7)
    more, _ = trained({**MASKED, **ATTENTION_TERMS}, batch_of(True))
    assert {name: more[name] for name in MASKED} == pytest.approx(
        {name: alone[name] for name in MASKED}, rel=1e-6
    )


def test_terms_of_every_token_are_their_mean_over_all():
    batch = batch_of(True)
    found, _ = trained({"cosine": {"rows": "tokens"}, "kl": {"rows": "tokens"}}, batch)
    view = batch.views["student"]
    outputs = [
        model.eval()(**view.model_inputs(), output_hidden_states=True)
        for model in (masked_lm(2, 0), masked_lm(4, 1))
    ]
    own, taught = (output.hidden_states[-1][MASK] for output in outputs)
    cosine = 1 - torch.cosine_similarity(own, taught)
    assert found["cosine"] == pytest.approx(float(cosine.mean()), rel=1e-5)
    q, p = (output.logits[MASK].log_softmax(-1) for output in outputs)
    assert found["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_what_no_term_asks_for_may_be_anything(packed):
    losses = {**ATTENTION_TERMS, "hidden_mse": {"layers": {0: 0, 1: 3}, "rows": "tokens"}}
    batch = batch_of(True, packed=packed)
    wanted, gradients = trained(losses, batch_of(True))
    teacher = masked_lm(4, 1, ATTENTION if packed else "eager")
    with torch.no_grad():
        for name, weight in teacher.named_parameters():
            if name.startswith(("bert.encoder.layer.3.", "cls.")):
                weight.fill_(torch.nan)
        teacher.bert.embeddings.word_embeddings.weight[0] = torch.nan  # padding alone has it
    found, same = trained(losses, batch, teacher)
    assert found == pytest.approx(wanted, rel=1e-5)
    for name, gradient in gradients.items():
        assert torch.isfinite(same[name]).all()
        torch.testing.assert_close(same[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("losses", [ATTENTION_TERMS, {"relation_kl": {}}])
def test_a_batch_of_no_rows_has_a_loss_of_0_and_zero_gradients(losses):
    found, gradients = trained(losses, batch_of(True, dummy=True))
    assert set(found.values()) == {0.0}
    for name, gradient in gradients.items():
        assert gradient is None or not gradient.any(), name
    _, real = trained(losses, batch_of(True))
    assert {n for n, g in real.items() if g is None} == {
        n for n, g in gradients.items() if g is None
    }
    head = {name: gradient for name, gradient in real.items() if name.startswith("cls.")}
    assert head and all(gradient is not None and not gradient.any() for gradient in head.values())


EVERY_TERM = {
    "cross_entropy": {},
    "kl": {"rows": "tokens", "temperature": 2.0},
    "cosine": {"rows": "tokens", "layers": {1: 2, 2: 4}},
    "hidden_mse": {"rows": "tokens", "layers": {0: 0, 2: 4}},
    "attention_kl": {"layers": {1: 2, 2: 4}},
    "relation_kl": {"layers": {2: 3}},
    "attention_mse": {"of": "maps", "layers": {1: 1}},
}


def steps_of(world, config, *, checkpointing=False):
    """The parts of the loss of four steps, and how often a layer of the student ran."""
    student, teacher = (
        built("bert", AutoModelForMaskedLM, seed=seed, num_hidden_layers=layers, hidden_size=16)
        for seed, layers in enumerate((2, 4))
    )
    terms = terms_of(EVERY_TERM, TermInputs(16, {"t": 16}, 2, {"t": 4}))
    bundle = Bundle(student, {"t": teacher}, terms)
    engine = engine_of(world, bundle, config, decay=0.1, checkpointing=checkpointing)
    calls = []
    student.bert.encoder.layer[1].attention.register_forward_hook(lambda *_: calls.append(None))
    steps = [engine.train_step([batch_of(True)]) for _ in range(4)]
    engine.close()
    return [{name: float(part) for name, part in parts.items()} for parts in steps], len(calls)


@pytest.mark.parametrize("config", ["zero0_fp32", "zero1_bf16", "zero3_fp32"])
def test_activations_computed_again_change_no_loss(world, config):
    """A layer of the student is called twice in each step then; else only by the first pass, which
    looks whether it needs the layers, and at stage 3."""
    plain, once = steps_of(world, config)
    again, twice = steps_of(world, config, checkpointing=True)
    for one, other in zip(plain, again, strict=True):
        assert other == pytest.approx(one, rel=1e-5)
    assert plain[-1]["loss"] < plain[0]["loss"] and (once, twice) == (
        4 if "zero3" in config else 1,
        8,
    )


def test_bf16_gives_the_losses_of_fp32(world):
    (exact, _), (halves, _) = (
        steps_of(world, f"zero1_{precision}") for precision in ("fp32", "bf16")
    )
    for one, half in zip(exact, halves, strict=True):
        assert one.keys() == half.keys() == {"loss", *EVERY_TERM}
        assert half == pytest.approx(one, rel=0.05, abs=2e-3)
