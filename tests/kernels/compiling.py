"""Record an op's Triton launches on CPU tensors and compile them for GPUs that are not here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
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

    def compile(self, target: str) -> int | None:
        """Bytes of local memory a thread uses: register spills. None on AMD targets."""
        gpu = TARGETS[target]
        options = dict(self.options)
        if gpu.backend == "hip":
            options.pop("maxnreg", None)  # the launch leaves it out there
        compiled = triton.compile(self.source(), target=gpu, options=options)
        if gpu.backend == "hip":
            assert compiled.asm["hsaco"]
            return None
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "--dump-resource-usage", file.name],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
        # STACK holds spills, LOCAL what a kernel declares itself.
        return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


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
                key: kwargs[key] for key in ("num_warps", "num_stages", "maxnreg") if key in kwargs
            }
            arguments |= {key: value for key, value in kwargs.items() if key in names}
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


@contextmanager
def recorded(*modules: ModuleType) -> Any:
    """Within it the modules' ops take the Triton path and only note their launches."""
    launches: list[Launch] = []
    patches: list[Any] = []
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and name.endswith("_kernel"):
                patches.append(mock.patch.object(module, name, _Recorder(value, launches)))
        patches.append(mock.patch.object(module, "use_triton", lambda tensor: True))
    for patch in patches:
        patch.start()
    try:
        yield launches
    finally:
        for patch in patches:
            patch.stop()
