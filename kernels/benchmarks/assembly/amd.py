"""AMD's assembler text, as Triton keeps it. Instructions of the scalar unit, which are issued
beside those of the vector units, are not counted."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from .program import Compiled, Loop, counted

WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2,
          "sshort": 2, "ubyte": 1, "sbyte": 1, "byte": 1}  # fmt: skip
SPECIAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_")
SHUFFLES = ("ds_bpermute", "ds_permute", "ds_swizzle", "v_permlane")


def read(asm: dict[str, Any], warps: int, shared: int, target: str) -> Compiled:
    """asm: what Triton keeps of a launch."""
    assert asm["hsaco"]
    text = asm["amdgcn"]

    def size(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        return int(found[1])

    registers = size("vgpr_count")
    found = counted(*_bodies(text), _counts)
    programs = min(32 // warps, (64 << 10) // shared if shared else 32)
    waves = min(8, 512 // max(8, -(-registers // 8) * 8))  # of each of the four vector units
    return Compiled(
        registers=registers,
        spilled=size("private_segment_fixed_size"),
        shared=shared,
        occupancy=min(4 * waves // warps, programs) * warps / 32,
        loops=[_loop(body, 64 * warps, whole) for body, whole in found],
    )


def _bodies(text: str) -> tuple[list[Counter[str]], Counter[str]]:
    """Of each loop the opcodes without those of loops inside, by the compiler's comments: blocks of
    a loop need not lie together. And all."""
    bodies: dict[str, Counter[str]] = {}
    everything: Counter[str] = Counter()
    block = loop = ""
    for line in text.partition("\n.Lfunc_end")[0].splitlines():
        if label := re.match(r"^(?:\.L|; %)(BB\w+|bb\.\d+):", line):
            block, loop = label[1], ""
        if "Loop Header: Depth" in line:
            loop = block
        elif inside := re.search(r";\s+in Loop: Header=(BB\w+)", line):
            loop = inside[1]
        elif op := re.match(r"^\t(s_barrier|(?!s_)[a-z]\w+)\s*(.*)", line):
            name = op[1] + ("_dpp" if " row_mask:" in op[2] else "")
            everything[name] += 1
            bodies.setdefault(loop, Counter())[name] += 1
    return [body for loop, body in bodies.items() if loop], everything


def _counts(op: str) -> bool:
    return op.startswith(("global_", "buffer_", "v_mfma"))


def _loop(body: Counter[str], threads: int, whole: bool) -> Loop:
    def number(*names: str) -> int:
        return sum(count for op, count in body.items() if op.startswith(names))

    return Loop(
        instructions=body.total() - number("s_barrier"), threads=threads,
        loads=_widths(body, "load"), stores=_widths(body, "store"), special=number(*SPECIAL),
        shuffles=number(*SHUFFLES) + sum(n for op, n in body.items() if op.endswith("_dpp")),
        barriers=number("s_barrier"), matrix="MFMA" if number("v_mfma") else "", whole=whole,
    )  # fmt: skip


def _widths(body: Counter[str], kind: str) -> dict[int, int]:
    widths: Counter[int] = Counter()
    for op, count in body.items():
        if found := re.match(rf"(?:global|buffer)_{kind}_([a-z]+\d?)", op):
            widths[WIDTHS[found[1]]] += count
    return dict(widths)
