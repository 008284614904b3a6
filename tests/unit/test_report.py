"""The page and the sentence about a run."""

import html.parser
import re
import xml.etree.ElementTree
from pathlib import Path

import html5lib
import numpy as np
import pytest
import torch
from runs import command_line
from texts import check_text

from ds_distill.errors import UserError
from ds_distill.evaluation.bootstrap import paired_interval
from ds_distill.evaluation.predictions import TokenScores
from ds_distill.evaluation.scores import build_metric, to_teacher
from ds_distill.files import write_json, write_text
from ds_distill.recipe import dump_recipe, load_recipe
from ds_distill.recipe.metrics import METRICS
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.reporting.page import page as tables_page
from ds_distill.reporting.report import report
from ds_distill.reporting.result_tables import (
    confusions,
    evaluation_tables,
    judged_model,
    verdict,
)
from ds_distill.reporting.results import evaluations_of_student
from ds_distill.run.folder import RunFolder
from ds_distill.run.inputs import describe_environment
from ds_distill.run.publish import report_stopped
from ds_distill.sweep.found import run_result

CLASSES = ["red", "green"]
SIZE = 2000
SCORES = {"accuracy": 0.123, "macro_f1": 0.456, "ece": 0.0789}
ENVIRONMENT = {
    "ranks": 2,
    "gpus": [],
    "processor": "A processor",
    "cores": 2,
    "packages": {"torch": "2.13", "deepspeed": "0.19", "transformers": "5.23"},
}
ONE_OF_EACH = {
    "first": ("teacher", 0.6),
    "values": ("teacher", 0.5),  # a method of a dictionary
    "average": ("student", 0.7),
    "few": ("control", 0.55),
}
HOSTILE = ["</svg><script>alert(1)</script>", 'a" onload="b', "x" * 300, "&lt;", "\u202eabc"]


def difference(first, second):
    """With 2 points around it."""
    apart = first - second
    return {"difference": apart, "interval": [apart - 0.02, apart + 0.02]}


def make_results(models=ONE_OF_EACH, student="average", *, labels=CLASSES, baseline=0.3, **more):
    """models: {name: (role, score)}. more: the task's `metric`, or what a run's results have."""
    metric = more.pop("metric", "accuracy")
    reports = {
        name: {
            "role": role,
            "parameters": 30_000_000 if role == "teacher" else 10_000_000,
            "to_baseline": difference(score, baseline or 0.0),
            "examples": SIZE,
            **SCORES,
            metric: score,
            "reliability": [
                {"confidence": 0.95, "accuracy": 0.5, "count": 500},
                {"confidence": 0.85, "accuracy": 0.75, "count": 1500},
            ],
            "per_class": dict.fromkeys(labels, score),
            "class_counts": {label: [0, 0, 0] for label in labels},
            "confusion": [[0] * len(labels)] * len(labels),
        }
        for name, (role, score) in models.items()
    }
    comparisons = [
        {"student": name, "other": other, **difference(score, models[other][1])}
        for name, (role, score) in models.items()
        for other in models
        if role == "student" and other != name
    ]
    for row in comparisons:
        if models[row["other"]][0] == "teacher":
            pair = reports[row["student"]], reports[row["other"]]
            row |= to_teacher(*pair, METRICS["classes"][metric])
    answer = {"answer": "green", "rule": "the most frequent class", "split": "train"}
    evaluation = {
        **{"phase": "evaluate", "kind": "evaluate", "task": "task", "seconds": 1.0},
        **{"split": "test", "over": "classes", "metric": metric, "metric_settings": {}},
        "models": reports,
        "baseline": {**answer, "examples": SIZE, **SCORES, metric: baseline},
        "comparisons": comparisons,
    }
    use = {"use": "choose", "split": "validation", "examples": 321, "warnings": []}
    return {
        **{"run": "a-run", "description": "Words.", "student": student, "task": "task"},
        "seconds": 13.3,
        "uses": [{**use, "of": ["epoch of average", "student to ship"]}],
        "phases": [
            {"phase": "distil", "kind": "distil", "task": "task", "seconds": 12.34},
            evaluation,
        ],
        "environment": ENVIRONMENT,
        **more,
    }


class Page(html.parser.HTMLParser):
    """Text and tags of valid HTML; every tag that is opened is closed."""

    ROWS = re.compile("tr|p|h[1-3]|summary|figure|text|blockquote|pre|figcaption")

    def __init__(self, source):
        super().__init__()
        html5lib.HTMLParser(strict=True).parse(source)
        self.source, self.tags, self.text, self._open = source, [], "", []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta":
            self._open.append(tag)
        named = dict(attrs)
        self.text += "\n" if self.ROWS.fullmatch(tag) else " | " if tag in ("td", "th") else ""
        self.text += "# " if tag == "h2" else ""
        marked = {*named.get("class", "").split()} & {"up", "down", "shipped"}
        if marked and tag in ("td", "p", "tr", "div"):
            self.text += f"[{' '.join(sorted(marked))}] "
        if tag == "circle":
            self.text += f"({named['cx']}, {named['cy']}, {named['r']})"

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self.text += data if data.strip() else ""

    def lines(self):
        return [" ".join(line.split()) for line in self.text.splitlines() if line.strip(" |")]


def report_of(results, **options):
    return report({**results, "verdict": verdict(results)}, **options)


def page_of(results, **options):
    return Page(report_of(results, **options).html())


# ------------------------------------------------------------------------------ sentence

GREEN = "better than always predicting 'green' (30.0%)"
NO_WIDTH = [0.45, 0.45 + 1e-15]


VERDICTS = {
    "one of each": (
        {"t": ("teacher", 0.6), "u": ("teacher", 0.8), "c": ("control", 0.69)},
        {"metric": "micro_f1"},
    ),
    "students": (
        {"a": ("student", 0.6), "b": ("student", 0.7), "c": ("student", 0.5)},
        {"baseline": 0.7},
    ),
    "low is better": ({"t": ("teacher", 0.8), "low": ("student", 0.05)}, {"metric": "ece"}),
    "another ships": ({"t": ("teacher", 0.6), "bad": ("student", 0.4)}, {"student": "bad"}),
    "none ships": ({"t": ("teacher", 0.6)}, {"student": None}),
    "not evaluated": ({"t": ("teacher", 0.6)}, {"student": "gone"}),
}


def test_the_verdict_is_a_sentence_with_the_numbers():
    made = {
        name: make_results({**models, "average": ("student", 0.7)}, **options)
        for name, (models, options) in VERDICTS.items()
    }
    text = "".join(f"{name}: {verdict(results)}\n" for name, results in made.items())
    check_text(Path(__file__).with_name("verdicts.txt"), text)


@pytest.mark.parametrize(
    ("more", "outcome"), [(1, "not told apart from"), (100, "better than"), (-100, "worse than")]
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
    assert f"test, {outcome} teacher `t`" in verdict(results)


@pytest.mark.parametrize("interval", [[-0.11, 0.09], NO_WIDTH])
def test_a_test_that_is_too_small_to_tell_is_not_called_level(interval):
    """By intervals of 10 points either way nothing is known, and by none at all neither."""
    results = make_results({"t": ("teacher", 0.7), "average": ("student", 0.69)})
    record = results["phases"][-1]
    record["comparisons"][0]["interval"] = interval
    assert verdict(results).endswith(f"{GREEN}; not told apart from teacher `t` (70.0%).")
    assert "?" not in next(evaluation_tables(record)).text()
    record["models"]["t"]["to_baseline"] = {"difference": 0.45, "interval": interval}
    table = next(evaluation_tables(record)).text()
    if interval is NO_WIDTH:
        assert page_of(results).text.count("not known: every resample gives the same") == 2
    else:
        assert "to +9.0)?" in table and "too small to tell" in table


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


def test_what_was_judged_before_the_last_training_is_not_what_is_shipped():
    """The score of other weights under the same name was in the verdict, the card and a sweep."""
    results = make_results({"average": ("student", 0.9), "t": ("teacher", 0.8)})
    trained = {"trained": [{"output": "average", "split": "train", "examples": 9}]}
    trained["trained"][0]["choosing"] = None
    first, judged = results["phases"]
    results["phases"] = [{**first, **trained}, judged]
    assert evaluations_of_student(results) == [judged]
    assert run_result(results)["models"]["average"]["score"] == 0.9
    results["phases"].append({**first, **trained, "phase": "more"})
    assert "No evaluate phase comes after it" in verdict(results)
    assert run_result(results)["student"] is None
    assert evaluations_of_student({**results, "phases": [*results["phases"], judged]}) == [judged]


# ---------------------------------------------------------------------------------- page


def expertise_record(labels, text):
    def score(of, low, high, **more):
        shares = {**dict.fromkeys(labels, of), labels[1]: None}
        apart = {"difference": of - 0.6, "interval": [low, high]}
        return {"score": of, "per_class": shares, **apart, **more}

    answers = [{"label": label, "probability": 0.875} for label in labels]
    shares = {"first": 0.25, "values": 0.75}
    return {
        **{"phase": "expertise", "kind": "expertise", "seconds": 1.0, "split": "validation"},
        "left_out": {"third": "is best at no class: nearest on <red>"},
        "texts": [text],
        "comparison": {
            **{"over": "classes", "metric": "accuracy", "examples": 1234, "choice": "gate"},
            "policies": {
                "average": score(0.6, 0.0, 0.0),
                "gate": score(0.7, 0.04, 0.16, followed=dict.fromkeys(labels, shares)),
            },
            "teachers": {"first": score(0.5, -0.2, -0.03), "values": score(0.5, -0.2, 0.03)},
            "any_teacher": score(0.9, 0.2, 0.4),
            "agreement": {"first, values": 0.42},
            "disagreements": [
                {
                    **{"row": 3, "label": labels[0], "target": answers[1], "followed": shares},
                    "teachers": {"first": answers[0], "values": answers[1]},
                }
            ],
        },
    }


def whole_results():
    """With all that a page may show."""
    confusion = {"first": [[95, 5], [1, 0]], "average": [[80, 20], [1, 0]]}
    results = make_results(metric="micro_f1")
    [distil, judged] = results["phases"]
    judged["metric_settings"] = {"leave_out": ["<none>", "b"]}
    judged["comparisons"][0]["median_class_difference"] = -0.123
    for name, counts in confusion.items():
        judged["models"][name]["confusion"] = counts
    judged["models"]["average"]["class_counts"] = {"red": [80, 81, 100], "green": [0, 20, 1]}
    judged["models"]["average"]["per_class"]["green"] = None
    judged["warnings"] = ["teacher first: accuracy 16.5% <on> test"]
    judged["peak_bytes"], distil["peak_bytes"] = None, 5 << 29
    results["uses"][0]["warnings"] = ["average was trained on this split"]
    # What chose is listed, and its score is on no page.
    choosing = {"split": "validation", "metric": "accuracy", "score": 0.98765}
    distil["trained"] = [{"output": "average", "choosing": choosing}]
    results["phases"].insert(0, expertise_record(CLASSES, "A <b>text</b>."))
    seconds = {"first": 0.02, "values": 0.03, "average": 0.0075}
    where = {"task": "task", "length": 64, "device": "CPU", "threads": 2}
    results["speed"] = {**where, "seconds": seconds}
    cached = {"added": 100, "examples": 120, "not_given": {"values": 20}}
    cache = {"phase": "cache", "kind": "cache", "task": "task", "seconds": 1.5, **cached}
    results["phases"].insert(0, cache)
    return results


def test_a_page_shows_all_that_a_run_has():
    loading = ["from transformers import pipeline"]
    page = page_of(whole_results(), recipe="name: a-run", loading=loading)
    check_text(Path(__file__).with_name("report.txt"), "\n".join(page.lines()) + "\n")
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://", page.source)
    assert "default-src 'none'" in page.source and "<code>average</code>" in page.source


def without_evaluation(results):
    results["phases"].pop()


def without_student(results):
    results["student"] = None


def perplexity(results):
    """A difference of 0.001 is none with the two digits that are shown."""
    record = results["phases"][-1]
    record |= {"over": "masked tokens", "metric": "perplexity"}
    for model in (*record["models"].values(), record["baseline"]):
        model |= {"accuracy": 0.3, "loss": 2.0, "perplexity": 7.389, "tokens": 9876}
    own = {"tokens": 12345, "loss": 2.5, "perplexity": 12.18}
    record["models"]["average"]["own_tokens"] = own
    record["models"]["average"]["to_baseline"] = {"difference": -9.0, "interval": [-9.5, -8.5]}
    record["comparisons"][0] |= {"difference": -0.001, "interval": [-1.5, 1.25]}


def labels(results):
    record = results["phases"][-1]
    record |= {"over": "labels", "metric": "macro_f1"}
    record["baseline"]["rule"] = "the most frequent label"
    for model in record["models"].values():
        for name in ("accuracy", "ece", "confusion"):
            del model[name]


def many_warnings(results):
    """Twelve teachers in two phases stood 24 times before the first table."""
    for record in results["phases"]:
        record["warnings"] = [f"teacher {number} of {record['phase']}" for number in range(12)]


def another_policy(results):
    results["phases"].insert(0, expertise_record(CLASSES, "a text"))
    results["phases"][0]["comparison"]["disagreements_of"] = "expertise"


def without_texts(results):
    results["phases"].insert(0, expertise_record(CLASSES, "a text"))
    del results["phases"][0]["texts"]


def level(results):
    """Nothing is not negative."""
    row = results["phases"][-1]["comparisons"][0]
    row |= difference(0.7, 0.70001)


def test_pages_of_other_runs():
    changes = [without_evaluation, without_student, perplexity, labels, many_warnings]
    text = ""
    for change in (*changes, another_policy, without_texts, level):
        results = make_results({"t": ("teacher", 0.6), "average": ("student", 0.7)})
        change(results)
        page = page_of(results)
        folded = (change is many_warnings) + (change is another_policy)
        assert page.tags.count("details") == folded
        shown = page.lines()[3 : page.lines().index("# Which examples were used for what")]
        text += "\n".join([f"## {change.__name__}", *shown, ""])
    check_text(Path(__file__).with_name("other_reports.txt"), text)


def test_students_are_compared_once_the_shipped_one_first_and_of_low_metrics_the_lower_is_better():
    models = {"a": ("student", 0.2), "b": ("student", 0.05), "t": ("teacher", 0.1)}
    source = page_of(make_results(models, "b", metric="ece")).source
    part = source[source.index("Each student against") : source.index("Which examples")]
    row = r"<tr.*?>(\w+)</td><td[^>]*>\w+ (\w+)</td><td class=.(up|down)."
    assert re.findall(row, part) == [("b", "a", "up"), ("b", "t", "up"), ("a", "t", "down")]


def test_classes_are_shown_of_a_model_that_was_judged_on_all_examples():
    """Not of the last one, a file of predictions that says something of a few."""
    evaluation = {"models": {"t": {}, "llm": {"not_given": 3}}}
    assert judged_model(evaluation, None) == judged_model(evaluation, "other") == "t"
    assert judged_model(evaluation, "llm") == "llm"
    assert judged_model({"models": {"a": {}, "b": {}}}, None) == "b"


def test_what_a_class_has_beside_its_scores():
    evaluation = whole_results()["phases"][-1]
    models = evaluation["models"]

    def shown():
        _, table = evaluation_tables(evaluation, "average")
        return table.heads[1:4], [" ".join(map(str, row[:4])) for row in table.rows]

    confused = confusions(models, "average")
    assert " ".join(map(str, confused.rows[0])) == "red: green 100 5.0% 0.0% 20.0% 0.0%"
    of_both = ["red 100 98.8% 60.0%", "green 1 0.0% 60.0%"]
    assert shown() == (["examples", "precision", "first"], of_both)
    sparse = {"true": [0, 0, 1], "predicted": [0, 1, 0], "count": [80, 20, 1]}
    models["average"]["confusion"] = sparse
    assert confusions(models, "average") == confused
    evaluation["over"] = "labels"
    models["average"]["class_counts"]["green"] = [0, 4, 0]
    counted = ["red 100 98.8% 80.0%", "green 0 0.0% none"]
    assert shown() == (["examples", "precision", "recall"], counted)


def test_hostile_names_and_texts_leave_a_page_and_its_figures_whole():
    bad = HOSTILE[0]
    models = {"first": ("teacher", 0.6), bad: ("teacher", 0.5), "average": ("student", 0.7)}
    results = make_results(models, labels=HOSTILE, run=bad, description=bad)
    results["environment"] = {**ENVIRONMENT, "processor": bad}
    results["phases"].insert(0, expertise_record(HOSTILE, bad))
    made = report_of(results, recipe="name: </pre><script>", loading=["</pre><b>"])
    page = Page(made.html())
    assert "script" not in page.tags and "b" not in page.tags
    assert page.text.count(bad) >= 9  # shown as it was written
    figures = dict(made.figures())
    assert len(figures) == page.tags.count("svg") == 3
    for name, figure in figures.items():
        assert re.fullmatch(r"[A-Za-z0-9.-]+", name)
        assert xml.etree.ElementTree.fromstring(figure).tag.endswith("svg")


def test_no_table_is_wider_than_a_page():
    """Classes are rows, and more than eight models go to another table."""
    labels = [f"class-{number}" for number in range(40)]
    models = {f"teacher-{number}": ("teacher", 0.5) for number in range(23)}
    results = make_results({**models, "average": ("student", 0.7)}, labels=labels)
    source = page_of(results).source
    rows = re.findall(r"<tr.*?</tr>", source, re.DOTALL)
    assert max(len(re.findall(r"<t[hd]", row)) for row in rows) == 9
    of_all = source[source.index("<h2>Accuracy by class") :]
    for label in labels:
        assert of_all.count(f">{label}</td>") == 4, "24 models, and two columns before them"


def test_of_many_classes_a_page_shows_the_worst_and_the_best():
    labels = [f"class {number}." for number in range(200)]
    results = make_results(labels=labels)
    record = results["phases"][-1]
    for model in record["models"].values():
        model["per_class"] = {label: (n * 7 % 200) / 200 for n, label in enumerate(labels)}
        model["per_class"][labels[50]] = None
    text = page_of(results).text
    of_accuracy = text[text.index("Accuracy by class") : text.index("Precision is of")]
    shown, folded = of_accuracy.split("180 more")
    in_order = sorted(range(200), key=lambda n: n * 7 % 200)
    for number in (*in_order[:10], *in_order[-10:]):
        assert f"class {number}." in shown and f"class {number}." not in folded
    assert shown.count("class ") < 25 and labels[50] in folded
    *_, table = evaluation_tables(record)
    assert (len(table.rows), len(table.folded)) == (20, 180)
    assert "\nand 180 more\n" in table.text()
    assert len(Page(tables_page("title", [], [table]).html()).tags) > 4 * 200


# ------------------------------------------------------------------------------ in a folder


@pytest.mark.parametrize("content", ["{", '{"phases": [{"kind": "evaluate"}]}'])
def test_a_report_of_damaged_results_is_refused(content, tmp_path):
    """As where several runs are set side by side: it ended in a traceback."""
    (tmp_path / "recipe.yaml").write_text(dump_recipe(load_recipe("quickstart")))
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match=r"results\.json"):
        command_line("report", tmp_path)


def test_cpu_ranks_of_a_machine_with_gpus_ran_on_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    assert describe_environment(2, "cpu")["gpus"] == []
    assert describe_environment(2, "cuda:0")["gpus"] == ["GPU 0", "GPU 1"]


def test_a_run_that_stopped_half_way_has_a_report_that_says_where(tmp_path):
    run, recipe = tmp_path / "run", load_recipe("quickstart")
    trained = {"output": "first", "split": "train", "examples": 9, "steps": 2, "choosing": None}
    about = {"phase": "teach-first", "kind": "fine-tune", "task": "task", "seconds": 1.5}
    write_text(run / "recipe.yaml", dump_recipe(recipe))
    write_json(run / "phases" / "00-teach-first.json", {**about, "trained": [trained]})
    done = command_line("report", run)
    assert f"Continue with: ds-distill run {run}/recipe.yaml --folder {run} --resume" in done.output
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    steps = len(recipe.phases)
    assert f"The run stopped in phase teach-second, after 1 of {steps} phases." in page.text
    assert "teach-first" in page.text and "How to load" not in page.text
    report_stopped(recipe, RunFolder(run), "Out of <memory>.")
    assert "Out of <memory>." in Page((run / "report.html").read_text(encoding="utf-8")).text
    assert not (run / "results.json").exists(), "it can go on"
