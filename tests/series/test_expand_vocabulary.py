"""A student's vocabulary grows by words of the text, and it learns from a teacher that does not
know them (VE-KD)."""

from ci.test_expand_vocabulary import folder, settings  # noqa: F401
from runs import (
    Runs,
    after_steps,
    curves,
    digests,
    end_of_a_phase,
    evaluation,
    files,
    is_between_phases,
    others,
    records,
    without_measures,
    written,
)

from ds_distill.files import read_json


def writes_the_student(folder):
    return any(folder.glob("models/.01-student*"))


def test_kills_within_the_expansion_after_it_and_in_the_distillation_change_nothing(
    settings, warm, tmp_path
):
    runs = Runs(written(settings, tmp_path), warm, None)
    whole, folder = tmp_path / "whole", tmp_path / "run"
    runs.finish(whole)
    taught, expanded = ["00-fine-tune.json"], ["00-fine-tune.json", "01-expand-vocabulary.json"]
    assert runs.kill(folder, end_of_a_phase(folder), resume=False), "it ended too early"
    assert records(folder) == taught, "the expansion was done"
    assert runs.kill(folder, writes_the_student, resume=True), "it ended too early"
    assert records(folder) == taught and not (folder / "models" / "01-student").exists()
    assert runs.kill(folder, end_of_a_phase(folder), resume=True), "it ended too early"
    assert records(folder) == expanded and is_between_phases(folder)
    assert runs.kill(folder, after_steps(10, 0.0), resume=True), "it ended too early"
    assert records(folder) == expanded
    runs.finish(folder, resume=True)
    # The teacher, the expanded student, the trained one, and as it is shipped.
    assert len(digests(whole)) == 4
    assert digests(folder) == digests(whole)
    assert curves(folder) == curves(whole) and others(folder) == others(whole)
    assert files(folder) == files(whole), "a kill left something behind"
    assert evaluation(folder)["models"] == evaluation(whole)["models"]
    ours, theirs = (read_json(run / "phases" / expanded[-1]) for run in (folder, whole))
    assert without_measures(ours) == without_measures(theirs)
