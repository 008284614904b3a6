"""The kinds of task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from jinja2 import Template
from pydantic import Field, PrivateAttr, field_validator, model_validator

from ds_distill.recipe.data import Columns, Data
from ds_distill.recipe.metrics import METRICS, one_metric
from ds_distill.recipe.metrics.answers import SquadF1
from ds_distill.recipe.metrics.characters import CharacterF1
from ds_distill.recipe.metrics.classes import Accuracy, MicroF1
from ds_distill.recipe.metrics.metric import MetricClass, MetricSettings, Over
from ds_distill.recipe.metrics.numbers import Pearson
from ds_distill.recipe.metrics.words import EntityF1
from ds_distill.recipe.part import Needs, OneOf, Part
from ds_distill.recipe.section import Count, Section
from ds_distill.recipe.tags import SPAN_TAGS

TASKS: dict[str, type[TaskSettings]] = {}
"""A recipe's `task.type` -> the kind of task."""

Rows = Literal["text", "words", "question"]
"""What a row of data is: a text or a pair of them; a list of words; a question about a context."""


COMPARED = Field(
    description="What models are compared and chosen by: a metric's name, or its settings. "
    "Evaluations report\nothers too."
)


class TaskSettings(Part):
    """Settings of a task. What other code asks of a task it asks here or of what it runs, a
    `ds_distill.tasks.TaskKind`, and not of its kind."""

    kind_of_part, key, table = "task", "type", TASKS

    rows: ClassVar[Rows] = "text"
    """What a row of its data is."""

    reads_labels: ClassVar[bool] = True
    """Whether what models learn is a column of the data, and not the texts' own tokens."""
    asks: ClassVar[bool] = False
    """Whether its labels are answers to a question about a context."""
    of_words: ClassVar[bool] = False
    """Whether models predict a class of each word, and not of the example."""
    many_labels: ClassVar[bool] = False
    """Whether an example has any number of the labels, and not one class."""
    numbers: ClassVar[bool] = False
    """Whether models predict numbers, and no distributions."""
    of_vocabulary: ClassVar[bool] = False
    """Whether models predict tokens: distributions over a vocabulary, which a cache keeps by a
    codec."""
    ragged: ClassVar[bool] = False
    """Whether a row's classes are the tokens of its window, so that rows have unlike numbers of
    them. Each window has two rows, an answer's start and its end."""

    over: ClassVar[Over]
    """What its metrics are over."""
    heads: ClassVar[tuple[str, ...]]
    """Endings of the names of transformers' classes that have a head for it, its own first."""
    noun: ClassVar[str]
    """What a model with such a head is called."""
    outputs: ClassVar[int | None] = None
    """How many outputs the head has, where the task's labels do not say."""
    problem: ClassVar[str | None] = None
    """transformers' `problem_type` of a model with such a head, where it has one."""
    other_problems: ClassVar[Sequence[str]] = ()
    """Others' whose outputs cannot be read as this task's."""
    label_term: ClassVar[str] = "cross_entropy"
    """The term by which a model is fine-tuned on labels where the recipe names none."""
    checks_model: ClassVar[str | None] = None
    """`module:name` of a function (reference, config, tokenizer) that raises UserError for a model
    that cannot have such a head."""
    pipeline: ClassVar[str]
    """The pipeline of transformers that a model of it runs in."""
    usage_of: ClassVar[str]
    """The template of `usage`: a file of the folder of that name beside this one, or its path."""

    _location: str = PrivateAttr("task")

    def usage(self, pairs: bool) -> str:
        """Python that uses a student in its folder. pairs: whether its examples are pairs of
        texts."""
        file = Path(__file__).with_name("usage") / self.usage_of
        template = Template(file.read_text(encoding="utf-8"))
        return template.render(task=self, pairs=pairs, letter=LETTER_WITHOUT_BLANKS)

    @property
    def given_labels(self) -> list[str] | None:
        """Label names in the order of the class ids; none where neither examples nor words have
        classes, and None where the data say which."""
        return []

    @property
    def has_classes(self) -> bool:
        """Whether examples or words have classes."""
        return self.given_labels != []

    def lacks(self, needs: Needs) -> tuple[str, str] | None:
        """What a part does that such a task has nothing for, and what the task has; None where the
        part is for such tasks."""
        if needs.classes and not self.has_classes:
            return "works by class", "has no classes"
        if needs.distributions and self.numbers:
            return "is of distributions over classes or tokens", "has numbers in their place"
        if needs.every_token and not self.of_vocabulary:
            return "is of every token of a text", "has other rows: what its labels are of"
        if needs.numbers and not self.numbers:
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
        return {} if named == Columns() else {"columns": self._text_columns(named)}

    def _text_columns(self, named: Columns) -> list[list[str]]:
        return [[named.text, *filter(None, [named.text_b])]]

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


class LabelledTask(TaskSettings):
    """A task of texts, or pairs of texts, with labels."""

    labels: list[str] | None = None
    """Label names in the order of the class ids. Default: what the data declare
    (labels.json in the folder, the hub's features), else the sorted names in train."""

    @property
    def given_labels(self) -> list[str] | None:
        return self.labels or None

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: list[str] | None) -> list[str] | None:
        if labels is not None:
            if len(labels) < 2:
                raise ValueError("needs at least two labels")
            repeated = {label for label in labels if labels.count(label) > 1}
            if repeated:
                raise ValueError(f"label {sorted(repeated)[0]!r} stands twice")
        return labels


class Classifier(LabelledTask):
    """A task whose models classify a text."""

    heads, noun, pipeline = ("ForSequenceClassification",), "classifier", "text-classification"
    usage_of = "text-classification.jinja"


class SingleLabel(Classifier):
    """Classify texts, or pairs of texts; each has one label."""

    runs, over = "ds_distill.tasks.labelled:SingleLabelKind", "classes"
    problem, other_problems = "single_label_classification", ("regression",)

    type: Literal["single-label"] = "single-label"
    metric: Annotated[MetricSettings, one_metric("classes"), COMPARED] = Accuracy.Settings()


class MultiLabel(Classifier):
    """Classify texts, or pairs of texts; each has any number of labels. A row's labels are a list,
    which may be empty. What a teacher knows is known for each label."""

    runs, over, many_labels = "ds_distill.tasks.labelled:MultiLabelKind", "labels", True
    problem = "multi_label_classification"
    other_problems = ("single_label_classification", "regression")

    type: Literal["multi-label"] = "multi-label"
    metric: Annotated[MetricSettings, one_metric("labels"), COMPARED] = MicroF1.Settings()


class Regression(TaskSettings):
    """Predict a number of each text, or pair of texts, such as how alike two are. A row's label is
    a finite number; models have one output, which is the number itself."""

    runs, over, numbers = "ds_distill.tasks.labelled:RegressionKind", "numbers", True
    heads, noun, pipeline = (
        ("ForSequenceClassification",),
        "regression model",
        "text-classification",
    )
    outputs, problem, label_term = 1, "regression", "mse"
    usage_of = "text-classification.jinja"

    type: Literal["regression"] = "regression"
    metric: Annotated[MetricSettings, one_metric("numbers"), COMPARED] = Pearson.Settings()


LETTER_WITHOUT_BLANKS = (
    r"[\p{Han}\p{Hiragana}\p{Katakana}\x{3006}\x{30FC}\x{FF70}"
    r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}&&[^\p{M}\p{Nd}]][\p{M}\p{Cf}\x{FF9E}\x{FF9F}]*"
)
"""Of the `tokenizers` library: a letter of a script that is written without blanks, with the marks
that stand on it. Each is a word, because where words end there is for a dictionary to say. The
characters that are named one by one belong to kana, and Unicode has them as common to several
scripts. Digits stay together."""


class WordTask(TaskSettings):
    """A task that has a row for each word, and reads what is too long in windows of words."""

    of_words = True
    heads, noun, pipeline = ("ForTokenClassification",), "token classifier", "token-classification"
    checks_model = "ds_distill.models.configuration:check_token_classifier"

    @property
    def cuts(self) -> bool:
        return False

    @property
    def overlap(self) -> int:
        """Of windows that hold as many words as tokens, which is the most there can be."""
        return self.max_length // 4

    @property
    def row_share(self) -> float:
        """Tokenizers make 1.2 to 1.5 tokens of an English word (measured on the NER sets). Those
        of a question, which are no rows, are few."""
        return 0.75


class TokenClassification(WordTask, LabelledTask):
    """Give each word a tag, such as that of the entity it is part of. A row is a list of words and
    a list of tags; the labels are the tags. A word is read at its first token, so teachers and
    student meet on words, whatever their tokenizers are. One that has no token in some model's view
    teaches nothing, and is predicted O in every score. A text too long for `max_length` is read in
    windows that share a quarter of their words; a word counts where it has most around it."""

    rows = "words"
    runs, over = "ds_distill.tasks.labelled:TokenClassificationKind", "words"
    usage_of = "token-classification.jinja"

    type: Literal["token-classification"] = "token-classification"
    max_length: Annotated[int, Field(ge=8, le=4096)] = 128
    """Tokens of a window at most, in every model's view; a text that fits is one."""
    subwords: Literal["first", "all"] = "first"
    """The tokens of a word that fine-tune phases train on its tag (Rohanian et al. 2022: all).
    Teachers and student meet at first ones, and predictions and scores are of these, either way."""
    metric: Annotated[MetricSettings, one_metric("words"), COMPARED] = EntityF1.Settings()

    def _text_columns(self, named: Columns) -> list[list[str]]:
        return [[named.tokens], *super()._text_columns(named)]


class Untagged(TokenClassification):
    """The same without reading the tags."""

    reads_labels = False


class QuestionTask(TaskSettings):
    """A task of questions, each about a context."""

    rows, asks = "question", True

    def _text_columns(self, named: Columns) -> list[list[str]]:
        return [[named.question, named.context]]


class CharacterSpans(QuestionTask, WordTask):
    """Find all that answers a question in its context: any number of spans of its characters, also
    none. Each word of the context is in an answer or not, and is read at its first token, so
    teachers and student meet on words, whatever their tokenizers are. A run of words in an answer
    is a predicted span, and scores are of characters. A context too long for `max_length` is read
    in windows that share a quarter of their words; a word counts where it has most around it. One
    that has no token in some model's view teaches nothing, and is in no predicted span."""

    runs, over = "ds_distill.tasks.labelled:CharacterSpansKind", "characters"
    usage_of = "character-spans.jinja"

    type: Literal["character-spans"] = "character-spans"
    max_length: Annotated[int, Field(ge=32, le=4096)] = 384
    """Tokens of a window at most, the question's included, in every model's view. A question that
    is longer than half of it is cut."""
    metric: Annotated[MetricSettings, one_metric("characters"), COMPARED] = CharacterF1.Settings()

    @property
    def given_labels(self) -> list[str]:
        """The tags of words, which no recipe chooses."""
        return list(SPAN_TAGS)


class ExtractiveQA(QuestionTask):
    """Find the answer to a question in its context: a span of its characters. A context too long
    for `max_length` is read in windows that overlap. A window has two rows, the answer's start and
    its end, whose classes are the tokens of its context, so all models must have the same
    tokenizer. The window's first token stands for `no answer in this window`."""

    runs, over, ragged = "ds_distill.tasks.extractive_qa:ExtractiveQAKind", "answers", True
    needs = Needs(same_tokens=True)
    heads, noun = ("ForQuestionAnswering",), "model for extractive questions"
    checks_model = "ds_distill.models.configuration:check_question_answerer"
    pipeline = "question-answering"
    usage_of = "extractive-qa.jinja"

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


class MaskSettings(Section):
    """Which tokens are masked. A token that a teacher does not know always is, and shown as the
    mask token (VE-KD)."""

    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of the tokens that are masked, special tokens apart."""
    shown: Literal["bert", "mask"] = "bert"
    """What the masked ones are shown as. `bert`: 80% as the mask token, 10% as a random token and
    10% as they are; `mask`: all as the mask token."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """A seed of its own, so that runs with different `seed`s can share a cache."""
    variants: Count | None = None
    """How many masked variants of each example there are: epoch e takes number e mod variants. A
    cache needs it, and stores them all. Default: every epoch has its own."""


class MaskedLM(TaskSettings):
    """Predict the masked tokens of a text. Needs no labels; the cross_entropy term's label is the
    token that was masked. All models must have the same tokens;
    rows of embeddings that pad a vocabulary, to a multiple of 64 in ModernBERT, do not count."""

    reads_labels, of_vocabulary = False, True
    runs, over = "ds_distill.tasks.masked_lm:MaskedLMKind", "masked tokens"
    usage_of = "fill-mask.jinja"
    needs = Needs(same_tokens=True)
    heads, noun, pipeline = ("ForMaskedLM", "BertForPreTraining"), "masked-LM", "fill-mask"
    checks_model = "ds_distill.models.configuration:check_masked_lm"

    type: Literal["masked-lm"] = "masked-lm"
    long: Literal["split", "cut"] = "cut"
    """What becomes of texts longer than `max_length`: `split` makes windows of them, each an
    example of its own; `cut` throws the rest away."""
    masking: MaskSettings = MaskSettings()
    metric: Annotated[MetricSettings, one_metric("masked tokens"), COMPARED] = Accuracy.Settings()

    @property
    def cuts(self) -> bool:
        return self.long == "cut"

    @property
    def row_share(self) -> float:
        return self.masking.rate

    @property
    def variants(self) -> int:
        return self.masking.variants or 1

    def not_cacheable(self) -> str | None:
        if self.masking.variants is not None:
            return None
        return (
            f"a cache holds a number of mask variants of each example. Set {self.location}.masking."
            "variants, e.g. to the number of epochs: epoch e takes number e mod variants."
        )


def metric_of(task: TaskSettings) -> MetricClass:
    """The class of a task's metric."""
    return METRICS[task.over][task.metric.name]


Task = Annotated[TaskSettings, OneOf("task", "type", TASKS, default="single-label")]


_SPLITS = ".data.splits."


def key_of(task: Task, key: str) -> str:
    """A key of a task, `data.path`, as the recipe has it: `task.data.path`; of one of several tasks
    `tasks.NAME.data.path`; of one that reads a split from other data, which it knows as train,
    `task.data.splits.NAME.path`."""
    location = task.location
    if key == "type" or _SPLITS not in location:
        return f"{location.partition(_SPLITS)[0]}.{key}"
    return f"{location}.{'split' if key == 'data.splits.train' else key.removeprefix('data.')}"


def labels_named(task: Task) -> str:
    """How the recipe would name the labels of a task."""
    key = key_of(task, "labels")
    return f"{key}={{THEIRS: OURS}}" if _SPLITS in task.location else f"{key}=[A, B]"
