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


def target_of(
    folder: Path,
    content: dict[str, bytes],
    use: Callable[[Path], object],
    changes: dict[str, Change] = {},  # noqa: B006
    **more: Any,
) -> Target:
    """A folder with these files. changes: by file, where it is not the one of its ending."""
    for name, given in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(given)
    each = {n: changes.get(n) or CHANGES.get(Path(n).suffix, damaged) for n in content}
    return Target(folder, each, use, **more)


def files_of(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def recipe_target(folder: Path, settings: dict[str, Any]) -> Target:
    content = {"recipe.yaml": yaml.safe_dump(settings, sort_keys=False).encode()}
    return target_of(folder, content, lambda place: check_all(load_recipe(place / "recipe.yaml")))


def data_target(folder: Path, settings: dict[str, Any], content: dict[str, bytes]) -> Target:
    """Files of one data set, of a kind each."""

    def use(place: Path) -> None:
        task = {**settings["task"], "data": {"path": str(place)}}
        check_all(Recipe.model_validate({**settings, "task": task}))

    return target_of(folder, content, use)


def model_target(folder: Path, model: Path) -> Target:
    """Of its files those that may be changed, and the others beside them."""
    shutil.copytree(model, folder)
    names = ("config.json", "tokenizer_config.json", "tokenizer.json")
    names += ("model.safetensors.index.json", "model-1.safetensors", "model.safetensors")
    content = {name: of for name, of in files_of(model).items() if name in names}
    weights = [name for name in content if name.endswith(".safetensors")]

    def use(place: Path) -> None:
        found = list(predict(place, ["the cat runs", "x " * 200]))
        json.dumps(found, allow_nan=False)

    changes: dict[str, Change] = dict.fromkeys(weights, damaged_header)
    return target_of(folder, content, use, changes, nodes=tuple(content))


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
    rows = [{"text": f"the cat runs {number}", "id": number} for number in range(20)]
    parquet = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(rows), parquet)
    content = {
        "a.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "b.csv": ("text,id\n" + "".join(f"a {n},{n}\n" for n in range(20))).encode(),
        "c.txt.gz": gzip.compress(b"the dog\n" * 20),
        "d.parquet": parquet.getvalue(),
    }

    def use(place: Path) -> None:
        """Reads what was changed; where nothing was, all."""
        files = [place / name for name in content]
        changed = [f for f in files if not f.is_file() or f.read_bytes() != content[f.name]]
        for file in changed or files:
            output = io.StringIO()
            predict_file(str(model), file, output, progress=lambda sentence: None)
            assert escaped(output.getvalue()) == output.getvalue()

    return target_of(folder, content, use, nodes=tuple(content))


def cache_target(folder: Path, cache: Path) -> Target:
    def use(place: Path) -> None:
        reader = CacheReader(place)
        reader.verify()
        for teacher in reader.teachers:
            reader.read(teacher, torch.arange(4).numpy())

    return target_of(folder, files_of(cache), use)


def run_target(folder: Path, run: Path) -> Target:
    """A run's folder that is to be continued."""
    recipe = load_recipe(run / "recipe.yaml")
    content = {"recipe.yaml": (run / "recipe.yaml").read_bytes()}
    return target_of(
        folder, content, lambda place: RunFolder(place).check_new_or_same(recipe, resume=True)
    )


def checkpoint_target(folder: Path) -> Target:
    """The newest checkpoint of a training, whose files keep their sizes."""
    world = World.start()
    engine = make_engine(world, "zero0_fp32")
    engine.train_step([make_batch()])
    Checkpoints(folder, world).save(engine, 1, asdict(Progress(1, {"a": 0.5}, 0, {"a": 1.0})))

    def resized(content: bytes, draw: random.Random) -> bytes:
        return damaged_header(content, draw).ljust(len(content))[: len(content)]

    content = files_of(folder)
    changes: dict[str, Change] = {n: resized for n in content if not n.endswith(".json")}
    use = lambda place: Checkpoints(place, world).load(engine, Progress)  # noqa: E731
    return target_of(folder, content, use, changes)


def damaged_header(content: bytes, draw: random.Random) -> bytes:
    return damaged(content[:4000], draw) + content[4000:]


CHANGES: dict[str, Change] = {
    ".jsonl": changed_lines,
    ".json": changed_json,
    ".yaml": changed_yaml,
    ".gz": gzip_of_one_line,
}
"""By a file's ending; of others bytes are changed."""
