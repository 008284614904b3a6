"""A score that is not defined, as the correlation of a constant, in all that is said of a run."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from records import EVALUATION

from ds_distill.evaluation.prediction_files import SavedPredictions
from ds_distill.evaluation.predictions import NumberPredictions
from ds_distill.evaluation.scores import build_metrics, comparisons, difference, model_report
from ds_distill.reporting.report import report
from ds_distill.reporting.result_tables import evaluation_tables, verdict
from ds_distill.run.folder import RunFolder
from ds_distill.sweep.found import results, run_result, summary
from ds_distill.sweep.runs import SweepRun, Variant
from ds_distill.sweep.side_by_side import side_by_side, side_table
from ds_distill.sweep.tables import sweep_table, sweep_tables
from ds_distill.tables import Table

METRICS_OF_NUMBERS = build_metrics("numbers")


def results_of(predicted):
    """What results.json has of a run that evaluated models, by name their role and predictions.
    `one` is the student to ship."""
    truth = np.random.default_rng(0).normal(size=60)
    metric = METRICS_OF_NUMBERS["pearson"]
    scored = {name: NumberPredictions(each, truth) for name, (_, each) in predicted.items()}
    baseline = NumberPredictions(np.full(60, 0.5), truth)
    reports = {name: model_report(one, METRICS_OF_NUMBERS) for name, one in scored.items()}
    roles = {name: role for name, (role, _) in predicted.items()}
    record = {
        **EVALUATION,
        **{"over": "numbers", "metric": "pearson", "examples_mark": "the same"},
        "models": {
            name: {
                "role": role,
                "parameters": 10,
                **reports[name],
                "to_baseline": difference(scored[name], baseline, metric),
            }
            for name, role in roles.items()
        },
        "baseline": {
            **{"answer": "0.5", "rule": "the mean label", "split": "train"},
            **model_report(baseline, METRICS_OF_NUMBERS),
        },
        "comparisons": comparisons(scored, roles, reports, metric),
    }
    choosing = {"split": "validation", "examples": 30, "score": reports["one"]["pearson"]}
    trained = [
        {"output": "one", "split": "train", "examples": 60, "steps": 4, "choosing": choosing}
    ]
    packages = dict.fromkeys(("torch", "deepspeed", "transformers"), "1")
    environment = {"ranks": 1, "gpus": [], "processor": "one", "cores": 1, "packages": packages}
    phases = [{"phase": "distil", "kind": "distil", "task": "task", "seconds": 1.0}, record]
    phases[0]["trained"] = trained
    found = {"run": "run", "description": "", "student": "one", "task": "task", "seconds": 2.0}
    found |= {"uses": [], "phases": phases, "environment": environment}
    return {**found, "verdict": verdict(found)}


NOISE = np.random.default_rng(1).normal(size=60)
GOOD = np.random.default_rng(0).normal(size=60) + NOISE
CONSTANT = np.full(60, 3.0)


@pytest.mark.parametrize("one", [GOOD, CONSTANT], ids=["defined", "undefined"])
@pytest.mark.parametrize("other", [GOOD + NOISE, CONSTANT], ids=["defined", "undefined"])
def test_an_undefined_score_is_shown_as_one(one, other, tmp_path):
    """In tables, verdict, page and side by side: as undefined, and never as level."""
    models = {
        "bert": ("teacher", other),
        "one": ("student", one),
        "other": ("student", other),
        "labels": ("control", other),
    }
    found = results_of(models)
    record = found["phases"][-1]
    text = "\n".join(map(Table.text, evaluation_tables(record)))
    assert "undefined" in text and "the same number" in text and "always 0.5 " in text
    page = report(found).html()
    assert "What always predicts one number has no Pearson" in page and "always 0.5<" in page
    said = found["verdict"]
    undefined = one is CONSTANT or other is CONSTANT
    assert ("undefined" in said) == undefined
    if undefined:
        assert "within chance" not in said
    if one is not CONSTANT and other is CONSTANT:
        assert (
            "not comparable with teacher `bert` (undefined), student `other` (undefined), "
            "control `labels` (undefined)." in said
        )
    if one is CONSTANT:
        assert ", not comparable with teacher `bert`" in said
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps(found))
        truth = np.random.default_rng(0).normal(size=60)
        saved = {model: NumberPredictions(each, truth) for model, (_, each) in models.items()}
        file = RunFolder(folder).predictions(1, "evaluate")
        SavedPredictions([], np.arange(60), saved).write(file)
    [group] = side_by_side([tmp_path / "a", tmp_path / "b"])
    table = side_table(group)
    [to_first] = [row[-2] for row in table.rows if row[0] == "b one"]
    assert (str(to_first) == "undefined") == (one is CONSTANT)


def test_a_setting_that_diverged_is_ranked_last_and_named():
    scores = {("1e-5", 1): GOOD, ("1e-5", 2): GOOD + NOISE, ("1", 1): GOOD, ("1", 2): CONSTANT}
    ended = {
        Variant((f"rate={rate}", f"seed={seed}")): run_result(results_of({"one": ("student", x)}))
        for (rate, seed), x in scores.items()
    }
    found = summary(ended)
    assert found["chosen"] == 0
    assert found["settings"][1]["score"]["mean"] is None
    text = sweep_table(found).text()
    assert "Undefined, and ranked last: rate=1." in text and "rate=1e-5" in text
    [line] = [line for line in text.splitlines() if line.startswith("rate=1 ")]
    assert line.count("undefined") == 4, "score, one of the seeds, choosing, to the first"
    assert "the mean label: undefined" not in text
    alone = summary({variant: each for variant, each in ended.items() if variant.seed == "2"})
    assert alone["chosen"] == 0
    nothing = {v: run_result(results_of({"one": ("student", CONSTANT)})) for v in ended}
    found = summary(nothing)
    assert found["chosen"] is None
    assert (
        "No setting is chosen: none has a Pearson on the examples that choose."
        in sweep_table(found).text()
    )


def test_a_mean_goes_on_where_a_model_has_no_score():
    rates = ("1e-5", "1")
    diverged = {"good": ("1",), "bad": rates, "partly": ("1",)}
    for order in (["good", "bad", "partly"], ["bad", "good", "partly"]):
        runs, ended = [], {}
        for recipe, name, rate, seed in product(("one", "two"), order, rates, ("1", "2")):
            about = (f"student.model={name}", f"rate={rate}", f"seed={seed}")
            variant = Variant(about, recipe)
            runs.append(SweepRun(variant, None, Path()))
            one = CONSTANT if rate in diverged[name] else GOOD
            ended[variant] = run_result(results_of({"one": ("student", one)}))
        scores, table, _ = sweep_tables(results(runs, ended))
        assert scores.rows[order.index("bad")] == ["bad", *["undefined"] * 2, "-", "-", ""]
        assert [row[0] for row in table.rows] == [
            f"student.model={name}, rate=1e-5" for name in ("good", "partly")
        ]
        assert "Undefined, and ranked last: student.model=bad, rate=1e-5; " in table.text()
        assert "Undefined, and ranked last: student.model=good, rate=1." in table.notes
