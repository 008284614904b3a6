"""Live teachers on two ranks, asked without padding, and cached teachers in one process, asked
with it, are the same job."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from toys import TOY_LABELS
from transformers import AutoModelForSequenceClassification, AutoTokenizer

ROUTING = ["average", "expertise", "random"]


def losses(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """(model, step) -> losses of a run's students."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "train" and event["phase"] in ROUTING:
            found[event["phase"], event["step"]] = {"loss": event["loss"], "kl": event["kl"]}
    return found


def compare(
    ds_distill: Any, here: Path, recipe: str, overrides: list[str], steps: int, tolerance: float
) -> None:
    """tolerance: relative, on every loss of every step."""
    overrides = [*overrides, "logging.every=1"]
    runs = {
        "cached": ["run", recipe, *overrides, "deepspeed=zero0_fp32"],
        "live": [
            *["launch", recipe, "--num-gpus", "2", *overrides, "deepspeed=zero3_fp32"],
            *["phases.distil.teachers=live", "padding=never"],
        ],
    }
    for name, arguments in runs.items():
        done = ds_distill(*arguments, "--folder", here / name, cwd=here, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cached, live = losses(here / "cached"), losses(here / "live")
    assert cached.keys() == live.keys() and len(cached) == len(ROUTING) * steps
    worst = 0.0
    for place, values in cached.items():
        for name, value in values.items():
            assert live[place][name] == pytest.approx(value, rel=tolerance), (place, name)
            worst = max(worst, abs(live[place][name] / value - 1))
    print(f"largest relative difference of a loss: {worst:.1e}")


def classifiers(folder: Path, body: Path) -> dict[str, dict[str, Any]]:
    """Two teachers that are one: the second has its outputs reversed, and says so."""
    named, turned = folder / "named", folder / "turned"
    torch.manual_seed(0)
    labels = dict(enumerate(TOY_LABELS))
    model = AutoModelForSequenceClassification.from_pretrained(body, id2label=labels)
    for place in (named, turned):
        model.save_pretrained(place)
        AutoTokenizer.from_pretrained(body).save_pretrained(place)
        model.classifier.weight.data = model.classifier.weight.data.flip(0).contiguous()
        model.classifier.bias.data = model.classifier.bias.data.flip(0).contiguous()
        model.config.id2label = {number: f"LABEL_{number}" for number in labels}
    order = {f"LABEL_{2 - number}": label for number, label in labels.items()}
    return {"named": {"model": str(named)}, "turned": {"model": str(turned), "labels": order}}


def test_live_on_two_ranks_equals_cached(
    toy_settings: dict[str, Any], ds_distill: Any, tmp_path: Path
) -> None:
    """The cache holds fp32. Two ranks add up gradients in another order, the teachers' too;
    dropout would differ between them."""
    settings = copy.deepcopy(toy_settings)
    settings["teachers"] |= classifiers(tmp_path, Path(toy_settings["student"]["model"]))
    settings["training"] |= {"epochs": 1, "learning_rate": 1e-3, "dropout": 0.0}
    for phase in settings["phases"]:
        if "cache" in phase:
            phase["cache"]["dtype"] = "float32"
        if "distil" in phase:
            phase["distil"] |= {"routing": ROUTING, "epochs": 1}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    compare(ds_distill, tmp_path, "toy.yaml", [], 13, 1e-4)
    for run in ("cached", "live"):  # the order of a sharded teacher's labels, too
        models = json.loads((tmp_path / run / "results.json").read_text())["phases"][-1]["models"]
        assert models["turned"] == models["named"]
