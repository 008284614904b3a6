"""Masked-LM batches: the masks are a function of (seed, epoch, example key)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.batches import Examples, Rows, RowsOf
from ds_distill.data.tokenise import TokenTable
from ds_distill.keys import uniform
from ds_distill.reads import TOKENS
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
        examples: Examples,
        indices: np.ndarray,
        views: Mapping[TokenTable, PaddedView],
        epoch: int,
    ) -> Rows:
        first, *others = views.values()
        if any(not torch.equal(first.attention_mask, view.attention_mask) for view in others):
            raise ValueError("views of a masked-LM must have the same tokens, as its rows are")
        variant = epoch if variants is None else epoch % variants
        view, labels = mask_view(first, examples.keys, masking, variant)
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
            examples=view.example_indices,
            labels=labels,
            sets=sets,
            views={
                table: replace(own, input_ids=view.input_ids, positions=view.positions)
                for table, own in views.items()
            },
            noun="masked tokens",
        )

    return rows
