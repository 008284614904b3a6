"""What the documents show of studies is what their files hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))

import entity_experts
import label_experts
import label_sets
from pages import show, shown

STUDIES: dict[str, tuple[Path, Path, str, Callable[[list[dict[str, Any]]], str]]] = {
    study.MARK: (study.RESULTS, study.PAGE, study.MARK, study.tables)
    for study in (entity_experts, label_experts, label_sets)
}


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_shows_what_the_file_holds(name: str) -> None:
    results, page, mark, tables = STUDIES[name]
    assert shown(page, mark) == tables(json.loads(results.read_text())["runs"])


@pytest.mark.parametrize("name", STUDIES)
def test_a_file_has_the_commit_of_each_run_and_names_no_folder(name: str) -> None:
    results, *_ = STUDIES[name]
    text = results.read_text()
    for run in json.loads(text)["runs"]:
        assert len(run["environment"]["commit"].removesuffix("+changes")) == 40
    assert "/tmp/" not in text and str(Path.home()) not in text


def test_only_what_is_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one -->\nold\n<!-- end of one -->\nz\n")
    show(page, "one", "new\nlines\n")
    assert page.read_text() == "a\n<!-- one -->\nnew\nlines\n<!-- end of one -->\nz\n"
    with pytest.raises(SystemExit, match="no place for two"):
        show(page, "two", "")
