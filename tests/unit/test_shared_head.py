"""Teachers trained through one head, against a plain loop over models with heads of their own."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from engines import plain_adamw
from families import NO_DROPOUT, built
from families import SIZES as OF_ALL
from transformers import (
    AutoModelForSequenceClassification,
    get_linear_schedule_with_warmup,
)

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import CLASSIFIER_HEADS
from ds_distill.models.shared_head import SharedHeadBundle, share_head
from ds_distill.recipe import load_recipe
from ds_distill.recipe.phases import Distil
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training
from ds_distill.routing import Router
from ds_distill.types import Batch
from ds_distill.views import PaddedView

STEPS, CLASSES, RATE, DECAY, MAX_NORM = 4, 3, 1e-3, 1.0, 9.0
"""The decay is a hundred times the usual, and the norm between those of the steps."""

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "pooler_hidden_size": 16, "num_labels": CLASSES}
DROPOUT = ("dropout", "attention_dropout", "seq_classif_dropout", "classifier_dropout_prob")


def make(family, seed):
    more = {**SIZES, **NO_DROPOUT, **dict.fromkeys(DROPOUT, 0.0)}
    return built(family, AutoModelForSequenceClassification, "eager", seed, **more).train()


def layers_of(model):
    return [model.get_submodule(at) for at in CLASSIFIER_HEADS[model.config.model_type]]


def make_batch(step, families):
    """Six examples; each model reads its own tokens, of other lengths."""
    draw = torch.Generator().manual_seed(step)
    views = {}
    for number, family in enumerate(families):
        ids = torch.randint(5, 60, (6, 7 + number), generator=draw)
        views[family] = PaddedView(ids, torch.ones_like(ids), torch.zeros_like(ids))
    keys = torch.arange(12).view(6, 2)
    labels = torch.randint(0, CLASSES, (6,), generator=draw)
    return Batch(keys, views, labels, {"all": torch.arange(6), "labelled": torch.arange(6)})


def plain_loop(models, batches):
    """Trains in place. Each model has a head of its own that starts as the others': what the heads'
    gradients add up to goes into all. Returns the losses, and how often gradients were scaled."""
    heads = [layers_of(model) for model in models.values()]
    own = {id(p) for layers in heads[1:] for layer in layers for p in layer.parameters()}
    every = [p for model in models.values() for p in model.parameters()]
    adam = plain_adamw(every, DECAY, lr=RATE)
    schedule = get_linear_schedule_with_warmup(adam, 1, STEPS + 2)
    told, scaled = [], 0
    for batch in batches:
        losses = {}
        for name, model in models.items():
            view = batch.views[name]
            logits = model(input_ids=view.input_ids, attention_mask=view.attention_mask).logits
            losses[name] = F.cross_entropy(logits, batch.labels)
            losses[name].backward()
        for layers in zip(*heads, strict=True):
            for what in ("weight", "bias"):
                together = sum(getattr(layer, what).grad for layer in layers)
                for layer in layers:
                    getattr(layer, what).grad = together.clone()
        norm = sum(p.grad.square().sum() for p in every if id(p) not in own).sqrt()
        scaled += bool(norm > MAX_NORM)
        for parameter in every:
            parameter.grad *= min(1.0, MAX_NORM / (float(norm) + 1e-6))
        adam.step()
        schedule.step()
        adam.zero_grad()
        told.append({name: loss.item() for name, loss in losses.items()})
    return told, scaled


@pytest.mark.parametrize("stage", range(4))
def test_losses_and_weights_are_those_of_a_plain_loop(world, stage):
    families = ["bert", "roberta", "deberta-v2"]
    models = {family: make(family, seed) for seed, family in enumerate(families)}
    share_head(models, seed=3)
    plain = {family: copy.deepcopy(model).train() for family, model in models.items()}
    batches = [make_batch(step, families) for step in range(STEPS)]
    terms = build_terms(losses_of({"cross_entropy": {}}), TermInputs(16))
    training = Training(batch_size=6, max_grad_norm=MAX_NORM)
    engine = Engine(
        SharedHeadBundle(models, dict.fromkeys(families, terms)),
        deepspeed_config(f"zero{stage}_fp32", training, 1),
        world,
        OptimizerSettings(RATE, DECAY, STEPS + 2, 1),
    )
    ours = [{n: loss.item() for n, loss in engine.train_step([b]).items()} for b in batches]
    expected, scaled = plain_loop(plain, batches)
    assert 0 < scaled < STEPS, "the norm of some steps is too large, of others not"
    for step, (found, losses) in enumerate(zip(ours, expected, strict=True)):
        assert found.keys() == {"loss", *(f"{name}/cross_entropy" for name in families)}
        assert found["loss"] == pytest.approx(sum(losses.values()), rel=1e-5), step
        for name, loss in losses.items():
            assert found[f"{name}/cross_entropy"] == pytest.approx(loss, rel=1e-5), (step, name)
    for name, model in plain.items():
        weights = engine.student_weights(name)
        for key, weight in model.named_parameters():
            if key.endswith(("key.bias", "key_proj.bias")):
                continue  # softmax does not see it: its gradient is rounding, which Adam enlarges
            torch.testing.assert_close(weights[key], weight.detach(), rtol=0, atol=1e-5)
    predicted = engine.predict(batches[0], families)
    for name, model in plain.items():
        view = batches[0].views[name]
        logits = model.eval()(input_ids=view.input_ids, attention_mask=view.attention_mask).logits
        torch.testing.assert_close(predicted[name].logits, logits, rtol=0, atol=1e-4)
    engine.close()


@pytest.mark.parametrize("family", CLASSIFIER_HEADS)
def test_every_family_has_its_head_where_the_table_says(family):
    """Whatever a classifier has beside its encoder, and the pooler in that, is the shared head."""
    models = {"first": make("bert", 0), family: make(family, 1)}
    share_head(models, seed=0)
    model = models[family].eval()
    pooling, prediction = layers_of(model)
    assert pooling.weight.shape == (16, 16) and prediction.weight.shape == (CLASSES, 16)
    for shared, own in zip(layers_of(models["first"]), (pooling, prediction), strict=True):
        assert shared.weight is own.weight and shared.bias is own.bias
    body = {id(p) for n, p in model.base_model.named_parameters() if "pooler" not in n}
    head = {id(p) for p in model.parameters()} - body
    assert head == {id(p) for layer in (pooling, prediction) for p in layer.parameters()}
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3)}
    with torch.no_grad():
        logits = model(**given).logits
        pooling.weight.neg_()
        assert not torch.allclose(model(**given).logits, logits), "the pooling layer is read"
        prediction.weight.zero_()
        prediction.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert model(**given).logits.tolist() == [[1.0, 2.0, 3.0]]


def test_the_head_is_drawn_from_the_seed():
    def drawn(seed):
        models = {name: make("bert", number) for number, name in enumerate("ab")}
        share_head(models, seed)
        return [layer.weight.detach().clone() for layer in layers_of(models["b"])]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))
    assert float(first[0].std()) == pytest.approx(OF_ALL["initializer_range"], rel=0.2)


def cross_entropy(logits, label):
    return logits.double().logsumexp(0) - logits.double()[label]


def mt_bert_weights(errors):
    return [1 / (1 + error) for error in errors]


def ca_mkd_weights(errors):
    total = sum(error.exp() for error in errors)
    return [(1 - error.exp() / total) / (len(errors) - 1) for error in errors]


@pytest.mark.parametrize("policy", ["mt-bert", "ca-mkd"])
def test_the_students_loss_is_that_of_the_recipe_row_by_row(policy):
    """Its three terms added up by their equations, with the recipe's own weights."""
    recipe = load_recipe(policy)
    [phase] = [phase for phase in recipe.phases if isinstance(phase, Distil)]
    names = ["bert", "roberta", "deberta-v2"]
    student, *models = (make(name, seed).eval() for seed, name in enumerate(["bert", *names]))
    teachers = dict(zip(names, models, strict=True))
    torch.manual_seed(0)
    settings = dict(phase.losses)
    if (of_states := settings["hidden_mse"]).layers != "last":  # toys have few layers
        settings["hidden_mse"] = of_states.model_copy(update={"layers": {1: 2}})
    [(own_layer, other)] = settings["hidden_mse"].pairs(2, 2)
    depths = dict.fromkeys(names, 2)
    terms = build_terms(settings, TermInputs(16, dict.fromkeys(names, 16), 2, depths))
    bundle = Bundle(student, teachers, terms, Router(phase.routing[0]))
    batch = make_batch(0, ["student", *names])
    counts = {name: torch.tensor(6.0) for name in batch.row_sets}
    found = bundle.eval()(replace(batch, counts=counts))

    def answer(model, name, layer):
        view = batch.views[name]
        given = {"input_ids": view.input_ids, "attention_mask": view.attention_mask}
        with torch.no_grad():
            out = model(**given, output_hidden_states=True)
        return out.logits.double(), out.hidden_states[layer][:, 0].double()

    own, own_state = answer(student, "student", own_layer)
    of_teachers = [answer(teachers[name], name, other) for name in names]
    maps = [one.weight.detach().double() for one in terms["hidden_mse"].projections.values()]
    wanted = {name: torch.zeros((), dtype=torch.float64) for name in phase.losses}
    weigh = mt_bert_weights if policy == "mt-bert" else ca_mkd_weights
    for row, label in enumerate(batch.labels.tolist()):
        weights = weigh([cross_entropy(logits[row], label) for logits, _ in of_teachers])
        wanted["cross_entropy"] += cross_entropy(own[row], label)
        for weight, (logits, state), map_ in zip(weights, of_teachers, maps, strict=True):
            p, q = logits[row].log_softmax(0), own[row].log_softmax(0)
            wanted["kl"] += weight * (p.exp() * (p - q)).sum()
            wanted["hidden_mse"] += (state[row] - map_ @ own_state[row]).square().mean()
    for name, total in wanted.items():
        loss = phase.losses[name].weight * total / 6
        assert found[name].item() == pytest.approx(loss.item(), rel=1e-4), name
