"""An optimizer step of live teachers on two hosts whose link is slow, and what the plan says of it.

    python tools/benchmarks/two_hosts_step.py --output tests/results/two-hosts-step.json

Two network namespaces of a machine, one rank with one thread in each, and between them a cable of
1 Gbit/s and 1 ms (tests/two_hosts/relay.py). Three teachers of 4 layers and width 256, a student of
2 layers, width 128, random weights, fp32, 8 micro-batches of 4 examples of 32 tokens a step: live
teachers at stage 1, and at stage 3 with the texts of 8 steps at once, as a run reads them, or step
by step; and none, as from a cache. Seconds are of whole windows, shared by their steps.
Where namespaces may not be made it says so, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2] / "tests"
sys.path.insert(0, str(ROOT))

GBIT, SECONDS = 1.0, 1e-3
MICRO_STEPS, EXAMPLES, LENGTH, CLASSES = 8, 4, 32, 3
ROUNDS = 5
WAYS = {
    "live stage 1": (1, True, 1),
    "live stage 3": (3, True, 8),
    "step by step": (3, True, 1),
    "cached": (1, False, 1),
}
"""Stage, whether teachers are live, and how many steps' texts they read at once."""
TEACHER, STUDENT = "google/bert_uncased_L-4_H-256_A-4", "google/bert_uncased_L-2_H-128_A-2"
TEACHERS = ("one", "two", "three")
MTU = "65000"


def measure(output: Path) -> None:
    """As a rank: the seconds of each way's steps; rank 0 writes them."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from ds_distill.engine.config import deepspeed_config
    from ds_distill.engine.engine import Engine, OptimizerSettings
    from ds_distill.engine.placement import sharded_loading
    from ds_distill.engine.world import World, no_chatter
    from ds_distill.losses import TermInputs, build_terms
    from ds_distill.models.bundle import Bundle
    from ds_distill.planning.models import shipped_configs
    from ds_distill.recipe.terms import losses_of
    from ds_distill.recipe.training import Training
    from ds_distill.routing import Router
    from ds_distill.types import Batch, Signals
    from ds_distill.views import PaddedView, View

    world = World.start()

    def model(name: str) -> Any:
        config = AutoConfig.from_pretrained(shipped_configs()[name], num_labels=CLASSES)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)

    def batch(live: bool) -> Batch:
        ids = torch.randint(5, 30000, (EXAMPLES, LENGTH))
        view: View = PaddedView(ids, torch.ones_like(ids))
        logits = torch.randn(EXAMPLES, CLASSES)
        return Batch(
            keys=torch.randint(0, 2**40, (EXAMPLES, 2)),
            views={"student": view} | ({name: view for name in TEACHERS} if live else {}),
            labels=torch.zeros(EXAMPLES, dtype=torch.int64),
            row_sets={"all": torch.arange(EXAMPLES)},
            signals={} if live else {name: Signals(logits) for name in TEACHERS},
        )

    seconds: dict[str, list[float]] = {}
    for way, (stage, live, ahead) in WAYS.items():
        training = Training(
            batch_size=EXAMPLES * MICRO_STEPS * world.size, micro_batch_size=EXAMPLES
        )
        config = deepspeed_config(f"zero{stage}_fp32", training, world.size)
        torch.manual_seed(0)
        with sharded_loading(config), no_chatter():
            teachers = {name: model(TEACHER) for name in TEACHERS} if live else {}
        terms = build_terms(losses_of({"kl": {}}), TermInputs(128))
        router = Router("average")
        settings = OptimizerSettings(1e-4, 0.01, 100, 1)
        bundle = Bundle(model(STUDENT), teachers, terms, router)
        engine = Engine(bundle, config, world, settings, together=ahead * MICRO_STEPS)
        seconds[way] = timed(engine, partial(batch, live), ahead)
        engine.close()
    if world.is_main:
        output.write_text(json.dumps(seconds))
    world.barrier()
    world.stop()


def timed(engine: Any, batch: Callable[[], Any], ahead: int) -> list[float]:
    """Seconds of a step in each window of so many steps."""
    found = []
    for _ in range(2 + ROUNDS):
        window = [[batch() for _ in range(MICRO_STEPS)] for _ in range(ahead)]
        engine.world.barrier()
        started = time.perf_counter()
        for step in engine.read_ahead(window):
            engine.train_step(step)
        found.append((time.perf_counter() - started) / ahead)
    return found[2:]


def planned() -> dict[str, Any]:
    """What `ds-distill plan` says of each way: seconds of a step by part."""
    from planned_step import planned_steps

    from ds_distill.planning.gpus import find_device

    device = find_device("cpu", 1)
    device = replace(device, per_machine=1, network=GBIT * 1e9 / 8, network_latency=SECONDS)
    shape = CLASSES, LENGTH, EXAMPLES, MICRO_STEPS, 2, device, "zero3_fp32"
    plans = planned_steps([TEACHER] * len(TEACHERS), STUDENT, *shape)
    found = {}
    for way, (stage, live, _) in WAYS.items():
        if way == "step by step":  # a plan is of what a run does
            continue
        step = plans[stage, "live" if live else "cached"].step
        found[way] = {"step": step.total, **asdict(step)}
    return found


def on_two_hosts(folder: Path) -> dict[str, list[float]]:
    """Seconds of each way's steps. Raises pytest's Skipped where namespaces may not be made."""
    from two_hosts.network import run, two_hosts
    from two_hosts.relay import Way

    with two_hosts(folder) as hosts:
        login = f"{hosts.prefix}login"
        ends = [(login, "node-a"), (login, "node-b")]
        ends += [(f"{hosts.prefix}{name}", "eth0") for name in ("node-a", "node-b")]
        for namespace, interface in ends:
            run("ip", "-n", namespace, "link", "set", interface, "mtu", MTU)
        way = Way(rate=GBIT * 1e9 / 8, delay=SECONDS)
        hosts.cable_of_b(way, way)
        group = {"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        group |= {"MASTER_ADDR": hosts.address("node-a"), "MASTER_PORT": "29500"}
        group |= {"GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"}
        output = folder / "seconds.json"
        command = [sys.executable, __file__, "--output", str(output), "--rank"]
        with (folder / "ranks.log").open("w+") as log:
            ranks = [
                subprocess.Popen(
                    hosts.at(name, *command),
                    env={**os.environ, **group, "RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
                for rank, name in enumerate(("node-a", "node-b"))
            ]
            try:
                codes = [rank.wait(550) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            log.seek(0)
            assert codes == [0, 0], log.read()[-4000:]
        return json.loads(output.read_text())


def show(found: dict[str, Any]) -> None:
    for way, one in found["ways"].items():
        line = f"{way:<13} {one['median']:7.3f} s ({one['least']:.3f} to {one['most']:.3f})"
        if "planned" in one:
            line += f", planned {one['planned']['step']:7.3f} s"
        if "before" in one:
            line += f", before {one['before']['median']:7.3f} s"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--before", type=Path, help="the output of an earlier commit, to compare")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        measure(given.output)
        return
    import pytest
    import torch

    from ds_distill.run.inputs import describe_environment

    torch.set_num_threads(1)  # of the plan: as each rank
    os.environ["HF_HUB_OFFLINE"] = "1"  # the recipe's data are named and not there
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = on_two_hosts(Path(folder))
        except pytest.skip.Exception as skipped:
            sys.exit(f"nothing was measured: {skipped}")
        plans = planned()
    before = json.loads(given.before.read_text()) if given.before else None
    ways: dict[str, Any] = {}
    for way, taken in seconds.items():
        spread = {"median": median(taken), "least": min(taken), "most": max(taken)}
        ways[way] = spread | ({"planned": plans[way]} if way in plans else {})
        if before is not None and way in before["ways"]:
            ways[way]["before"] = {key: before["ways"][way][key] for key in spread}
    link = {"bits_per_second": GBIT * 1e9, "seconds": SECONDS}
    shape = {"micro_steps": MICRO_STEPS, "examples": EXAMPLES, "tokens": LENGTH, "rounds": ROUNDS}
    found = {"link": link, **shape, "ways": ways, **describe_environment(2, "cpu")}
    if before is not None:
        found["commit_before"] = before["commit"]
    show(found)
    given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
