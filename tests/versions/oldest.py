"""Run part of the tests on the oldest versions of libraries that pyproject.toml allows.

    python tests/versions/oldest.py                        the stated set
    python tests/versions/oldest.py datasets==4.0.0 ...    other versions in their place

Each package is installed alone (pip --no-deps) into a temporary folder that comes before the
environment's own on PYTHONPATH, so torch and deepspeed stay: their bounds are what the whole suite
runs on. Ends with pytest's exit code.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

OLDEST = {
    "datasets": "4.0.0",
    "numpy": "2.0.2",
    "pyarrow": "20.0.0",
    "pydantic": "2.10.0",
    "transformers": "5.8.0",
}
"""The lower bounds of pyproject.toml that were tried. Older ones: transformers 5.0 reads attention
code from elsewhere under another name, and its DistilBERT splits unlike BERT; pyarrow 19 reads no
JSON lines in batches; pandas needs this numpy."""

COMPANIONS = {"huggingface_hub": "1.12.0", "pydantic_core": "2.27.0", "tokenizers": "0.22.2"}
"""What those versions ask for, where it is older than what is installed."""

TESTS = [
    *(f"tests/unit/test_{part}.py" for part in ("models", "packed", "recipe", "sources")),
    *(f"tests/unit/test_{part}.py" for part in ("cache", "losses", "masked_lm")),
    "tests/e2e/test_shipped_student.py::test_loaded_plainly_it_predicts_what_the_results_say",
    "tests/e2e/test_masked_lm_cache.py",
]


def run(versions: dict[str, str]) -> int:
    """pytest's exit code on these versions."""
    with tempfile.TemporaryDirectory(prefix="oldest-") as folder:
        wanted = [f"{name}=={version}" for name, version in versions.items()]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--target", folder, *wanted], check=True)
        path = os.pathsep.join([folder, str(ROOT), str(ROOT / "kernels")])
        environment = {**os.environ, "PYTHONPATH": path}
        show = "import importlib.metadata as m; print({n: m.version(n) for n in %r})" % [*versions]
        subprocess.run([sys.executable, "-c", show], env=environment, check=True)
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS]
        return subprocess.run(pytest, env=environment, cwd=ROOT).returncode


def main() -> int:
    given = dict(argument.split("==") for argument in sys.argv[1:])
    return run({**OLDEST, **COMPANIONS, **given})


if __name__ == "__main__":
    sys.exit(main())
