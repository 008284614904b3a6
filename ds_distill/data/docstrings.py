"""Real text without a download: the docstrings of installed packages.

`docstrings:scipy,sympy` makes one example of each paragraph, labelled with its package. The
files are parsed, never imported. Names of the packages are masked, so that a
paragraph has to be classified by its content. Splits are made of files, not of paragraphs:
paragraphs of one file are so similar that a random split would leak.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from ds_distill.data.built import build_once
from ds_distill.data.examples import EXAMPLES
from ds_distill.errors import UserError, did_you_mean
from ds_distill.keys import content_keys
from ds_distill.process.garbage_collection import without_garbage_collection
from ds_distill.recipe.sources import DOCSTRINGS as PREFIX

SHARES = {"train": 0.25, "transfer": 0.25, "validation": 0.2, "test": 0.3}
"""Split -> its share of the files. Transfer has no labels. Validation is large, because half of it
fits routing and half chooses, and a gate needs many files to generalise to others."""

UNLABELLED = ("transfer",)

VERSION = 2
"""Part of the cached file's name: increase it when the same packages give other examples."""

MIN_WORDS = 6
MASK = "library"

Progress = Callable[[int, int], None]
"""Called as (files read, files in all)."""

_SKIPPED_FOLDERS = re.compile(
    r"tests?|testing|externals?|_external|extern|_?vendor(ed)?|third_party|_numpy"
    r"|array_api_compat|array_api_extra|__pycache__|node_modules"
)
_ALIASES = {  # other names of a package: in prose, and in code before a dot
    "numpy": (("NumPy",), ("np",)),
    "networkx": ((), ("nx",)),
    "pandas": ((), ("pd",)),
    "scipy": ((), ("sp",)),
    "skimage": (("scikit-image",), ()),
    "sklearn": (("scikit-learn", "scikit learn", "scikits.learn"), ()),
    "tensorflow": ((), ("tf",)),
    "torch": (("pytorch", "libtorch"), ()),
    "transformers": (("Hugging Face", "HuggingFace"), ()),
}
_DISTRIBUTIONS = {"sklearn": "scikit-learn", "skimage": "scikit-image", "cv2": "opencv-python"}
_UNDERLINE = re.compile(r"\s*([-=~^*#+.'\"_])\1{2,}\s*")
_FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_CODE_DIRECTIVES = (".. code", ".. plot", ".. math", ".. ipython", ".. doctest")


def parse_packages(path: str) -> list[str]:
    """The packages of a path `docstrings:PACKAGE,PACKAGE`, in its order.

    Raises UserError when there is none, one is listed twice, or one is no top-level name.
    """
    packages = [name.strip() for name in path.removeprefix(PREFIX).split(",")]
    for name in packages:
        if not name.isidentifier():
            raise UserError(
                f"{name!r} is not the import name of a package. "
                f"Write {PREFIX}PACKAGE,PACKAGE with names as in `import PACKAGE`.",
                at=f"task.data.path={path}",
            )
        if packages.count(name) > 1:
            raise UserError(
                f"package {name!r} is listed twice. Keep one.", at=f"task.data.path={path}"
            )
    return packages


def docstring_corpus(packages: list[str], folder: Path, progress: Progress | None = None) -> Path:
    """Extract the packages' docstrings once; later calls and other ranks reuse the file.

    The result is an Arrow stream file in `folder` with the columns of `examples.EXAMPLES`
    (label: the package's position in `packages`), `group`, int64: a hash of the file's name, and
    `split`, int8: position in SHARES. Rows are sorted by split. The file's name is a hash of
    all it depends on: VERSION, the packages, and the names, sizes and times of their files.

    Raises UserError when a package is not installed or has no docstrings.
    """
    files = [(label, *file) for label, name in enumerate(packages) for file in _files(name)]
    state = xxhash.xxh3_128(f"{VERSION} {packages} {SHARES}".encode())
    for label, name, path in files:
        status = path.stat()
        state.update(f"{label} {name} {status.st_size} {status.st_mtime_ns}\n".encode())
    target = folder / f"docstrings-{state.hexdigest()}.arrow"

    def write(temporary: Path) -> None:
        table = _extract(packages, files, progress)
        with (
            pa.OSFile(str(temporary), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=10_000)

    return build_once(target, write)


def split_of_file(name: str) -> int:
    """The split (position in SHARES) of a file, from its package and path alone."""
    uniform = xxhash.xxh3_64_intdigest(name.encode()) / 2**64
    return int(np.searchsorted(np.cumsum(list(SHARES.values()))[:-1], uniform, side="right"))


def _group_of_file(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode()) - 2**63


def paragraphs(docstring: str) -> Iterator[str]:
    """Prose paragraphs of a docstring, white space collapsed, without code and underlines."""
    literal_margin: int | None = None  # indentation of the line that ended with `::`
    for block in re.split(r"\n[ \t]*\n", _FENCED.sub("\n", docstring)):
        lines = [line for line in block.split("\n") if line.strip()]
        lines = [line for line in lines if not _UNDERLINE.fullmatch(line)]
        if not lines:
            continue
        margin = len(lines[0]) - len(lines[0].lstrip())
        if literal_margin is not None and margin > literal_margin:
            continue
        literal_margin = margin if lines[-1].rstrip().endswith("::") else None
        if lines[0].lstrip().startswith(_CODE_DIRECTIVES):
            literal_margin = margin
            continue
        if any(line.lstrip().startswith((">>>", "...", "In [")) for line in lines):
            continue
        text = " ".join(" ".join(lines).split())
        if len(text.split()) >= MIN_WORDS:
            yield text


def name_mask(packages: list[str]) -> Callable[[str], str]:
    """A function that replaces the packages' names and usual aliases by MASK."""
    names: list[str] = []
    prefixes: list[str] = []
    for package in packages:
        prose, code = _ALIASES.get(package, ((), ()))
        names += [package, *prose]
        prefixes += code
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    # The next letter may be a capital: TorchScript, NetworkXError.
    pattern = rf"(?<![A-Za-z0-9])(?i:{'|'.join(longest_first)})(?![a-z0-9])"
    if prefixes:
        pattern += rf"|(?<![\w.])(?:{'|'.join(prefixes)})(?=\.\w)"
    compiled = re.compile(pattern)
    return lambda text: compiled.sub(MASK, text)


def _files(package: str) -> list[tuple[str, Path]]:
    """(name, path) of a package's modules, without tests and vendored folders.

    The name is the path from the package on, the same on every machine.
    """
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        hint = did_you_mean(package, [*_DISTRIBUTIONS, *_ALIASES])
        raise UserError(
            f"package {package!r} is not installed in {sys.prefix}.{hint} "
            f"Install it with `pip install {_DISTRIBUTIONS.get(package, package)}` or take it "
            f"out of the list after `{PREFIX}`.",
            at="task.data.path",
        )
    files: dict[str, Path] = {}
    for folder in map(Path, spec.submodule_search_locations or []):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).parts
            if not any(_SKIPPED_FOLDERS.fullmatch(part) for part in parts[:-1]):
                files.setdefault("/".join((package, *parts)), path)
    if not spec.submodule_search_locations and spec.origin and spec.origin.endswith(".py"):
        files[f"{package}.py"] = Path(spec.origin)
    if not files:
        raise UserError(
            f"package {package!r} has no Python files to read docstrings from. "
            f"Take it out of the list after `{PREFIX}`.",
            at="task.data.path",
        )
    return sorted(files.items())


def _extract(
    packages: list[str], files: list[tuple[int, str, Path]], progress: Progress | None
) -> pa.Table:
    mask = name_mask(packages)
    sources: dict[str, tuple[int, int, int]] = {}  # text -> label, group, split of its first file
    shared: set[str] = set()
    with _parsing():
        for count, (label, name, path) in enumerate(files, start=1):
            source = (label, _group_of_file(name), split_of_file(name))
            for docstring in _docstrings(path):
                for paragraph in paragraphs(docstring):
                    text = mask(paragraph)
                    if sources.setdefault(text, source)[0] != label:
                        shared.add(text)
            if progress is not None and (count % 50 == 0 or count == len(files)):
                progress(count, len(files))
    rows = [(text, *source) for text, source in sources.items() if text not in shared]
    counts = np.bincount([label for _, label, *_ in rows], minlength=len(packages))
    for package, count in zip(packages, counts, strict=True):
        if count == 0:
            raise UserError(
                f"package {package!r} has no docstring paragraphs of its own "
                f"with {MIN_WORDS} words or more. Take it out of the list after `{PREFIX}`.",
                at="task.data.path",
            )
    rows.sort(key=lambda row: row[3])  # stable: files keep their order within a split
    texts, labels, groups, splits = map(list, zip(*rows, strict=True))
    keys = content_keys(texts)
    schema = EXAMPLES.append(pa.field("group", pa.int64())).append(pa.field("split", pa.int8()))
    return pa.table([texts, labels, keys[:, 0], keys[:, 1], groups, splits], schema=schema)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # a template, or code for another Python version
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                # An escape may give a lone surrogate, which cannot be encoded.
                yield docstring.encode("utf-8", "replace").decode()
        # Only statements contain definitions; walking the expressions, too, would take
        # longer than parsing.
        for block in ("finalbody", "orelse", "cases", "handlers", "body"):
            todo += reversed(getattr(node, block, ()))


@contextmanager
def _parsing() -> Iterator[None]:
    with without_garbage_collection(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
        yield
