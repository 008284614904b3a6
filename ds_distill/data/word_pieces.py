"""A WordPiece vocabulary that grows by a corpus's words. Imports no torch.

VE-KD (Gao et al. 2024), section 3.1: tokens of a vocabulary that is trained on the domain's text
and that the general model lacks are added to its own. Old tokens keep their ids, so that the old
vocabulary is a prefix of the new one.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece
from tokenizers.trainers import WordLevelTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerBase

from ds_distill.errors import UserError

CONTINUES = "##"
"""WordPiece's mark of a piece that does not begin a word."""


LEAST = 2
"""How often a piece must occur to become a token, as in the training of BERT's vocabulary."""


def expand_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    size: int,
    known: int,
    share: float | None = None,
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """A tokenizer with more words, and the new tokens in the order of their ids.

    A text in which no new token occurs keeps its ids, and none gets more unknown tokens.

    texts: the corpus, gone through twice; a vocabulary of `size` is trained on it by the
        tokenizer's own rules, and its tokens that are not there yet are added in its order.
    size: tokens and rows in all; fewer where the corpus has no more words.
    known: rows of the model's embeddings: new ids begin there. The tokenizer may have fewer
        tokens; the ids between belong to no text.
    share: of the corpus's words, the share that shall be one token each; no token is added beyond
        that.

    Raises UserError for a tokenizer that is not of WordPiece, and where so many words are one token
    already.
    """
    rules = rules_of_word_pieces(tokenizer)
    vocabulary: dict[str, int] = rules["model"]["vocab"]
    kept = tokenizer.get_vocab()
    trained = _trained(rules, tokenizer.all_special_tokens, texts, size)
    lacking = _lacking_characters(kept)
    wanted = dict.fromkeys([*lacking, *trained])
    found = [token for token in wanted if token not in kept][: max(size - known, 0)]
    if share is not None:
        enough = _tokens_for(share, rules, texts, kept, found)
        found = found[: max(enough, len(lacking))]
    # So that the tokenizer's length is one more than its largest id, as libraries take it.
    for number in range(max(kept.values()) + 1, known):
        vocabulary[f"[unused row {number}]"] = number
    vocabulary |= {token: known + number for number, token in enumerate(found)}
    expanded = copy.deepcopy(tokenizer)
    expanded._tokenizer = Tokenizer.from_str(json.dumps(rules))
    return expanded, found


def _trained(
    rules: dict[str, Any], special: list[str], texts: Iterable[str], size: int
) -> list[str]:
    """The vocabulary of a corpus, in its order, equal in each call."""
    same = Tokenizer.from_str(json.dumps(rules))
    words = Tokenizer(WordLevel())
    words.normalizer, words.pre_tokenizer = same.normalizer, same.pre_tokenizer
    every = WordLevelTrainer(vocab_size=2**31, min_frequency=1, show_progress=False)
    words.train_from_iterator(texts, every)
    # The trainer numbers these as it meets them, in an order that is not that of the last call,
    # and merges pieces that are as frequent by their numbers.
    within = {character for word in words.get_vocab() for character in word[1:]}
    pieces = Tokenizer(WordPiece())
    pieces.normalizer, pieces.pre_tokenizer = same.normalizer, same.pre_tokenizer
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=LEAST,
        special_tokens=[*special, *(CONTINUES + one for one in sorted(within))],
        show_progress=False,
    )
    pieces.train_from_iterator(texts, trainer)
    found = pieces.get_vocab()
    return sorted(found, key=found.__getitem__)


def _tokens_for(
    share: float,
    rules: dict[str, Any],
    texts: Iterable[str],
    kept: dict[str, int],
    found: list[str],
) -> int:
    """How many of the found tokens make this share of the words one token each; all, where they are
    too few."""
    same = Tokenizer.from_str(json.dumps(rules))
    words: Counter[str] = Counter()
    for text in texts:
        plain = same.normalizer.normalize_str(text) if same.normalizer else text
        words.update(word for word, _ in same.pre_tokenizer.pre_tokenize_str(plain))
    wanted = share * words.total()
    covered = sum(count for word, count in words.items() if word in kept)
    if covered >= wanted:
        raise UserError(
            f"{covered / max(1, words.total()):.1%} of the text's words are one token each before "
            f"any is added, and the share to reach is {share:.1%}. Set a larger share, or none."
        )
    for number, token in enumerate(found):
        if covered >= wanted:
            return number
        covered += words[token]
    return len(found)


def rules_of_word_pieces(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a WordPiece tokenizer's file says. Raises UserError for another one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    kind = rules["model"].get("type", "of Python")
    if kind != "WordPiece" or rules["model"]["continuing_subword_prefix"] != CONTINUES:
        raise UserError(
            f"the tokenizer ({type(tokenizer).__name__}) is {kind}, and only a WordPiece "
            "vocabulary, such as BERT's, can be expanded: a word that is added to one of BPE or "
            "unigrams would not be found, or would change how other words are cut."
        )
    return dict(rules)


def _lacking_characters(vocabulary: Iterable[str]) -> list[str]:
    """Characters that stand within a piece and are none themselves.

    Pieces are found from the left, the longest first. Without these a word that begins with a new
    piece could be left with a rest that no piece fits, and be unknown.
    """
    pieces = {
        piece for piece in vocabulary if not piece.startswith("[")
    }  # special ones are not cut
    within = {
        character
        for piece in pieces
        for character in (piece.removeprefix(CONTINUES) if piece[:2] == CONTINUES else piece[1:])
    }
    return sorted(CONTINUES + one for one in within if CONTINUES + one not in pieces)


def pieces_of(token: str, vocabulary: dict[str, int]) -> list[int]:
    """The ids of the pieces that WordPiece finds for a token; none where it is unknown."""
    begin = CONTINUES if token.startswith(CONTINUES) else ""
    rest, found = token.removeprefix(CONTINUES), []
    while rest:
        for end in range(len(rest), 0, -1):
            if (number := vocabulary.get(begin + rest[:end])) is not None:
                break
        else:
            return []
        found.append(number)
        begin, rest = CONTINUES, rest[end:]
    return found
