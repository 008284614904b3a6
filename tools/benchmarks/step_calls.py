"""What a training step calls: operations of torch, floating point operations, Python functions.

    python tools/benchmarks/step_calls.py [--tree FOLDER]

Counts that are the same on every machine, where seconds of two commits differ by a fifth from run
to run. Of steps with the losses that were there before others came: two live teachers of a
classifier with the average, and a masked-LM's KL, cross-entropy and cosine. With --tree the code of
another checkout is counted, such as a worktree of an earlier commit.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import pstats
import sys
from pathlib import Path
from typing import Any

STEPS = 5
KINDS = ("single-label", "masked-lm")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    return parser.parse_args()


def first_of(*names: str) -> Any:
    """Of names MODULE:NAME the first that a tree has: modules have moved."""
    for name in names:
        module, _, what = name.partition(":")
        try:
            return getattr(importlib.import_module(module), what)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"none of {names}")


def engine_and_batch(kind: str, world: Any) -> tuple[Any, Any]:
    import torch
    import transformers as tr

    from ds_distill import Batch, Bundle, PaddedView, Router
    from ds_distill.engine.config import deepspeed_config
    from ds_distill.engine.engine import Engine, OptimizerSettings
    from ds_distill.losses import TermInputs, build_terms

    losses_of = first_of("ds_distill.recipe.terms:losses_of", "ds_distill.parts.terms:losses_of")
    training = first_of("ds_distill.recipe.phases:Training", "ds_distill.parts.phases:Training")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    word = kind == "masked-lm"
    head = tr.BertForMaskedLM if word else tr.BertForSequenceClassification

    def model(layers: int) -> Any:
        config = tr.BertConfig(vocab_size=1000, num_labels=4, num_hidden_layers=layers, **sizes)
        return head._from_config(config, attn_implementation="eager")

    names = ["one"] if word else ["one", "two"]
    asked: dict[str, Any] = {"kl": {}, "cosine": {}, "cross_entropy": {}} if word else {"kl": {}}
    terms = build_terms(losses_of(asked), TermInputs(64, dict.fromkeys(names, 64)))
    router = None if word else Router({"policy": "average"}, temperature=1.0)
    bundle = Bundle(model(2), {name: model(4) for name in names}, terms, router)
    settings = training(batch_size=8, micro_batch_size=8)
    config = deepspeed_config("zero0_fp32", settings, 1)
    engine = Engine(bundle, config, world, OptimizerSettings(1e-3, 0.0, 100, 0))
    ids = torch.randint(5, 1000, (8, 16))
    positions = torch.arange(0, 128, 7) if word else None
    view = PaddedView(ids, torch.ones_like(ids), torch.zeros_like(ids), positions=positions)
    labels = ids.flatten()[positions] if word else torch.arange(8) % 4
    batch = Batch.from_views(dict.fromkeys(["student", *names], view), labels)
    return engine, batch


def counted(kind: str, world: Any) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.flop_counter import FlopCounterMode

    engine, batch = engine_and_batch(kind, world)
    for _ in range(3):
        engine.train_step([batch])
    with FlopCounterMode(display=False) as flops:
        engine.train_step([batch])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            engine.train_step([batch])
    operations = sum(e.count for e in profiled.key_averages() if e.key.startswith("aten::"))
    python = cProfile.Profile()
    python.enable()
    for _ in range(STEPS):
        engine.train_step([batch])
    python.disable()
    calls = pstats.Stats(python).total_calls  # type: ignore[attr-defined]
    return {
        "torch_operations": operations // STEPS,
        "flops": flops.get_total_flops(),
        "python_calls": calls // STEPS,
    }


def main() -> None:
    tree = arguments().tree.resolve()
    sys.path[:0] = [str(tree), str(tree / "kernels")]
    from ds_distill.engine.world import World

    world = World.start()
    print(json.dumps({kind: counted(kind, world) for kind in KINDS}, indent=2))


if __name__ == "__main__":
    main()
