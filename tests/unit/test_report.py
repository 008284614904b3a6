"""The page and the sentence about a run."""

import html.parser
import re
import xml.etree.ElementTree

import html5lib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ds_distill.cli import app
from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import TokenScores
from ds_distill.evaluation.scores import build_metric, to_teacher
from ds_distill.files import write_json, write_text
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.reporting.by_class import ByClass, ClassRow, ClassScores, by_class
from ds_distill.reporting.confusions import commonest_confusions
from ds_distill.reporting.page import page as tables_page
from ds_distill.reporting.page_figures import page_figures
from ds_distill.reporting.report import _judged, render_report
from ds_distill.reporting.result_tables import evaluation_tables
from ds_distill.reporting.results import evaluations_of_student
from ds_distill.reporting.verdict import verdict
from ds_distill.run.environment import describe_environment
from ds_distill.run.folder import RunFolder
from ds_distill.run.publish import report_stopped
from ds_distill.sweep.table import run_result

CLASSES = ["red", "green"]
ENVIRONMENT = {
    "ranks": 2,
    "gpus": [],
    "processor": "A processor",
    "cores": 2,
    "packages": {"torch": "2.13", "deepspeed": "0.19", "transformers": "5.23"},
}
SIZE = 2000
SCORES = {"accuracy": 0.123, "macro_f1": 0.456, "ece": 0.0789}


def make_results(
    models,
    shipped="average",
    evaluated=True,
    labels=CLASSES,
    description="Words.",
    baseline=0.3,
    metric="accuracy",
):
    """models: {name: (role, score)}. All intervals are the difference and 2 points around."""
    phases = [{"phase": "distil", "kind": "distil", "task": "task", "seconds": 12.34}]
    if evaluated:
        evaluation = make_evaluation(models, labels, baseline, metric)
        record = {"phase": "evaluate", "kind": "evaluate", "task": "task", "seconds": 1.0}
        phases.append({**record, **evaluation})
    results = {
        "run": "a-run",
        "description": description,
        "student": shipped,
        "task": "task",
        "seconds": 13.3,
        "uses": [
            {
                "use": "choose",
                "split": "validation",
                "examples": 321,
                "of": ["epoch of average", "student to ship"],
                "warnings": [],
            }
        ],
        "phases": phases,
        "environment": ENVIRONMENT,
    }
    return {**results, "verdict": verdict(results)}


def test_what_was_judged_before_the_last_training_is_not_what_is_shipped():
    """The score of other weights under the same name was in the verdict, the card and a sweep."""
    results = make_results({"average": ("student", 0.9), "t": ("teacher", 0.8)})
    scores = {"examples": 9, "choosing": None}
    trained = {"trained": [{"output": "average", "split": "train", **scores}]}
    first, judged = results["phases"]
    again = {"phase": "more", "kind": "fine-tune", "task": "task", "seconds": 1.0, **trained}
    results["phases"] = [{**first, **trained}, judged]
    assert evaluations_of_student(results) == [judged]
    assert verdict(results).startswith("Student `average`: accuracy 90.0%")
    assert run_result(results)["models"]["average"]["score"] == 0.9
    results["phases"].append(again)
    assert "No evaluate phase comes after it" in verdict(results)
    assert run_result(results)["student"] is None
    assert evaluations_of_student({**results, "phases": [*results["phases"], judged]}) == [judged]


@pytest.mark.parametrize("content", ["{", '{"phases": [{"kind": "evaluate"}]}'])
def test_a_report_of_damaged_results_is_refused(content, tmp_path):
    """As where several runs are set side by side: it ended in a traceback."""
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load_recipe("quickstart")))
    (tmp_path / "results.json").write_text(content)
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(done.exception, UserError) and "results.json" in str(done.exception)


def test_cpu_ranks_of_a_machine_with_gpus_ran_on_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    assert describe_environment(2, "cpu")["gpus"] == []
    assert describe_environment(2, "cuda:0")["gpus"] == ["GPU 0", "GPU 1"]


def test_classes_are_shown_of_a_model_that_was_judged_on_all_examples():
    """Not of the last one, a file of predictions that says something of a few."""
    evaluation = {"models": {"t": {}, "llm": {"not_given": 3}}}
    assert _judged(evaluation, None) == _judged(evaluation, "other") == "t"
    assert _judged(evaluation, "llm") == "llm"
    assert _judged({"models": {"a": {}, "b": {}}}, None) == "b"


def make_evaluation(models, labels, baseline, metric):
    def difference(first, second):
        return {
            "difference": first - second,
            "interval": [first - second - 0.02, first - second + 0.02],
        }

    reports = {
        name: {
            "role": role,
            "parameters": 30_000_000 if role == "teacher" else 10_000_000,
            "to_baseline": difference(accuracy, baseline or 0.0),
            "examples": SIZE,
            **SCORES,
            metric: accuracy,
            "reliability": [
                {"confidence": 0.95, "accuracy": 0.5, "count": 500},
                {"confidence": 0.85, "accuracy": 0.75, "count": 1500},
            ],
            "per_class": {label: accuracy for label in labels},
            "confusion": [[0] * len(labels)] * len(labels),
        }
        for name, (role, accuracy) in models.items()
    }
    entry = METRICS["classes"][metric]
    comparisons = [
        {
            "student": student,
            "other": other,
            **difference(accuracy, models[other][1]),
            **(
                to_teacher(reports[student], reports[other], entry)
                if models[other][0] == "teacher"
                else {}
            ),
        }
        for student, (role, accuracy) in models.items()
        if role == "student"
        for other in models
        if other != student
    ]
    return {
        "over": "classes",
        "metric": metric,
        "metric_settings": {},
        "models": reports,
        "baseline": {
            "answer": "green",
            "rule": "the most frequent class",
            "split": "train",
            "examples": SIZE,
            **SCORES,
            metric: baseline,
        },
        "comparisons": comparisons,
        "split": "test",
    }


class Page(html.parser.HTMLParser):
    """Text and tags of valid HTML; every tag that is opened is closed."""

    def __init__(self, source):
        super().__init__()
        html5lib.HTMLParser(strict=True).parse(source)
        self.tags, self.text, self._open = [], "", []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self.text += data


def page_of(*args, **options):
    return Page(render_report(make_results(*args, **options)))


ONE_OF_EACH = {
    "first": ("teacher", 0.6),
    "second": ("teacher", 0.5),
    "average": ("student", 0.7),
    "few": ("control", 0.55),
}


# ------------------------------------------------------------------------------ sentence

GREEN = "better than always predicting 'green' (30.0%)"
NO_WIDTH = [0.45, 0.45 + 1e-15]


@pytest.mark.parametrize(
    ("models", "options", "ending"),
    [
        (
            {"t": ("teacher", 0.6)},
            {},
            f"70.0% on 2,000 examples of test: {GREEN} and teacher `t` (60.0%).",
        ),
        (
            {"t": ("teacher", 0.6), "u": ("teacher", 0.8), "c": ("control", 0.69)},
            {},
            f": {GREEN} and teacher `t` (60.0%); worse than teacher `u` (80.0%); within chance of "
            "control `c` (69.0%).",
        ),
        (
            {"a": ("student", 0.6), "b": ("student", 0.7), "c": ("student", 0.5)},
            {},
            f": {GREEN}, student `a` (60.0%) and student `c` (50.0%); within chance of student `b` "
            "(70.0%).",
        ),
        (
            {"t": ("teacher", 0.7)},
            {"baseline": 0.7},
            ": within chance of always predicting 'green' (70.0%) and teacher `t` (70.0%).",
        ),
        (
            {"t": ("teacher", 0.6)},
            {"metric": "micro_f1"},
            f": micro F1 70.0% on 2,000 examples of test: {GREEN} and teacher `t` (60.0%).",
        ),
        (
            {"t": ("teacher", 0.8), "low": ("student", 0.05)},
            {"metric": "ece"},
            "worse than always predicting 'green' (30.0%) and student `low` (5.0%).",
        ),
    ],
)
def test_the_verdict_is_a_sentence_with_the_numbers(models, options, ending):
    found = make_results({**models, "average": ("student", 0.7)}, **options)["verdict"]
    assert found.startswith("Student `average`: ") and found.endswith(ending)


def test_the_verdict_without_a_student_or_an_evaluation():
    assert make_results(ONE_OF_EACH, shipped=None)["verdict"] == "No student was trained."
    wanted = (
        "The student is `average`. No evaluate phase comes after it, so its quality was not "
        "measured."
    )
    assert make_results(ONE_OF_EACH, evaluated=False)["verdict"] == wanted
    assert make_results({"first": ("teacher", 0.6)})["verdict"] == wanted


def test_the_verdict_is_about_the_shipped_student():
    models = {"t": ("teacher", 0.6), "good": ("student", 0.7), "bad": ("student", 0.4)}
    assert ", teacher `t` (60.0%) and student `bad`" in make_results(models, "good")["verdict"]
    assert "worse than teacher `t`" in make_results(models, "bad")["verdict"]


@pytest.mark.parametrize(
    ("more", "outcome"), [(1, "within chance of"), (100, "better than"), (-100, "worse than")]
)
def test_better_means_that_the_interval_leaves_out_zero(more, outcome):
    """One example more of 2,000 is no difference; a hundred more are."""
    models = {"t": ("teacher", 0.5), "average": ("student", 0.5 + more / SIZE)}
    results = make_results(models, baseline=None)
    own, other = np.arange(SIZE) < 1000 + more, np.arange(SIZE) < 1000
    [row] = results["phases"][-1]["comparisons"]
    first, second = (TokenScores(right, right, np.ones(SIZE)) for right in (own, other))
    judge = build_metric("masked tokens", Accuracy.Settings())
    row["interval"] = list(paired_interval(first, second, judge))
    assert f"test: {outcome} teacher `t`" in verdict(results)


@pytest.mark.parametrize("interval", [[-0.11, 0.09], NO_WIDTH])
def test_a_test_that_is_too_small_to_tell_is_not_called_level(interval):
    """By intervals of 10 points either way nothing is known, and by none at all neither."""
    results = make_results({"t": ("teacher", 0.7), "average": ("student", 0.69)})
    record = results["phases"][-1]
    record["comparisons"][0]["interval"] = interval
    assert verdict(results).endswith(
        f"{GREEN}; not told apart, by so small a test, from teacher `t` (70.0%)."
    )
    [table, *_] = evaluation_tables(record)
    assert "?" not in table.text()
    record["models"]["t"]["to_baseline"] = {"difference": 0.45, "interval": interval}
    [table, *_] = evaluation_tables(record)
    if interval is NO_WIDTH:
        page = render_report({**results, "verdict": verdict(results)})
        assert Page(page).text.count("not known: every resample gives the same") == 2
        assert "<td>+45.0 (not known" in page
    else:
        assert "to +9.0)?" in table.text() and "too small to tell" in table.text()


@pytest.mark.parametrize(
    ("metric", "interval", "score", "wide"),
    [
        ("accuracy", [-0.05, 0.05], 0.7, False),
        ("accuracy", [-0.05, 0.06], 0.7, True),
        ("accuracy", [0.01, 0.3], 0.7, False),  # beyond chance
        ("ece", [-0.05, 0.06], 0.1, True),
        ("loss", [-0.05, 0.06], 2.0, False),
        ("loss", [-0.2, 0.2], 2.0, True),
    ],
)
def test_too_small_is_five_points_or_a_twentieth_of_a_loss(metric, interval, score, wide):
    over = "masked tokens" if metric == "loss" else "classes"
    assert METRICS[over][metric].too_wide(interval, score) is wide


def test_of_a_metric_that_is_to_be_low_the_lower_is_better():
    models = {"t": ("teacher", 0.1), "average": ("student", 0.2), "low": ("student", 0.05)}
    source = render_report(make_results(models, metric="ece"))
    part = source[source.index("Each student against") : source.index("Which examples")]
    rows = re.findall(
        r"<tr.*?<td>(\w+)</td>.*?>(\w+)</td>.*?<td class=.(up|down).>", part, re.DOTALL
    )
    assert rows == [("average", "t", "down"), ("average", "low", "down"), ("low", "t", "up")]


def test_perplexities_are_compared_as_they_are():
    """A difference of 0.001 is none with the two digits that are shown."""
    results = make_results({"t": ("teacher", 0.6), "average": ("student", 0.7)})
    record = results["phases"][-1]
    record |= {"over": "masked tokens", "metric": "perplexity"}
    numbers = {"accuracy": 0.3, "loss": 2.0, "perplexity": 7.389, "tokens": 9876}
    for model in (*record["models"].values(), record["baseline"]):
        model |= numbers
    outcome = {"difference": -0.001, "interval": [-1.5, 1.25]}
    record["models"]["average"]["to_baseline"] = {"difference": -9.0, "interval": [-9.5, -8.5]}
    record["comparisons"][0] |= outcome
    found = verdict(results)
    assert found == (
        "Student `average`: perplexity 7.39 on 9,876 masked tokens of test: better than always "
        "predicting 'green' (7.39); not told apart, by so small a test, from teacher `t` (7.39)."
    )
    page = Page(render_report({**results, "verdict": found})).text
    for part in ("Perplexity on test", "perplexity ↓", "loss ↓", "↓: less is better"):
        assert part in page
    assert "+0.00" in page and "−1.50 to +1.25" in page and "points" not in page


# ---------------------------------------------------------------------------------- page


@pytest.mark.parametrize("students", [1, 2, 3, 4])
@pytest.mark.parametrize("controls", [0, 1])
def test_a_page_shows_every_model(students, controls):
    names = ["average", "expertise", "random", "ca-mkd"][:students]
    models = {"first": ("teacher", 0.6), **{name: ("student", 0.7) for name in names}}
    models |= {f"control-{i}": ("control", 0.5) for i in range(controls)}
    page = page_of(models)
    for name in models:
        assert page.text.count(name) >= 3  # accuracy, per class, comparisons
    assert page.text.count("(shipped)") == 1
    for text in ("70.0%", "45.6%", "7.9%", "red", "green", "+10.0", "+8.0 to +12.0", "12.3"):
        assert text in page.text
    for text in ("always 'green'", "+40.0 (+38.0 to +42.0)", "30.0%"):
        assert text in page.text, "the baseline"
    assert page.tags.count("table") == 6


def test_a_page_sets_the_students_f1_of_each_class_beside_each_teachers():
    results = make_results({"first": ("teacher", 0.6), "average": ("student", 0.7)})
    models = results["phases"][-1]["models"]
    models["first"]["confusion"], models["average"]["confusion"] = (
        [[8, 2], [0, 0]],
        [[6, 4], [0, 0]],
    )
    found = by_class(models, "average")
    red, green = found.shown
    assert (red.scores.examples, red.scores.precision, red.scores.recall) == (10, 1.0, 0.6)
    assert red.scores.f1 == pytest.approx(2 * 6 / (6 + 10))
    assert red.differences["first"] == pytest.approx(12 / 16 - 16 / 18)
    assert (green.scores.precision, green.scores.recall, green.scores.f1) == (0.0, None, None)
    source = render_report(results)
    assert "to first" in Page(source).text and 'data-figure="per-class-first"' in source
    assert "−13.9" in Page(source).text
    for model in models.values():  # of labels and of entities the record has counts
        del model["confusion"]
        model["class_counts"] = {"red": [6, 6, 10], "green": [0, 4, 0]}
    assert by_class(models, "average").shown[0].scores == red.scores


def test_the_bars_of_classes_take_the_whole_figure():
    """Where all differences were of one sign, half of it was empty."""

    def rows(*differences: float | None) -> ByClass:
        scores = ClassScores(10, 1.0, 1.0, 1.0)
        named = {f"class {n}": {"first": one} for n, one in enumerate(differences)}
        made = [ClassRow(label, scores, one) for label, one in named.items()]
        return ByClass("student", ["first"], made, [])

    assert rows(0.2, 0.4).span == (0.0, 0.4)
    assert [bar[1:] for bar in rows(0.2, 0.4).bars("first")] == [(0.0, 0.5), (0.0, 1.0)]
    assert rows(-0.4, None).span == (-0.4, 0.0)
    assert [bar[1:] for bar in rows(-0.4, None).bars("first")] == [(1.0, 0.0), (1.0, 1.0)]
    found = rows(-0.1, 0.3).bars("first")
    assert [bar[1:] for bar in found] == [
        (pytest.approx(0.25), pytest.approx(0.0)),
        (pytest.approx(0.25), pytest.approx(1.0)),
    ]
    assert rows(0.0, None).span == (0.0, 1.0)


def test_a_page_shows_what_the_student_takes_for_what():
    results = make_results({"first": ("teacher", 0.6), "student": ("student", 0.7)})
    models = results["phases"][-1]["models"]
    names = list(models["student"]["per_class"])
    one, other = names[0], names[1]
    size = len(names)
    for name, wrong in (("first", 5), ("student", 20)):
        confusion = [[0] * size for _ in range(size)]
        confusion[0][0], confusion[0][1], confusion[1][0] = 100 - wrong, wrong, 1
        models[name]["confusion"] = confusion
    first, second = commonest_confusions(models, "student")
    assert (first.label, first.predicted, first.examples) == (one, other, 100)
    assert first.shares == {"first": 0.05, "student": 0.2}
    assert (second.label, second.examples, second.shares["student"]) == (other, 1, 1.0)
    sparse = {"true": [0, 0, 1], "predicted": [0, 1, 0], "count": [80, 20, 1]}
    models["student"]["confusion"] = sparse
    assert commonest_confusions(models, "student") == [first, second]
    page = Page(render_report(results))
    assert "What student takes for what" in page.text and "20.0%" in page.text


def test_a_page_without_an_evaluation_says_what_was_done():
    page = page_of(ONE_OF_EACH, evaluated=False)
    assert "No evaluate phase" in page.text and "distil" in page.text
    assert page.tags.count("table") == 2


def test_a_page_without_students_or_others():
    assert "No student was trained." in page_of({}, shipped=None, evaluated=False).text
    assert page_of({"average": ("student", 0.7)}).tags.count("table") == 5  # nothing to compare


def test_a_class_without_examples_is_named_as_one():
    results = make_results(ONE_OF_EACH)
    for model in results["phases"][-1]["models"].values():
        model["per_class"]["green"] = None
    text = Page(render_report(results)).text
    part = text[text.index("Accuracy by class") : text.index("Reliability")]
    assert part.count("none") == len(ONE_OF_EACH) + 1  # explained


def test_names_are_escaped():
    bad = '<script>alert("1")</script>&amp;'
    models = {bad: ("teacher", 0.6), "average": ("student", 0.7)}
    results = make_results(models, labels=[bad, "b"], description=bad)
    results["run"] = bad
    results["environment"] = {**ENVIRONMENT, "processor": bad}
    source = render_report(results)
    page = Page(source)
    assert "<script" not in source and "script" not in page.tags
    assert page.text.count(bad) >= 7  # shown as it was written


def test_names_that_are_also_methods_of_a_dictionary():
    models = {name: ("teacher", 0.5) for name in ("items", "values", "first")}
    page = page_of({**models, "average": ("student", 0.7)}, labels=["values", "items", "keys"])
    assert page.text.count("items") >= 4


def test_a_difference_has_a_sign_and_nothing_is_not_negative():
    results = make_results({"t": ("teacher", 0.70001), "average": ("student", 0.7)})
    text = Page(render_report(results)).text
    assert "+0.0" in text and "−2.0 to +2.0" in text and "−0.0" not in text


def test_no_table_is_wider_than_a_page():
    """Classes are rows, and more than eleven models go to another table."""
    labels = [f"class-{number}" for number in range(40)]
    models = {f"teacher-{number}": ("teacher", 0.5) for number in range(23)}
    source = render_report(make_results({**models, "average": ("student", 0.7)}, labels=labels))
    rows = re.findall(r"<tr.*?</tr>", source, re.DOTALL)
    assert max(len(re.findall(r"<t[hd]", row)) for row in rows) == 10
    of_all = source[source.index("<h2>Accuracy by class") :]
    for label in labels:
        assert of_all.count(f"<td>{label}</td>") == 3, "24 models: three tables"


def test_two_students_are_compared_once_and_the_shipped_one_comes_first():
    models = {"a": ("student", 0.6), "b": ("student", 0.7), "t": ("teacher", 0.5)}
    source = render_report(make_results(models, "b"))
    part = source[source.index("Each student against") : source.index("Which examples")]
    pairs = re.findall(r"<td>(\w+)</td><td class=.word.>(\w+)</td>", part)
    assert pairs == [("b", "a"), ("b", "t"), ("a", "t")]


def test_the_tasks_metric_is_the_first_column():
    results = make_results(ONE_OF_EACH, metric="micro_f1")
    results["phases"][-1]["metric_settings"] = {"leave_out": ["<none>", "b"]}
    page = Page(render_report(results)).text
    assert "Micro F1 on test" in page and "Micro F1: leave out <none>, b." in page
    [header] = re.findall(r"model\s*role\s*(.*)", page)
    assert header.startswith("micro F1to the baselineaccuracymacro F1ECE ↓")


def test_the_result_table_says_how_much_smaller_and_faster_a_student_is():
    results = make_results(ONE_OF_EACH)
    assert "parameters" in Page(render_report(results)).text, "also of a run that timed nothing"
    seconds = {"first": 0.02, "second": 0.03, "average": 0.0075}
    results["speed"] = {
        "task": "task",
        "length": 64,
        "device": "CPU",
        "threads": 2,
        "seconds": seconds,
    }
    text = Page(render_report(results)).text
    for part in ("30.0 M", "10.0 M (33%)", "7.5 ms", "4.0×", "not timed", "1.5×"):
        assert part in text, part
    assert "one text of 64 tokens" in text and "2 CPU threads" in text
    assert "Speed-up against second, the slowest teacher" in text


def test_a_page_shows_retention_and_the_median_of_the_classes():
    models = {"t": ("teacher", 0.8), "average": ("student", 0.6), "c": ("control", 0.5)}
    results = make_results(models)
    results["phases"][-1]["comparisons"][0]["median_class_difference"] = -0.123
    page = Page(render_report(results)).text
    part = page[page.index("Each student against") : page.index("Which examples")]
    assert "75.0%" in part and "−12.3" in part, "60% of 80%"
    assert part.count("%") == 2, "none of the control, and one in the heading"


def test_a_page_of_labels_has_no_accuracy():
    results = make_results(ONE_OF_EACH, metric="micro_f1")
    record = results["phases"][-1]
    record["over"] = "labels"
    record["baseline"]["rule"] = "the most frequent label"
    for model in record["models"].values():
        for name in ("accuracy", "ece", "confusion"):
            del model[name]
    page = Page(render_report({**results, "verdict": verdict(results)})).text
    part = page[: page.index("Which examples")]
    reliability = "the probability that a model gives a label"
    for words in ("Micro F1 on test", "F1 by label", "of labels", reliability):
        assert words in part, words
    assert "ccuracy" not in part and "class" not in part and "ECE" not in part


def test_a_page_has_a_figure_of_reliability_for_each_model():
    source = render_report(make_results(ONE_OF_EACH))
    figures = source.count('data-figure="reliability-')
    assert figures == len(ONE_OF_EACH) == source.count("<circle") / 2
    assert 'cx="95.0" cy="50.0" r="6.0"' in source, "a quarter of the predictions: 1.5 + 9 / 2"


def test_the_page_lists_what_chose_and_shows_no_accuracy_of_it():
    results = make_results(ONE_OF_EACH)
    results["phases"][0]["trained"] = [
        {
            "output": "average",
            "choosing": {"split": "validation", "metric": "accuracy", "score": 0.98765},
        }
    ]
    [use] = results["uses"]
    use["warnings"] = ["average was trained on this split"]
    text = Page(render_report(results)).text
    assert "321" in text and "epoch of average, student to ship" in text
    assert "Figures on these are too optimistic: average was trained on this split." in text
    assert "98.8" not in text and "0.98" not in text


def test_a_page_needs_nothing_from_elsewhere():
    source = render_report(make_results(ONE_OF_EACH))
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", source)
    assert "default-src 'none'" in source
    assert "<code>average</code>" in source


def test_a_page_shows_how_targets_compare():
    def score(accuracy, low, high):
        return {
            "score": accuracy,
            "per_class": {"<red>": accuracy, "green": None},
            "difference": accuracy - 0.6,
            "interval": [low, high],
        }

    results = make_results(ONE_OF_EACH)
    comparison = {
        "over": "classes",
        "metric": "accuracy",
        "examples": 1234,
        "policies": {"average": score(0.6, 0.0, 0.0), "gate": score(0.7, 0.04, 0.16)},
        "teachers": {"first": score(0.5, -0.2, -0.03)},
        "any_teacher": score(0.9, 0.2, 0.4),
        "agreement": {"first, second": 0.42},
        "choice": "gate",
    }
    results["phases"].insert(
        0,
        {
            "phase": "expertise",
            "kind": "expertise",
            "seconds": 1.0,
            "split": "validation",
            "left_out": {"second": "is best at no class: nearest on <red>"},
            "comparison": comparison,
        },
    )
    page = Page(render_report(results)).text
    for part in (
        "1,234 examples of validation; these are targets, not students",
        "gate (chosen)",
        "+10.0",
        "+4.0 to +16.0",
        "teacher first",
        "−20.0 to −3.0",
        "any teacher",
        "90.0%",
        "<red>",
        "none",
        "first, second predict the same on 42%",
        "Left out: teacher second, which is best at no class: nearest on <red>.",
    ):
        assert part in page, part


HOSTILE = ["</svg><script>alert(1)</script>", 'a" onload="b', "x" * 300, "&lt;", "\u202eabc"]


def expertise_record(labels, text):
    share = {label: 0.5 for label in labels}
    score = {"score": 0.6, "per_class": share, "difference": 0.0, "interval": [0.0, 0.0]}
    followed = {label: {"first": 0.75, "second": 0.25} for label in labels}
    answers = {
        name: {"label": label, "probability": 0.875}
        for name, label in zip(("first", "second"), labels, strict=False)
    }
    shares = {"first": 0.25, "second": 0.75}
    one = {
        "row": 3,
        "label": labels[0],
        "teachers": answers,
        "target": answers["second"],
        "followed": shares,
    }
    return {
        "phase": "expertise",
        "kind": "expertise",
        "seconds": 1.0,
        "split": "validation",
        "left_out": {},
        "texts": [text],
        "comparison": {
            "over": "classes",
            "metric": "accuracy",
            "examples": 12,
            "choice": "gate",
            "policies": {"average": score, "gate": {**score, "followed": followed}},
            "teachers": {"first": score, "second": score},
            "any_teacher": score,
            "agreement": {},
            "disagreements": [one],
        },
    }


def test_a_page_shows_who_knows_what_and_where_teachers_disagree():
    results = make_results(ONE_OF_EACH)
    results["phases"].insert(0, expertise_record(CLASSES, "A <b>text</b>."))
    text = Page(render_report(results)).text
    for part in (
        "accuracy of each teacher",
        "Whom gate (chosen) follows",
        "1: first; 2: second",
        "red: gate is wrong, with green 87.5%",
        "A <b>text</b>.",
    ):
        assert part in text, part
    assert "Whom average" not in text, "it treats all alike"
    results["phases"][0]["comparison"]["disagreements_of"] = "posterior"
    assert "red: posterior is wrong" in Page(render_report(results)).text
    del results["phases"][0]["texts"]
    assert "Where the teachers disagree" not in Page(render_report(results)).text


def test_hostile_names_and_texts_leave_a_page_and_its_figures_whole():
    models = {"first": ("teacher", 0.6), HOSTILE[0]: ("teacher", 0.5), "average": ("student", 0.7)}
    results = make_results(models, labels=HOSTILE)
    results["phases"].insert(0, expertise_record(HOSTILE, HOSTILE[0]))
    source = render_report(results, recipe="name: </pre><script>", loading=["</pre><b>"])
    page = Page(source)
    assert "script" not in page.tags and "b" not in page.tags
    figures = dict(page_figures(source))
    assert len(figures) == source.count("data-figure=") == 2 + 3 + 2
    for name, figure in figures.items():
        assert re.fullmatch(r"[A-Za-z0-9.-]+", name)
        assert xml.etree.ElementTree.fromstring(figure).tag.endswith("svg")


def test_a_run_that_stopped_half_way_has_a_report_that_says_where(tmp_path):
    run, recipe = tmp_path / "run", load_recipe("quickstart")
    trained = {"output": "first", "split": "train", "examples": 9, "steps": 2, "choosing": None}
    about = {"phase": "teach-first", "kind": "fine-tune", "task": "task", "seconds": 1.5}
    write_text(run / "recipe.yaml", dump_recipe(recipe))
    write_json(run / "phases" / "00-teach-first.json", {**about, "trained": [trained]})
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    assert f"Continue with: ds-distill run {run}/recipe.yaml --folder {run} --resume" in done.output
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    steps = len(recipe.phases)
    assert f"The run stopped in phase teach-second, after 1 of {steps} phases." in page.text
    assert "teach-first" in page.text and "How to load" not in page.text
    report_stopped(recipe, RunFolder(run), "Out of <memory>.")
    assert "Out of <memory>." in Page((run / "report.html").read_text(encoding="utf-8")).text
    assert not (run / "results.json").exists(), "it can go on"


def test_a_page_says_what_the_cache_saved_and_how_to_load():
    results = make_results(ONE_OF_EACH)
    results["cached"] = [
        {"phase": "cache", "seconds": 10.0, "examples": 100, "read": 600, "saved": 50.0}
    ]
    text = Page(render_report(results, loading=["from transformers import pipeline"])).text
    assert "students read 600 examples" in text and "about 50.0 seconds more" in text
    assert "How to load the student" in text and "from transformers import pipeline" in text


def test_a_page_says_what_memory_each_phase_took():
    results = make_results(ONE_OF_EACH)
    assert "memory" not in Page(render_report(results)).text
    first, last = results["phases"][0], results["phases"][-1]
    first["peak_bytes"], last["peak_bytes"] = 5 << 29, None
    text = Page(render_report(results)).text
    assert "2.50 GiB" in text and "the most that rank 0 held in the phase" in text


def test_what_phases_warn_of_is_on_the_page():
    results = make_results(ONE_OF_EACH)
    results["phases"][-1]["warnings"] = ["teacher first: accuracy 16.5% <on> test"]
    page = Page(render_report(results))
    assert "teacher first: accuracy 16.5% <on> test" in page.text and "details" not in page.tags


def test_many_warnings_are_gathered():
    """Twelve teachers in two phases stood 24 times before the first table."""
    results = make_results(ONE_OF_EACH)
    for record in results["phases"]:
        record["warnings"] = [f"teacher {number} of {record['phase']}" for number in range(12)]
    page = Page(render_report(results))
    assert page.tags.index("details") < page.tags.index("table")
    assert page.tags.count("details") == 1 and "24 warnings" in page.text
    assert "teacher 11 of evaluate" in page.text


def test_of_thousands_of_classes_a_page_shows_the_worst_and_the_best():
    labels = [f"class {number}." for number in range(2_000)]
    results = make_results(ONE_OF_EACH, labels=labels)
    record = results["phases"][-1]
    for model in record["models"].values():
        model["per_class"] = {label: (n * 7 % 2_000) / 2_000 for n, label in enumerate(labels)}
        model["per_class"][labels[500]] = None
    text = Page(render_report(results)).text
    shown, folded = text[text.index("Accuracy by class") :].split("1,980 more")
    in_order = sorted(range(2_000), key=lambda n: n * 7 % 2_000)
    for number in (*in_order[:10], *in_order[-10:]):
        assert f"class {number}." in shown and f"class {number}." not in folded
    assert shown.count("class ") < 25 and labels[500] in folded
    *_, by_class = evaluation_tables(record)
    assert len(by_class.rows) == 20 and len(by_class.folded) == 1_980
    assert "\nand 1,980 more\n" in by_class.text()
    assert len(Page(tables_page("title", [], [by_class])).tags) > 4 * 2_000
