"""Three 24-layer teachers and a student in one engine: what each rank holds, where the time of a
step goes, and what the plan says of both.

    deepspeed --num_gpus 2 tools/benchmarks/large_teachers.py --output held.json
    deepspeed --num_gpus 2 tools/benchmarks/large_teachers.py --micro-steps 4 --steps 6

BERT-large, RoBERTa-large and DeBERTa-v3-large at their real sizes and vocabularies, random
weights, sharded by ZeRO stage 3 beside a DistilBERT-sized student; a few distillation steps, of
which the first two are not counted in the parts. Runs on GPUs, where teachers that can are asked
without padding, and on CPU ranks with DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from planned_step import planned_steps
from rank_memory import held_bytes, peak_bytes
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from ds_distill.engine.config import deepspeed_config, zero_stage
from ds_distill.engine.engine import Engine, OptimizerSettings
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.precision import model_dtype
from ds_distill.engine.world import World, no_chatter
from ds_distill.files import write_json
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.packing import packed_attention, packed_backend
from ds_distill.planning.gpus import cpu, own_gpu
from ds_distill.process.timers import Timers, timing
from ds_distill.recipe.terms import losses_of
from ds_distill.recipe.training import Training
from ds_distill.routing import Router
from ds_distill.run.inputs import describe_environment
from ds_distill.types import Batch
from ds_distill.views import PackedView, PaddedView, View

CLASSES = 6
FIRST = 2
"""Steps in which DeepSpeed looks at what is read, and kernels are compiled."""
HUB = ("google-bert/bert-large-uncased", "FacebookAI/roberta-large", "microsoft/deberta-v3-large")
STUDENT = "distilbert/distilbert-base-uncased"
_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_labels": CLASSES,
}


def configurations() -> dict[str, PreTrainedConfig]:
    """The published configurations of the three teachers."""
    return {
        "bert-large": BertConfig(vocab_size=30522, **_LARGE),
        "roberta-large": RobertaConfig(
            vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **_LARGE
        ),
        "deberta-v3-large": DebertaV2Config(
            vocab_size=128100,
            type_vocab_size=0,
            relative_attention=True,
            max_relative_positions=-1,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            pooler_dropout=0,
            pooler_hidden_act="gelu",
            **_LARGE,
        ),
    }


def distil(
    world: World,
    config_name: str,
    batch: int,
    length: int,
    layers: int,
    micro_steps: int,
    count: int,
) -> dict[str, Any]:
    """Build the bundle, take `count` steps, and return what this run measured of each rank."""
    larges = configurations()
    for large in larges.values():
        large.num_hidden_layers = layers
    training = Training(batch_size=batch * micro_steps * world.size, micro_batch_size=batch)
    config = deepspeed_config(config_name, training, world.size)
    torch.manual_seed(0)
    student = AutoModelForSequenceClassification.from_config(DistilBertConfig(num_labels=CLASSES))
    backends = {}
    if world.device.type == "cuda" and model_dtype(config) == torch.bfloat16:
        backends = {
            name: packed_backend(large, world.device, half=True) for name, large in larges.items()
        }
    packed = [name for name, backend in backends.items() if backend is not None]
    started = time.perf_counter()
    with sharded_loading(config), no_chatter():
        teachers = {
            name: AutoModelForSequenceClassification.from_config(
                large,
                dtype=model_dtype(config),
                attn_implementation=packed_attention(large) if name in packed else None,
            )
            for name, large in larges.items()
        }
    loading = time.perf_counter() - started
    losses = losses_of({"kl": {"temperature": 2.0}})
    terms = build_terms(losses, TermInputs(768))
    bundle = Bundle(student, teachers, terms, Router("average"))
    engine = Engine(bundle, config, world, OptimizerSettings(5e-5, 0.01, 10, 1))
    steps: list[dict[str, float]] = []
    parts: dict[str, float] = {}
    with timing(timers := Timers(world.device)):
        for step in range(count):
            first = (step * world.size + world.rank) * micro_steps
            own = [_batch(batch, length, first + each, packed) for each in range(micro_steps)]
            timers.read()
            started = time.perf_counter()
            losses_of_step = engine.train_step(own)
            loss = float(world.sum(losses_of_step["loss"].clone()))
            steps.append({"loss": loss, "seconds": round(time.perf_counter() - started, 3)})
            for part, seconds in timers.read().items():
                if step >= FIRST:
                    parts[part] = parts.get(part, 0.0) + seconds / (count - FIRST)
    numel = {name: _numel(teacher) for name, teacher in teachers.items()}
    return {
        "config": config_name,
        "batch_per_rank": batch,
        "micro_steps": micro_steps,
        "length": length,
        "layers": layers,
        "packed": backends,
        "parameters": {**numel, "student": _numel(student)},
        "loading_seconds": round(loading, 1),
        "steps": steps,
        "seconds_of_parts": {part: round(seconds, 4) for part, seconds in parts.items()},
        "planned": None
        if layers != 24
        else planned(world, config_name, batch, length, micro_steps),
        "ranks": _held_by_ranks(world, student, teachers),
    }


def planned(
    world: World, config_name: str, batch: int, length: int, micro_steps: int
) -> dict[str, Any] | None:
    """What `ds-distill plan` says of such a step, by part, and of the memory that it takes; None
    where the device is not known."""
    on_gpu = world.device.type == "cuda"
    device = own_gpu(world.device) if on_gpu else cpu(world.size)
    if device is None:
        return None
    shape = CLASSES, length, batch, micro_steps, world.size, device, config_name
    stage = zero_stage(deepspeed_config(config_name, None, 1))
    plan = planned_steps(HUB, STUDENT, *shape)[stage, "live"]
    return {"seconds": plan.step.total, "parts": asdict(plan.step), "peak_bytes": plan.total}


def _held_by_ranks(
    world: World, student: torch.nn.Module, teachers: Mapping[str, torch.nn.Module]
) -> list[dict[str, Any]]:
    """Bytes that each rank holds of the models, and its largest memory so far."""
    held = torch.zeros(world.size, len(teachers) + 2, dtype=torch.float64)
    held[world.rank] = torch.tensor(
        [*map(held_bytes, teachers.values()), held_bytes(student), peak_bytes(world)],
        dtype=torch.float64,
    )
    held = world.sum(held.to(world.device)).cpu().long()
    return [
        {
            "teacher_bytes": dict(zip(teachers, row[:-2], strict=True)),
            "student_bytes": row[-2],
            "peak_bytes": row[-1],
        }
        for row in held.tolist()
    ]


def _batch(size: int, length: int, seed: int, packed: Collection[str]) -> Batch:
    """Random words; each teacher's view has its own ids and lengths, as real tokenizers give."""
    generator = torch.Generator().manual_seed(seed)
    views: dict[str, View] = {}
    for name, vocabulary, extra in (
        ("student", 30522, 0),
        ("bert-large", 30522, 0),
        ("roberta-large", 50265, 3),
        ("deberta-v3-large", 128100, 1),
    ):
        shape = (size, length + extra)
        ids = torch.randint(1000, vocabulary, shape, generator=generator)
        view = PaddedView(ids, torch.ones(shape, dtype=torch.int64))
        views[name] = PackedView.of(view) if name in packed else view
    return Batch(
        keys=torch.randint(0, 2**60, (size, 2), generator=generator),
        views=views,
        labels=torch.full((size,), -100),
        row_sets={"all": torch.arange(size)},
    )


def _numel(model: torch.nn.Module) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="zero3_bf16", help="DeepSpeed config")
    parser.add_argument("--batch", type=int, default=4, help="examples per rank")
    parser.add_argument("--length", type=int, default=64, help="tokens per example")
    parser.add_argument("--layers", type=int, default=24, help="fewer for a try on a CPU")
    parser.add_argument("--micro-steps", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    # The deepspeed launcher gives it to every rank; World takes it from the environment.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    world = World.start()
    shape = arguments.batch, arguments.length, arguments.layers
    measured = distil(world, arguments.config, *shape, arguments.micro_steps, arguments.steps)
    if world.is_main:
        for rank, row in enumerate(measured["ranks"]):
            print(f"rank {rank}: peak {row['peak_bytes'] / 2**30:.2f} GiB")
            for name, size in row["teacher_bytes"].items():
                whole = measured["parameters"][name] * model_bytes(arguments.config)
                print(f"  {name:<17} {size / 2**20:8.1f} MiB held, {size / whole:6.1%} of it")
            print(f"  {'student':<17} {row['student_bytes'] / 2**20:8.1f} MiB held")
        for number, step in enumerate(measured["steps"]):
            print(f"step {number}: loss {step['loss']:.4f}, {step['seconds']} s")
        for part, seconds in measured["seconds_of_parts"].items():
            print(f"  {part:<26} {seconds * 1000:9.1f} ms")
        if plan := measured["planned"]:
            print(f"planned: {plan['seconds']:.3f} s, {plan['peak_bytes'] / 2**30:.2f} GiB")
        if arguments.output:
            environment = describe_environment(world.size, str(world.device))
            write_json(
                arguments.output,
                {"environment": environment, **measured},
            )
    world.barrier()
    world.stop()


def model_bytes(config_name: str) -> int:
    """Bytes of a weight under a DeepSpeed config."""
    return model_dtype(deepspeed_config(config_name, None, 1)).itemsize


if __name__ == "__main__":
    main()
