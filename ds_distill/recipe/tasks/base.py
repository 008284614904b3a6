"""What the settings of all tasks have."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr

from ds_distill.recipe.data import Columns, Data
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.section import Section


class TaskSettings(Section):
    """Settings of a task. What other code asks of a task it asks here, of its entry or of its
    implementation, and not of its kind."""

    has_classes: ClassVar[bool]
    """Whether each example has a class: expertise tables, experts and class logits make sense."""

    many_labels: ClassVar[bool] = False
    """Whether an example has any number of classes, instead of one."""

    of_words: ClassVar[bool] = False
    """Whether an example is a list of words, and each word has a class, instead of the example."""

    has_numbers: ClassVar[bool] = False
    """Whether an example's label is a number, and models predict one: there are no classes then."""

    over_vocabulary: ClassVar[bool] = False
    """Whether models predict distributions over a vocabulary, which a cache keeps by a codec."""

    of_questions: ClassVar[bool] = False
    """Whether an example is a question about a context, and its labels are spans of that. With
    `of_words` they are any number of spans, and each word of the context has a class. Else it is
    one: the classes of a row are the tokens of a window, so that rows have unlike numbers of
    them."""

    can_split: ClassVar[bool] = False
    """Whether `long: split` can be set."""

    _location: str = PrivateAttr("task")

    @property
    def has_labels(self) -> bool:
        """Whether the labels of rows are read."""
        return self.has_classes or self.has_numbers or self.of_questions

    @property
    def of_texts(self) -> bool:
        """Whether what is predicted is of a whole text: models are sequence classifiers."""
        return not (self.of_words or self.of_questions or self.over_vocabulary)

    @property
    def given_labels(self) -> list[str] | None:
        """Label names in the order of the class ids, where the recipe gives them."""
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
        if self.of_questions:
            return {"columns": [[named.question, named.context]]}
        texts = [[named.text, *filter(None, [named.text_b])]]
        return {"columns": [[named.tokens], *texts] if self.of_words else texts}

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
    metric: MetricSettings = Accuracy.Settings()
    """What models are compared and chosen by: a metric's name, or its settings. Evaluations report
    others too."""
