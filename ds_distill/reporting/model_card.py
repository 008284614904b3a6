"""The README.md that is shipped with the student."""

from __future__ import annotations

from typing import Any

import yaml

from ds_distill.recipe.schema import MaskedLM, Recipe
from ds_distill.reporting.verdict import last_evaluation


def model_card(recipe: Recipe, results: dict[str, Any]) -> str:
    """Markdown with the metadata block of the Hugging Face hub."""
    evaluation = last_evaluation(results)
    masked_lm = isinstance(recipe.task, MaskedLM)
    pipeline = "fill-mask" if masked_lm else "text-classification"
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "tags": ["knowledge-distillation", "ds-distill"],
    }
    if _is_hub_id(recipe.student.model):
        metadata["base_model"] = recipe.student.model
    if evaluation:
        metadata["metrics"] = ["accuracy", "perplexity" if masked_lm else "f1"]
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False).strip(),
        "---",
        "",
        f"# {recipe.name}: student `{results['student']}`",
        "",
        results["verdict"],
        "",
        "```python",
        "from transformers import pipeline",
        "",
        *(
            (
                'fill = pipeline("fill-mask", model="PATH/TO/THIS/FOLDER")',
                'fill(f"a text with a {fill.tokenizer.mask_token} in it")',
            )
            if masked_lm
            else (
                'classify = pipeline("text-classification", model="PATH/TO/THIS/FOLDER")',
                'classify("a text")',
            )
        ),
        "```",
        "",
        "## How it was made",
        "",
        f"Starts from `{recipe.student.model}`"
        + (f", layers {recipe.student.layers}" if recipe.student.layers else "")
        + f"; task data: `{recipe.task.data.path}`.",
    ]
    if recipe.teachers:
        teachers = ", ".join(f"{name} (`{t.model}`)" for name, t in recipe.teachers.items())
        lines += ["", f"Teachers: {teachers}."]
    if evaluation:
        lines += ["", f"## Accuracy on {evaluation['split']}", "", *_table(evaluation)]
    environment = results["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in environment["packages"].items() if v)
    lines += ["", "## Versions", "", f"ds_distill {environment['ds_distill']}, {versions}."]
    return "\n".join(lines) + "\n"


def _table(evaluation: dict[str, Any]) -> list[str]:
    first = next(iter(evaluation["models"].values()))
    if "tokens" in first:
        return [
            f"On {first['tokens']:,} hidden tokens, the same ones for all models.",
            "",
            "| model | role | accuracy | perplexity |",
            "|---|---|---|---|",
            *(
                f"| {name} | {m['role']} | {m['accuracy']:.3f} | {m['perplexity']:.2f} |"
                for name, m in evaluation["models"].items()
            ),
        ]
    labels = list(first["per_class"])
    rows = [
        "| model | role | accuracy | macro F1 | " + " | ".join(labels) + " |",
        "|" + "---|" * (4 + len(labels)),
    ]
    for name, model in evaluation["models"].items():
        classes = [
            "-" if value is None else f"{value:.3f}" for value in model["per_class"].values()
        ]
        numbers = [f"{model['accuracy']:.3f}", f"{model['macro_f1']:.3f}", *classes]
        rows.append(f"| {name} | {model['role']} | " + " | ".join(numbers) + " |")
    return rows


def _is_hub_id(reference: str) -> bool:
    return not reference.startswith(("pkg:", ".", "/", "~")) and reference.count("/") <= 1
