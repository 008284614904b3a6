"""Export a student: make the file, compare it with the model on real examples, write it if it
predicts as well."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from ds_distill.data.batches import Collator
from ds_distill.data.schedule import plan_once
from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.engine.world import World
from ds_distill.errors import UserError
from ds_distill.evaluation.scores import difference
from ds_distill.export.onnx_model import OnnxModel, make_program, quantised, save
from ds_distill.files import new_folder, write_json, write_text
from ds_distill.keys import numbered_keys
from ds_distill.models.encoder import read_signals
from ds_distill.models.load import MASKED_LM
from ds_distill.recipe import Recipe
from ds_distill.recipe.metrics.metric import MetricClass
from ds_distill.recipe.tasks import TASKS
from ds_distill.reporting.result_tables import difference_cell, wide_note
from ds_distill.reporting.results import interval_as, task_metric_of
from ds_distill.run.any_checkpoint import CHECKPOINT, evaluation_recipe
from ds_distill.run.execute import execute
from ds_distill.run.inference import inference_collator
from ds_distill.run.inputs import describe_environment
from ds_distill.run.run import Run
from ds_distill.run.speed import measure
from ds_distill.tables import Cell, Table
from ds_distill.tasks.kind import PredictInputs
from ds_distill.types import LACKING, Batch, Signals
from ds_distill.views import PaddedView

FP32, INT8, PYTORCH = "model.onnx", "model_int8.onnx", "PyTorch"
RECORD = "export.json"
"""In the exported folder: what was compared, and how it came out."""

TOLERANCE = 1e-3
"""Between logits of PyTorch and of the fp32 file, as a part of the largest one, or of 1: rounding
is a thousandth of that."""
TEXTS = 1000
"""On so many of a split, at most, logits are compared one by one."""
BATCH = 32
SECONDS = 1.0
"""Of timing, for each model, about."""


def export_student(
    student: Path,
    output: Path,
    recipe: Recipe,
    task: str | None,
    *,
    split: str,
    int8: bool,
    max_loss: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Write a student's ONNX files, tokenizer and configuration to `output`, with a card. Returns
    what `export.json` says there.

    student: the model's folder. recipe, task: whose data judge; task None: the only one. max_loss:
        as of `loses`.

    Raises UserError, and writes nothing, where a file predicts otherwise than it may.
    """
    if output.exists() and not (output / RECORD).is_file():
        raise UserError(f"{output}: exists, and is no export. Name another folder: --output.")
    judging = evaluation_recipe(recipe, task, str(student), split)
    [settings] = judging.tasks_by_name.values()
    if TASKS[settings.type].heads[0] == MASKED_LM:
        raise UserError(
            "export is for models that answer: labels, words, questions, numbers. A masked-LM is "
            "fine-tuned on a task first."
        )
    judging = judging.model_copy(update={"padding": "always"})  # the files know no packed views
    with tempfile.TemporaryDirectory(prefix="ds-distill-") as scratch, new_folder(output) as made:
        [judged] = execute(judging, Path(scratch) / "run", first=0).values()
        found = _compared(judged, made, split, int8, max_loss, progress)
        shutil.copy(student / "config.json", made)
        load_tokenizer(str(student), None).save_pretrained(made)
        write_json(made / RECORD, found)
        table, file = export_table(found), list(found["files"])[-1]
        usage = _USAGE.format(file=file)
        write_text(made / "README.md", "\n".join([table.markdown(), "", *table.notes, "", usage]))
    return found


_USAGE = """Run in the folder of these files; PyTorch is not needed:

```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
session = onnxruntime.InferenceSession("{file}", providers=["CPUExecutionProvider"])
inputs = tokenizer(["A text."], padding=True, truncation=True, return_tensors="np")
outputs = session.run(None, {{one.name: inputs[one.name] for one in session.get_inputs()}})
```
"""


def export_table(found: dict[str, Any]) -> Table:
    """The files beside PyTorch; found: the content of export.json."""
    metric, first = task_metric_of(found), found[PYTORCH]
    heads = ["", metric.title, "less PyTorch's", "MB", "ms a text", "largest logit difference"]
    score, milliseconds = metric.shown_as(first["score"]), f"{first['milliseconds']:.3g}"
    rows: list[list[str | Cell]] = [[PYTORCH, score, "", "", milliseconds, ""]]
    for name, one in found["files"].items():
        score, apart = metric.shown_as(one["score"]), difference_cell(metric, one, first["score"])
        size, milliseconds = f"{one['bytes'] / 1e6:.1f}", f"{one['milliseconds']:.3g}"
        rows.append([name, score, apart, size, milliseconds, f"{one['logits']['largest']:.2g}"])
    texts = found["files"][FP32]["logits"]["texts"]
    note = (
        f"On {found['examples']:,} examples of {found['split']}, with 95% intervals; *: beyond "
        f"chance. Time: the median for one text of {found['length']} tokens, {found['threads']} "
        f"CPU thread(s). Logits on {texts:,} texts."
    )
    return Table("", heads, rows, [note, *wide_note(metric, rows)])


def _compared(
    run: Run, folder: Path, split: str, int8: bool, max_loss: float, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Write the files, and judge them on a split."""
    reference = run.reference(CHECKPOINT, 0)
    examples = run.data.examples(split)
    collate = inference_collator(run, examples, split, [reference], fp32=True)
    model = run.model(reference).eval().float()
    view = collate(np.arange(1)).views[CHECKPOINT]
    assert isinstance(view, PaddedView)
    progress(f"Exporting {type(model).__name__}: half a minute or so ...")
    files = _make_files(model, list(view.model_inputs()), folder, int8, progress)
    runners = {PYTORCH: LoneModel(run.world, lambda view: read_signals(model, view).logits.float())}
    runners |= {name: LoneModel(run.world, one.logits) for name, one in files.items()}
    scored, logits = {}, {}
    for name, runner in runners.items():
        bar = run.log.bar(f"{name} on {split}", len(collate.lengths))
        found = run.kind.predict(runner, PredictInputs(collate, examples, [CHECKPOINT], BATCH, bar))
        scored[name] = run.kind.scored(found[CHECKPOINT], examples)
        logits[name] = _logits(runner, collate)
    progress("Timing ...")
    with torch.inference_mode():
        models: dict[str, PreTrainedModel | OnnxModel] = {PYTORCH: model, **files}
        cases = measure(models, 1, run.task.max_length, torch.device("cpu"), SECONDS)
    metric = run.kind.metric
    groups = numbered_keys(examples.group_keys.numpy()[run.kind.counted(examples)])
    compared: dict[str, dict[str, Any]] = {
        name: {
            "score": run.kind.report(scored[name])[metric.name],
            "milliseconds": 1e3 * case.median,
        }
        for name, case in cases.items()
    }
    pytorch = compared.pop(PYTORCH)
    for name, found in compared.items():
        largest, scale = logit_difference(logits[PYTORCH], logits[name])
        texts = min(len(collate.lengths), TEXTS)
        found["bytes"] = sum(file.stat().st_size for file in folder.glob(f"{name}*"))
        found |= difference(scored[name], scored[PYTORCH], metric, groups)
        found["logits"] = {"texts": texts, "largest": largest, "scale": scale}
        _refuse(name, found, pytorch["score"] or 0.0, type(metric), split, max_loss)
    return {
        "split": split,
        "examples": len(scored[PYTORCH]),
        "metric": metric.name,
        "over": TASKS[run.task.type].over,
        "length": run.task.max_length,
        "threads": torch.get_num_threads(),
        "max_loss": max_loss,
        PYTORCH: pytorch,
        "files": compared,
        "environment": describe_environment(1, "cpu"),
    }


def _make_files(
    model: PreTrainedModel,
    inputs: list[str],
    folder: Path,
    int8: bool,
    progress: Callable[[str], None],
) -> dict[str, OnnxModel]:
    """By name, in the folder. inputs: the arguments of the model's forward."""
    program = make_program(model, inputs)
    save(program, folder / FP32)
    if int8:
        progress("Quantising its weights to int8 ...")
        save(quantised(program), folder / INT8)
    names = (FP32, INT8) if int8 else (FP32,)
    return {name: OnnxModel(folder / name, model.config) for name in names}


@dataclass(frozen=True)
class LoneModel:
    """A `ModelRunner` of one model, without an engine."""

    world: World
    logits: Callable[[PaddedView], torch.Tensor]
    """At the rows of a view, float32 [n, C]."""

    def predict(
        self, batch: Batch, models: Iterable[str], layers: Iterable[int] = ()
    ) -> dict[str, Signals]:
        [name] = models
        with torch.no_grad():
            return {name: Signals(self.logits(cast(PaddedView, batch.views[name])))}


def _logits(runner: LoneModel, collate: Collator) -> torch.Tensor:
    """Those of the longest, shortest and all between of the first TEXTS examples, on the CPU, all
    in one row."""
    batches = map(collate, plan_once(collate.lengths[:TEXTS], BATCH))
    found = (runner.predict(batch, [CHECKPOINT])[CHECKPOINT].logits for batch in batches)
    return torch.cat([logits.cpu().flatten() for logits in found])


def logit_difference(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two models' logits, float32 of one shape, and the first's largest
    logit. A NaN is as far as can be."""
    known = first > LACKING / 2
    apart = (first - second)[known].abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return apart.max().item(), first[known].abs().max().item()


def _refuse(
    name: str, found: dict[str, Any], score: float, metric: MetricClass, split: str, max_loss: float
) -> None:
    """Raises UserError for a file that does not compute what the model does, or of int8 loses more
    of its score than it may. score: the model's."""
    logits = found["logits"]
    most = TOLERANCE * max(1.0, logits["scale"])
    if name == FP32 and not logits["largest"] <= most:
        raise UserError(
            f"{name}: its logits differ from PyTorch's by up to {logits['largest']:.2g} on "
            f"{logits['texts']:,} texts of {split}, and rounding explains {most:.1g}. The "
            "exporter does not know this model well; nothing was written."
        )
    if name == INT8 and (why := loses(found["interval"], score, metric, max_loss)):
        raise UserError(
            f"{name}: on {split} {why} (--max-loss). Nothing was written: export without --int8, "
            "or allow it more."
        )


def loses(
    interval: list[float] | None, score: float, metric: MetricClass, most: float
) -> str | None:
    """Why a model is refused whose score differs from another's: the interval of the difference,
    with all of which it is worse by more than `most`. None where it is taken.

    score: the other's. most: points; of a metric that is no share, per cent of the score.
    """
    bound = most / 100 * (1.0 if metric.is_share() else abs(score))
    shown = f"{most:g} points" if metric.is_share() else f"{most:g}% of {metric.shown_as(score)}"
    if interval is None:
        return f"{metric.title} is not defined for what it predicts, so nothing says how good it is"
    low, high = interval
    if (high < -bound) if metric.higher_is_better else (low > bound):
        ends = interval_as(metric.difference_as, interval)
        return f"its {metric.title} differs by {ends}, beyond chance more than {shown}"
    return None
