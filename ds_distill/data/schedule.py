"""The examples of each optimizer step, micro-step and rank.

Plans are global and then split over ranks, as functions of (seed, epoch, example key): an
optimizer step has the same examples for every number of ranks. Batches are prepared in a thread
while the device computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from ds_distill.data.batches import Units
from ds_distill.data.columns import keep_per_class
from ds_distill.keys import uniform
from ds_distill.process.activity import mark
from ds_distill.recipe.phases import FineTune
from ds_distill.types import Batch

SHUFFLE, SHARE = 1, 2
"""Purposes: streams of random numbers that must differ from each other."""

PADDED_BATCH = 64
"""Examples per rank and forward pass of a model with padding, if the recipe has no value."""

TOKENS_PER_CALL = 32_768
"""Tokens per forward pass without padding: enough to keep a GPU busy."""

POOL_BATCHES = 50
"""Batches whose examples are sorted by length together: enough for little padding, few
enough that batches stay random."""


def plan_epoch(
    lengths: np.ndarray, keys: torch.Tensor, batch_size: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Global batches of one epoch: each example once, similar lengths together, random order.

    lengths: int [N], keys: int64 [N, 2]. Each batch is int64 [<= batch_size], longest
    example first, so that a batch that does not fit in memory fails at once. The one that is not
    full is drawn before any are sorted: what a pool leaves would always be its shortest.
    """
    order = np.argsort(uniform(keys, seed, epoch, SHUFFLE).numpy(), kind="stable")
    whole = len(order) - len(order) % batch_size
    pool_size = batch_size * POOL_BATCHES
    batches = []
    for pool in [*np.split(order[:whole], range(pool_size, whole, pool_size)), order[whole:]]:
        pool = pool[np.argsort(-lengths[pool], kind="stable")]
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    firsts = torch.from_numpy(np.array([batch[0] for batch in batches], dtype=np.int64))
    batch_order = np.argsort(uniform(keys[firsts], seed, epoch, SHUFFLE, 1).numpy(), kind="stable")
    return [batches[number] for number in batch_order]


def plan_once(lengths: np.ndarray, batch_size: int) -> list[np.ndarray]:
    """Global batches that visit every example once, longest first, for inference."""
    order = np.argsort(-lengths, kind="stable")
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def cut_by_tokens(indices: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Split examples into consecutive parts of at most `tokens` tokens; a longer example is a
    part of its own.

    lengths: int [N], by example.
    """
    parts, start, total = [], 0, 0
    for at, length in enumerate(lengths[indices].tolist()):
        if total + length > tokens and at > start:
            parts.append(indices[start:at])
            start, total = at, 0
        total += length
    return [*parts, indices[start:]] if len(indices) else []


def split_batch(batch: np.ndarray, micro_steps: int, num_ranks: int, rank: int) -> list[np.ndarray]:
    """This rank's share of a global batch: one array of examples per micro-step.

    Examples of similar length share a micro-step, so that no rank waits for another's long
    example. Shares differ by at most one example and may be empty.
    """
    shares = np.array_split(batch, micro_steps * num_ranks)
    return [shares[step * num_ranks + rank] for step in range(micro_steps)]


def padding_share(lengths: np.ndarray, batches: list[np.ndarray], shares: int = 1) -> float:
    """The share of padding when each batch is padded in `shares` parts, as `split_batch` cuts."""
    sizes = np.array([len(batch) for batch in batches], dtype=np.int64)
    some, more = np.divmod(sizes, shares)
    parts = (some[:, None] + (np.arange(shares) < more[:, None])).ravel()
    parts = parts[parts > 0]
    if not len(parts):
        return 0.0
    in_order = lengths[np.concatenate(batches)]
    longest = np.maximum.reduceat(in_order, np.cumsum(parts) - parts).astype(np.int64)
    padded = int((longest * parts).sum())
    return 1.0 - int(in_order.sum(dtype=np.int64)) / padded if padded else 0.0


def keep_share_of_others(
    labels: np.ndarray, keys: torch.Tensor, classes: list[int], share: float
) -> np.ndarray:
    """Indices of all examples of `classes` and a `share` of the others.

    labels: int64 [N], or [N, L] where an example is of any number of classes.
    """
    if labels.ndim > 1:
        others = (labels[:, classes] <= 0).all(axis=1)
    else:
        others = ~np.isin(labels, classes)
    dropped = others & (uniform(keys, SHARE).numpy() >= share)
    return np.flatnonzero(~dropped)


# -------------------------------------------------------------------------------------- of a phase


def chosen_examples(phase: FineTune, examples: Units, labels: list[str]) -> np.ndarray:
    """Indices of the examples that a phase trains on, int64 [n], ascending: labelled, in focus,
    capped per class.

    labels: the task's. Raises ValueError where one of the focus is none of them.
    """
    chosen = np.flatnonzero(examples.labelled)
    if phase.focus is not None:
        part = examples.at(chosen)
        classes = [labels.index(label) for label in phase.focus.classes]
        share = phase.focus.share_of_others
        chosen = chosen[keep_share_of_others(part.labels, part.keys, classes, share)]
    if phase.per_class is not None:
        part = examples.at(chosen)
        capped = keep_per_class(part.labels, part.keys.numpy(), phase.per_class)
        chosen = chosen[capped]
    return chosen


Item = TypeVar("Item")
Made = TypeVar("Made")


def pinned_for(device: torch.device, batch: Batch) -> Batch:
    """A batch whose copy to a device does not wait for what that has still to do."""
    return batch.pin_memory() if device.type == "cuda" else batch


def prefetch(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Yield make(item) for each item in order, computed in a thread one item ahead: each is taken
    of `items`, by the caller's thread, before the one before it is yielded.

    An error of `make` is raised when its item is reached. A rank that others wait for is in one of
    two places of this loop, which its progress shows.
    """
    number, of = 1, f" of {len(items)}" if isinstance(items, Sized) else ""
    left = iter(items)
    with ThreadPoolExecutor(1) as thread:
        futures = deque(thread.submit(make, item) for item in islice(left, 1))
        while futures:
            mark(f"prepares batch {number}{of}", everywhere=True)
            made = futures.popleft().result()
            futures.extend(thread.submit(make, item) for item in islice(left, 1))
            mark(f"computes batch {number}{of}", everywhere=True)
            yield made
            number += 1
