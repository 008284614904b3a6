"""Whether all that run.py needs works on this machine: one line for each item, within a minute.

    python tools/gpu/run.py --kit KIT --check

Calls each thing whose behaviour depends on versions or on the GPU once, at tiny sizes.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "tools" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
SHOWN = (
    "torch",
    "triton",
    "deepspeed",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "accelerate",
    "datasets",
    "numpy",
    "pyarrow",
    "pydantic",
    "flashdeberta",
    "liger-kernel",
    "textbrewer",
)
NEEDED_BYTES = 45 * 10**9
"""Of GPU memory, for the largest problem of the kernels' benchmark with its float64 oracle."""


def versions() -> str:
    """Python and packages, in brackets what the tests ran on where that is another."""
    outputs = [f"Python {platform.python_version()}"]
    tested = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        tested[name.lower().replace("_", "-")] = version
    missing = []
    for name in SHOWN:
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        other = tested.get(name.replace("_", "-"))
        same = other is None or here.split("+")[0] == other
        outputs.append(f"{name} {here}" if same else f"{name} {here} [{other}]")
    if missing:
        raise ModuleNotFoundError(f"not installed: {', '.join(missing)}. {', '.join(outputs)}")
    return ", ".join(outputs)


def machine() -> str:
    import psutil

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(tempfile.gettempdir())
    return (
        f"{os.cpu_count()} cores, {memory.available / 2**30:.0f} GiB of memory and "
        f"{disk.free / 2**30:.0f} GiB of temporary disk free"
    )


def gpu() -> str:
    import torch

    query = "name,memory.total,memory.used,driver_version,clocks.sm,power.limit"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    free, total = torch.cuda.mem_get_info()
    outputs = (
        f"{done.stdout.strip() or 'nvidia-smi says nothing'}; CUDA {torch.version.cuda}, "
        f"capability {torch.cuda.get_device_capability()}, {free / 2**30:.0f} of "
        f"{total / 2**30:.0f} GiB free"
    )
    if free < NEEDED_BYTES:
        raise MemoryError(f"the largest problems will not fit: {outputs}")
    return outputs


def imports() -> str:
    """Every module that steps use."""
    names = ["ds_kernels", "liger_kernel.transformers", "liger_kernel.chunked_loss"]
    for package in ("ds_distill", "ds_kernels"):
        path = importlib.import_module(package).__path__
        names += [module.name for module in pkgutil.walk_packages(path, f"{package}.")]
    names += [file.stem for file in sorted(BENCHMARKS.glob("*.py"))]
    failed = []
    for name in names:
        if name.endswith("__main__"):  # would run it
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise ImportError("; ".join(failed))
    return f"{len(names)} modules"


def apis() -> str:
    from apis import fault, from_source

    lines = from_source()
    faults = [outputs for outputs in map(fault, lines) if outputs]
    if faults:
        raise AttributeError("; ".join(faults))
    return f"{len(lines)} names of the libraries, with their keywords"


def triton_kernel() -> str:
    import torch
    from trivial import double

    source = torch.randn(1000, device="cuda")
    target = torch.full_like(source, float("nan"))
    double[(4,)](source, target, 1000, BLOCK=256)
    assert torch.equal(target, 2 * source), "wrong values"
    return "right"


def kernels() -> str:
    """The three ops of the first steps in bf16, against their reference."""
    import torch

    import ds_kernels

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, width = 32, 3001  # more logits than plain PyTorch takes on a GPU
    logits, other = torch.randn(2, rows, width)
    top = other.log_softmax(-1).topk(8)
    tail = torch.log1p(-top.values.exp().sum(-1))
    hidden, weight = torch.randn(rows, 64), torch.randn(width, 64) * 0.1
    calls: dict[str, tuple[Any, list[torch.Tensor]]] = {
        "masked_kl": (ds_kernels.masked_kl, [logits, other]),
        "topk_kl": (ds_kernels.topk_kl, [logits, top.values, top.indices, tail]),
        "linear_kl": (ds_kernels.linear_kl, [hidden, weight, hidden.flip(0), weight]),
    }
    outputs = []
    for name, (op, tensors) in calls.items():
        results = []
        for place in ("cpu", device):
            given = [
                x.to(place, torch.bfloat16) if x.is_floating_point() else x.to(place)
                for x in tensors
            ]
            given[0].requires_grad_()
            loss = op(*given)
            loss.backward()
            results.append((float(loss.detach()), given[0].grad.float().cpu()))
        used = ds_kernels.last_path()
        assert used == ("triton" if device == "cuda" else "reference"), f"{name}: {used}"
        (wanted, exact), (loss, gradient) = results
        apart = float((gradient - exact).norm() / exact.norm())
        assert abs(loss - wanted) < 0.01 * wanted and apart < 0.02, f"{name}: {loss}, {wanted}"
        outputs.append(f"{name} {loss:.3f}")
    return ", ".join(outputs)


def packed_attention() -> str:
    """Both kernels of packed views, as `packed.py` and `packed_deberta.py` call them."""
    import torch
    from large_teachers import configurations

    from ds_distill.models.packed import attend
    from ds_distill.models.packed_deberta import flash_attention, plain_attention
    from ds_distill.views import PackedView, PaddedView

    mask = torch.arange(70) < torch.tensor([[70], [3], [33]])
    view = PackedView.of(PaddedView(torch.ones(3, 70).long() * 7, mask.long())).to(
        torch.device("cuda")
    )
    q, k, v = torch.randn(3, 1, 16, 106, 64, device="cuda").bfloat16()
    cu_seqlens = {"cu_seq_lens_q": view.cu_seqlens, "max_length_q": view.max_seqlen}
    for window in (None, 9):  # with gradients through varlen_attn, without by its operation
        options = {**cu_seqlens, "sliding_window": window, "scaling": 0.125}
        plain = attend(torch.nn.Module(), q.float(), k.float(), v.float(), None, **options)[0]
        for with_gradients in (True, False):
            with torch.set_grad_enabled(with_gradients):
                ours = attend(torch.nn.Module(), q, k, v, None, **options)[0]
            assert (ours.float() - plain).abs().max() < 0.05, "differs from plain attention"

    from transformers import AutoModel

    config = configurations()["deberta-v3-large"]
    config.num_hidden_layers, config.vocab_size = 1, 100
    module = AutoModel.from_config(config).encoder.layer[0].attention.self
    q, k, v = torch.randn(3, 106, 16, 64, device="cuda").bfloat16()
    tables = torch.randn(2, 16, 512, 64, device="cuda").bfloat16()
    given = (view, module, 1 / (3 * 64) ** 0.5)
    flash = flash_attention(q, k, v, *tables, *given)
    plain = plain_attention(*(x.float() for x in (q, k, v, *tables)), *given)
    assert (flash.float() - plain).abs().max() < 0.05, "flashdeberta differs from plain attention"
    return "varlen_attn and flashdeberta as plain attention"


def compiled() -> str:
    """Inductor, which makes a rival of each op; and float32 products of bf16 matrices."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(64, 64, device=device)
    made = torch.compile(lambda y: y.log_softmax(-1).exp().sum(-1), dynamic=False)(x)
    assert (made - 1).abs().max() < 1e-4
    if device == "cuda":
        half = x.bfloat16()
        assert torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
    return "torch.compile" + (", torch.mm(out_dtype)" if device == "cuda" else "")


def engine() -> str:
    """Two steps of one DeepSpeed engine, three tiny teachers and a student, at stage 3."""
    import torch
    import transformers
    from distillation_paths import Setting, live, live_batch, prepare

    from ds_distill.engine.world import World

    name = "zero3_bf16" if torch.cuda.is_available() else "zero3_fp32"
    setting = Setting("classification", "tiny", batch=4, length=20, steps=2, config=name)
    transformers.utils.logging.disable_progress_bar()
    world = World.start()
    with tempfile.TemporaryDirectory() as place:
        prepare(setting, Path(place), world)
        run = live(setting, Path(place), world)
        steps = run([live_batch(setting, number, world) for number in range(2)])
    world.stop()
    assert 0 < steps.first_loss < 10, steps.first_loss
    return f"{name} on {world.device}, first loss {steps.first_loss:.4f}"


ITEMS: list[tuple[str, Callable[[], str], bool]] = [
    ("versions", versions, False),
    ("machine", machine, False),
    ("GPU", gpu, True),
    ("Triton", triton_kernel, True),
    ("kernels", kernels, False),
    ("packed attention", packed_attention, True),
    ("APIs", apis, False),
    ("engine", engine, False),
    ("inductor", compiled, True),
    ("imports", imports, False),
]
"""Name, what is done, whether it needs a GPU."""


def main() -> None:
    toy = "--toy" in sys.argv
    bad = []
    for name, item, needs_gpu in ITEMS:
        if toy and needs_gpu:
            print(f"-      {name}: needs a GPU", flush=True)
            continue
        started = time.monotonic()
        try:
            word, outputs = "ok", item()
        except BaseException as error:
            bad.append(name)
            at = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(at.filename).name}:{at.lineno}"
            word, outputs = "BAD", f"{type(error).__name__} at {place}: {error}"
        print(f"{word:<7}{name}, {time.monotonic() - started:.0f} s: {outputs}", flush=True)
    print("READY" if not bad else f"NOT READY: {', '.join(bad)}", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
