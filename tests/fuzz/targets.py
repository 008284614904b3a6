"""What is fuzzed: files that ds_distill reads, and what reads them."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import torch
import yaml
from engines import make_batch, make_engine
from mutations import (
    changed_json,
    changed_lines,
    changed_yaml,
    damaged,
    gzip_of_one_line,
    hostile_node,
)
from safetensors.torch import load_file

from ds_distill.cache.reader import CacheReader
from ds_distill.check.check import check_all
from ds_distill.engine.world import World
from ds_distill.predictors.file import predict_file
from ds_distill.predictors.prediction import predict
from ds_distill.process.terminal import escaped
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.run.folder import RunFolder
from ds_distill.training.checkpoints import Checkpoints
from ds_distill.training.progress import Progress

Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A folder, the files in it that may be changed, and what reads it.

    `use` returns, or raises UserError; anything else is a fault.
    """

    folder: Path
    files: dict[str, Change]
    use: Callable[[Path], object]
    nodes: tuple[str, ...] = ()
    """Names in whose place a link, a pipe or a folder may be put, see `hostile_node`."""

    def case(self, seed: int, place: Path) -> Path:
        """A copy with one file changed. `seed` decides which, and how."""
        draw = random.Random(seed)
        shutil.copytree(self.folder, place)
        if self.nodes and draw.random() < 0.3:
            victim = place.with_name("victim")
            (victim / "02-student").mkdir(parents=True, exist_ok=True)
            hostile_node(place / draw.choice(self.nodes), victim, draw)
            return place
        name = draw.choice(sorted(self.files))
        file = place / name
        file.write_bytes(self.files[name](file.read_bytes(), draw))
        return place


def recipe_target(folder: Path, settings: dict[str, Any]) -> Target:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return Target(
        folder,
        {"recipe.yaml": changed_yaml},
        lambda place: check_all(load_recipe(place / "recipe.yaml")),
    )


def data_target(folder: Path, settings: dict[str, Any], content: dict[str, bytes]) -> Target:
    """Files of one data set, of a kind each."""
    folder.mkdir()
    for name, given in content.items():
        (folder / name).write_bytes(given)
    kinds = {".jsonl": changed_lines, ".json": changed_json}
    changes = {name: kinds.get(Path(name).suffix, damaged) for name in content}

    def use(place: Path) -> None:
        task = {**settings["task"], "data": {"path": str(place)}}
        check_all(Recipe.model_validate({**settings, "task": task}))

    return Target(folder, changes, use)


def model_target(folder: Path, model: Path) -> Target:
    shutil.copytree(model, folder)
    changes: dict[str, Change] = {
        "config.json": changed_json,
        "tokenizer_config.json": changed_json,
        "tokenizer.json": changed_json,
        "model.safetensors.index.json": changed_json,
        "model-1.safetensors": lambda content, draw: damaged(content[:4000], draw) + content[4000:],
        "model.safetensors": lambda content, draw: damaged(content[:4000], draw) + content[4000:],
    }

    def use(place: Path) -> None:
        found = list(predict(place, ["the cat runs", "x " * 200]))
        json.dumps(found, allow_nan=False)

    there = {name: change for name, change in changes.items() if (folder / name).is_file()}
    return Target(folder, there, use, nodes=tuple(there))


def sharded_model_target(folder: Path, model: Path) -> Target:
    """One of whose weights an index says where they are."""
    shutil.copytree(model, folder.with_name("sharded"))
    whole = folder.with_name("sharded") / "model.safetensors"
    whole.rename(whole.with_name("model-1.safetensors"))
    names = load_file(whole.with_name("model-1.safetensors"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    whole.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    return model_target(folder, folder.with_name("sharded"))


def texts_target(folder: Path, model: Path) -> Target:
    """Files that are predicted."""
    folder.mkdir()
    rows = [{"text": f"the cat runs {number}", "id": number} for number in range(20)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.csv").write_text("text,id\n" + "".join(f"a {n},{n}\n" for n in range(20)))
    (folder / "c.txt.gz").write_bytes(gzip.compress(b"the dog\n" * 20))
    (folder / "d.parquet").write_bytes(parquet_of(rows))
    changes: dict[str, Change] = {
        "a.jsonl": changed_lines,
        "b.csv": damaged,
        "c.txt.gz": gzip_of_one_line,
        "d.parquet": damaged,
    }
    before = {name: (folder / name).read_bytes() for name in changes}

    def use(place: Path) -> None:
        """Reads what was changed; where nothing was, all."""
        files = [place / name for name in changes]
        changed = [f for f in files if not f.is_file() or f.read_bytes() != before[f.name]]
        for file in changed or files:
            output = io.StringIO()
            predict_file(str(model), file, output, progress=lambda sentence: None)
            assert escaped(output.getvalue()) == output.getvalue()

    return Target(folder, changes, use, nodes=tuple(changes))


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def cache_target(folder: Path, cache: Path) -> Target:
    shutil.copytree(cache, folder)
    changes: dict[str, Change] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        changes[name] = changed_json if file.suffix == ".json" else damaged

    def use(place: Path) -> None:
        reader = CacheReader(place)
        reader.verify()
        for teacher in reader.teachers:
            reader.read(teacher, torch.arange(4).numpy())

    return Target(folder, changes, use)


def run_target(folder: Path, run: Path) -> Target:
    """A run's folder that is to be continued."""
    folder.mkdir()
    shutil.copy(run / "recipe.yaml", folder)
    recipe = load_recipe(run / "recipe.yaml")
    return Target(
        folder,
        {"recipe.yaml": changed_yaml},
        lambda place: RunFolder(place).check_new_or_same(recipe, resume=True),
    )


def checkpoint_target(folder: Path) -> Target:
    """The newest checkpoint of a training, whose files keep their sizes."""
    world = World.start()
    engine = make_engine(world, "zero0_fp32")
    engine.train_step([make_batch()])
    Checkpoints(folder, world).save(engine, 1, asdict(Progress(1, {"a": 0.5}, 0, {"a": 1.0})))

    def resized(content: bytes, draw: random.Random) -> bytes:
        header = damaged(content[:4000], draw)
        return (header + content[4000:]).ljust(len(content))[: len(content)]

    changes: dict[str, Change] = {}
    for file in (folder / "step-00000001").iterdir():
        change = changed_json if file.suffix == ".json" else resized
        changes[str(file.relative_to(folder))] = change
    return Target(folder, changes, lambda place: Checkpoints(place, world).load(engine, Progress))
