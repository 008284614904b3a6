"""The index of as many keys as a large corpus has."""

from __future__ import annotations

from pathlib import Path

from unit.test_cache_index import KEYS, check_index


def test_the_index_is_small_and_answers(tmp_path: Path) -> None:
    check_index(KEYS, tmp_path)
