"""Record an op's Triton launches on CPU tensors, compile them for GPUs that are not here, and count
what the compiler made: registers, spills, shared memory, and the instructions of each loop."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
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
CAPABILITIES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "gfx942": 0}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
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

    def compile(self, target: str) -> Compiled | None:
        """What it became. On AMD targets None: it compiles."""
        gpu = TARGETS[target]
        options = dict(self.options)
        if gpu.backend == "hip":
            options.pop("maxnreg", None)  # the launch leaves it out there, and has no PTX
            self.arguments |= {"PTX": False} if "PTX" in self.arguments else {}
        compiled = triton.compile(self.source(), target=gpu, options=options)
        if gpu.backend == "hip":
            assert compiled.asm["hsaco"]
            return None
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = _output("cuobjdump", "--dump-resource-usage", file.name)
            sass = _output("nvdisasm", "-c", file.name)
        size = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
        shared = int(compiled.metadata.shared)
        return Compiled(
            kernel=self.kernel.__name__.strip("_"),
            registers=size["REG"],
            spilled=size["STACK"] + size["LOCAL"],  # what is spilled, and what a kernel declares
            shared=shared,
            occupancy=_occupancy(size["REG"], shared, compiled.metadata.num_warps, target),
            loops=[Loop.of(body, compiled.metadata.num_warps) for body in _loops(sass)],
        )


@dataclass(frozen=True)
class Loop:
    """A loop that reads memory or multiplies matrices.

    instructions: of one thread in one turn; threads: of a program.
    accesses: bytes of an access to global memory -> how many of them, loads and stores.
    """

    instructions: int
    threads: int
    loads: dict[int, int]
    stores: dict[int, int]
    special: int  # exponentials, logarithms, roots
    shuffles: int
    barriers: int
    matrix: str  # the matrix instruction, or ""

    @classmethod
    def of(cls, body: Counter[str], warps: int) -> Loop:
        def number(*names: str) -> int:
            return sum(count for op, count in body.items() if op.split(".")[0] in names)

        matrix = [name for name in ("HGMMA", "UTCHMMA", "HMMA", "FFMA2") if number(name)]
        return cls(
            instructions=body.total(), threads=32 * warps, loads=_widths(body, "LDG"),
            stores=_widths(body, "STG"), special=number("MUFU"), shuffles=number("SHFL"),
            barriers=number("BAR"), matrix=matrix[0] if matrix else "",
        )  # fmt: skip

    def each(self, elements: int) -> float:
        """Instructions per element, of which a program takes so many in one turn."""
        return self.instructions * self.threads / elements


@dataclass(frozen=True)
class Compiled:
    """A launch as the compiler made it. spilled, shared: bytes of a thread, of a program.
    occupancy: warps that fit, of those that a multiprocessor can hold."""

    kernel: str
    registers: int
    spilled: int
    shared: int
    occupancy: float
    loops: list[Loop]


def _output(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [TOOLS / tool, *arguments], capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout


def _occupancy(registers: int, shared: int, warps: int, target: str) -> float:
    memory = {"sm_80": 164, "sm_90": 228, "sm_100": 228}[target] * 1024
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    programs = min(32, 64 // warps, by_registers, memory // (shared + 1024))
    return programs * warps / 64


def _loops(sass: str) -> Iterator[Counter[str]]:
    """Opcodes of the bodies of loops with accesses or products: from a label to the branch back to
    it, without the loops inside."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_[\w]+):", line):
            labels[label[1]] = len(found)
        elif op := re.match(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            found.append((op[1], op[2]))
    spans = []
    for at, (op, arguments) in enumerate(found):
        target = re.search(r"\((\.L_\w+)\)", arguments) if op.startswith("BRA") else None
        if target and labels.get(target[1], at) < at:
            spans.append((labels[target[1]], at + 1))
    for begin, end in spans:
        inner = [
            span for span in spans if begin <= span[0] and span[1] <= end and span != (begin, end)
        ]
        own = [at for at in range(begin, end) if not any(b <= at < e for b, e in inner)]
        body = Counter(found[at][0] for at in own)
        if any(op.startswith(("LDG", "STG", "HGMMA", "UTCHMMA", "HMMA")) for op in body):
            yield body


def _widths(body: Counter[str], kind: str) -> dict[int, int]:
    """Bytes of an access -> how many."""
    widths: Counter[int] = Counter()
    for op, count in body.items():
        name, *parts = op.split(".")
        if name not in (kind, f"{kind}STS"):
            continue
        sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
        widths[next((sizes[part] for part in parts if part in sizes), 4)] += count
    return dict(widths)


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
        if hasattr(module, "capability"):
            own = CAPABILITIES[target]
            patches.append(mock.patch.object(module, "capability", lambda device, own=own: own))
    for patch in patches:
        patch.start()
    try:
        yield launches
    finally:
        for patch in patches:
            patch.stop()
