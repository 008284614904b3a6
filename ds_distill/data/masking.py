"""Masked-LM batches: which tokens are hidden is a function of (seed, epoch, example key)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ds_distill.data.batches import CachedSignals, Examples, views_by_model
from ds_distill.data.keys import uniform
from ds_distill.data.tokenise import TokenTable
from ds_distill.types import Batch, PaddedView, Signals

CHOSEN, SHOWN, RANDOM_TOKEN = 201, 202, 203
"""Purposes: which tokens are chosen, what is shown in their place, which random token."""


@dataclass(frozen=True)
class Masking:
    """BERT's rule: of the chosen tokens 80% are shown as [MASK], 10% as a random token, 10%
    as they are (Devlin et al. 2019)."""

    rate: float
    mask_id: int
    special_ids: tuple[int, ...]
    vocabulary: int
    """Random tokens are drawn from the first so many ids."""
    seed: int

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, rate: float, seed: int) -> Masking:
        assert tokenizer.mask_token_id is not None, "a masked-LM tokenizer has a mask token"
        return Masking(
            rate, tokenizer.mask_token_id, tuple(tokenizer.all_special_ids), len(tokenizer), seed
        )


def mask_view(
    view: PaddedView, keys: torch.Tensor, masking: Masking, epoch: int
) -> tuple[PaddedView, torch.Tensor]:
    """Hide tokens of a view.

    view: B examples; keys: int64 [B, 2]. Returns the view with what is shown and `rows` set to
    the n chosen positions, and the true ids there: int64 [n].
    """
    ids = view.input_ids
    position = torch.arange(ids.shape[1], device=ids.device)[None, :]
    draws = {
        purpose: _token_draws(keys, masking.seed, epoch, purpose, position)
        for purpose in (CHOSEN, SHOWN, RANDOM_TOKEN)
    }
    special = torch.isin(ids, torch.tensor(masking.special_ids, device=ids.device))
    chosen = (draws[CHOSEN] < masking.rate) & ~special & (view.attention_mask == 1)
    random_ids = (draws[RANDOM_TOKEN] * masking.vocabulary).long()
    shown = torch.where(draws[SHOWN] < 0.8, masking.mask_id, random_ids)
    shown = torch.where(draws[SHOWN] < 0.9, shown, ids)
    rows = chosen.flatten().nonzero().squeeze(1)
    masked = replace(view, input_ids=torch.where(chosen, shown, ids), rows=rows)
    return masked, ids.flatten()[rows]


def _token_draws(
    keys: torch.Tensor, seed: int, epoch: int, purpose: int, position: torch.Tensor
) -> torch.Tensor:
    """Uniform numbers in [0, 1) per token: float64 [B, S]."""
    return uniform(keys[:, None, :], seed, epoch, purpose, position)


class MaskedLMCollator:
    """Batches of masked-LM: one row per hidden token."""

    def __init__(
        self,
        examples: Examples,
        tables: Mapping[str, TokenTable],
        masking: Masking,
        *,
        draws: int | None = None,
        cached: CachedSignals | None = None,
        packed: Collection[str] = (),
    ) -> None:
        """
        examples: the split's N examples.
        tables: a token table over the same N examples for each model that runs, all with the
            same tokens, because a row must mean the same token in every view.
        draws: how many ways of masking an example there are; epoch e takes number e mod draws,
            as a cache keeps them. None: every epoch has its own.
        cached: numbers of examples [B] and the epoch -> cached teachers' signals, by teacher.
        packed: the models that get packed views.
        """
        self._examples = examples
        self._tables = dict(tables)
        self._masking = masking
        self._draws, self._cached, self._packed = draws, cached, frozenset(packed)
        self.lengths: np.ndarray = next(iter(tables.values())).lengths

    def __call__(self, indices: np.ndarray, epoch: int = 0) -> Batch:
        """See `Collator`."""
        filler = len(indices) == 0
        chosen = np.zeros(1, dtype=np.int64) if filler else indices
        keys = self._examples.keys[torch.from_numpy(chosen)]
        plain = {id(table): table.view(chosen) for table in self._tables.values()}
        draw = epoch if self._draws is None else epoch % self._draws
        view, labels = mask_view(next(iter(plain.values())), keys, self._masking, draw)
        assert view.rows is not None
        signals = self._cached(chosen, epoch) if self._cached else {}
        _check_rows(signals, len(labels))
        if len(view.rows) == 0:  # every rank must run the head in each step
            filler = True
            view = replace(view, rows=torch.zeros(1, dtype=torch.int64))
            labels = torch.full((1,), -100)
            signals = {name: said.filler() for name, said in signals.items()}
        assert view.rows is not None
        counted = torch.full((len(labels),), not filler)
        views = {
            number: replace(own, input_ids=view.input_ids, rows=view.rows)
            for number, own in plain.items()
        }
        return Batch(
            keys=keys[view.row_examples],
            views=views_by_model(self._tables, views, self._packed),
            labels=labels,
            row_sets={"all": counted, "labelled": counted},
            epoch=epoch,
            signals=signals,
        )


def _check_rows(signals: Mapping[str, Signals], rows: int) -> None:
    """The cache's fingerprints should make this impossible; a wrong row would be silent."""
    for name, said in signals.items():
        if len(said) != rows:
            raise ValueError(
                f"the cache has {len(said)} rows of teacher {name!r} for a batch whose masks "
                f"choose {rows} tokens"
            )
