"""Record an op's Triton launches on CPU tensors, and compile them for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from assembly import Compiled, amd, nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ds_kernels import _tiles

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CHOICES = {
    # What the ops ask a device for.
    "sm_80": {"capability": 80, "warp_lanes": 32},
    "sm_90": {"capability": 90, "warp_lanes": 32},
    "sm_100": {"capability": 100, "warp_lanes": 32},
    "gfx942": {"capability": 0, "warp_lanes": 64},
}
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


@dataclass
class Launch:
    """One kernel launch: what Triton would specialise on."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    def source(self) -> ASTSource:
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
            parts = value if isinstance(value, tuple) else (value,)
            for position, part in enumerate(parts):
                path = (index, position) if isinstance(value, tuple) else (index,)
                divisible = part.data_ptr() if isinstance(part, torch.Tensor) else part
                if isinstance(divisible, int) and divisible % 16 == 0:
                    attributes[path] = [["tt.divisibility", 16]]
            types = tuple(_type(part) for part in parts)
            signature[parameter.name] = types if isinstance(value, tuple) else types[0]
        return ASTSource(
            fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes
        )

    def compile(self, target: str) -> Compiled:
        """What it became."""
        gpu = TARGETS[target]
        options = dict(self.options)
        if gpu.backend == "hip":
            options.pop("maxnreg", None)  # the launch leaves it out there, and has no PTX
            self.arguments |= {"PTX": False} if "PTX" in self.arguments else {}
        compiled = triton.compile(self.source(), target=gpu, options=options)
        read = amd.read if gpu.backend == "hip" else nvidia.read
        warps, shared = compiled.metadata.num_warps, int(compiled.metadata.shared)
        return read(compiled.asm, warps, shared, target)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


class _Recorder:
    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            names = [parameter.name for parameter in self.kernel.params]
            arguments = dict(zip(names, args, strict=False))
            options = {
                key: kwargs[key]
                for key in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
                if key in kwargs
            }
            arguments |= {key: value for key, value in kwargs.items() if key in names}
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


@contextmanager
def recorded(*modules: ModuleType, target: str = "sm_90") -> Any:
    """Within it the modules' ops take the Triton path and only note their launches, chosen as on
    `target`."""
    launches: list[Launch] = []
    patches: list[Any] = []
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                patches.append(mock.patch.object(module, name, _Recorder(value, launches)))
        patches.append(mock.patch.object(module, "use_triton", lambda tensor: True))
    for module in (*modules, _tiles):
        for name, value in CHOICES[target].items():
            if hasattr(module, name):
                choose = lambda device, value=value: value  # noqa: E731
                patches.append(mock.patch.object(module, name, choose))
    for patch in patches:
        patch.start()
    try:
        yield launches
    finally:
        for patch in patches:
            patch.stop()
