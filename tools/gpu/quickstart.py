"""The quickstart as a user runs it, from MiniLM in the kit: its figures and its report are kept.

python tools/gpu/quickstart.py MODEL [KEY=VALUE ...] --output FOLDER/quickstart.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="MiniLM's folder, or a reference to it")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    models = ("teachers.first.model", "teachers.second.model", "student.model")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "quickstart"
        command = [sys.executable, "-m", "ds_distill", "quickstart", "--folder", str(folder)]
        command += [*(f"{key}={given.model}" for key in models), *given.overrides]
        started = time.monotonic()
        done = subprocess.run(command)
        seconds = round(time.monotonic() - started, 1)
        if done.returncode:
            sys.exit(done.returncode)
        shutil.copy(folder / "report.html", given.output.with_suffix(".html"))
        figures = {
            "seconds": seconds,
            "environment": json.loads((folder / "environment.json").read_text()),
            "results": json.loads((folder / "results.json").read_text()),
        }
    given.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
