"""A masked-LM that gets rows for new tokens: of its embeddings and of its output."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_distill.data.word_pieces import pieces_of
from ds_distill.models.load import seeded


@torch.no_grad()
def expand_embeddings(
    model: PreTrainedModel,
    vocabulary: dict[str, int],
    tokens: list[str],
    start: str = "pieces",
    seed: int = 0,
) -> None:
    """Give a masked-LM a row for each of the new tokens, behind those that it has: of its
    embeddings, and of its output with the bias, tied as before.

    vocabulary: the ids of the tokens that it has.
    start: `pieces`, the mean of the rows of the token's old pieces, of all rows where it has none;
        or `random`, as transformers begins, from `seed`.
    """
    if not tokens:
        return
    old = model.get_input_embeddings().weight.shape[0]
    with seeded(seed):
        model.resize_token_embeddings(old + len(tokens), mean_resizing=False)
    if start == "random":
        return
    chosen = [pieces_of(token, vocabulary) or list(range(old)) for token in tokens]
    table = model.get_input_embeddings().weight
    grown = {id(table): table}
    head = model.get_output_embeddings()
    for weight in (head.weight, getattr(head, "bias", None)):
        if weight is not None:
            grown.setdefault(id(weight), weight)
    for weight in grown.values():
        weight[old:] = _means(weight[:old], chosen)


def _means(rows: torch.Tensor, chosen: list[list[int]]) -> torch.Tensor:
    """The mean of each of the chosen groups of rows."""
    flat = rows if rows.ndim > 1 else rows[:, None]
    offsets = torch.tensor([0, *map(len, chosen[:-1])]).cumsum(0)
    ids = torch.tensor([one for of_token in chosen for one in of_token])
    means = nn.functional.embedding_bag(ids, flat, offsets, mode="mean")
    return means.view(-1, *rows.shape[1:])
