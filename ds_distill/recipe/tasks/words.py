"""What the settings of tasks of words have."""

from __future__ import annotations

from ds_distill.recipe.tasks.base import TaskSettings

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
