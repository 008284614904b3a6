"""What the settings of all tasks have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from ds_distill.recipe.data import Columns, Data
from ds_distill.recipe.entry import Needs
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.section import Section

Rows = Literal["text", "words", "question"]
"""What a row of data is: a text or a pair of them; a list of words; a question about a context."""

Predicts = Literal["class", "labels", "number", "tag", "span", "token", "nothing"]
"""What models predict: one class of an example; any number of its labels; a number; a tag of each
word, of a text or of a question's context; start and end of one span of the context, each over the
tokens of a window; hidden tokens, each as a distribution over the vocabulary, which a cache keeps
by a codec. Nothing: the data are read without their labels."""


COMPARED = Field(
    description="What models are compared and chosen by: a metric's name, or its settings. "
    "Evaluations report\nothers too."
)


class TaskSettings(Section):
    """Settings of a task. What other code asks of a task it asks here, of its entry or of its
    implementation, and not of its kind."""

    rows: ClassVar[Rows]
    """What a row of its data is."""

    predicts: ClassVar[Predicts]
    """What models predict."""

    _location: str = PrivateAttr("task")

    @property
    def given_labels(self) -> list[str] | None:
        """Label names in the order of the class ids; none where neither examples nor words have
        classes, and None where the data say which."""
        return None if self.predicts in ("class", "labels", "tag") else []

    def lacks(self, needs: Needs) -> tuple[str, str] | None:
        """What a part does that such a task has nothing for, and what the task has; None where the
        part is for such tasks."""
        if needs.classes and self.given_labels == []:
            return "works by class", "has no classes"
        if needs.distributions and self.predicts == "number":
            return "is of distributions over classes or tokens", "has numbers in their place"
        if needs.every_token and self.predicts != "token":
            return "is of every token of a text", "has other rows: what its labels are of"
        if needs.numbers and self.predicts != "number":
            return "is of numbers", "has none: models predict distributions"
        return None

    @property
    def cuts(self) -> bool:
        """Whether what is longer than `max_length` is thrown away."""
        return True

    @property
    def overlap(self) -> int:
        """Tokens of a window of a long text that stand in the window before it, too."""
        return 0

    @property
    def reading(self) -> dict[str, Any]:
        """How a student of it is read, beside `max_length`, where that is not always the same: JSON
        values that travel with it, under the names of transformers' pipelines where they have
        them. `columns`: those that hold an example's texts, the first that are in a file."""
        named = self.data.columns
        if named == Columns():
            return {}
        if self.rows == "question":
            return {"columns": [[named.question, named.context]]}
        texts = [[named.text, *filter(None, [named.text_b])]]
        return {"columns": [[named.tokens], *texts] if self.rows == "words" else texts}

    @property
    def row_share(self) -> float | None:
        """The share of an example's tokens that are rows of the loss; None: the example is one."""
        return None

    @property
    def variants(self) -> int:
        """How many different rows of each example a cache holds."""
        return 1

    def not_cacheable(self) -> str | None:
        """Why no cache can hold teachers' signals, and what to do; None where one can."""
        return None

    @property
    def location(self) -> str:
        """Where it stands in its recipe, for messages: `task`, or `tasks.NAME`."""
        return self._location

    def stands_at(self, location: str) -> None:
        """The recipe says where, once it has been read."""
        self._location = location

    type: str
    data: Data
    """Where the examples come from."""
    max_length: Annotated[int, Field(ge=8, le=4096)] = 128
    """Longest input in tokens of each model; what is longer is cut."""
    metric: Annotated[MetricSettings, COMPARED] = Accuracy.Settings()
