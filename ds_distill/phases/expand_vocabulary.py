"""Make a student whose vocabulary has the words of a text, too: rows for them of its embeddings and
of its output."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.data.word_pieces import expand_tokenizer, pieces_of
from ds_distill.files import new_folder
from ds_distill.models.load import save_model, seeded
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.phases import ExpandVocabulary
from ds_distill.records import Expansion
from ds_distill.run.run import Run

SHOWN = 20
"""New words in the record, the most frequent."""


def expand_vocabulary(phase: ExpandVocabulary, number: int, name: str, run: Run) -> Expansion:
    """Leave the student with more tokens as a model of the run."""
    [output] = phase.outputs
    start = run.reference(phase.start, number)
    before = run.data.tables(phase.split, [start])[start.name]
    texts, folder = run.data.texts(phase.split), run.folder.model(number, output)
    if run.world.is_main and not folder.is_dir():
        _make(phase, texts, folder, start, run)
    run.world.barrier()
    made = run.reference(output, number + 1)
    after = run.data.tables(phase.split, [made])[made.name]
    known, tokenizer = run.data.rows(start), run.data.tokenizer(made)
    counts = after.counts(len(tokenizer))[known:]
    often = np.argsort(-counts, kind="stable")[:SHOWN].tolist()
    tokens = tokenizer.convert_ids_to_tokens([known + at for at in often])
    lengths = [float(table.lengths.mean()) for table in (before, after)]
    run.log.info(
        f"  {output}: {len(counts):,} tokens more than the {known:,} that there were; a text of "
        f"{phase.split} has {lengths[1]:.1f} in place of {lengths[0]:.1f}. The commonest: "
        f"{', '.join(tokens[:8])}"
    )
    return {
        "output": output,
        "split": phase.split,
        "known": known,
        "added": len(counts),
        "not_used": int((counts == 0).sum()),
        "share_of_tokens": float(counts.sum() / max(1, after.lengths.sum())),
        "tokens_before": lengths[0],
        "tokens_after": lengths[1],
        "most_frequent": {token: int(counts[at]) for token, at in zip(tokens, often, strict=True)},
    }


def _make(
    phase: ExpandVocabulary, texts: Iterable[str], folder: Path, start: ModelReference, run: Run
) -> None:
    """Write the model and its tokenizer into a folder."""
    old = load_tokenizer(start.model, start.revision)
    model = run.model(start, new_head=True)
    run.log.info(f"  looks for words in {phase.split}")
    tokenizer, tokens = expand_tokenizer(old, texts, phase.size, run.data.rows(start), phase.share)
    expand_embeddings(model, old.get_vocab(), tokens, phase.embeddings, run.recipe.seed)
    folder.parent.mkdir(exist_ok=True)
    with new_folder(folder) as temporary:
        save_model(model, model.state_dict(), temporary)
        tokenizer.save_pretrained(temporary)


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
