"""The task of giving each word of a text a tag."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_distill.recipe.entry import TaskEntry
from ds_distill.recipe.metrics import one_metric
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.metrics.words import EntityF1
from ds_distill.recipe.tasks.base import COMPARED, Predicts, Rows
from ds_distill.recipe.tasks.labelled import LabelledTask
from ds_distill.recipe.tasks.words import WordTask


class TokenClassification(WordTask, LabelledTask):
    """Give each word a tag, such as that of the entity it is part of. A row is a list of words and
    a list of tags; the labels are the tags. A word is read at its first token, so teachers and
    student meet on words, whatever their tokenizers are. One that has no token in some model's view
    teaches nothing, and is predicted O in every score. A text too long for `max_length` is read in
    windows that share a quarter of their words; a word counts where it has most around it."""

    rows: ClassVar[Rows] = "words"
    predicts: ClassVar[Predicts] = "tag"

    type: Literal["token-classification"] = "token-classification"
    max_length: Annotated[int, Field(ge=8, le=4096)] = 128
    """Tokens of a window at most, in every model's view; a text that fits is one."""
    subwords: Literal["first", "all"] = "first"
    """The tokens of a word that fine-tune phases train on its tag (Rohanian et al. 2022: all).
    Teachers and student meet at first ones, and predictions and scores are of these, either way."""
    metric: Annotated[MetricSettings, one_metric("words"), COMPARED] = EntityF1.Settings()


class Untagged(TokenClassification):
    """The same without reading the tags."""

    predicts: ClassVar[Predicts] = "nothing"


def _usage(task: TokenClassification, pairs: bool) -> list[str]:
    return [
        'tag = pipeline("token-classification", model=".", aggregation_strategy="first")',
        f"tag.tokenizer.model_max_length = {task.max_length}  # it reads long texts in windows",
        f'tag("a text of any length " * 1000, stride={task.overlap})',
    ]


ENTRY = TaskEntry(
    name="token-classification",
    settings=TokenClassification,
    implementation="ds_distill.tasks.token_classification:TokenClassificationKind",
    over="words",
    heads=("ForTokenClassification",),
    noun="token classifier",
    checks_model="ds_distill.models.configuration:check_token_classifier",
    pipeline="token-classification",
    usage=_usage,
)
