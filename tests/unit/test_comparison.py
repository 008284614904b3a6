"""The comparison of policies on data whose answer is known."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import seqeval.metrics
import torch

from ds_distill.check.labels import class_mistakes
from ds_distill.data.batches import Units
from ds_distill.evaluation.predictions import ClassPredictions
from ds_distill.evaluation.scores import build_metric
from ds_distill.keys import content_keys
from ds_distill.recipe import LONE_TASK, load_recipe
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.classes import MicroF1
from ds_distill.recipe.policies import candidates
from ds_distill.reporting.report import routing_table
from ds_distill.routing import held_out, multi_label
from ds_distill.routing.comparison import Score, choose, compare
from ds_distill.routing.fitting import fit, folds_of
from ds_distill.routing.gate import FOLDS
from ds_distill.routing.held_out import held_out_targets
from ds_distill.routing.multi_label import fit_label
from ds_distill.routing.router import Router
from ds_distill.types import Signals

LABELS = list("abcd")


def keys_of(count):
    return torch.from_numpy(content_keys([f"text {number}" for number in range(count)]))


def truth_of(count, generator):
    return torch.randint(len(LABELS), (count,), generator=generator)


def told_by_states(count, seed=0):
    """Each teacher knows two classes and takes the others for its own; a direction of its states
    says which half the example is of. No weighing of the teachers sees that."""
    generator = torch.Generator().manual_seed(seed)
    truth = truth_of(count, generator)
    signals = {}
    for number, name in enumerate(("first", "second")):
        own = truth % 2 == number
        # On classes of the other teacher it is as sure of a class of its own, drawn by lot.
        foreign = 2 * torch.randint(2, (count,), generator=generator) + number
        logits = torch.randn(count, 4, generator=generator)
        logits[torch.arange(count), torch.where(own, truth, foreign)] += 6.0
        states = torch.randn(count, 8, generator=generator)
        states[:, 3] += torch.where(own, 3.0, -3.0)
        signals[name] = Signals(logits, {-1: states})
    return signals, truth.numpy(), keys_of(count)


def equally_good(count, seed=0, states=0):
    """Two teachers that err independently, on all classes alike, and states of pure noise."""
    generator = torch.Generator().manual_seed(seed)
    truth = truth_of(count, generator)
    signals = {}
    for name in ("first", "second"):
        logits = torch.randn(count, 4, generator=generator)
        logits[torch.arange(count), truth] += 1.5
        noise = torch.randn(count, states, generator=generator)
        signals[name] = Signals(logits, {-1: noise} if states else {})
    return signals, truth.numpy(), keys_of(count)


def test_the_gate_wins_where_states_tell_the_expert():
    signals, truth, keys = told_by_states(400)
    found = compare(signals, truth, keys, LABELS)
    assert found.choice == "gate"
    assert found.policies["gate"].score > 0.95
    assert found.policies["average"].score < 0.8
    assert found.any_teacher.score > 0.95
    # Without the states nobody can tell.
    blind = {name: Signals(outputs.logits) for name, outputs in signals.items()}
    found = compare(blind, truth, keys, LABELS)
    assert found.policies["gate"].score < 0.85
    assert found.policies["gate"].difference > -0.05


def test_the_average_wins_where_teachers_are_alike():
    """Also against a gate that sees 300 columns of noise beside 200 examples: fitted and judged on
    the same examples it would be right on all of them."""
    signals, truth, keys = equally_good(200, 0, states=150)
    found = compare(signals, truth, keys, LABELS)
    assert found.choice == "average"
    assert found.policies["gate"].interval[0] <= 0
    assert found.policies["random"].interval[1] < 0


def test_an_example_is_judged_by_what_was_learnt_from_others():
    """Changing an example's own label changes no policy's target for it."""
    signals, truth, keys = told_by_states(120)
    before = held_out_targets(signals, truth, keys, LABELS)
    changed = truth.copy()
    changed[7] = (changed[7] + 1) % 4
    after = held_out_targets(signals, changed, keys, LABELS)
    learnt = 0
    for name in candidates():
        one, other = before[name].logits, after[name].logits
        assert torch.equal(one[7], other[7]), name
        learnt += not torch.equal(one, other)
    assert learnt >= 3, "the label of one example matters to others"


def test_a_comparison_shows_signs_of_progress(monkeypatch):
    """Other ranks wait for it, and a run ends where there is none for long."""
    marks = []
    monkeypatch.setattr(held_out, "mark", marks.append)
    monkeypatch.setattr(multi_label, "mark", marks.append)
    signals, truth, keys = told_by_states(120)
    compare(signals, truth, keys, LABELS)
    assert marks == ["compares the policies"] * FOLDS
    many = np.eye(len(LABELS), dtype=np.int64)[truth]
    multi_label.fit_by_label(signals, many, keys, LABELS)
    assert marks[FOLDS:] == ["fits routing"] * len(LABELS)


def test_policies_of_many_labels_are_fitted_as_labels_are(monkeypatch):
    signals, truth, keys = told_by_states(120)
    many, fits, steps = np.eye(len(LABELS), dtype=np.int64)[truth], [], []

    def noted(*given, **options):
        fits.append(given[0])
        return fit_label(*given, **options)

    monkeypatch.setattr(held_out, "fit_label", noted)
    held_out_targets(signals, many, keys, LABELS, advance=lambda: steps.append(0))
    assert len(fits) == len(steps) == FOLDS * len(LABELS)


def test_folds_that_judge_are_not_those_of_a_fit(monkeypatch):
    """Dealt by the same numbers, a fold left out would leave one of the fit's own folds empty."""
    signals, truth, keys = equally_good(1000)
    learnt_from = []

    def noted(signals, truth, keys, *rest, **options):
        learnt_from.append(keys)
        return fit(signals, truth, keys, *rest, **options)

    monkeypatch.setattr(held_out, "fit", noted)
    held_out_targets(signals, truth, keys, LABELS, seed=3)
    assert len(learnt_from) == FOLDS
    for rest in learnt_from:
        assert 700 < len(rest) < 900
        sizes = torch.bincount(folds_of(rest, 3), minlength=FOLDS)
        # 5 standard errors
        assert (sizes - len(rest) / FOLDS).abs().max() < 5 * (len(rest) * 0.2 * 0.8) ** 0.5


def test_the_figures_are_what_counting_gives():
    signals, truth, keys = told_by_states(150)
    truth[:10] = -1
    found = compare(signals, truth, keys, LABELS)
    known = truth >= 0
    assert found.examples == 140
    outputs = {name: signals.logits.argmax(1).numpy()[known] for name, signals in signals.items()}
    right = {name: outputs[name] == truth[known] for name in outputs}
    for name in outputs:
        assert found.teachers[name].score == pytest.approx(right[name].mean())
        for index, label in enumerate(LABELS):
            these = right[name][truth[known] == index]
            assert found.teachers[name].per_class[label] == pytest.approx(these.mean())
    either = right["first"] | right["second"]
    assert found.any_teacher.score == pytest.approx(either.mean())
    assert found.agreement == {
        "first, second": pytest.approx((outputs["first"] == outputs["second"]).mean())
    }
    summed = (signals["first"].logits + signals["second"].logits).argmax(1).numpy()
    mean = summed[known] == truth[known]
    assert found.policies["average"].score == pytest.approx(mean.mean())
    assert found.policies["average"].interval == (0.0, 0.0)
    random = found.policies["random"]
    assert random.difference == pytest.approx(random.score - mean.mean())
    assert random.interval[0] <= random.difference <= random.interval[1]


@pytest.mark.parametrize(
    ("metric", "policies", "chosen"),
    [
        # of each but the average: its score, and the interval of its difference
        ("accuracy", {"gate": (0.72, 0.001, 0.04)}, "gate"),
        ("accuracy", {"gate": (0.72, -0.001, 0.04)}, "average"),
        ("accuracy", {"gate": (0.72, 0.0, 0.04)}, "average"),
        ("accuracy", {"gate": (0.7, 0.0, 0.0)}, "average"),
        # The most accurate is asked, not the one that is surest to be better.
        (
            "accuracy",
            {"gate": (0.75, -0.01, 0.11), "calibrated": (0.73, 0.02, 0.04)},
            "average",
        ),
        ("accuracy", {"gate": (0.5, -0.3, -0.1)}, "average"),
        ("ece", {"gate": (0.5, -0.3, -0.1)}, "gate"),
        ("ece", {"gate": (0.6, -0.3, 0.1)}, "average"),
        ("ece", {"gate": (0.9, 0.1, 0.3)}, "average"),
    ],
)
def test_within_chance_the_average_wins(metric, policies, chosen):
    scores = {"average": Score(0.7, {}, 0.0, (0.0, 0.0))}
    scores |= {
        name: Score(value, {}, 0.0, (low, high)) for name, (value, low, high) in policies.items()
    }
    assert choose(scores, METRICS["classes"][metric]) == chosen


def test_policies_are_compared_by_the_tasks_metric():
    task_metric = MicroF1.Settings(leave_out=["a"])
    signals, truth, keys = told_by_states(200)
    found = compare(signals, truth, keys, LABELS, task_metric=task_metric)
    assert found.metric == task_metric.name
    metric = build_metric("classes", task_metric, LABELS)

    def score(logits):
        return pytest.approx(metric.value(ClassPredictions(logits.numpy(), truth)), abs=1e-6)

    for name, outputs in signals.items():
        assert found.teachers[name].score == score(outputs.logits)
    average = sum(outputs.logits for outputs in signals.values()) / 2
    assert found.policies["average"].score == score(average)
    gate = found.policies["gate"]
    assert gate.difference == pytest.approx(gate.score - found.policies["average"].score)
    assert gate.interval[0] <= gate.difference <= gate.interval[1]
    text = routing_table(found.to_json(), "validation").text()
    title = METRICS["classes"][task_metric.name].title
    assert f"{title[0].upper()}{title[1:]} of each policy's target" in text
    for name, policy in found.policies.items():
        shown = f"{name} (chosen)" if name == found.choice else name
        [line] = [line for line in text.splitlines() if line.startswith(f"{shown}  ")]
        assert f"{policy.score:.1%}" in line
    assert f"Routing `chosen` is {found.choice} here" in text and "first, second" in text
    assert set(candidates()) == set(found.policies)


def test_with_thousands_of_classes_there_is_no_gate(monkeypatch, tmp_path):
    """Its weights are about twice the classes times the classes: it was still not fitted after
    677 s with 2,000 classes."""
    monkeypatch.setattr("ds_distill.routing.fitting.fit_gate", lambda *_: pytest.fail("a gate"))
    labels = [f"class {number}" for number in range(200)]
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(len(labels), (300,), generator=generator).numpy()
    logits = torch.randn(300, len(labels), generator=generator)
    logits[torch.arange(300), torch.from_numpy(truth)] += 4.0
    signals = {"first": Signals(logits), "second": Signals(logits.roll(1, dims=0))}
    steps = []
    found = compare(signals, truth, keys_of(300), labels, advance=lambda: steps.append(None))
    assert set(found.policies) == {*candidates()} - {"gate"} and len(steps) == FOLDS
    text = routing_table(found.to_json(), "validation").text()
    why = "it is fitted on 150 classes at most, and there are 200"
    assert f"Not compared: gate, as {why}." in text
    fitted = fit(signals, truth, keys_of(300), labels)
    fitted.save(tmp_path / "routing.safetensors")
    batch = SimpleNamespace(labels=torch.from_numpy(truth), keys=keys_of(300), epoch=0, row_sets={})
    with pytest.raises(ValueError, match=f"no gate: {why}"):
        Router("gate", fitted=tmp_path / "routing.safetensors")(signals, batch)


def test_a_recipe_that_names_a_gate_for_thousands_of_classes_is_refused(toy_recipe):
    recipe = load_recipe(str(toy_recipe), ["phases.distil.routing=[average, gate]"])
    [said] = map(str, class_mistakes(recipe, LONE_TASK, [f"class {n}" for n in range(151)]))
    assert said.startswith("phases.distil.routing: gate cannot be taken here: it is fitted on 150")
    assert not list(class_mistakes(recipe, LONE_TASK, LABELS))


def test_of_words_those_that_count_are_fitted_on_and_all_are_scored():
    """60 examples of three words, of which the last never counts: what teachers say there is noise,
    and it is O in every score. Intervals are over the examples."""
    generator = torch.Generator().manual_seed(3)
    tags = ["O", "B-a", "I-a"]
    examples, rows = 60, 180
    truth = torch.randint(0, 3, (rows,), generator=generator).numpy()
    words = Units.plain(keys_of(examples), truth, offsets=np.arange(0, rows + 1, 3))
    words = replace(words, counted=np.arange(rows) % 3 < 2)

    def saying(right):
        heard = torch.rand(rows, generator=generator) < right
        said = torch.where(heard, torch.from_numpy(truth), 0)
        logits = 6.0 * torch.nn.functional.one_hot(said, 3).float()
        logits[~words.counted] = 100 * torch.randn(rows // 3, 3, generator=generator)
        return logits

    signals = {"first": Signals(saying(0.9)), "second": Signals(saying(0.5))}
    found = compare(signals, truth, keys_of(examples), tags, words=words)
    assert found.over == "words" and found.metric == "entity_f1" and found.examples == examples
    for name, of in signals.items():
        predicted = of.logits.argmax(dim=1).numpy()
        predicted[~words.counted] = 0
        split = [[tags[tag] for tag in part] for part in predicted.reshape(examples, 3)]
        known = [[tags[tag] for tag in part] for part in truth.reshape(examples, 3)]
        expected = seqeval.metrics.f1_score(known, split)
        assert found.teachers[name].score == pytest.approx(expected)
        assert set(found.teachers[name].per_class) == {"a"}
    other = {name: Signals(of.logits.clone()) for name, of in signals.items()}
    for of in other.values():
        of.logits[~words.counted] *= -1
    again = compare(other, truth, keys_of(examples), tags, words=words)
    assert again == found, "what is said of words that do not count has no effect"


def test_a_comparison_says_whom_policies_follow_on_each_class():
    """By the states of told_by_states a gate can tell which teacher is right."""
    signals, truth, keys = told_by_states(400)
    found = compare(signals, truth, keys, LABELS, examples=6)
    assert found.policies["average"].followed == {}, "alike everywhere"
    followed = found.policies["gate"].followed
    assert list(followed) == LABELS
    for shares in followed.values():
        assert list(shares) == list(signals) and sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert len(found.disagreements) == 6
    for one in found.disagreements:
        assert one.label == LABELS[truth[one.row]]
        for name, answer in one.teachers.items():
            assert answer.label == LABELS[int(signals[name].logits[one.row].argmax())]
        assert len({answer.label for answer in one.teachers.values()}) > 1
        assert sum(one.followed.values()) == pytest.approx(1, abs=1e-3)
    assert found.choice == found.disagreements_of == "gate"
    assert not compare(signals, truth, keys, LABELS).disagreements, "only where asked for"


def test_examples_are_of_a_policy_that_a_student_follows_where_the_average_is_chosen():
    """The quickstart trains a student of the average and one of the gate, which is within chance
    and may ship."""
    draw = np.random.default_rng(0)
    truth = draw.integers(4, size=150)
    alike = np.eye(4)[np.where(draw.random(150) < 0.7, truth, draw.integers(4, size=150))]
    signals = {
        name: Signals(torch.from_numpy(4 * alike + draw.normal(size=(150, 4))).float())
        for name in ("first", "second")
    }
    given = signals, truth, keys_of(150), LABELS
    found = compare(*given, examples=4, followed=["average", "calibrated"])
    assert (found.choice, found.disagreements_of) == ("average", "calibrated")
    assert [one.row for one in found.disagreements] == [
        one.row for one in compare(*given, examples=4).disagreements
    ]
    assert compare(*given, examples=4, followed=["ca-mkd"]).disagreements_of == "average"
