"""Masked-LM batches: the masks are a function of (seed, epoch, example key)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.batches import CachedSignals, Examples, check_cached_rows, views_by_model
from ds_distill.data.tokenise import TokenTable
from ds_distill.keys import uniform
from ds_distill.reads import TOKENS
from ds_distill.types import Batch
from ds_distill.views import PaddedView

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


class MaskedLMCollator:
    """Batches of masked-LM: one row per masked token, or per token."""

    def __init__(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        masking: Masking,
        *,
        variants: int | None = None,
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
        every_token: bool = False,
    ) -> None:
        """
        examples: the split's N examples.
        tables: a token table over the same N examples for each model that runs, all with the
            same tokens, because a row must be the same token in every view.
        variants: number of mask variants of an example; epoch e uses number e mod `variants`, as
            in a cache. None: every epoch has its own.
        cached: reads the cached signals of a batch; None for live teachers.
        packed: the models that get packed views.
        every_token: every real token is a row, in the row set `tokens`, and masked ones are those
            of the others. Not with cached signals, which are of masked tokens.

        Tokens that not all models know are in the row set `labelled` alone.
        """
        self.lengths: np.ndarray = next(iter(tables.values())).lengths
        self._examples = examples
        self._tables = dict(tables)
        for name, table in self._tables.items():
            if not np.array_equal(table.lengths, self.lengths):
                raise ValueError(
                    f"the views of {', '.join(self._tables)} must have the same tokens, because a "
                    f"masked-LM row is one token in all of them: those of {name!r} have other "
                    "lengths"
                )
        self._masking = masking
        self._variants, self._cached, self._packed = variants, cached, frozenset(packed)
        assert not (every_token and cached), "`check` refuses a cache for every token"
        self._every_token = every_token

    def __call__(self, indices: np.ndarray, epoch: int = 0, *, signals: bool = True) -> Batch:
        """See `Collator`."""
        dummy = len(indices) == 0
        chosen = np.zeros(1, dtype=np.int64) if dummy else indices
        keys = self._examples.keys[torch.from_numpy(chosen)]
        plain = {id(table): table.view(chosen) for table in self._tables.values()}
        variant = epoch if self._variants is None else epoch % self._variants
        view, labels = mask_view(next(iter(plain.values())), keys, self._masking, variant)
        assert view.positions is not None
        cached = self._cached(chosen, epoch) if self._cached and signals else {}
        check_cached_rows(cached, len(labels), "masked tokens")
        masked, tokens = torch.arange(len(labels)), labels
        if self._every_token:
            ids = next(iter(plain.values())).input_ids
            view, labels, masked = _with_every_token(view, labels)
            tokens = ids.flatten()[view.positions]
        assert view.positions is not None
        if len(view.positions) == 0:  # every rank must run the head in each step
            dummy = True
            view = replace(view, positions=torch.zeros(1, dtype=torch.int64))
            labels = torch.full((1,), -100)
            cached = {name: outputs.dummy() for name, outputs in cached.items()}
        assert view.positions is not None
        known = tokens < self._masking.known
        sets = {"all": masked[known[masked]], "labelled": masked}
        if self._every_token:
            sets[TOKENS] = known.nonzero()[:, 0]
        if dummy:
            sets = {name: rows[:0] for name, rows in sets.items()}
        views = {
            number: replace(own, input_ids=view.input_ids, positions=view.positions)
            for number, own in plain.items()
        }
        return Batch(
            keys=keys[view.example_indices],
            views=views_by_model(self._tables, views, self._packed),
            labels=labels,
            row_sets=sets,
            epoch=epoch,
            signals=cached,
        )
