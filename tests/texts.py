"""Texts that are compared whole, each with a file beside its test.

DS_DISTILL_WRITE_TEXTS=1 pytest FILE     writes them anew; git shows what changed
"""

from __future__ import annotations

import os
from pathlib import Path


def check_text(file: Path, text: str) -> None:
    if os.environ.get("DS_DISTILL_WRITE_TEXTS"):
        file.write_text(text, encoding="utf-8")
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()
