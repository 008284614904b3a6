"""Masked-LM batches: the masks are a function of (seed, epoch, example key). And whole words
that are hidden of a text, the same ones whatever WordPiece vocabulary cuts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.batches import Rows, RowsOf, Units
from ds_distill.data.tokenise import TokenTable
from ds_distill.data.word_pieces import CONTINUES
from ds_distill.keys import uniform
from ds_distill.reads import TOKENS
from ds_distill.types import Batch
from ds_distill.views import PackedView, PaddedView

CHOSEN, SHOWN, RANDOM_TOKEN = 201, 202, 203
"""Purposes: which tokens are masked, what replaces them, which random token."""


@dataclass(frozen=True)
class Masking:
    """BERT's masking: of the chosen tokens 80% become [MASK], 10% a random token, and 10% stay
    (Devlin et al. 2019). A token that the teacher does not know is always chosen, and becomes
    [MASK] (VE-KD, Gao et al. 2024, section 3.2)."""

    rate: float
    """Share of the known tokens that are chosen."""
    mask_id: int
    special_ids: tuple[int, ...]
    known: int
    """Tokens with ids below this are known to all models; random ones are among them."""
    seed: int
    shown: Literal["bert", "mask"] = "bert"
    """`mask`: all that are chosen become [MASK], as in VE-KD's code."""

    @staticmethod
    def of(
        tokenizer: PreTrainedTokenizerBase,
        rate: float,
        seed: int,
        known: int | None = None,
        shown: Literal["bert", "mask"] = "bert",
    ) -> Masking:
        """known: None where all models know the tokenizer's whole vocabulary."""
        assert tokenizer.mask_token_id is not None, "a masked-LM tokenizer has a mask token"
        special = tuple(tokenizer.all_special_ids)
        known = len(tokenizer) if known is None else known
        return Masking(rate, tokenizer.mask_token_id, special, known, seed, shown)


def mask_view(
    view: PaddedView, keys: torch.Tensor, masking: Masking, epoch: int
) -> tuple[PaddedView, torch.Tensor]:
    """Mask tokens of a view.

    view: B examples; keys: int64 [B, 2]. Returns the masked view, with `positions` set to the n
    masked tokens, and their true ids: int64 [n].
    """
    ids = view.input_ids
    position = torch.arange(ids.shape[1], device=ids.device)[None, :]
    uniforms = {
        purpose: _token_uniforms(keys, masking.seed, epoch, purpose, position)
        for purpose in (CHOSEN, SHOWN, RANDOM_TOKEN)
    }
    special = torch.isin(ids, torch.tensor(masking.special_ids, device=ids.device))
    new = ids >= masking.known
    chosen = ((uniforms[CHOSEN] < masking.rate) | new) & ~special & (view.attention_mask == 1)
    random_ids = (uniforms[RANDOM_TOKEN] * masking.known).long()
    shown = torch.where(uniforms[SHOWN] < 0.8, masking.mask_id, random_ids)
    shown = torch.where(uniforms[SHOWN] < 0.9, shown, ids)
    always = new if masking.shown == "bert" else torch.ones_like(new)
    shown = torch.where(always, masking.mask_id, shown)
    positions = chosen.flatten().nonzero().squeeze(1)
    masked = replace(view, input_ids=torch.where(chosen, shown, ids), positions=positions)
    return masked, ids.flatten()[positions]


def _token_uniforms(
    keys: torch.Tensor, seed: int, epoch: int, purpose: int, position: torch.Tensor
) -> torch.Tensor:
    """Uniform numbers in [0, 1) per token: float64 [B, S]."""
    return uniform(keys[:, None, :], seed, epoch, purpose, position)


def _with_every_token(
    view: PaddedView, labels: torch.Tensor
) -> tuple[PaddedView, torch.Tensor, torch.Tensor]:
    """A masked view with a row for each real token: the view, the labels of its rows, -100 where a
    token is not masked, and which rows are: int64 [n] both."""
    tokens = view.attention_mask.flatten().nonzero()[:, 0]
    assert view.positions is not None
    masked = torch.searchsorted(tokens, view.positions)
    of_rows = torch.full((len(tokens),), -100).index_copy(0, masked, labels)
    return replace(view, positions=tokens), of_rows, masked


def masked_rows(
    masking: Masking, variants: int | None = None, *, every_token: bool = False
) -> RowsOf:
    """A row per masked token, or per token, the same one in all views.

    variants: number of mask variants of an example; epoch e uses number e mod `variants`, as in a
        cache. None: every epoch has its own.
    every_token: every real token is a row, in the row set `tokens`, and masked ones are those of
        the others. Not with cached signals, which are of masked tokens.

    Tokens that not all models know are in the row set `labelled` alone.
    """

    def rows(
        units: Units, indices: np.ndarray, views: Mapping[TokenTable, PaddedView], epoch: int
    ) -> Rows:
        first, *others = views.values()
        if any(not torch.equal(first.attention_mask, view.attention_mask) for view in others):
            raise ValueError("views of a masked-LM must have the same tokens, as its rows are")
        variant = epoch if variants is None else epoch % variants
        view, labels = mask_view(first, units.keys, masking, variant)
        masked, tokens = torch.arange(len(labels)), labels
        if every_token:
            view, labels, masked = _with_every_token(view, labels)
            assert view.positions is not None
            tokens = first.input_ids.flatten()[view.positions]
        known = tokens < masking.known
        sets = {"all": masked[known[masked]], "labelled": masked}
        if every_token:
            sets[TOKENS] = known.nonzero()[:, 0]
        return Rows(
            units=view.example_indices,
            labels=labels,
            sets=sets,
            views={
                table: replace(own, input_ids=view.input_ids, positions=view.positions)
                for table, own in views.items()
            },
        )

    return rows


# ------------------------------------------------------------------------------------- whole words


HIDDEN_WORD = 204
"""Purpose: which words are hidden."""

_AT_ONCE = 1024
"""Examples of which all tokens are looked at together."""


@dataclass(frozen=True)
class HiddenWords:
    """W words of a split, in ascending order of (example, word): int64 [W] each."""

    example: np.ndarray
    word: np.ndarray
    """Its number in its example, from 0."""
    first: np.ndarray
    """The position of its first piece."""
    pieces: np.ndarray
    """How many it has."""

    @staticmethod
    def of(
        table: TokenTable,
        tokenizer: PreTrainedTokenizerBase,
        keys: torch.Tensor,
        masking: Masking,
        max_length: int,
    ) -> HiddenWords:
        """Those that are chosen at the masking's rate by (seed, key, number), of one vocabulary.

        Words that a vocabulary does not know, and the last of a text that is cut, are never hidden.

        table: of the N examples; keys: int64 [N, 2]. max_length: tokens from which a text is cut.
        """
        vocabulary = tokenizer.get_vocab()
        continues = np.zeros(1 + max(vocabulary.values()), dtype=bool)
        continues[[number for token, number in vocabulary.items() if token[:2] == CONTINUES]] = True
        parts = []
        for begin in range(0, len(table.lengths), _AT_ONCE):
            indices = np.arange(begin, min(begin + _AT_ONCE, len(table.lengths)))
            view = table.view(indices)
            ids, real = view.input_ids.numpy(), view.attention_mask.numpy() == 1
            special = np.isin(ids, masking.special_ids)
            starts = real & (special | ~continues[ids])
            word = np.cumsum(starts, axis=1) - 1
            numbers = torch.from_numpy(word)
            drawn = uniform(keys[indices][:, None], masking.seed, HIDDEN_WORD, numbers).numpy()
            full = table.lengths[indices] >= max_length
            last = word.max(axis=1, where=real & ~special, initial=-1)
            hidden = real & ~special & (drawn < masking.rate)
            hidden &= ~(full[:, None] & (word == last[:, None]))
            example, first = np.nonzero(hidden & starts)
            codes = np.nonzero(hidden)[0] * word.shape[1] + word[hidden]
            _, pieces = np.unique(codes, return_counts=True)
            parts.append(np.stack([indices[example], word[example, first], first, pieces]))
        found = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0))
        return HiddenWords(*found.astype(np.int64))

    @staticmethod
    def common(found: Sequence[HiddenWords]) -> list[HiddenWords]:
        """Of several vocabularies, the words that are hidden in all."""
        codes = [words.example << 32 | words.word for words in found]
        of_all = reduce(np.intersect1d, codes)
        chosen = [np.isin(code, of_all) for code in codes]
        return [words._at(kept) for words, kept in zip(found, chosen, strict=True)]

    def _at(self, chosen: np.ndarray) -> HiddenWords:
        return HiddenWords(
            *(part[chosen] for part in (self.example, self.word, self.first, self.pieces))
        )


class HiddenWordsCollator:
    """Batches in which words are hidden and one piece of each is asked for, from the first on."""

    def __init__(
        self, table: TokenTable, words: HiddenWords, keys: torch.Tensor, mask_id: int, packed: bool
    ) -> None:
        self.words = words
        self._table, self._keys, self._mask_id, self._packed = table, keys, mask_id, packed

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N]: tokens of each example."""
        return self._table.lengths

    @property
    def counts(self) -> np.ndarray:
        """How many words are hidden of each example: float64 [N]."""
        return np.bincount(self.words.example, minlength=len(self.lengths)).astype(np.float64)

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all hidden pieces, and the example of each: int64 [n] both."""
        words = self.words
        places = np.repeat(words.first, words.pieces) + _numbers(words.pieces)
        owners, ids = np.repeat(words.example, words.pieces), [np.zeros(0, dtype=np.int64)]
        for begin in range(0, len(self.lengths), _AT_ONCE):
            indices = np.arange(begin, min(begin + _AT_ONCE, len(self.lengths)))
            here = (owners >= begin) & (owners <= indices[-1])
            rows = self._table.view(indices).input_ids.numpy()
            ids.append(rows[owners[here] - begin, places[here]])
        return np.concatenate(ids), owners

    def __call__(self, indices: np.ndarray, piece: int, model: str) -> Batch:
        """The batch of some examples for a model: rows are the pieces of this number. Pieces before
        it are shown; words that have no more than these stay hidden. Without examples, a batch of
        one dummy row, as of `Collator`."""
        dummy = len(indices) == 0
        chosen = np.zeros(1, dtype=np.int64) if dummy else indices
        at = np.full(len(self._keys), -1)
        at[chosen] = np.arange(len(chosen))
        words = self.words._at(at[self.words.example] >= 0)
        view = self._table.view(chosen)
        length = view.input_ids.shape[1]
        begins = at[words.example] * length + words.first
        asked = words.pieces > piece
        ids = view.input_ids.flatten()
        shown = ids.clone()
        from_piece = np.where(asked, piece, 0)
        counts = words.pieces - from_piece
        shown[np.repeat(begins + from_piece, counts) + _numbers(counts)] = self._mask_id
        positions = torch.from_numpy(begins[asked] + piece)
        dummy = dummy or len(positions) == 0
        if dummy:
            positions = torch.zeros(1, dtype=torch.int64)
        view = replace(view, input_ids=shown.view_as(view.input_ids), positions=positions)
        rows = torch.arange(len(positions))
        return Batch(
            keys=self._keys[torch.from_numpy(chosen)][view.example_indices],
            views={model: PackedView.of(view) if self._packed else view},
            labels=ids[positions],
            row_sets={"all": rows[:0] if dummy else rows},
        )


def _numbers(counts: np.ndarray) -> np.ndarray:
    """0 to count - 1 for each count: int64 [sum]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
