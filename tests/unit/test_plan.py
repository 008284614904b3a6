"""Plans: who sees which example when."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.data.schedule import (
    cut_by_tokens,
    keep_share_of_others,
    padding_share,
    plan_epoch,
    plan_once,
    split_batch,
)
from ds_distill.keys import content_keys, uniform


def make_keys(count):
    return torch.from_numpy(content_keys([f"text {number}" for number in range(count)]))


def realistic_lengths(count, seed=0):
    """Tokens of short texts: log-normal with a median of 40, cut at 128."""
    lengths = np.random.default_rng(seed).lognormal(np.log(40), 0.6, count)
    return lengths.clip(3, 128).astype(np.int32)


def content_of(plan, keys):
    """Batches as keys, so that plans of differently ordered files can be compared."""
    return [keys[torch.from_numpy(batch)].tolist() for batch in plan]


sizes = st.integers(1, 400)
batch_sizes = st.integers(1, 7)


@settings(deadline=None)
@given(sizes, batch_sizes, st.integers(0, 5))
def test_an_epoch_visits_each_example_once(count, batch_size, epoch):
    lengths = realistic_lengths(count)
    plan = plan_epoch(lengths, make_keys(count), batch_size, 0, epoch)
    assert sorted(np.concatenate(plan)) == list(range(count))
    assert len(plan) == -(-count // batch_size)
    assert sum(len(batch) < batch_size for batch in plan) <= 1
    for batch in plan:
        assert (np.diff(lengths[batch]) <= 0).all()  # longest first


@given(
    st.lists(st.integers(1, 50), max_size=40).map(np.array),
    st.integers(1, 120),
    st.randoms(use_true_random=False),
)
def test_parts_by_tokens_hold_each_example_in_order(lengths, tokens, draw):
    indices = np.array(draw.sample(range(len(lengths)), len(lengths)), dtype=np.int64)
    parts = cut_by_tokens(indices, lengths, tokens)
    assert [i for part in parts for i in part] == indices.tolist()
    for number, part in enumerate(parts):
        assert len(part) == 1 or lengths[part].sum() <= tokens
        if number + 1 < len(parts):  # one more would not have fitted
            assert lengths[part].sum() + lengths[parts[number + 1][0]] > tokens


@settings(deadline=None)
@given(sizes, batch_sizes)
def test_inference_visits_each_example_once_longest_first(count, batch_size):
    lengths = realistic_lengths(count)
    plan = plan_once(lengths, batch_size)
    order = np.concatenate(plan)
    assert sorted(order) == list(range(count))
    assert (np.diff(lengths[order]) <= 0).all()
    assert all(len(batch) == batch_size for batch in plan[:-1])


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 6))
def test_dealing_covers_a_batch_in_even_shares(count, micro_steps, num_ranks):
    batch = np.random.default_rng(count).permutation(count)
    shares = [split_batch(batch, micro_steps, num_ranks, rank) for rank in range(num_ranks)]
    assert all(len(share) == micro_steps for share in shares)
    sizes = [len(part) for share in shares for part in share]
    assert max(sizes) - min(sizes) <= 1
    # Micro-step by micro-step and rank by rank, the shares are the batch in its order.
    in_order = [shares[rank][step] for step in range(micro_steps) for rank in range(num_ranks)]
    np.testing.assert_array_equal(np.concatenate(in_order), batch)


def test_the_order_of_the_file_does_not_matter():
    lengths, keys = realistic_lengths(1000), make_keys(1000)
    order = np.random.default_rng(1).permutation(1000)
    # Keys decide ties of length too: the same batches in the same inner order.
    one = content_of(plan_epoch(lengths, keys, 16, 7, 2), keys)
    other = content_of(plan_epoch(lengths[order], keys[order], 16, 7, 2), keys[order])
    assert one == other


def plan_by_hand(lengths, keys, batch_size, seed, epoch):
    """Shuffled; the remainder is what comes last; the others cut into pools of 50 batches; each
    pool longest first, cut into batches; all shuffled by a stream of their own, each by its first
    example."""
    uniforms = uniform(keys, seed, epoch, 1).tolist()
    order = sorted(range(len(lengths)), key=lambda i: uniforms[i])
    whole = len(order) - len(order) % batch_size
    batches = [sorted(order[whole:], key=lambda i: -lengths[i])] if order[whole:] else []
    order = order[:whole]
    while order:
        pool, order = order[: 50 * batch_size], order[50 * batch_size :]
        pool.sort(key=lambda i: -lengths[i])
        while pool:
            batch, pool = pool[:batch_size], pool[batch_size:]
            batches.append(batch)
    return sorted(batches, key=lambda batch: uniform(keys[batch[:1]], seed, epoch, 1, 1).item())


@pytest.mark.parametrize(("count", "batch_size"), [(1, 3), (3, 3), (150, 1), (151, 1), (999, 4)])
def test_the_plan_is_the_same_in_every_version(count, batch_size):
    """A run that is resumed after an update goes on with the plan that it began."""
    lengths, keys = realistic_lengths(count), make_keys(count)
    for seed, epoch in ((0, 0), (3, 7)):
        plan = plan_epoch(lengths, keys, batch_size, seed, epoch)
        wanted = plan_by_hand(lengths.tolist(), keys, batch_size, seed, epoch)
        assert [batch.tolist() for batch in plan] == wanted


def test_an_experts_share_is_no_place_in_an_epoch():
    keys = make_keys(8000)
    kept = keep_share_of_others(np.zeros(8000, dtype=np.int64), keys, [1], 0.25)
    np.testing.assert_array_equal(kept, np.flatnonzero(uniform(keys, 2).numpy() < 0.25))
    order = np.concatenate(plan_epoch(np.full(8000, 9), keys, 16, 0, 0))
    places = np.flatnonzero(np.isin(order, kept)) / 8000
    assert places.mean() == pytest.approx(0.5, abs=4 * (1 / 12 / len(kept)) ** 0.5)


@pytest.mark.parametrize("shares", [1, 4])
def test_like_lengths_meet(shares):
    lengths, keys = realistic_lengths(4000), make_keys(4000)
    bucketed = padding_share(lengths, plan_epoch(lengths, keys, 32, 0, 0), shares)
    shuffled = np.random.default_rng(0).permutation(4000).reshape(-1, 32)
    at_random = padding_share(lengths, list(shuffled), shares)
    # Seen: 0.029 against 0.613 whole, 0.007 against 0.502 in four shares.
    assert bucketed < 0.05 < 0.4 < at_random


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 5), st.randoms())
def test_padding_share_is_what_cutting_each_batch_gives(sizes, shares, random):
    """Cutting each cost 12.5 s on every rank with 10M examples."""
    lengths = np.array([random.randint(1, 50) for _ in range(sum(sizes))], dtype=np.int32)
    order = np.array(random.sample(range(sum(sizes)), sum(sizes)), dtype=np.int64)
    batches = np.split(order, np.cumsum(sizes)[:-1]) if sizes else []
    cut = [part for batch in batches for part in np.array_split(batch, shares) if len(part)]
    padded = sum(int(lengths[part].max()) * len(part) for part in cut)
    wanted = 1 - lengths.sum() / padded if padded else 0.0
    assert padding_share(lengths, batches, shares) == pytest.approx(wanted)


def test_an_experts_split_keeps_its_classes_and_a_share_of_the_others():
    labels = np.random.default_rng(0).integers(0, 4, 8000)
    keys = make_keys(8000)
    kept = keep_share_of_others(labels, keys, [1, 2], 0.25)
    assert set(np.flatnonzero(np.isin(labels, [1, 2]))) <= set(kept)
    others = np.isin(labels, [0, 3])
    share = np.isin(labels[kept], [0, 3]).sum() / others.sum()
    assert share == pytest.approx(0.25, abs=0.03)  # 4 standard errors
    np.testing.assert_array_equal(
        keep_share_of_others(labels, keys, [1, 2], 0.0), np.flatnonzero(~others)
    )
    assert len(keep_share_of_others(labels, keys, [1], 1.0)) == 8000
    # A larger share keeps what a smaller one kept.
    assert set(kept) <= set(keep_share_of_others(labels, keys, [1, 2], 0.5))
    # Of several labels: one of the classes is enough, and what is not known is none.
    several = np.array([[0, 1, 0], [1, 0, 1], [0, 0, 0], [-100, -100, 1], [1, 0, 0]])
    assert keep_share_of_others(several, keys[:5], [1, 2], 0.0).tolist() == [0, 1, 3]
