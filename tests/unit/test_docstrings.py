"""Docstrings as a corpus: what is taken, what is left out, and which split it lands in. Some are in
docstrings.yaml."""

import importlib
import re
from pathlib import Path

import datasets
import pytest
import yaml

from ds_distill.data import docstrings
from ds_distill.data.docstrings import (
    SHARES,
    docstring_corpus,
    name_mask,
    paragraphs,
    split_of_file,
)
from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.recipe.tasks import Data, MaskedLM, SingleLabel

TEXTS = yaml.safe_load(Path(__file__).with_name("docstrings.yaml").read_text(encoding="utf-8"))
MODULE = '''"""Module {number} of {package} says a {word} or two.

Words that all packages say in just the same way.
"""
raise RuntimeError("parsed, never imported")


class Thing:
    """A thing of {package} that holds a {word} numbered {number}.

    Parameters
    ----------
    x : int
        The {word} numbered {number}.

    >>> Thing("one two three four five six seven")
    """

    if True:
        async def method(self):
            """Too short."""

            def inner():
                """An inner function of module {number} about a {word}."""
'''
PARAGRAPHS = (
    "Module {number} of library says a {word} or two.",
    "A thing of library that holds a {word} numbered {number}.",
    "Parameters x : int The {word} numbered {number}.",
    "An inner function of module {number} about a {word}.",
)
WORDS = {"fakeone": "plum", "faketwo": "pear"}
MODULES = 30


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two packages that can be found and not imported."""
    for package, word in WORDS.items():
        folder = tmp_path / "site" / package
        for skipped in ("tests", "_vendor"):
            (folder / "deep" / skipped).mkdir(parents=True)
            text = f'"""A docstring in a folder {skipped} that must not be seen."""'
            (folder / "deep" / skipped / "some.py").write_text(text)
        (folder / "__init__.py").touch()
        (folder / "broken.py").write_text("def (")
        (folder / "binary.py").write_bytes(b'"""\xff\xfe not a text in any known coding"""')
        for number in range(MODULES):
            text = MODULE.format(package=package, number=number, word=word)
            (folder / f"module_{number}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return list(WORDS)


def task(path="docstrings:fakeone,faketwo", labels=None, **data):
    return SingleLabel(data=Data(path=path, **data), labels=labels)


# -------------------------------------------------------------------------------- paragraphs


@pytest.mark.parametrize(("docstring", "expected"), TEXTS["paragraphs"])
def test_paragraphs_are_prose(docstring, expected):
    assert list(paragraphs(docstring)) == expected


@pytest.mark.parametrize(("text", "masked"), TEXTS["masked"].items())
def test_names_of_the_listed_packages_are_masked(text, masked):
    assert name_mask(["torch", "sklearn", "pandas"])(text) == masked


# ------------------------------------------------------------------------------------ corpus


def test_the_corpus_holds_what_each_package_says_alone(packages, tmp_path):
    data = datasets.Dataset.from_file(str(docstring_corpus(packages, tmp_path)))
    expected = [
        (text.format(number=number, word=word), label)
        for label, word in enumerate(WORDS.values())
        for number in range(MODULES)
        for text in PARAGRAPHS
    ]
    assert sorted(zip(data["text"][:], data["label"][:], strict=True)) == sorted(expected)


def test_a_file_is_in_one_split_and_nothing_is_lost(packages, tmp_path):
    source = open_source(task(), tmp_path)
    places = {
        (word, str(number)): source.splits[split_of_file(f"{package}/module_{number}.py")]
        for package, word in WORDS.items()
        for number in range(MODULES)
    }
    count = 0
    for split in source.splits:
        for text in source.read(split)["text"]:
            [word], [number] = re.findall("plum|pear", text), re.findall(r"\d+", text)
            assert places[word, number] == split
            count += 1
    assert count == 2 * MODULES * len(PARAGRAPHS)


def test_the_source_caps_each_class_and_hides_it_where_there_are_no_labels(packages, tmp_path):
    seen = []
    capped = task(per_class={"train": 9, "transfer": 9})
    source = open_source(capped, tmp_path, lambda done, of: seen.append((done, of)))
    assert source.labels == packages
    assert source.splits == list(SHARES)
    for split in source.splits:
        data = source.read(split)
        assert data.column_names == ["text", "label", "key_hi", "key_lo", "copy", "group"]
        truth = [
            list(WORDS.values()).index("pear" if "pear" in t else "plum") for t in data["text"]
        ]
        assert data["label"][:] == ([-1] * len(truth) if split == "transfer" else truth)
        if split in capped.data.per_class:
            assert [truth.count(label) for label in (0, 1)] == [9, 9]
    assert seen[-1] == (2 * (MODULES + 3), 2 * (MODULES + 3))
    with pytest.raises(UserError, match=r"no labels.*train, validation, test"):
        source.read("transfer", need_labels=True)


def test_a_cap_is_of_packages_where_a_task_has_no_classes(packages, tmp_path):
    """The built-in recipe masked-lm caps its splits, and was refused."""
    data = Data(path="docstrings:fakeone,faketwo", per_class=dict.fromkeys(SHARES, 3))
    source = open_source(MaskedLM(data=data), tmp_path)
    for split in SHARES:
        read = source.read(split)
        assert sum("plum" in text for text in read["text"]) == len(read) - 3 == 3
        assert set(read["label"]) == {-1}


def test_a_second_reading_extracts_nothing_until_a_file_changes(tmp_path, monkeypatch):
    folder = tmp_path / "site" / "fakethree"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('"""One two three four five six seven."""')
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    first = docstring_corpus(["fakethree"], tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(docstrings, "_extract", None)
        assert docstring_corpus(["fakethree"], tmp_path / "cache") == first
    (folder / "new.py").write_text('"""Eight nine ten eleven twelve thirteen."""')
    second = docstring_corpus(["fakethree"], tmp_path / "cache")
    assert second != first
    assert len(datasets.Dataset.from_file(str(second))) == 2
