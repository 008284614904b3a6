"""Ranks under test, started one by one without a launcher, so that each can be stopped, killed or
left out. plants.py makes one misbehave."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from processes import marked
from warm import PLANT, Fork, Warm

from ds_distill.process.identity import free_port


def with_plants(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment of processes that heed PLANT where Python starts."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("plants.py"), site / "sitecustomize.py")
    path = [str(site), environment.get("PYTHONPATH", "")]
    return {**environment, **marked(), "PYTHONPATH": ":".join(filter(None, path))}


def group(size: int) -> list[dict[str, str]]:
    """Of each rank of a new group, the environment that makes it one."""
    together = {"WORLD_SIZE": str(size), "LOCAL_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    together["MASTER_PORT"] = str(free_port())
    return [{**together, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class Ranks:
    """Ranks of one recipe."""

    def __init__(self, recipe: Path, warm: Warm, *options: str) -> None:
        self._warm, self._recipe, self._options = warm, recipe, options
        self._started: list[Fork] = []

    def start(
        self,
        folder: Path,
        *more: str,
        ranks: tuple[int, ...] = (0, 1),
        size: int = 2,
        plant: str = "",
        rank_options: Mapping[int, Sequence[str]] = MappingProxyType({}),
        rank_folders: Mapping[int, Path] = MappingProxyType({}),
    ) -> list[Fork]:
        """Start some of the ranks, `size` in all. rank_options, rank_folders: more options, and
        another current folder, of some ranks."""
        environments, planted = group(size), {PLANT: plant} if plant else {}
        command = ["run", str(self._recipe), *self._options, *more, "--folder", str(folder)]
        started = [
            self._warm.start(
                [*command, *rank_options.get(rank, ())],
                rank_folders.get(rank, folder.parent),
                {**self._warm.environment, **environments[rank], **planted},
            )
            for rank in ranks
        ]
        self._started += started
        return started

    def kill(self) -> None:
        for fork in self._started:
            fork.kill()


def run_ranks(
    arguments: list[str],
    size: int,
    warm: Warm,
    cwd: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    timeout: float = 600,
) -> str:
    """Run a script of Python as each of `size` ranks of this machine, without a launcher. Returns
    their output; all must end well.

    arguments: the script and its own. environment: beside that of all.
    """
    started = [
        warm.start(arguments, cwd, {**warm.environment, **environment, **own})
        for own in group(size)
    ]
    try:
        codes = [fork.wait(timeout) for fork in started]
    finally:
        for fork in started:
            fork.kill()
    said = ["".join(fork.communicate()) for fork in started]
    assert codes == [0] * size, "\n".join(text[-4000:] for text in said)
    return "\n".join(said)
