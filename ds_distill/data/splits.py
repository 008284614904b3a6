"""The splits of a data set: the files of a folder, or what the hub has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import datasets

from ds_distill.data.places import key_of
from ds_distill.data.readers import SUFFIXES, HubSplit, Reader, file_suffix
from ds_distill.errors import UserError, did_you_mean
from ds_distill.recipe.tasks import Task

USUAL_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}


def folder_splits(task: Task, folder: Path) -> dict[str, Path]:
    """The file of each split in a folder: as `task.data.splits` says, else by the files' names.

    Raises UserError where a split has no file, or several.
    """
    files = {
        path.name: path
        for path in sorted(folder.iterdir())
        if file_suffix(path) and path.is_file() and path.name[0] != "."
        if path.name != "labels.json"
    }
    if not files:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise UserError(
            f"no data file in this folder (it holds: {there}). Put one "
            f"file per split there, e.g. train.jsonl; endings: {', '.join(SUFFIXES)}.",
            at=f"{key_of(task, 'data.path')}={folder}",
        )
    stems = {name: name[: -len(file_suffix(path) or "")] for name, path in files.items()}
    by_split: dict[str, list[str]] = {}
    if named := task.data.own_splits():
        for split, wanted in named.items():
            by_split[split] = [name for name in files if wanted in (name, stems[name])]
            if not by_split[split]:
                raise wrong_split(task, split, wanted, list(files), [*files, *stems.values()])
    else:
        for name, stem in stems.items():
            usual = USUAL_NAMES.get(stem.lower(), stem)
            by_split.setdefault(usual, []).append(name)
    for split, names in by_split.items():
        if len(names) > 1:
            choice = key_of(task, f"data.splits.{split}")
            raise UserError(
                f"several files could be split {split!r}: "
                f"{', '.join(names)}. Choose with {choice}={names[0]}.",
                at=f"{key_of(task, 'data.path')}={folder}",
            )
    return {split: files[by_split[split][0]] for split in in_order(by_split)}


def in_order(splits: Iterable[str]) -> list[str]:
    """train, validation and test first, then the others as they come."""
    usual = ("train", "validation", "test")
    names = list(splits)
    return [s for s in usual if s in names] + [s for s in names if s not in usual]


def hub_splits(task: Task, cache_folder: Path | None) -> dict[str, Reader]:
    """The splits of a hub data set, which `datasets` loads or downloads.

    Raises UserError where it cannot be loaded, or has no such split.
    """
    path, config = task.data.path, task.data.config
    no_hub_id = path.startswith((".", "/", "~")) or path.count("/") > 1 or ":" in path
    # `csv` and the like are loaders of `datasets`, which would take files of this folder.
    loaders = getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())
    if no_hub_id or path in loaders or file_suffix(Path(path)):
        parent = Path(path).expanduser().parent
        there = list(map(str, parent.iterdir())) if os.path.isdir(parent) else []
        raise UserError(
            f"no such file or folder.{did_you_mean(path, there)} "
            "Give a folder, a file, data:NAME, the id of a hub data set, or "
            "docstrings:PACKAGE,PACKAGE.",
            at=f"{key_of(task, 'data.path')}={path}",
        )
    try:
        splits = datasets.load_dataset(
            path, config, cache_dir=str(cache_folder) if cache_folder else None
        )
    except Exception as error:  # many kinds: connection, authentication, not found, config
        reason = " ".join(str(error).split())[:300].rstrip(".")
        name = f"{path} (configuration {config})" if config else path
        raise UserError(
            "this is no local file or folder, and the hub data set "
            f"{name} could not be loaded: {reason}. Check the name and the connection, or give "
            "a local path.",
            at=f"{key_of(task, 'data.path')}={path}",
        ) from error
    names = task.data.own_splits() or {USUAL_NAMES.get(name, name): name for name in splits}
    for split, name in names.items():
        if name not in splits:
            raise wrong_split(task, split, name, list(splits))
    return {split: HubSplit(splits[name], f"{path}, split {name}") for split, name in names.items()}


def wrong_split(
    task: Task, split: str, wanted: str, there: list[str], accepted: list[str] | None = None
) -> UserError:
    """A split that the recipe names and the data do not have.

    there: what may be named; accepted: all that would be understood, to find the nearest in.
    """
    return UserError(
        f"not there.{did_you_mean(wanted, accepted or there)} Choose one of: {', '.join(there)}.",
        at=f"{key_of(task, f'data.splits.{split}')}={wanted}",
    )
