"""NVIDIA's cubin, read with the tools that Triton brings."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton

from .program import Compiled, Loop, counted

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX = ("HGMMA", "UTCHMMA", "HMMA")
INSTRUCTION = r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);"
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def read(asm: dict[str, Any], warps: int, shared: int, target: str) -> Compiled:
    """asm: what Triton keeps of a launch."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        found = counted(*_bodies(_output("nvdisasm", "-c", file.name)), _counts)
        loops = [_loop(body, 32 * warps, whole) for body, whole in found]
    size = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
    return Compiled(
        registers=size["REG"],
        spilled=size["STACK"] + size["LOCAL"],  # what is spilled, and what a kernel declares
        shared=shared,
        occupancy=_occupancy(size["REG"], shared, warps, target),
        loops=loops,
    )


def _output(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _occupancy(registers: int, shared: int, warps: int, target: str) -> float:
    memory = {"sm_80": 164, "sm_90": 228, "sm_100": 228}[target] * 1024
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    programs = min(32, 64 // warps, by_registers, memory // (shared + 1024))
    return programs * warps / 64


def _bodies(sass: str) -> tuple[list[Counter[str]], Counter[str]]:
    """Of each loop the opcodes without those of loops inside, from a label to the branch back to
    it; and all. A branch from behind the program's end comes from where it waits, not a loop."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_[\w]+):", line):
            labels[label[1]] = len(code)
        elif op := re.match(INSTRUCTION, line):
            code.append((op[2], (op[1] or "") + op[3]))  # a predicate is an operand
    spans = []
    for at, (op, operands) in enumerate(code):
        target = re.search(r"\((\.L_\w+)\)", operands) if op.startswith("BRA") else None
        begin = labels.get(target[1], at) if target else at
        if begin < at and ("EXIT", "") not in code[begin:at]:
            spans.append((begin, at + 1))
    bodies = []
    for begin, end in spans:
        inner = [
            span for span in spans if begin <= span[0] and span[1] <= end and span != (begin, end)
        ]
        own = [at for at in range(begin, end) if not any(b <= at < e for b, e in inner)]
        bodies.append(Counter(code[at][0] for at in own))
    # Filling behind the end of the code, and the branch to itself that stops a thread there.
    while code and code[-1][0] in ("NOP", "BRA"):
        code.pop()
    return bodies, Counter(op for op, _ in code)


def _counts(op: str) -> bool:
    return op.startswith(("LDG", "STG", "HGMMA", "UTCHMMA", "HMMA"))


def _loop(body: Counter[str], threads: int, whole: bool) -> Loop:
    def number(*names: str) -> int:
        return sum(count for op, count in body.items() if op.split(".")[0] in names)

    return Loop(
        instructions=body.total(), threads=threads, loads=_widths(body, "LDG"),
        stores=_widths(body, "STG"), special=number("MUFU"), shuffles=number("SHFL"),
        barriers=number("BAR"), matrix=next((name for name in MATRIX if number(name)), ""),
        whole=whole,
    )  # fmt: skip


def _widths(body: Counter[str], kind: str) -> dict[int, int]:
    widths: Counter[int] = Counter()
    for op, count in body.items():
        name, *parts = op.split(".")
        if name in (kind, f"{kind}STS"):
            widths[next((WIDTHS[part] for part in parts if part in WIDTHS), 4)] += count
    return dict(widths)
