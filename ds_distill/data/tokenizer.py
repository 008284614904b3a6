"""Read what somebody else has saved, whose folder is not trusted; load tokenizers, tell which of
them are alike, and how many tokens texts have. Imports no torch."""

from __future__ import annotations

import json
import os
from typing import Any
from weakref import WeakKeyDictionary

import datasets
import numpy as np
import xxhash
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from ds_distill.data.columns import example_keys
from ds_distill.errors import UserError, first_line
from ds_distill.keys import hash_keys
from ds_distill.process.activity import mark

# Code in a model's folder is never run.
SAFE: dict[str, Any] = {"trust_remote_code": False}


class Unreachable(UserError):
    """A model whose configuration cannot be read."""

    def __init__(self, reference: str, reason: str) -> None:
        self.reference = reference
        super().__init__(
            f"its configuration cannot be read: {reason} Use a hub id that can be reached, a local "
            "folder, or pkg:PACKAGE/FOLDER.",
            at=f"model {reference!r}",
        )


def check_nodes(reference: str) -> None:
    """Raises UserError where something in a model's folder is neither a file nor a folder, such as
    a pipe, which would be waited for without end. Links are followed: the hub's cache is of
    them."""
    if not os.path.isdir(reference):
        return
    for entry in os.scandir(reference):
        if not (os.path.isfile(entry.path) or os.path.isdir(entry.path)):  # False for a loop
            what = "a link to nothing" if entry.is_symlink() else "no regular file"
            raise UserError(f"{entry.path}: is {what}. Remove it, or copy the model again.")


def unreadable(reference: str, what: str, error: BaseException) -> UserError:
    if "trust_remote_code" in str(
        error
    ):  # transformers advises it, but recipes have no such option
        return UserError(
            f"model {reference!r}: its {what} needs Python code from its own folder (`auto_map`), "
            "which is never run. Use a model type that transformers itself has."
        )
    if isinstance(error, RecursionError):
        return UserError(
            f"model {reference!r}: its {what} cannot be read: a JSON file is nested too deeply. "
            "Copy the model again."
        )
    if what == "configuration":
        return Unreachable(reference, first_line(error))
    return UserError(f"model {reference!r}: its {what} cannot be read: {first_line(error)}")


def load_tokenizer(
    reference: str, revision: str | None = None, *, of_words: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved reference.

    of_words: for lists of words. RoBERTa's then sets a space before each, as in a text; without it
        makes 18% more tokens of them, others than those it was pre-trained with (measured on the
        NER sets: 1.43 tokens a word instead of 1.21).

    Raises UserError when it cannot be read, or cuts words in a list otherwise than in a text.
    """

    def load(**options: Any) -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(reference, revision=revision, **options, **SAFE)
        except Exception as error:  # tokenizers raises plain Exception
            raise unreadable(reference, "tokenizer", error) from error

    check_nodes(reference)
    tokenizer = load()
    limit, least = tokenizer.model_max_length, tokenizer.num_special_tokens_to_add(pair=True) + 1
    if not isinstance(limit, int | float) or not limit >= least:
        raise UserError(
            f"model {reference!r}: its tokenizer_config.json has model_max_length={limit}, and a "
            f"number of tokens from {least} is possible. Correct it, or take it out."
        )
    tokenizer.model_max_length = int(min(limit, VERY_LARGE_INTEGER))
    tokenizer.padding_side = "right"  # as batches are padded in training
    if of_words and not _cuts_as_in_text(tokenizer):
        tokenizer = load(add_prefix_space=True)
        if not _cuts_as_in_text(tokenizer):
            raise UserError(
                f"model {reference!r}: its tokenizer ({type(tokenizer).__name__}) cuts a word of a "
                "list otherwise than in a text, also with add_prefix_space, so what it was "
                "pre-trained on does not help here. Use another model for a task of words."
            )
    return tokenizer


def _cuts_as_in_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether words in a list are cut as between blanks in a text."""
    words = ["the", "word"]
    in_list = tokenizer(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    in_text = tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
    last = in_text[1:]  # the first word has no blank before it
    return bool(in_list[len(in_list) - len(last) :] == last)


def check_vocabulary(
    reference: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises UserError for an empty tokenizer, or one with ids beyond the embeddings."""
    # transformers silently makes an empty tokenizer where the vocabulary is missing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"model {reference!r}: its tokenizer has only {len(tokenizer)} special tokens: the "
            "vocabulary (tokenizer.json, vocab.txt or the like) is missing. Put it in the model's "
            "folder."
        )
    tokens = token_count(tokenizer)
    if tokens > config.vocab_size:
        raise UserError(
            f"model {reference!r}: its tokenizer has {tokens} tokens, but its embeddings "
            f"only {config.vocab_size}. The tokenizer files belong to another model: put the right "
            "ones in its folder."
        )


def token_count(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than its largest id: rows of a model's embeddings from there on are padding."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def same_tokens(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers give the same ids for every text. Their models may take
    different other inputs, like BERT and DistilBERT."""
    return tokens_fingerprint(first) == tokens_fingerprint(second)


def tokens_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits that are the same for tokenizers that split texts into the same tokens."""
    return _fingerprint(tokenizer, tokenizer.special_tokens_map, tokenizer.truncation_side)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same, and different for models that take different inputs with these tokens."""
    names, side = tokenizer.model_input_names, tokenizer.truncation_side
    return _fingerprint(tokenizer, tokenizer.special_tokens_map, names, side)


def _fingerprint(tokenizer: PreTrainedTokenizerBase, *settings: Any) -> str:
    """Of a tokenizer's rules, which are read once: those of a large vocabulary take a second."""
    rest = json.dumps(settings, sort_keys=True, default=str)
    known = _FINGERPRINTS.setdefault(tokenizer, {})
    key = (len(tokenizer), rest)
    if key not in known:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
        for setting in ("truncation", "padding"):  # settings of the last call
            rules.pop(setting, None)
        every = json.dumps(rules, sort_keys=True, default=str)
        known[key] = xxhash.xxh3_64_hexdigest(f"[{every}, {rest[1:]}".encode())
    return known[key]


_FINGERPRINTS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, str], str]] = (
    WeakKeyDictionary()
)


# ----------------------------------------------------------------------------------------- lengths


SAMPLE = 1_000
"""Examples of which `share_cut` reads no more."""

_SAMPLED = 110
"""Purpose of hashes: which examples these are."""


def token_lengths(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str] | list[list[str]],
    texts_b: list[str] | None = None,
) -> np.ndarray:
    """Tokens of each text, list of words, or pair of texts, uncut: int64 [N]."""
    encoded = tokenizer(
        texts,
        texts_b,
        is_split_into_words=bool(texts) and isinstance(texts[0], list),
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning of what is longer than the model's maximum
    )
    return np.array([len(ids) for ids in encoded["input_ids"]], dtype=np.int64)


BEGINNING = 10_000
"""Characters of a text, or words of a list, that are tokenised to know its length: the rest counts
as many tokens. A text of 20 MB took 20 s."""


def example_lengths(examples: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Tokens of each example, uncut: int64 [N]; of long ones as their beginnings have."""
    columns = examples.column_names
    first = examples["words" if "words" in columns else "text"][:]
    second = examples["text_b"][:] if "text_b" in columns else None
    begun, size = [text[:BEGINNING] for text in first], np.array([len(text) for text in first])
    read = np.minimum(size, BEGINNING)
    if second is not None:
        sizes = np.array([len(text) for text in second])
        size, read = size + sizes, read + np.minimum(sizes, BEGINNING)
    begun_b = None if second is None else [text[:BEGINNING] for text in second]
    lengths = token_lengths(tokenizer, begun, begun_b)
    return np.asarray(lengths * size // np.maximum(read, 1))


def share_cut(
    examples: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> float:
    """The share of the tokens that are thrown away where examples are cut at `max_length`; of a
    sample, if there are many.

    examples: columns as of `Source.read`.
    """
    hashes = hash_keys(example_keys(examples), _SAMPLED)
    sample = examples.select(np.sort(np.argsort(hashes, kind="stable")[:SAMPLE]))
    mark("counts the tokens of a sample")
    lengths = example_lengths(sample, tokenizer)
    total = int(lengths.sum())
    return float(np.maximum(lengths - max_length, 0).sum() / total) if total else 0.0
