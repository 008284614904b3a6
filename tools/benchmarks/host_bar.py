"""What Python and torch's dispatch take of a step, beside TextBrewer and a plain loop, and of a
batch of a validation.

    pip install textbrewer
    python tools/benchmarks/host_bar.py [--config zero1_fp32] [--padded] [--output FILE]

Needs no GPU: models of 24 layers so narrow that nothing else takes time. CPU seconds of this
process, which others on the machine hardly change; of blocks of 8 steps, in which the ways take
turns, the median ratio and where 80% of them are. Ours takes the paths of a GPU in bf16, packed
views, with one call of torch's attention in the kernels' place; --padded: those of a CPU. Triton's
launcher and waits for a device are in neither. Another checkout TREE is measured by its own code:

    PYTHONPATH=TREE:TREE/kernels:TREE/tools/benchmarks python -P tools/benchmarks/host_bar.py
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
# TextBrewer writes no log here.
sys.modules.setdefault("tensorboardX", SimpleNamespace(SummaryWriter=object))  # type: ignore[arg-type]

import distillation_paths as paths  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from distillation_step import batch_of  # noqa: E402
from transformers import DistilBertConfig, PreTrainedConfig  # noqa: E402
from two_engines_rival import _logits, adamw, kl  # noqa: E402

from ds_distill.engine.world import World  # noqa: E402
from ds_distill.files import write_json  # noqa: E402
from ds_distill.models import encoder, packed, packed_deberta  # noqa: E402
from ds_distill.run.inputs import describe_environment  # noqa: E402
from ds_distill.types import Batch  # noqa: E402

ROUNDS, BLOCK = 14, 8
AHEAD = 4
"""Steps that teachers read at once in the way of that name; in `live` one."""
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.1,
}
RATIOS = (
    ("live", "textbrewer"),
    ("live", "plain"),
    ("ahead", "textbrewer"),
    ("ahead", "live"),
    ("cached", "plain labels"),
    ("cached", "textbrewer"),
    ("validation", "plain validation"),
)


class Narrow(paths.Setting):
    @property
    def teachers(self) -> dict[str, PreTrainedConfig]:
        made = paths.configurations()
        if self.task == "masked-lm":
            made = {"bert-large": made["bert-large"]}
        for config in made.values():
            config.update(SIZES)
            if hasattr(config, "pooler_hidden_size"):
                config.update({"pooler_hidden_size": 32, "position_buckets": 16})
        return made

    @property
    def student(self) -> PreTrainedConfig:
        off = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
        config = DistilBertConfig(num_labels=paths.CLASSES, **off)
        config.update({**SIZES, "hidden_dim": 32, "num_hidden_layers": 6})
        return config


def one_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Attention [T, heads, width] of texts of one length."""
    shape = (cu_seqlens.shape[0] - 1, -1, *q.shape[1:])
    q, k, v = q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape)
    return F.scaled_dot_product_attention(q, k, v.transpose(1, 2)).transpose(1, 2).flatten(0, 1)


def take_paths_of_a_gpu(padded: bool) -> None:
    """Rivals' models have transformers' default attention, and ours, unless `padded`, read packed
    views through `one_call`: of BERT's with gradients, and always in checkouts without `_flash`, as
    a custom operator, as torch's `varlen_attn` is one."""

    def model_of(
        setting: paths.Setting, folder: Path, name: str, world: World, *, ours: bool = False
    ) -> Any:
        options: dict[str, Any] = {"new_head": False, "attention": None}
        if ours and not padded:
            of_deberta = paths.load_config(str(folder / name)).model_type == "deberta-v2"
            options["attention"] = None if of_deberta else packed.ATTENTION
        if setting.task == "masked-lm":
            return paths.load_model(paths.MASKED_LM, str(folder / name), **options)
        labels = [f"LABEL_{number}" for number in range(paths.CLASSES)]
        return paths.load_model(paths.CLASSIFIER, str(folder / name), labels, **options)

    paths.model_of = model_of
    if padded:
        return
    varlen = torch.library.custom_op("host_bar::varlen", one_call, mutates_args=())

    def attend_tokens(q: Any, k: Any, v: Any, scale: Any, cu_seqlens: Any, longest: int) -> Any:
        attend = varlen if torch.is_grad_enabled() else one_call
        return attend(q, k, v, cu_seqlens)

    def attend_deberta(*given: Any) -> torch.Tensor:
        q, k, v, _, _, view, *_ = given
        return one_call(q, k, v, view.cu_seqlens)

    paths.packs = lambda *_: True
    packed.attend_tokens = encoder.attend_tokens = attend_tokens  # type: ignore[assignment]
    packed_deberta.plain_attention = attend_deberta  # type: ignore[assignment]


def plain(setting: paths.Setting, folder: Path, world: World, labels: bool = False) -> paths.Runner:
    """transformers' models and torch's AdamW, no engine."""
    student = paths.model_of(setting, folder, "student", world).train()
    teachers = {} if labels else paths.load_teachers(setting, folder, world)
    optimizer = adamw(student, paths.optimizer_settings(setting))

    def step(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            said = [_logits(teacher.eval(), batch, name) for name, teacher in teachers.items()]
        own = _logits(student, batch, "student")
        if labels:
            loss = F.cross_entropy(own, batch.labels)
        else:
            loss = kl(own, torch.stack(said).mean(0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return paths.run_steps(step, world.device)


def validation(
    setting: paths.Setting, folder: Path, world: World, ours: bool = True
) -> paths.Runner:
    """A batch that the student predicts between two epochs; not `ours`: without gradients alone."""
    student = paths.model_of(setting, folder, "student", world, ours=ours)
    if ours:
        bundle = paths.Bundle(student, paths.load_teachers(setting, folder, world))
        settings = setting.deepspeed, world, paths.optimizer_settings(setting)
        engine = paths.Engine(bundle, *settings)

    @torch.no_grad()
    def predict(batch: Batch) -> torch.Tensor:
        if ours:
            return engine.predict(batch, ["student"])["student"].logits.sum()
        return _logits(student.eval(), batch, "student").sum()

    return paths.run_steps(predict, world.device)


def brewed(setting: paths.Setting, folder: Path, world: World) -> paths.Runner:
    from textbrewer_rival import text_brewer  # it takes names of `paths` as they are by then

    return text_brewer(setting, folder, world)


WAYS: dict[str, tuple[Callable[[Any, Path, World], paths.Runner], str, int]] = {
    "live": (paths.live, "live", 0),
    "ahead": (partial(paths.live, ahead=AHEAD), "live", 0),
    "cached": (paths.cached, "cached", 0),
    # Its first step of a block is not counted: it makes its optimizer's state there.
    "textbrewer": (brewed, "textbrewer", 1),
    "plain": (plain, "textbrewer", 0),
    "plain labels": (partial(plain, labels=True), "labels", 0),
    "validation": (validation, "textbrewer", 0),
    "plain validation": (partial(validation, ours=False), "textbrewer", 0),
}
"""How a way is made, whose batches it reads, and how many steps of a block do not count."""


def measure(setting: paths.Setting, world: World, rounds: int) -> dict[str, dict[str, float]]:
    """Ratios of CPU time by names of the ways, with milliseconds of both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths.prepare(setting, folder, world)
        runs = {}
        for way, (make, kind, dropped) in WAYS.items():
            batches = [batch_of(kind, setting, n, folder, world) for n in range(paths.DISTINCT)]
            runs[way] = make(setting, folder, world), (batches * BLOCK)[: BLOCK + dropped], dropped
        took: dict[str, list[float]] = {way: [] for way in runs}
        for turn in range(rounds + 1):
            for way in [*runs][:: 1 if turn % 2 else -1]:
                run, batches, dropped = runs[way]
                gc.collect()
                gc.disable()
                took[way].append(1e3 * float(np.mean(run(batches).seconds[dropped:])))
                gc.enable()
    of_each = {way: np.array(each[1:]) for way, each in took.items()}  # without the warm-up
    found = {}
    for ours, theirs in RATIOS:
        low, ratio, high = np.quantile(of_each[ours] / of_each[theirs], [0.1, 0.5, 0.9]).tolist()
        found[f"{ours} of {theirs}"] = {
            "ratio": ratio,
            "p10": low,
            "p90": high,
            "ms": float(np.median(of_each[ours])),
            "of_ms": float(np.median(of_each[theirs])),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="zero1_fp32")
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    paths.now = lambda device: time.process_time()
    paths._MORE_TOKENS = {}
    take_paths_of_a_gpu(given.padded)
    world, tasks = World.start(), {}
    for task in ("classification", "masked-lm"):
        setting = Narrow(task, "tiny", 4, 4, 1000, given.config)
        tasks[task] = measure(setting, world, given.rounds)
        for name, one in tasks[task].items():
            spread = f"{one['ratio']:.2f} ({one['p10']:.2f} to {one['p90']:.2f})"
            print(f"{task:15} {name:24} {spread}  {one['ms']:.1f} ms of {one['of_ms']:.1f}")
    if given.output:
        about = {"deepspeed": given.config, "padded": given.padded, "rounds": given.rounds}
        about["environment"] = describe_environment(1, str(world.device))
        write_json(given.output, {**about, "tasks": tasks})
    world.stop()


if __name__ == "__main__":
    main()
