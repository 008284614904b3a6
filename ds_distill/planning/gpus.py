"""Devices that a plan can be made for: memory, speed, and the links between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ds_distill.errors import UserError, did_you_mean
from ds_distill.process.machine import machine_memory

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One GPU, or one CPU process."""

    name: str
    memory: int
    """Bytes."""
    half_flops: float
    """Floating-point operations a second of matrix products in bf16, or in fp16 where there is no
    bf16; dense."""
    full_flops: float
    """Likewise in fp32, as torch computes it by default: without TF32."""
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second that it can send to others of its machine."""
    network: float
    """Bytes a second of a network card of its machine: an assumption, 400 Gbit/s where machines
    have a card for each GPU, else 100 Gbit/s."""
    has_bf16: bool
    source: str
    """Where the figures come from."""
    efficiency: float = 0.7
    """Share of the operations a second that large matrix products reach."""
    achieved_bandwidth: float = 0.8
    """Share of the bandwidth that element-wise kernels reach."""
    launch: float = 25e-6
    """Seconds that a kernel takes at least: Python and torch have to start it. This and the next
    three are fitted to steps that virtual machines with an H100 and an H200 took
    (docs/planning.md)."""
    per_weight: float = 75e-6
    """Seconds that DeepSpeed takes in Python for a trained weight: for its gradient in a backward
    pass below stage 3, and again in the optimizer's step."""
    teacher_hooks: float = 4.3e-3
    """Seconds of DeepSpeed's hooks around a teacher's layer at stage 3, in Python."""
    student_hooks: float = 14e-3
    """Likewise of a student's, which has hooks on every module, forward and backward."""
    per_machine: int = 8
    cards: int = 8
    """Network cards of a machine: an assumption, one for each GPU with NVLink of today, else one
    in all."""
    achieved_link: float = 0.7
    """Share of the bytes a second of links and cards that collectives reach."""
    link_latency: float = 1e-6
    """Seconds of a message within a machine."""
    network_latency: float = 10e-6
    """Seconds of a message between machines."""
    reserve: float = 0.08
    """Share of the memory that torch cannot use: the driver's part, and fragments."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def usable(self) -> int:
        return int(self.memory * (1 - self.reserve))

    @property
    def without_python(self) -> Device:
        """A GPU that never waits for Python."""
        return replace(self, launch=0.0, per_weight=0.0, teacher_hooks=0.0, student_hooks=0.0)

    def flops(self, dtype: torch.dtype) -> float:
        return self.full_flops if dtype == torch.float32 else self.half_flops


def _gpu(
    name: str,
    gib: float,
    half: float,
    full: float,
    bandwidth: float,
    link: float,
    *,
    one_card: bool = False,
    has_bf16: bool = True,
) -> Device:
    """half, full: TFLOP/s. bandwidth, link: GB/s, the link's in one direction. one_card: of a
    machine, for all its GPUs."""
    speeds = half * 1e12, full * 1e12, bandwidth * 1e9, link * 1e9
    network, cards = (12.5e9, 1) if one_card else (50e9, 8)
    return Device(
        name, int(gib * GIB), *speeds, network, has_bf16, "NVIDIA's data sheet", cards=cards
    )


GPUS: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("b200", 179.0, 2250, 75, 7700, 900),
        _gpu("h200", 140.4, 989, 67, 4800, 450),
        _gpu("h100", 79.6, 989, 67, 3350, 450),
        _gpu("h100-pcie", 79.6, 756, 51, 2000, 64, one_card=True),
        _gpu("a100", 80.0, 312, 19.5, 2039, 300),
        _gpu("a100-40gb", 40.0, 312, 19.5, 1555, 300),
        _gpu("a100-pcie", 80.0, 312, 19.5, 1935, 32, one_card=True),
        _gpu("a100-pcie-40gb", 40.0, 312, 19.5, 1555, 32, one_card=True),
        _gpu("l40s", 45.0, 362, 91.6, 864, 32, one_card=True),
        _gpu("l4", 22.5, 121, 30.3, 300, 32, one_card=True),
        _gpu("a10", 22.5, 125, 31.2, 600, 32, one_card=True),
        _gpu("rtx4090", 24.0, 165, 82.6, 1008, 32, one_card=True),
        _gpu("v100", 32.0, 125, 15.7, 900, 150, one_card=True, has_bf16=False),
        _gpu("v100-pcie", 32.0, 112, 14.0, 900, 16, one_card=True, has_bf16=False),
        _gpu("t4", 15.0, 65, 8.1, 320, 16, one_card=True, has_bf16=False),
    )
}
"""By the name that `--gpu` takes. Memory is what nvidia-smi shows."""


def find_device(name: str | None, ranks: int) -> Device:
    """The device of that name; None: this machine's GPU, or its CPU where it has none.

    Raises UserError for a name or a GPU that is not known, and for less than one rank.
    """
    if ranks < 1:
        raise UserError(f"--gpus {ranks}: a plan is for 1 GPU or more.")
    if name is None and torch.cuda.is_available():
        own, given = own_gpu(torch.cuda.current_device()), torch.cuda.get_device_name()
        if own is None:
            raise UserError(
                f"this machine's GPU ({given}) is not known here. Take the one nearest to it in "
                f"memory and speed with --gpu: {', '.join(GPUS)}."
            )
        return own
    if name is None or name.lower() == "cpu":
        return measured_cpu(ranks)
    if name.lower() not in GPUS:
        known = [*GPUS, "cpu"]
        raise UserError(
            f"--gpu {name}: not a GPU that is known here.{did_you_mean(name, known)} Known: "
            f"{', '.join(known)} (measured on this machine). Take the one nearest to yours in "
            "memory and speed."
        )
    return GPUS[name.lower()]


_NOISE = re.compile(r"nvidia|tesla|geforce|sxm\d?|hbm\d\w*|\d+gb")
"""Words of a GPU's name that do not tell it from others: maker, kind of memory, its size, which
the device says itself, and the socket, unless it is for PCIe."""


def own_gpu(device: torch.device | int) -> Device | None:
    """A GPU of this machine; None where it is not known."""
    about = torch.cuda.get_device_properties(device)
    return gpu_named(about.name, about.total_memory)


def gpu_named(device_name: str, memory: int) -> Device | None:
    """The GPU that torch calls so, such as "NVIDIA A100-SXM4-40GB", with its own memory; None where
    it is not known: one more word, such as "Laptop" or "MIG", and it is another one.

    memory: bytes, as the device reports it.
    """
    words = _words(device_name)
    alike = [device for name, device in GPUS.items() if _words(name) == words]
    if not alike:
        return None
    return replace(min(alike, key=lambda device: abs(device.memory - memory)), memory=memory)


def _words(name: str) -> set[str]:
    """The words that tell a GPU from others."""
    parts = re.split(r"[\s_-]+|(?<=rtx)(?=\d)", name.lower())
    return {part for part in parts if not _NOISE.fullmatch(part)}


def measured_cpu(ranks: int) -> Device:
    """A process of `ranks` on this machine's cores, measured in a second. Ranks share its memory
    and its speed."""
    large = torch.ones(1024, 1024)
    half = large.bfloat16()
    words = torch.ones(16_000_000)
    small, out = torch.ones(8), torch.empty_like(words)
    return Device(
        name="cpu",
        memory=machine_memory() // ranks,
        half_flops=2 * 1024**3 / _seconds(lambda: half @ half) / ranks,
        full_flops=2 * 1024**3 / _seconds(lambda: large @ large) / ranks,
        bandwidth=2 * words.nbytes / _seconds(lambda: torch.mul(words, 2.0, out=out)) / ranks,
        link=1e9,
        network=1e9,
        has_bf16=True,
        source=f"measured on this machine, {torch.get_num_threads()} threads for {ranks} rank(s)",
        efficiency=1.0,
        achieved_bandwidth=1.0,
        launch=_seconds(lambda: small + small),
        per_weight=0.0,
        # tools/benchmarks/hook_time.py: 71 and 147 ms of 24 layers, 25 at stage 0, on a busy CPU.
        teacher_hooks=1.9e-3,
        student_hooks=5e-3,
        per_machine=ranks,
        cards=1,
        link_latency=3e-4,
    )


def _seconds(work: Callable[[], object]) -> float:
    """The fastest of a few calls."""
    work()
    times: list[float] = []
    end = time.perf_counter() + 0.2
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
