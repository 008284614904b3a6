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
from functools import cached_property
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import xxhash

from ds_distill.data.columns import BATCH, EXAMPLES, as_numpy, build_once, write_columns
from ds_distill.data.sources import Progress, Source, wrong_split
from ds_distill.errors import UserError, did_you_mean, located
from ds_distill.keys import content_keys
from ds_distill.process.garbage_collection import without_garbage_collection
from ds_distill.recipe.data import DOCSTRINGS as PREFIX
from ds_distill.recipe.tasks import Task, key_of

SHARES = {"train": 0.25, "transfer": 0.25, "validation": 0.2, "test": 0.3}
"""Split -> its share of the files. Transfer has no labels. Validation is large, because half of it
fits routing and half chooses, and a gate needs many files to generalise to others."""

UNLABELLED = ("transfer",)

VERSION = 2
"""Part of the cached file's name: increase it when the same packages give other examples."""

_SCHEMA = pa.schema([*EXAMPLES, ("group", pa.int64()), ("split", pa.int8())])

MIN_WORDS = 6
MASK = "library"

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


def parse_packages(task: Task) -> list[str]:
    """The packages of a task's path `docstrings:PACKAGE,PACKAGE`, in its order.

    Raises UserError when there is none, one is listed twice, or one is no top-level name.
    """
    path = f"{key_of(task, 'data.path')}={task.data.path}"
    packages = [name.strip() for name in task.data.path.removeprefix(PREFIX).split(",")]
    for name in packages:
        if not name.isidentifier():
            raise UserError(
                f"{name!r} is not the import name of a package. "
                f"Write {PREFIX}PACKAGE,PACKAGE with names as in `import PACKAGE`.",
                at=path,
            )
        if packages.count(name) > 1:
            raise UserError(f"package {name!r} is listed twice. Keep one.", at=path)
    return packages


def docstring_corpus(packages: list[str], folder: Path, progress: Progress | None = None) -> Path:
    """Extract the packages' docstrings once; later calls and other ranks reuse the file.

    The result is an Arrow stream file in `folder` with the columns of `columns.EXAMPLES`
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
        batches = _extract(packages, files, progress).to_batches(BATCH)
        write_columns(temporary, _SCHEMA, (batch.columns for batch in batches))

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
            )
    rows.sort(key=lambda row: row[3])  # stable: files keep their order within a split
    texts, labels, groups, splits = map(list, zip(*rows, strict=True))
    keys = content_keys(texts)
    columns = [texts, labels, keys[:, 0], keys[:, 1], groups, splits]
    return pa.table(columns, schema=_SCHEMA)


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


class DocstringSource(Source):
    """Paragraphs of docstrings, labelled with their package."""

    def __init__(self, task: Task, cache_folder: Path | None, progress: Progress | None) -> None:
        super().__init__(task, cache_folder)
        data = task.data
        self._path = f"{key_of(task, 'data.path')}={data.path}"
        packages = parse_packages(task)
        if task.of_words or task.asks or task.many_labels or task.numbers:
            raise UserError(
                "a docstring has one label, its package. Take "
                f"{key_of(task, 'type')}=single-label, or other data.",
                at=f"{key_of(task, 'type')}={task.type}",
            )
        labels = task.given_labels
        if labels and set(labels) != set(packages):
            odd, key = sorted(set(labels) ^ set(packages))[0], key_of(task, "labels")
            raise UserError(
                f"{odd!r} must stand both in {key} and in {self._path}: the labels are the "
                f"packages. Leave {key} out or list the same names.",
                at=key,
            )
        columns = data.columns
        settings = {"config": data.config}
        settings |= {
            f"columns.{key}": getattr(columns, key) for key in ("text_b", "group", "teacher")
        }
        for key, value in settings.items():
            if value is not None:
                raise UserError(
                    "docstrings have none. Take the key out.",
                    at=f"{key_of(task, f'data.{key}')}={value}",
                )
        self._packages = labels or packages
        self._progress = progress
        self._names = data.own_splits() or {name: name for name in SHARES}
        for split, name in self._names.items():
            if name not in SHARES:
                raise wrong_split(task, split, name, list(SHARES))
        self.splits = list(self._names)
        self._check_named_splits()

    def _label_names(self) -> list[str]:
        return list(self._packages)

    @cached_property
    def _corpus(self) -> Path:
        """Found once: it looks at every file of the packages, a tenth of a second each time."""
        with located(self._path):
            return docstring_corpus(self._packages, self.cache_folder, self._progress)

    def _examples(self, split: str) -> datasets.Dataset:
        data = datasets.Dataset.from_file(str(self._corpus))
        number = list(SHARES).index(self._names[split])
        rows = np.flatnonzero(as_numpy(data, "split") == number)
        if len(rows) == 0:
            raise UserError(
                f"split {split!r} got no files; the packages "
                "are too small for four splits. Add larger ones.",
                at=self._path,
            )
        # The split's rows stand together, so this is a slice without an index.
        data = data.select(range(rows[0], rows[-1] + 1)).remove_columns("split")
        if self._names[split] in UNLABELLED or not self.labels:
            data = data.rename_column("label", "class")
            data = data.add_column("label", np.full(len(data), -1, dtype=np.int64))
        return data

    def no_labels(self, split: str) -> UserError:
        labelled = [s for s, name in self._names.items() if name not in UNLABELLED]
        return UserError(
            f"split {split!r} has no labels, and they are "
            f"needed here. With labels: {', '.join(labelled)}.",
            at=self._path,
        )
