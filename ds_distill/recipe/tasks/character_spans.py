"""The task of finding any number of spans of a text."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_distill.recipe.entry import TaskEntry
from ds_distill.recipe.metrics import one_metric
from ds_distill.recipe.metrics.characters import CharacterF1
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.tags import SPAN_TAGS
from ds_distill.recipe.tasks.base import COMPARED, Predicts, Rows
from ds_distill.recipe.tasks.words import LETTER_WITHOUT_BLANKS, WordTask


class CharacterSpans(WordTask):
    """Find all that answers a question in its context: any number of spans of its characters, also
    none. Each word of the context is in an answer or not, and is read at its first token, so
    teachers and student meet on words, whatever their tokenizers are. A run of words in an answer
    is a predicted span, and scores are of characters. A context too long for `max_length` is read
    in windows that share a quarter of their words; a word counts where it has most around it. One
    that has no token in some model's view teaches nothing, and is in no predicted span."""

    rows: ClassVar[Rows] = "question"
    predicts: ClassVar[Predicts] = "tag"

    type: Literal["character-spans"] = "character-spans"
    max_length: Annotated[int, Field(ge=32, le=4096)] = 384
    """Tokens of a window at most, the question's included, in every model's view. A question that
    is longer than half of it is cut."""
    metric: Annotated[MetricSettings, one_metric("characters"), COMPARED] = CharacterF1.Settings()

    @property
    def given_labels(self) -> list[str]:
        """The tags of words, which no recipe chooses."""
        return list(SPAN_TAGS)


def _usage(task: CharacterSpans, pairs: bool) -> list[str]:
    """transformers' pipeline takes one text: the words in answers, by hand."""
    return [
        "from tokenizers import Regex, pre_tokenizers",
        "",
        f"letter = Regex(r'{LETTER_WITHOUT_BLANKS}')",
        'alone = pre_tokenizers.Split(letter, "isolated")',
        "both = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), alone])",
        "cut = both.pre_tokenize_str",
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        'model = AutoModelForTokenClassification.from_pretrained(".")',
        'question, context = "Who wrote it?", "Somebody wrote it. " * 1000',
        "words = cut(context)",
        "windows = tokenizer(",
        "    [word for word, _ in cut(question)], [word for word, _ in words],",
        '    is_split_into_words=True, truncation="only_second", return_overflowing_tokens=True,',
        f"    max_length={task.max_length}, stride={task.overlap}, padding=True,",
        '    return_tensors="pt",',
        ")",
        'del windows["overflow_to_sample_mapping"]',
        "inside = {}  # by the first token of each word",
        "tags = model(**windows).logits.argmax(dim=2).tolist()",
        "for of_tokens, window in zip(tags, windows.encodings):",
        "    for token, part in enumerate(window.sequence_ids):",
        "        if part == 1:",
        "            inside.setdefault(window.word_ids[token], of_tokens[token])",
        "print([word for number, (word, _) in enumerate(words) if inside.get(number)])",
    ]


ENTRY = TaskEntry(
    name="character-spans",
    settings=CharacterSpans,
    implementation="ds_distill.tasks.character_spans:CharacterSpansKind",
    over="characters",
    heads=("ForTokenClassification",),
    noun="token classifier",
    checks_model="ds_distill.models.configuration:check_token_classifier",
    pipeline="token-classification",
    imports="AutoModelForTokenClassification, AutoTokenizer",
    usage=_usage,
)
