"""What is fuzzed: files that ds_distill reads, and what reads them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from engines import make_batch, make_engine
from mutations import changed_json, changed_lines, changed_yaml, damaged

from ds_distill.cache.reader import CacheReader
from ds_distill.check.recipe import check_all
from ds_distill.engine.world import World
from ds_distill.models.configuration import load_config, load_tokenizer
from ds_distill.models.labels import class_names
from ds_distill.models.load import load_classifier
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.run.checkpoints import Checkpoints
from ds_distill.run.folder import RunFolder
from ds_distill.run.training_progress import Progress

Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A folder, the files in it that may be changed, and what reads it.

    `use` returns, or raises UserError; anything else is a fault.
    """

    folder: Path
    files: dict[str, Change]
    use: Callable[[Path], object]

    def case(self, seed: int, place: Path) -> Path:
        """A copy with one file changed. `seed` decides which, and how."""
        draw = random.Random(seed)
        shutil.copytree(self.folder, place)
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
        "model.safetensors": lambda content, draw: damaged(content[:4000], draw) + content[4000:],
    }

    def use(place: Path) -> None:
        config = load_config(str(place))
        tokenizer = load_tokenizer(str(place))
        model = load_classifier(str(place), class_names(config), new_head=False)
        del tokenizer, model

    return Target(folder, {n: c for n, c in changes.items() if (folder / n).is_file()}, use)


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
