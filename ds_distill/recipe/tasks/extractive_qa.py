"""The task of finding the answer to a question in a text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ds_distill.recipe.entry import Needs, TaskEntry
from ds_distill.recipe.metrics import one_metric
from ds_distill.recipe.metrics.answers import SquadF1
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.section import Count
from ds_distill.recipe.tasks.base import COMPARED, Predicts, Rows, TaskSettings


class ExtractiveQA(TaskSettings):
    """Find the answer to a question in its context: a span of its characters. A context too long
    for `max_length` is read in windows that overlap. A window has two rows, the answer's start and
    its end, whose classes are the tokens of its context, so all models must have the same
    tokenizer. The window's first token stands for `no answer in this window`."""

    rows: ClassVar[Rows] = "question"
    predicts: ClassVar[Predicts] = "span"

    type: Literal["extractive-qa"] = "extractive-qa"
    max_length: Annotated[int, Field(ge=32, le=4096)] = 384
    """Tokens of a window at most, the question's included. A question that is longer than half of
    it is cut."""
    stride: Count | None = None
    """So many tokens of a window, at most, are those at the end of the window before it; a third of
    `max_length` at most, which is the default. A longer answer may be whole in no window."""
    max_answer_length: Count = 30
    """Tokens of a predicted answer at most."""
    metric: Annotated[MetricSettings, one_metric("answers"), COMPARED] = SquadF1.Settings()

    @model_validator(mode="after")
    def _windows_go_on(self) -> ExtractiveQA:
        if self.overlap > self.max_length // 3:
            raise ValueError(
                f"stride={self.stride} is more than a third of max_length={self.max_length}: set "
                f"at most {self.max_length // 3}"
            )
        return self

    @property
    def cuts(self) -> bool:
        return False

    @property
    def overlap(self) -> int:
        return self.max_length // 3 if self.stride is None else self.stride

    @property
    def reading(self) -> dict[str, Any]:
        own = {"max_answer_len": self.max_answer_length, "doc_stride": self.overlap}
        return {**super().reading, **own}


def _usage(task: ExtractiveQA, pairs: bool) -> list[str]:
    """transformers has no pipeline for questions any more: the best span, by hand."""
    return [
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'model = AutoModelForQuestionAnswering.from_pretrained(".")',
        'question, context = "Who wrote it?", "Somebody wrote it. " * 1000',
        "windows = tokenizer(",
        '    question, context, truncation="only_second", return_overflowing_tokens=True,',
        f"    max_length={task.max_length}, stride={task.overlap}, padding=True,",
        '    return_tensors="pt",',
        ")",
        'del windows["overflow_to_sample_mapping"]',
        "logits, best = model(**windows).to_tuple()[:2], (float('-inf'), 0, 0)",
        "found = [of_side.tolist() for of_side in logits]",
        "for starts, ends, window in zip(*found, windows.encodings):",
        "    tokens = [i for i, part in enumerate(window.sequence_ids) if part == 1]",
        "    for i in tokens:",
        f"        near = [j for j in tokens if i <= j < i + {task.max_answer_length}]",
        "        j = max(near, key=lambda j: ends[j])",
        "        score = starts[i] + ends[j]",
        "        best = max(best, (score, window.offsets[i][0], window.offsets[j][1]))",
        "print(context[best[1]:best[2]])",
    ]


ENTRY = TaskEntry(
    name="extractive-qa",
    settings=ExtractiveQA,
    implementation="ds_distill.tasks.extractive_qa:ExtractiveQAKind",
    needs=Needs(same_tokens=True),
    over="answers",
    heads=("ForQuestionAnswering",),
    noun="model for extractive questions",
    checks_model="ds_distill.models.configuration:check_question_answerer",
    pipeline="question-answering",
    imports="AutoModelForQuestionAnswering, AutoTokenizer",
    usage=_usage,
)
