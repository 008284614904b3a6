"""Devices that a plan can be made for: memory, speed, and the links between them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch

from ds_distill.errors import UserError, did_you_mean
from ds_distill.planning.units import GIB
from ds_distill.process.machine import machine_memory

OF_PRODUCTS, OF_MEMORY, OF_LINKS = 0.7, 0.8, 0.7
"""Shares of a data sheet's figures that are reached: by large matrix products, by element-wise
kernels, by collectives. Assumptions, which a plan prints."""

RESERVE = 0.08
"""Share of the memory that torch cannot use: the driver's part, and fragments."""


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
    source: str = "NVIDIA's data sheet"
    """Where the figures come from."""
    torch_name: str = ""
    """A pattern of what torch calls it, behind the maker's names."""
    launch: float = 25e-6
    """Seconds that the host takes to start a kernel, in Python and torch; what DeepSpeed does in
    Python takes so many times as long, see `times`. Fitted to steps that virtual machines with an
    H100 and an H200 took (docs/planning.md), when students were called module by module; of those
    that are not called so any more a GPU has timed none."""
    per_machine: int = 8
    cards: int = 8
    """Network cards of a machine: an assumption, one for each GPU with NVLink of today, else one
    in all."""
    link_latency: float = 1e-6
    """Seconds of a message within a machine."""
    network_latency: float = 10e-6
    """Seconds of a message between machines."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def usable(self) -> int:
        return int(self.memory * (1 - RESERVE))

    def flops(self, dtype: torch.dtype) -> float:
        return self.full_flops if dtype == torch.float32 else self.half_flops


_NO_BF16 = ("v100", "v100-pcie", "t4")

GPUS = {
    name: Device(
        *(name, int(gib * GIB), half * 1e12, full * 1e12, bandwidth * 1e9, link * 1e9),
        network=12.5e9 if cards == 1 else 50e9,
        has_bf16=name not in _NO_BF16,
        torch_name=torch_name,
        cards=cards,
    )
    # TFLOP/s half and full; GB/s of memory, and of the link in one direction; network cards.
    for name, torch_name, gib, half, full, bandwidth, link, cards in (
        ("b200", "B200", 179.0, 2250, 75, 7700, 900, 8),
        ("h200", "H200", 140.4, 989, 67, 4800, 450, 8),
        ("h100", "H100 80GB HBM3", 79.6, 989, 67, 3350, 450, 8),
        ("h100-pcie", "H100 PCIe", 79.6, 756, 51, 2000, 64, 1),
        ("a100", "A100-SXM4?-80GB", 80.0, 312, 19.5, 2039, 300, 8),
        ("a100-40gb", "A100-SXM4?-40GB", 40.0, 312, 19.5, 1555, 300, 8),
        ("a100-pcie", "A100 80GB PCIe", 80.0, 312, 19.5, 1935, 32, 1),
        ("a100-pcie-40gb", "A100-PCIE-40GB", 40.0, 312, 19.5, 1555, 32, 1),
        ("l40s", "L40S", 45.0, 362, 91.6, 864, 32, 1),
        ("l4", "L4", 22.5, 121, 30.3, 300, 32, 1),
        ("a10", "A10", 22.5, 125, 31.2, 600, 32, 1),
        ("rtx4090", "RTX 4090", 24.0, 165, 82.6, 1008, 32, 1),
        ("v100", "V100-SXM.*", 32.0, 125, 15.7, 900, 150, 1),
        ("v100-pcie", "V100-PCIE-.*", 32.0, 112, 14.0, 900, 16, 1),
        ("t4", "T4", 15.0, 65, 8.1, 320, 16, 1),
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
        return cpu(ranks)
    if name.lower() not in GPUS:
        known = [*GPUS, "cpu"]
        raise UserError(
            f"--gpu {name}: not a GPU that is known here.{did_you_mean(name, known)} Known: "
            f"{', '.join(known)}. Take the one nearest to yours in memory and speed."
        )
    return GPUS[name.lower()]


def own_gpu(device: torch.device | int) -> Device | None:
    """A GPU of this machine; None where it is not known."""
    about = torch.cuda.get_device_properties(device)
    return gpu_named(about.name, about.total_memory)


def gpu_named(device_name: str, memory: int) -> Device | None:
    """The GPU that torch calls so, such as "NVIDIA A100-SXM4-40GB", with its own memory; None where
    it is not known: one more word, such as "Laptop" or "MIG", and it is another one.

    memory: bytes, as the device reports it.
    """
    for device in GPUS.values():
        if re.fullmatch(f"(NVIDIA |Tesla |GeForce )*({device.torch_name})", device_name):
            return replace(device, memory=memory)
    return None


def cpu(ranks: int) -> Device:
    """A process of `ranks` on this machine's cores: its memory, and speeds that are assumed of a
    core of a server. `ds-distill profile` measures."""
    cores = len(os.sched_getaffinity(0)) / ranks
    flops, bandwidth = 60e9 * cores, 8e9 * cores
    one = Device("cpu", machine_memory() // ranks, flops, flops, bandwidth, 1e9, 1e9, True)
    source, latency = "assumed of a server's cores", 3e-4
    return replace(
        one, source=source, launch=10e-6, per_machine=ranks, cards=1, link_latency=latency
    )
