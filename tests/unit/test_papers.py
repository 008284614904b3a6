"""The study of the papers' small forms, and what docs/studies shows of it."""

import json
import statistics
from pathlib import Path

import papers
import pytest
from papers_markdown import CLOSING, RESULTS, markdown, opening, page_of
from papers_tables import LABELS_ONLY, TABLES, overrides_of

from ds_distill.recipe import load_recipe

FILES = sorted(RESULTS.glob("*.json"))
EACH = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


# ------------------------------------------------------------------------------ what is there


@EACH
def test_the_page_shows_what_the_file_holds(file):
    _, mark, rest = page_of(file.stem).read_text(encoding="utf-8").partition(opening(file.stem))
    shown, end, _ = rest.partition(CLOSING)
    assert mark and end
    assert shown == markdown(file.stem, json.loads(file.read_text()))


def test_every_table_of_the_pages_has_a_file():
    pages = sorted({page_of(name) for name in TABLES})
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    shown = [name for name in TABLES if opening(name) in text]
    assert shown == [name for name in TABLES if name in {file.stem for file in FILES}]
    assert text.count(CLOSING) == len(shown)


@EACH
def test_a_file_is_of_a_commit_and_names_no_folder(file):
    text = file.read_text()
    commit = json.loads(text)["environment"]["commit"]
    assert len(commit) == 40, commit
    assert "data_folder" not in text and str(Path.home()) not in text and "/tmp/" not in text


# ---------------------------------------------------------------------------------- the study


@pytest.mark.parametrize("name", TABLES)
def test_every_variant_is_a_recipe(name):
    """Labels alone train as long, and from the same start."""
    table = TABLES[name]
    for variant in table.variants.values():
        recipe = load_recipe(table.recipe, overrides_of(table, variant), small=True)
        assert recipe.phases[-1].start, "the start is among what is evaluated"
        phases = dict(recipe.named_phases())
        assert {more["save_as"] for more in variant.more} <= phases.keys()
        if LABELS_ONLY in variant.more:
            for key in ("epochs", "steps", "batch_size", "learning_rate", "split", "starts"):
                assert getattr(phases["distil"], key) == getattr(phases["labels-only"], key), key


def evaluation(student, teacher, closed):
    def figures(score, **more):
        bins = [{"confidence": 0.75, "accuracy": score, "count": 40}]
        counts = {"confusion": [[14, 6], [2, 18]], "reliability": bins}
        return {"f1": score, "accuracy": score, "ece": 0.1, **counts, **more}

    def less(other):
        return {"difference": student - other, "interval": [-0.1, 0.1]}

    models = {
        "bert": figures(teacher, role="teacher"),
        "student": figures(student, role="student", to_baseline=less(0.5)),
    }
    pair = {"student": "student", "other": "bert", **less(teacher)}
    pair |= {"retention": student / teacher, "gap_closed": closed}
    answers = {"examples": 40, "answer": "no", "per_class": {"yes": 0.0, "no": 1.0}}
    record = {"phase": "evaluate", "split": "test", "over": "classes", "seconds": 1.0}
    record |= {"metric": "f1", "metric_settings": {}, "models": models, "comparisons": [pair]}
    return {**record, "baseline": figures(0.5, **answers)}


def results_of(student, teacher, closed=0.5):
    trained = {"output": "student", "steps": 9, "measures": {papers.OTHER_SIGN: 0.25}}
    distil = {"phase": "distil", "seconds": 2.0, "trained": [trained]}
    return {"phases": [distil, evaluation(student, teacher, closed)]}


def test_a_mean_over_seeds_has_an_interval_of_the_seeds_differences():
    found = papers.over_seeds([results_of(0.7, 0.6), results_of(0.8, 0.6), results_of(0.9, 0.6)])
    to_teacher, to_majority = found["differences"]
    assert to_teacher["seeds"] == pytest.approx([0.1, 0.2, 0.3])
    reach = 4.302653 * 0.1 / 3**0.5  # Student's t of two degrees of freedom, 97.5%
    assert to_teacher["t_interval"] == pytest.approx([0.2 - reach, 0.2 + reach])
    assert to_majority["other"] == papers.MAJORITY and to_majority["mean"] == pytest.approx(0.3)
    student = found["models"]["student"]
    assert student["f1"]["mean"] == pytest.approx(0.8)
    assert student["steps"]["seeds"] == [9, 9, 9]
    assert student["other_sign"]["mean"] == 0.25
    assert found["seconds"] == {"distil": [2.0] * 3, "evaluate": [1.0] * 3}
    assert "steps" not in found["models"]["bert"]


def test_the_majority_class_is_compared_by_accuracy_too():
    """The answer `no` is right 20 times; the student 32 times, alone 14 times."""
    found = papers.more_right(evaluation(0.8, 0.9, None), "student")
    assert found["difference"] == pytest.approx(12 / 40)
    one_each = [1] * 14 + [-1] * 2 + [0] * 24
    reach = 1.96 * statistics.pstdev(one_each) / 40**0.5
    assert found["interval"] == pytest.approx([0.3 - reach, 0.3 + reach])


def test_runs_of_other_commits_and_of_changed_checkouts_are_refused(tmp_path):
    def ran(name, *commits):
        """A run that was begun, and resumed, at these commits."""
        starts = [
            {"date": f"2026-{number}", "commit": commit * 40}
            for number, commit in enumerate(commits)
        ]
        (tmp_path / name).mkdir()
        environment = {**starts[-1], "phases": {"teach": starts[:1], "distil": starts}}
        (tmp_path / name / "environment.json").write_text(json.dumps(environment))
        return tmp_path / name

    once, resumed = ran("once", "a"), ran("resumed", "a", "a")
    other, mixed = ran("other", "b"), ran("mixed", "b", "a")
    where = papers.environment([once, resumed])
    assert where["commit"] == "a" * 40 and where["dates"] == ["2026-0", "2026-1"]
    for folders in ([once, other], [mixed]):
        with pytest.raises(SystemExit, match="different commits"):
            papers.environment(folders)
    for commit in (None, "a" * 40 + "+changes"):
        with pytest.raises(SystemExit, match="without changes"):
            papers.refuse_changes({"commit": commit}, dirty=False)
        papers.refuse_changes({"commit": commit}, dirty=True)
    papers.refuse_changes({"commit": "a" * 40}, dirty=False)
