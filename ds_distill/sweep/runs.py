"""The runs of a sweep and its folder, as they can be judged at once: nothing here imports torch."""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import yaml

from ds_distill.errors import UserError
from ds_distill.files import refuse_links_out, why_unwritable
from ds_distill.recipe import Recipe
from ds_distill.recipe.load import name_of
from ds_distill.recipe.phases import PHASES
from ds_distill.recipe.text import one_line
from ds_distill.run.folder import SWEEP, RunFolder

SEED, MODEL = "seed", "student.model"
"""Keys whose values are compared in a sweep of several recipes, where the others' are chosen."""


@dataclass(frozen=True)
class Variant:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    """KEY=VALUE of each key with several values, in the order of the arguments."""
    recipe: str = ""
    """Its recipe's name, in a sweep of several."""

    @property
    def setting(self) -> tuple[str, ...]:
        """Its overrides without the seed."""
        return tuple(each for each in self.overrides if not each.startswith(f"{SEED}="))

    @property
    def seed(self) -> str | None:
        """None where the sweep has one seed, the recipe's."""
        return self._value(SEED)

    @property
    def model(self) -> str | None:
        """The student's. None where the sweep has one, the recipe's."""
        return self._value(MODEL)

    def _value(self, of: str) -> str | None:
        given = dict(each.split("=", 1) for each in self.overrides)
        return given.get(of)

    @property
    def name(self) -> str:
        """Of its folder: keys by their last part, and values."""
        short = [re.sub(r"^[^=]*\.", "", each) for each in self.overrides]
        keys, whole = [each.partition("=")[0] for each in short], ",".join(short)
        whole = ",".join(filter(None, [self.recipe, whole]))
        safe = re.sub(r"[^\w.+=,-]", "_", whole)[:100]
        if safe == whole and len(set(keys)) == len(keys):
            return safe
        return f"{safe}-{hashlib.sha256(','.join(self.overrides).encode()).hexdigest()[:8]}"


def recipes_of(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By name the recipes that are meant, each as `load_recipe` takes it, and the group that it is
    of in a macro mean.

    words: recipes, each a group of its own; or folders of them, or built-in suites: those in one
        folder below it are a group.

    Raises UserError for a folder without recipes, and for two of the same name.
    """
    found: dict[str, tuple[str, str]] = {}
    for word in words:
        given = [(word, word)]
        if (folder := _folder(word)).is_dir():
            files = [one for one in sorted(folder.rglob("*.yaml")) if one.parent.name != "small"]
            given = [(str(f), str(f if f.parent == folder else f.parent)) for f in files]
            if not given:
                raise UserError(f"{word}: a folder without recipes. Name one with FILE.yaml in it.")
        for file, group in given:
            name = name_of(Path(file))
            if name in found:
                raise UserError(
                    f"{found[name][0]} and {file}: two recipes have the same name. Name each once, "
                    "or one in another file."
                )
            found[name] = file, group
    return found


def _folder(word: str) -> Path:
    """Of recipes: a folder, or a suite that comes with the package."""
    path = Path(word)
    return path if path.exists() else builtin_suites().get(word, path)


def builtin_suites() -> dict[str, Path]:
    """Folders of recipes that come with the package, by name."""
    folder = Path(str(importlib.resources.files("ds_configs"))) / "suites"
    return {path.name: path for path in sorted(folder.iterdir())}


def variants(arguments: Sequence[str]) -> tuple[list[str], list[Variant]]:
    """(overrides that all runs have, the runs), the last key's values changing fastest.

    arguments: KEY=A,B,C; a comma inside of brackets or quotes divides nothing. Of
        `losses.kl+cosine` both have the same value in each run.

    Without a key of several values there is one run. Raises UserError where a key or value stands
    twice.
    """
    fixed, swept, seen = [], [], set()
    for argument in arguments:
        key, _, text = argument.partition("=")
        keys = [".".join(parts) for parts in product(*(part.split("+") for part in key.split(".")))]
        for one in keys:
            if one in seen:
                raise UserError(f"{one} is given twice. List its values once: {one}=A,B,C.")
            seen.add(one)
        try:
            values = split(text)
        except ValueError as error:
            raise UserError(
                f"{argument}: a value is empty, or a quote or bracket has no end, or no beginning, "
                "so that it cannot be told where values end. Set a value that holds one in quotes."
            ) from error
        if len(values) == 1:
            fixed += [f"{one}={text}" for one in keys]
            continue
        if len(set(values)) < len(values):
            raise UserError(f"{argument}: a value stands twice.")
        swept.append([[f"{one}={value}" for one in keys] for value in values])
    return fixed, [Variant(tuple(chain(*chosen))) for chosen in product(*swept)]


def split(text: str) -> list[str]:
    """The values of an argument, as items of a list in YAML: a comma inside of brackets or quotes
    divides none. Raises ValueError for what is no such list."""
    if "," not in text:
        return [text]
    try:
        [whole] = yaml.compose_all(f"[{text}]", yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError("not readable as a list") from error
    return [text[item.start_mark.index - 1 : item.end_mark.index - 1] for item in whole.value]


@dataclass(frozen=True)
class SweepRun:
    variant: Variant
    recipe: Recipe
    sweep: Path
    """The sweep's folder."""
    group: str = ""
    """Of its recipe; see `recipes_of`."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.sweep / "runs" / self.variant.name)

    @property
    def file(self) -> Path:
        """The recipe's, from which `ds-distill run` reads it."""
        return self.sweep / "recipes" / f"{self.variant.name}.yaml"

    @property
    def is_done(self) -> bool:
        return self.folder.results.is_file()


def runs_of(
    recipes: Mapping[Variant, Recipe], folder: Path, groups: Mapping[str, str] | None = None
) -> list[SweepRun]:
    """The runs of recipes under each variant; folder: the sweep's. groups: by recipe.

    Raises UserError where there is but one run, and for runs that are judged by unlike scores.
    """
    groups = groups or {}
    if len(recipes) == 1:
        raise UserError(
            "a sweep needs a key with several values, e.g. seed=1,2,3 or "
            "training.learning_rate=1e-5,3e-5, or several recipes."
        )
    runs = [SweepRun(v, one, folder, groups.get(v.recipe, "")) for v, one in recipes.items()]
    _refuse_unlike_scores(runs)
    return runs


def _refuse_unlike_scores(runs: Sequence[SweepRun]) -> None:
    """Raises UserError where a task's models are judged by other metrics or on other examples in
    runs of one recipe: of such scores there is no difference, and no best one."""
    seen: dict[tuple[str, str], tuple[dict[str, Any], str]] = {}  # -> what judges, the first run
    for run in runs:
        for task, judge in _judges(run.recipe).items():
            first, name = seen.setdefault((run.variant.recipe, task), (judge, run.variant.name))
            for key in {**first, **judge}:
                if first.get(key) != judge.get(key):
                    raise UserError(
                        f"{name} would be judged with {key}={one_line(first.get(key))} and "
                        f"{run.variant.name} with {key}={one_line(judge.get(key))}: a sweep "
                        "compares a recipe's runs by one score, on the same examples. Start a "
                        "sweep for each."
                    )


def _judges(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """By task what decides its score, as keys of the recipe: the metric, and the examples of the
    last phase that evaluates."""
    found = {}
    for name, phase in recipe.named_phases():
        if PHASES[phase.kind].makes == "evaluation":
            task = recipe.task_of(phase)
            at, data = f"{task.location}.data", task.data.model_dump(mode="json")
            splits = [split for split, _ in phase.reads]
            options = task.metric.model_dump(exclude={"name"}, exclude_defaults=True)
            found[recipe.task_name(phase)] = {
                f"{task.location}.metric": {"name": task.metric.name, **options},
                f"phases.{name}.split": splits,
                **{f"{at}.{key}": data[key] for key in ("path", "config", "folds")},
                **{
                    f"{at}.{key}.{split}": data[key].get(split)
                    for key in ("splits", "per_class", "limit")
                    for split in splits
                },
            }
    return found


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raises UserError for a folder that holds something else than a sweep to go on with."""
    refuse_links_out(folder)
    if (folder / SWEEP).is_file():
        if not resume:
            raise UserError(
                f"{folder} holds a sweep. Add --resume to continue it, or give --folder."
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} exists and holds no sweep. Give --folder for another one.")
    elif (why := why_unwritable(folder)) is not None:
        raise UserError(f"--folder {folder}: {why}. Name another folder.")
