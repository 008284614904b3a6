"""`from ds_distill import ...`: what it names, what it leaves alone, and what it refuses."""

import inspect
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as tr
from processes import python
from runs import loaded
from toys import TOY_LABELS, make_toy_classifier
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ds_distill
from ds_distill import (
    KL,
    Batch,
    Bundle,
    CrossEntropy,
    PackedView,
    PaddedView,
    Router,
    Signals,
    Term,
    UserError,
    content_keys,
    evaluate,
    load_recipe,
    run_recipe,
)
from ds_distill.engine.world import World
from ds_kernels import masked_kl

TEXTS = ["the cat saw a dog", "rain and snow", "bread with soup and old cheese", "fog"]

# --------------------------------------------------------------------------------- names


def test_import_leaves_the_process_alone_and_recipes_load_without_torch():
    python("""
import os, random, sys, warnings
before = dict(os.environ), random.getstate(), list(warnings.filters)
import ds_distill
assert (dict(os.environ), random.getstate(), list(warnings.filters)) == before
loaded = {"torch", "deepspeed", "numpy", "transformers", "pydantic"} & {*sys.modules}
assert not loaded, loaded
ds_distill.load_recipe("quickstart")
assert "torch" not in sys.modules
""")


def test_models_and_losses_need_no_deepspeed_and_the_engine_changes_no_variable():
    """But for one that deepspeed sets itself."""
    python("""
import os, sys
import torch
import seqeval.metrics  # these two set variables of the environment themselves
from transformers import PreTrainedModel
os.environ.pop("DS_ACCELERATOR", None)
before = dict(os.environ), torch.get_rng_state()
from ds_distill import *
from ds_distill import Bundle, evaluate, run_recipe
assert "deepspeed" not in sys.modules
import ds_distill.cli
assert dict(os.environ) == before[0] and torch.equal(torch.get_rng_state(), before[1])
import ds_distill.engine.engine
from deepspeed.accelerator import get_accelerator
assert get_accelerator().device_name() == ("cuda" if torch.cuda.is_available() else "cpu")
changed = {n for n in {**before[0], **os.environ} if before[0].get(n) != os.environ.get(n)}
assert changed <= {"PYTORCH_NVML_BASED_CUDA_CHECK"}, changed
""")


def test_every_name_is_there_and_documented():
    assert set(ds_distill.__all__) <= set(dir(ds_distill))
    for name in set(ds_distill.__all__) - {"__version__"}:
        value = getattr(ds_distill, name)
        assert inspect.getdoc(value), name
        if inspect.isclass(value):
            for method, function in vars(value).items():
                public = not method.startswith("_") and inspect.isfunction(function)
                assert not public or function.__doc__ or overrides(value, method), (name, method)
    with pytest.raises(AttributeError, match="no attribute 'Bundel'"):
        ds_distill.Bundel  # noqa: B018


def overrides(kind, method):
    return any(getattr(base, method, None) is not None for base in kind.__mro__[1:])


# --------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A classifier of the toy task."""
    return make_toy_classifier(tmp_path_factory.mktemp("library") / "toy")


@pytest.fixture(scope="module")
def inputs(toy):
    return AutoTokenizer.from_pretrained(toy)(TEXTS, padding=True, return_tensors="pt")


def classifier(toy, seed=0):
    model = AutoModelForSequenceClassification.from_pretrained(toy).eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.classifier.reset_parameters()
    return model


def bundle(toy, teachers=1, terms=None, router=None):
    named = {name: classifier(toy, 1 + n) for n, name in enumerate(("a", "b", "c")[:teachers])}
    return Bundle(classifier(toy), named, terms or {"kl": KL({"temperature": 2.0})}, router).eval()


def batch_for(models, inputs, **given):
    view = PaddedView(**inputs)
    return Batch.from_views(dict.fromkeys(["student", "a", "b", "c"][: 1 + models], view), **given)


def test_a_loss_is_the_mean_over_the_batch(toy, inputs):
    terms = {"kl": KL({"temperature": 2.0}), "ce": CrossEntropy({"weight": 0.5})}
    models = bundle(toy, terms=terms)
    labels = torch.tensor([0, 2, -1, 1])
    parts = models(batch_for(1, inputs, labels=labels))
    student, teacher = models.student(**inputs).logits, models.teachers["a"](**inputs).logits
    known = labels >= 0
    entropy = 0.5 * torch.nn.functional.cross_entropy(student[known], labels[known])
    torch.testing.assert_close(parts["kl"], masked_kl(student, teacher, temperature=2.0).detach())
    torch.testing.assert_close(parts["ce"], entropy.detach())
    torch.testing.assert_close(parts["loss"], parts["kl"] + parts["ce"])
    parts["loss"].backward()
    assert all(p.grad is not None for p in models.student.classifier.parameters())
    assert all(p.grad is None for p in models.teachers.parameters())


class Shortest(Term):
    """A term from outside, with rows of its own."""

    rows = "short"

    def forward(self, seen):
        return seen.at(self.rows).student.logits.square().mean(dim=1)


class AllRows(Shortest):
    def forward(self, seen):
        return seen.student.logits.square().mean(dim=1)


def test_a_term_of_your_own_counts_rows_of_its_own(toy, inputs):
    models = bundle(toy, 0, {"mine": Shortest({})})
    short = torch.tensor([1, 3])
    loss = models(batch_for(0, inputs, row_sets={"short": short}))["loss"]
    expected = models.student(**inputs).logits.square().mean(dim=1)[short].mean()
    torch.testing.assert_close(loss, expected)
    with pytest.raises(ValueError, match=r"'mine' returned \[4\] values.*'short' has 2 rows"):
        bundle(toy, 0, {"mine": AllRows({})})(batch_for(0, inputs, row_sets={"short": short}))


# ---------------------------------------------------------------------------------- batches


def test_keys_follow_the_tokens_not_the_padding(inputs, toy):
    tokenizer = AutoTokenizer.from_pretrained(toy)
    keys = batch_for(0, inputs).keys
    assert keys.dtype == torch.int64 and len({tuple(key) for key in keys.tolist()}) == len(TEXTS)
    turned = tokenizer(TEXTS[::-1], padding="max_length", max_length=20, return_tensors="pt")
    assert batch_for(0, turned).keys.flip(0).equal(keys)
    packed = PackedView.of(PaddedView(**inputs))
    assert Batch.from_views({"student": packed}).keys.equal(keys)
    at = torch.tensor([1, 3, 9])
    rows = Batch.from_views({"student": PaddedView(**inputs, positions=at)})
    assert rows.keys.equal(keys[at // inputs["input_ids"].shape[1]])
    given = content_keys(TEXTS)
    assert batch_for(0, inputs, keys=given).keys.equal(torch.from_numpy(given))


def test_labels_and_counts(inputs):
    batch = batch_for(0, inputs, labels=torch.tensor([1, -1, -100, 0], dtype=torch.int32))
    assert batch.labels.tolist() == [1, -100, -100, 0] and batch.labels.dtype == torch.int64
    assert {name: int(count) for name, count in batch.counts.items()} == {"all": 4, "labelled": 2}
    assert "labelled" not in batch_for(0, inputs).row_sets


def test_a_batch_that_cannot_be_is_refused(inputs):
    view = PaddedView(**inputs)
    short = PaddedView(**{name: value[:2] for name, value in inputs.items()})
    views, kept = {"student": view}, r"row_sets\['mine'\] must be "
    no_view = r"views\['student'\] is a BatchEncoding.*PaddedView\(\*\*inputs\)"
    two_sizes = "same examples and rows.*student: 4 and 4, bert: 2 and 2"
    few_labels = r"labels must be torch\.int64 \[4\]; it is torch\.int64 \[2\]"
    shares = r"class or token ids, or numbers; they are torch\.float32"
    mask = kept + r".* int64 \[k\]; it is torch.bool \[4\].*nonzero"
    other_signals = {"a": Signals(torch.zeros(3, 3))}
    rows = [
        ("views is empty", {"views": {}}),
        (no_view, {"views": {"student": inputs}}),
        (two_sizes, {"views": {"student": view, "bert": short}}),
        (few_labels, {"labels": torch.tensor([0, 1])}),
        (shares, {"labels": torch.rand(4, 2)}),
        (r"keys must be torch\.int64 \[4, 2\]", {"keys": torch.zeros(4, dtype=torch.int64)}),
        (mask, {"row_sets": {"mine": torch.ones(4).bool()}}),
        (kept + r"ascending.*\[1, 1\]", {"row_sets": {"mine": torch.tensor([1, 1])}}),
        (kept + r".*in \[0, 4\); it is \[2, 4\]", {"row_sets": {"mine": torch.tensor([2, 4])}}),
        (kept + r".*; it is \[-1, 2\]", {"row_sets": {"mine": torch.tensor([-1, 2])}}),
        (r"signals\['a'\] has 3 rows, and the views 4", {"signals": other_signals}),
    ]
    for rule, given in rows:
        with pytest.raises((TypeError, ValueError), match=rule):
            Batch.from_views(**{"views": views, **given})
    with pytest.raises(ValueError, match=r"both \[B, S\]; they are \[7\] and \[7\]"):
        PaddedView(torch.ones(7).long(), torch.ones(7).long())


# --------------------------------------------------------------------------- errors with rules


def test_a_bundle_that_has_no_loss_says_why(toy, inputs):
    """A row set, a count, a teacher, a state, a view or a label that is not there."""
    none, one, two = (batch_for(models, inputs) for models in range(3))
    some = {"a": Signals(torch.zeros(4, 3), reported=torch.arange(4) < 2)}
    untaught = replace(batch_for(0, inputs, signals=some), counts={"all": torch.tensor(4.0)})
    states = ds_distill.HiddenMSE({"weight": 0.5}, ds_distill.TermInputs(32, {"a": 32}))
    stateless = batch_for(0, inputs, signals=bundle(toy)(one, predict=("a",)))
    alone = Bundle(None, {"a": classifier(toy)}, {"kl": KL()})
    mse, average = {"mse": ds_distill.LogitMSE()}, Router("average")
    short, labels = r"'mine' counts the rows 'short'.*only all: add it to", {"ce": CrossEntropy()}
    unlabelled = r"'ce' counts the rows 'labelled'.*no labels were given"
    two_teachers = r'here are a, b.*Router\("average"\)'
    rows = [
        (short, bundle(toy, 0, {"mine": Shortest({})}), none),
        (unlabelled, bundle(toy, 0, labels), none),
        (r"how many rows 'all'.*Batch\.from_views", bundle(toy), replace(one, counts={})),
        (r"how many rows 'taught'.*'kl'.*Batch\.from_views", bundle(toy), untaught),
        (two_teachers, bundle(toy, 2), two),
        (two_teachers, bundle(toy, 2, mse), two),
        ("needs one: give the bundle a teacher", bundle(toy, 0), none),
        (r"states of teacher 'a'.*hidden: \[-1\]", bundle(toy, 0, {"h": states}), stateless),
        ("no view for model 'b', only for student, a", bundle(toy, 2, router=average), one),
        ("without a student has no loss", alone, one),
        ("without terms has no loss", Bundle(classifier(toy), {}), none),
    ]
    for policy in ("ca-mkd", "mt-bert"):
        rule = rf"policy {policy} weighs .* made without labels"
        rows.append((rule, bundle(toy, 2, router=Router(policy)), two))
    for rule, models, batch in rows:
        with pytest.raises(ValueError, match=rule):
            models(batch)
    with pytest.raises(ValueError, match="no model 'student': it has a"):
        alone(one, predict=("student",))
    assert bundle(toy, 1, {"h": states})(one)["loss"] > 0
    labelled = batch_for(2, inputs, labels=torch.tensor([0, 1, -1, 2]))
    assert bundle(toy, 2, router=Router("mt-bert"))(labelled)["loss"] > 0


def test_policies_that_are_none():
    rows = [
        ("chosen", r"`chosen` stands for.*routing\.json"),
        ("averge", r"no policy 'averge'\. Did you mean `average`"),
        ({"policy": "x"}, r"no policy 'x'\. Known: average, "),
    ]
    for policy in ("gate", "expertise", "best", "calibrated"):
        rows.append((policy, rf"policy {policy} reads .*routing\.safetensors"))
    for policy, rule in rows:
        with pytest.raises(ValueError, match=rule):
            Router(policy)


# ------------------------------------------------------------------------- recipes and their runs


@pytest.fixture(scope="module")
def finished(toy_settings, tmp_path_factory):
    """What a short run returned, beside what the process was before and after it."""
    folder = tmp_path_factory.mktemp("run")
    World.stop()  # another file's, which this run would leave as it is

    def state():
        return dict(os.environ), torch.get_rng_state(), tr.utils.logging.get_verbosity()

    before, recipe = state(), loaded(toy_settings, folder, "training.epochs=1")
    done = run_recipe(recipe, folder / "run")
    assert isinstance(done, ds_distill.FinishedRun)
    return done, before, state()


def test_a_run_leaves_the_process_alone(finished):
    _, before, after = finished
    assert after[0] == before[0] and after[2] == before[2]
    assert torch.equal(after[1], before[1])
    assert not torch.distributed.is_initialized()


def test_a_run_returns_what_it_wrote(finished, toy_task):
    done, _, _ = finished
    assert done.report.is_file() and done.results["student"] in ("average", "expertise")
    student = AutoModelForSequenceClassification.from_pretrained(done.student)
    assert list(student.config.id2label.values()) == TOY_LABELS
    again = run_recipe(load_recipe(done.folder / "recipe.yaml"), str(done.folder), resume=True)
    assert again.results["phases"] == done.results["phases"]


def test_a_router_reads_a_runs_file(finished, toy, inputs):
    folder = finished[0].folder
    for path in (folder / "routing.safetensors", str(folder / "routing.safetensors")):
        router = Router({"policy": "expertise", "conflict": "best-expert"}, fitted=path)
    with pytest.raises(ValueError, match=r"is of the teachers first, second, and .* a, b"):
        bundle(toy, 2, router=router)(batch_for(2, inputs))


# --------------------------------------------------------------------------------- evaluation


def test_evaluation_counts_what_is_right(toy, inputs):
    model = classifier(toy)
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(dim=1)
    labels = predicted.clone()
    labels[0] = (labels[0] + 1) % 3
    labels[3] = -100
    model.train()
    batches = [
        {**{k: v[at] for k, v in inputs.items()}, "labels": labels[at]}
        for at in (slice(0, 3), slice(3, 4))
    ]
    scores = evaluate(model, batches)
    assert scores["examples"] == 3 and scores["accuracy"] == pytest.approx(2 / 3)
    assert list(scores["per_class"]) == TOY_LABELS
    assert np.sum(scores["confusion"]) == 3
    assert model.training, "the model is as it was"


def test_evaluation_needs_labels(toy, inputs):
    with pytest.raises(UserError, match="has no value on these 0 examples"):
        evaluate(classifier(toy), [{**inputs, "labels": torch.full((4,), -1)}])
