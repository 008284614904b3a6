"""What a run reads from outside its folder: the same on all ranks, and after a stop.

Each rank reads recipe, data and models by itself. A network file system may show an edited file
late, hosts have files and hub caches of their own, and between a stop and a resume all may change.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ds_distill
from ds_distill.cache.format import weights_fingerprint
from ds_distill.data.sources import Source
from ds_distill.engine.config import find_config
from ds_distill.engine.world import World
from ds_distill.errors import UserError, short
from ds_distill.files import checksum, write_json
from ds_distill.models.configuration import load_config
from ds_distill.recipe import Recipe
from ds_distill.recipe.references import predictions_file, resolve_model
from ds_distill.records import read_object
from ds_distill.run.folder import RunFolder, changes


def refuse_other_start(recipe: Recipe, world: World) -> None:
    """Raises UserError on a rank with another Python, other libraries or another code of this
    project than rank 0, that has read another recipe, or to which `_auto` is another DeepSpeed
    config. Each would train by its own settings, silently."""
    _, config = find_config(recipe.deepspeed)
    own = {**software(), **recipe.model_dump(mode="json"), "deepspeed": config}
    fix = "Install the same on all hosts, and give all ranks the same recipe and overrides."
    _refuse_other(own, world, fix)


def inputs_of(recipe: Recipe, sources: Mapping[str, Source]) -> dict[str, Any]:
    """inputs.json: `labels` by the task's place in the recipe, and `models`, the fingerprints of
    models and of teachers' files by the key that names them."""
    models = {
        f"teachers.{name}.model": (model, recipe.teachers[name].revision)
        for name, model in recipe.encoders.items()
    }
    models["student.model"] = recipe.student.model, recipe.student.revision
    found = {}
    for key, (model, revision) in models.items():
        reference = resolve_model(model, recipe.models_folder)
        commit = getattr(load_config(reference, revision), "_commit_hash", None)
        found[key] = weights_fingerprint(reference, commit)
    for name, file in recipe.from_files.items():
        path = predictions_file(name, file, recipe.data_folder)
        found[f"teachers.{name}.predictions"] = checksum(path)
    labels = {f"{source.task.location}.labels": source.labels for source in sources.values()}
    return {"labels": labels, "models": found}


def refuse_other_inputs(inputs: dict[str, Any], world: World) -> None:
    """Raises UserError on a rank that has read other labels or models than rank 0: what one writes
    would count as the other's."""
    fix = "Give all hosts the same files, and hub models a `revision`."
    _refuse_other({**inputs["labels"], **inputs["models"]}, world, fix)


def check_inputs(inputs: dict[str, Any], folder: RunFolder) -> list[str]:
    """Compare with those that the run in a folder began with, and write them where it begins. Main
    process. Returns a note for each model that has changed since.

    Raises UserError where the labels have: their numbers stand in what is done.
    """
    if not folder.inputs.is_file():
        write_json(folder.inputs, inputs)
        return []
    began = read_object(folder.inputs, "Remove that file: it is written again.")
    for key, now in inputs["labels"].items():
        if (then := began["labels"].get(key, now)) != now:
            raise UserError(
                f"--resume: {key} of the data are not those that the run in {folder.path} began "
                f"with, and its models know them by their numbers: {short(now)} now, "
                f"{short(then)} then. Give the data their labels back, or start a new run with "
                "--folder."
            )
    return [
        f"{'.'.join(change.key)}: is not what the run began with; phases that are done have used "
        "what was there before."
        for change in changes(began["models"], inputs["models"])
    ]


def _refuse_other(own: dict[str, Any], world: World, fix: str) -> None:
    of_main = world.from_main(lambda: own)
    differ = [*changes(of_main, json.loads(json.dumps(own)))]
    if differ:
        listed = "; ".join(
            f"{'.'.join(change.key)} ({short(change.now)}, there {short(change.was)})"
            for change in differ[:3]
        )
        who = f"rank {world.rank} on {socket.gethostname()}"
        raise UserError(f"{who}: it differs from rank 0 in {listed}. {fix}")


PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "datasets",
    "tokenizers",
    "numpy",
    "triton",
    "flashdeberta",
)


def describe_environment(num_ranks: int, device: str) -> dict[str, Any]:
    """Versions, devices and git commit, for environment.json."""
    count = 0 if device.startswith("cpu") else torch.cuda.device_count()
    gpus = [torch.cuda.get_device_name(i) for i in range(count)]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ds_distill": ds_distill.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "ranks": num_ranks,
        "device": device,
    }


def software() -> dict[str, str | None]:
    """What must be the same on all ranks: versions, and a digest of this project's code."""
    digest, root = hashlib.sha256(), Path(ds_distill.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    versions = {name: _version(name) for name in PACKAGES}
    code = digest.hexdigest()[:12]
    return {"python": platform.python_version(), "code of ds_distill": code, **versions}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that the package runs from, with `+changes` if it was edited."""
    root = Path(ds_distill.__file__).resolve().parent.parent
    describe = ["describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.check_output(["git", "-C", root, *describe], text=True).strip()
    return None


def _processor() -> str:
    with suppress(OSError):
        about = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*:\s*(.+)$", about, re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()
