"""`ds-distill init` writes recipes that `check` passes, and says which option decides where it
cannot know."""

import pytest
import yaml
from runs import command_line as ds_distill
from runs import results

SETS = {
    "tweeteval_emotion": "single-label",
    "hoc": "multi-label",
    "ner_ncbi_disease": "token-classification",
    "ner_bc2gm": "token-classification",
    "ner_bc5cdr_chem": "token-classification",
    "ner_jnlpba": "token-classification",
    "ner_linnaeus": "token-classification",
    "re_ddi": "single-label",
    "qa_xquad_en": "extractive-qa",
    "boolq": "single-label",
}
TRAINED = ("tweeteval_emotion", "hoc", "ner_linnaeus", "qa_xquad_en")
"""One of each kind."""


@pytest.mark.parametrize("name", SETS)
def test_real_data_sets_are_guessed_check_passes_and_they_train(
    name, tiny_models, tmp_path, shared_data
):
    file = tmp_path / "made.yaml"
    arguments = ["--teacher", tiny_models["bert"], "--output", file]
    ds_distill("init", shared_data / name, *arguments)
    assert yaml.safe_load(file.read_text())["task"]["type"] == SETS[name]
    checked = ds_distill("check", file)
    assert "no mistakes found" in checked.output, checked.output
    if name not in TRAINED:
        return
    chooses = [] if "keep: last" in file.read_text() else ["validation"]
    splits = ["train", "test", *chooses]
    few = [f"task.data.limit.{split}=80" for split in splits]
    few += ["training.batch_size=8", "training.epochs=1", "deepspeed=zero0_fp32"]
    few.append("teachers.teacher.below_majority=warn")  # ten steps teach it little
    ds_distill("run", file, *few, "--folder", tmp_path / "run")
    phases = results(tmp_path / "run")["phases"]
    trained = [one for phase in phases for one in phase.get("trained", [])]
    assert len(trained) == 3 and all(one["steps"] >= 10 for one in trained), trained
