"""What a run ships is what it measured: loaded by transformers alone, without arguments."""

import ast
import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import loaded, results
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from ds_distill.data.schedule import plan_once
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.evaluation.predictions import ClassPredictions, TokenScores
from ds_distill.phases import evaluate
from ds_distill.predictors.prediction import predict
from ds_distill.recipe import LONE_TASK
from ds_distill.reporting.model_card import model_card
from ds_distill.run.execute import execute
from ds_distill.run.inference import inference_collator

RUNS = [("single-label", "zero3_bf16"), ("masked-lm", "zero1_fp32")]
"""Task and DeepSpeed config."""


class Finished:
    """A run, and what its evaluate phase was told."""

    def __init__(self, run, told):
        self.run, self.told = run, told
        self.folder = run.folder.path
        self.results = results(self.folder)
        self.models = self.results["phases"][-1]["models"]
        self.masked_lm = run.recipe.task.type == "masked-lm"

    def folders(self):
        """Where each model that was evaluated lies."""
        trained = self.run.recipe.trained_models()
        return {output: self.run.folder.model(number, output) for number, output in trained}


@pytest.fixture(scope="module", params=RUNS)
def finished(request, tmp_path_factory, toy_settings, masked_lm_settings):
    """A teacher trained here, a student of it, both evaluated."""
    task, config = request.param
    settings = copy.deepcopy(toy_settings if task == "single-label" else masked_lm_settings)
    [teacher, *_] = settings["teachers"]
    settings["teachers"] = {teacher: settings["teachers"][teacher]}
    settings["training"] |= {"epochs": 1}
    settings["phases"] = [
        {"fine-tune": {"models": teacher}},
        {"distil": {"losses": {"kl": {"temperature": 2.0}}}},
        {"evaluate": {"split": "test", "batch_size": 16}},
    ]
    here = tmp_path_factory.mktemp("shipped")
    recipe = loaded(settings, here, f"deepspeed={config}")
    told = []
    predict = evaluate.predictions_of

    def noted(*given, **named):
        told.append(predict(*given, **named))
        return told[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "predictions_of", noted)
        run = execute(recipe, here / "run")[LONE_TASK]
    yield Finished(run, told[-1][0])
    World.stop()


def test_weights_are_float32_and_the_optimizers_own(finished):
    """As the configuration says, and not rounded to bf16 on their way, where the engine trained in
    it."""
    for folder in [*finished.folders().values(), finished.folder / "student"]:
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32", folder
        weights = load_file(folder / "model.safetensors").values()
        assert {w.dtype for w in weights} == {torch.float32}, folder
    rounded = sum(int((w.bfloat16().float() == w).sum()) for w in weights)
    assert rounded < 0.1 * sum(w.numel() for w in weights)


def test_loaded_plainly_it_predicts_what_the_results_say(finished):
    """On the same batches a classifier does so bit for bit. A masked-LM's head runs at the hidden
    tokens alone, so that its matrix products are of other shapes and may round the last bit
    otherwise."""
    kind = AutoModelForMaskedLM if finished.masked_lm else AutoModelForSequenceClassification
    for name, folder in finished.folders().items():
        model = kind.from_pretrained(folder).eval()
        if finished.masked_lm:
            scores, told = plain_scores(finished, model, name), finished.told[name]
            assert np.array_equal(scores.right, told.right)
            assert scores.loss == pytest.approx(told.loss, rel=1e-5, abs=1e-6)
            report = finished.run.kind.report(scores)
            outputs = {key: pytest.approx(value, rel=1e-6) for key, value in report.items()}
        else:
            logits = plain_logits(finished, model, name)
            assert torch.equal(logits, torch.from_numpy(finished.told[name]))
            labels = finished.run.data.examples("test").labels
            scored = ClassPredictions.labelled(logits.numpy(), labels)
            outputs = finished.run.kind.report(scored)
        assert {key: finished.models[name][key] for key in outputs} == outputs
    assert finished.results["student"] == "student"
    shipped, own = finished.folder / "student", finished.folders()["student"]
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (shipped / file).read_bytes() == (own / file).read_bytes()


def test_predicting_with_the_run_is_as_in_the_evaluation(finished):
    """Texts are cut at the same length without saying so."""
    if finished.masked_lm:
        with pytest.raises(UserError, match="was not trained on this task"):
            next(predict(finished.folder, ["a text"]))
        return
    texts = finished.run.data.texts("test")
    found = [one["predicted"] for one in predict(finished.folder, texts)]
    labels = finished.run.labels
    assert found == [labels[row.argmax()] for row in finished.told["student"]]


def test_others_may_read_what_a_run_leaves(finished):
    """As the umask has it; safetensors alone writes for its owner only."""
    probe = finished.folder / "probe"
    probe.touch()
    wanted = probe.stat().st_mode
    probe.unlink()
    found = [*(finished.folder / "student").iterdir(), *finished.folder.glob("models/*/*")]
    assert {"model.safetensors", "README.md", "tokenizer.json"} <= {path.name for path in found}
    assert {path.stat().st_mode for path in found if path.is_file()} == {wanted}


def test_the_cards_snippet_runs_as_it_stands(finished, monkeypatch):
    """On its own long text."""
    monkeypatch.chdir(finished.folder / "student")
    card = Path("README.md").read_text(encoding="utf-8")
    [code] = re.findall("```python\n(.*?)```", card, flags=re.S)
    outputs = run_snippet(code)
    if finished.masked_lm:
        assert {"score", "token_str", "sequence"} <= outputs[0].keys()
        return
    assert outputs[0]["label"] in finished.run.labels
    of_pairs = copy.deepcopy(finished.results)
    for record in of_pairs["phases"]:
        for model in record.get("trained", []):
            model["pairs"] = True
    recipe = finished.run.recipe
    [code] = re.findall("```python\n(.*?)```", model_card(recipe, of_pairs), flags=re.S)
    outputs = run_snippet(code)
    assert "text_pair" in code and outputs["label"] in finished.run.labels


def run_snippet(code):
    """What its last line gives."""
    *lines, last = ast.parse(code).body
    names = {}
    exec(compile(ast.Module(lines, []), "snippet", "exec"), names)
    return eval(compile(ast.Expression(last.value), "snippet", "eval"), names)


def batches(finished, name):
    run = finished.run
    places = [run.reference(model, len(run.recipe.phases)) for model in finished.models]
    collate = inference_collator(run, run.data.examples("test"), "test", places)
    for indices in plan_once(collate.lengths, 16):
        yield indices, collate(indices)


def plain_logits(finished, model, name):
    logits = torch.zeros(60, 3)
    for indices, batch in batches(finished, name):
        with torch.no_grad():
            outputs = model(**batch.views[name].model_inputs()).logits
        logits[torch.from_numpy(indices)] = outputs.float()
    return logits


def plain_scores(finished, model, name):
    sums = torch.zeros(3, 60, dtype=torch.float64)
    for indices, batch in batches(finished, name):
        view, counted = batch.views[name], batch.row_sets["all"]
        with torch.no_grad():
            logits = model(**view.model_inputs()).logits.flatten(0, 1)[view.positions].float()
        losses = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        values = torch.stack([losses, logits.argmax(1) == batch.labels, torch.ones_like(losses)])
        example = torch.from_numpy(indices)[view.example_indices[counted]]
        sums.index_add_(1, example, values.double()[:, counted])
    return TokenScores(*sums.numpy())
