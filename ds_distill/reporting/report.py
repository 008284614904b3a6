"""report.html: one page that opens anywhere, offline."""

from __future__ import annotations

import importlib.resources
from typing import Any

import jinja2

from ds_distill.reporting.verdict import last_evaluation


def render_report(results: dict[str, Any]) -> str:
    """The page for a run's results (the content of results.json)."""
    template = importlib.resources.files("ds_distill.reporting") / "report.html.jinja"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        results=results, evaluation=last_evaluation(results)
    )
