"""Blocks and commands of the documents, found in the Markdown files themselves: a new one is
covered by being there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("ds_distill", "ds_configs", "kernels", "launchers", "tests", "tools", "docs")
OTHERS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", *OTHERS]


@dataclass
class Block:
    """A fenced block, or a code span of one line."""

    place: str
    document: str
    language: str
    text: str
    is_span: bool = False


FENCED_BLOCK = re.compile(r"^[ \t]*```(.*)\n(?s:(.*?)\n)??[ \t]*```$", re.MULTILINE)


def blocks(path: Path) -> Iterator[Block]:
    document, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for found in FENCED_BLOCK.finditer(text):
        place = f"{document}:{1 + text.count(chr(10), 0, found.start())}"
        yield Block(place, document, found[1].strip(), found[2] or "")
    rest = FENCED_BLOCK.sub(lambda found: "\n" * found[0].count("\n"), text)
    assert "```" not in rest, f"{document}: a block is not closed"
    for number, line in enumerate(rest.split("\n"), 1):
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
            yield Block(f"{document}:{number}", document, "", span, is_span=True)


BLOCKS = [block for path in DOCUMENTS for block in blocks(path)]
FENCED = [block for block in BLOCKS if not block.is_span]
SPANS = [block for block in BLOCKS if block.is_span]


COMMANDS = r"(ds-distill|make|pip|deepspeed|torchrun|srun|sbatch|python3?) "
"""How a span begins that is a command, or the name of one."""


def commands(block: Block) -> list[str]:
    """Lines of a fenced block that are commands, or a span that is one, without what is said of
    them; none of other blocks."""
    if block.is_span:
        part = block.text.startswith("ds-distill") and " ... " in block.text
        return [block.text] if re.match(COMMANDS, block.text) and not part else []
    if block.language not in ("", "sh", "bash", "console") or block.text.startswith("- "):
        return []
    lines = re.sub(r" *\\\n *", " ", block.text).split("\n")
    if re.fullmatch(r"[\w.]+/", lines[0].split(" ")[0]):
        return []  # a folder's tree
    lines = [re.sub(r"\s+#.*|^\s*\$ |^#.*", "", line).strip() for line in lines]
    return [re.split(r"\s{2,}", line)[0] for line in lines if line]


def alternatives(line: str) -> Iterator[list[str]]:
    """The commands that a line of usage stands for: `a b|c [D ...]` is `a b D` and `a c D`."""
    line = re.sub(r"\[([^\[\]]*?)( \.\.\.)?\]", r"\1", line) if ".[" not in line else line
    words = [word for word in shlex.split(line) if word != "..."]
    choice = next((word for word in words if re.fullmatch(r"[a-z]+(\|[a-z]+)+", word)), None)
    for one in choice.split("|") if choice else [None]:
        yield [one if one and word == choice else word for word in words]
