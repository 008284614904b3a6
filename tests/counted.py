"""Counts what tests do, in their process and in all that it starts, as lines of one log.

A line is `#kind` for one of what is counted, `@kind name` for a part of ds_distill that was used,
`=tier<TAB>name` where what follows belongs to another file or fixture. Each is written at once:
processes under test are killed. tests/budget.py reads the log.

Children are reached by a sitecustomize.py on the PYTHONPATH that subprocess.Popen gives them, and
forks as they are. A start is one of Python: other programs, such as uname, are started by whichever
test is first to ask, and cost little. Not seen: a Python with -I, -E or -S.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

LOG = "DS_DISTILL_COUNTS"
"""Environment variable of children: the log."""


def _engine(engine: Any, bundle: Any, config: dict[str, Any], *_: Any) -> str:
    return _at_stage("#engines", config.get("zero_optimization", {}).get("stage", 0))


def _step(engine: Any, *_: Any) -> str:
    steps = _at_stage("#optimizer_steps", engine._stage, engine._micro_steps)
    return f"{steps}\n@stage {engine._stage}"


def _at_stage(kind: str, stage: int, micro_steps: int = 1) -> str:
    """Stage 3 gathers weights module by module, in each micro-step, and takes as long as all else:
    it is counted apart, too."""
    sharded = [f"#sharded_{kind[1:]}"] * micro_steps if stage == 3 else []
    return "\n".join([kind, *sharded])


KINDS = {
    "ds_distill.engine.engine": {"Engine.__init__": _engine, "Engine.train_step": _step},
    "ds_distill.run.execute": {"execute": lambda *_: "#runs", "_run_phase": lambda *_: "#phases"},
    "ds_distill.data.tokenizer": {"load_tokenizer": lambda *_: "#tokenizer_loads"},
    "ds_distill.planning.models": {"known_config": lambda *_: "#planned_models"},
    "ds_distill.planning.trace": {"Trace.__init__": lambda *_: "#traced_passes"},
    "ds_distill.training.loop": {"train": lambda *_: "#trainings"},
    "ds_distill.routing.comparison": {"compare": lambda *_: "#comparisons"},
    "ds_distill.models.load": {"load_model": lambda *_: "#model_loads"},
    "hypothesis.core": {
        "StateForActualGivenExecution.execute_once": lambda *_: "#hypothesis_examples"
    },
    "triton.runtime.interpreter": {"GridExecutor.__call__": lambda *_: "#kernels_interpreted"},
    "compiling": {"Launch.compile": lambda *_: "#kernels_compiled"},
    "ds_distill.recipe.part": {
        "Implemented.load": lambda part: f"@{part.kind_of_part.capitalize()} {part.part_name}"
    },
    "ds_distill.recipe.metrics.metric": {
        "Metric.__init__": lambda metric, *_: f"@Metric {getattr(metric, 'name', 'unnamed')}"
    },
    "typer._click.core": {
        "Command.invoke": lambda _, context: f"#commands\n@command {context.info_name}"
    },
    "torch._tensor": {"Tensor.backward": lambda *_: "#gradients"},
    "torch.autograd": {"grad": lambda *_: "#gradients"},
    "os": {"fork": lambda: "#forks"},
    "subprocess": {"Popen.__init__": None},
    "torch": {},
}
"""By module, functions and what a call of each says. None: it gives a child what makes it count."""
WHEN_DONE = "StateForActualGivenExecution.execute_once"
"""An example drawn in vain is none: how many are depends on which modules are imported, from which
hypothesis takes constants."""

seconds_of_forks = 0.0
"""Of a processor, of forks whose parent is another process of the tests."""
_log = ""
_open, _write, _close = os.open, os.write, os.close  # tests replace some
_now = "\tcollection"
_own = ""


def note(line: str) -> None:
    with suppress(OSError):  # in a child that may not write there
        file = _open(_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        try:
            _write(file, f"{line}\n".encode())
        finally:
            _close(file)


def is_on() -> bool:
    return bool(_log)


def start(log: str, site: str) -> None:
    """Count from now on. site: a folder for children's PYTHONPATH, which is filled."""
    import shutil

    os.makedirs(site, exist_ok=True)
    shutil.copy(__file__, f"{site}/counted.py")
    with open(f"{site}/sitecustomize.py", "w") as file:
        file.write("import counted\ncounted.start_in_child(__file__)\n")
    _hear(log, site)


def start_in_child(file: str) -> None:
    """Count in a process that one that counts has started, and go on with the sitecustomize.py
    that it would have had."""
    from importlib.machinery import PathFinder

    site = os.path.dirname(file)
    sys.path.remove(site)
    if LOG in os.environ:
        _hear(os.environ[LOG], site)
        note("#starts")
    other = PathFinder.find_spec("sitecustomize")
    if other is not None and other.loader is not None:
        other.loader.exec_module(sys.modules["sitecustomize"])


def _hear(log: str, site: str) -> None:
    global _log, _own
    _log, _own = log, site
    for name in KINDS:
        if name in sys.modules:
            _patch(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Patches modules as they are imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in KINDS:
            return None
        if name == "torch":
            note("#starts_with_torch")
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """Patches a module that another loader executes; that one is the module's."""

    def __init__(self, other: Any) -> None:
        self._other = other
        self.create_module = other.create_module

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._other
        self._other.exec_module(module)
        _patch(module)


def _patch(module: ModuleType) -> None:
    for path, says in KINDS[module.__name__].items():
        *way, name = path.split(".")
        owner = functools.reduce(getattr, way, module)
        function = inspect.getattr_static(owner, name)
        if isinstance(function, classmethod):
            around: Any = classmethod(_counting(function.__func__, says))
        else:
            around = _with_environment(function) if says is None else _counting(function, says)
        setattr(owner, name, around)


def _counting(function: Any, says: Callable[..., str]) -> Any:
    @functools.wraps(function)
    def counting(*given: Any, **named: Any) -> Any:
        if function.__qualname__ != WHEN_DONE:
            note(says(*given))
        result = function(*given, **named)
        if function.__qualname__ == WHEN_DONE:
            note(says(*given))
        return result

    return counting


def _with_environment(function: Any) -> Any:
    @functools.wraps(function)
    def with_environment(*given: Any, **named: Any) -> Any:
        environment = dict(os.environ if named.get("env") is None else named["env"])
        path = environment.get("PYTHONPATH", "")
        if _own not in path.split(os.pathsep):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_own, path)))
        return function(*given, **{**named, "env": {**environment, LOG: _log}})

    return with_environment


def switch(now: str) -> str:
    """What is counted from here on belongs to `now`. Returns what was before."""
    global _now
    before, _now = _now, now
    if _log and now != before:
        note(f"={now}")
    return before


@contextmanager
def aside(name: str) -> Iterator[None]:
    """For what whichever test comes first makes for all: it is no test's own."""
    before = switch(f"{_now.partition(chr(9))[0]}\tfixture {name}")
    try:
        yield
    finally:
        switch(before)
