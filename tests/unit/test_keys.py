"""Content keys and their hashes: the base of every random choice."""

import numpy as np
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ds_distill.keys import (
    among_keys,
    content_keys,
    distinct_keys,
    hash_keys,
    numbered_keys,
    uniform,
)

WORD = 2**64


def test_a_key_is_the_xxh3_128_of_the_text():
    high, low = (int(word) % WORD for word in content_keys(["naïve text"])[0])
    assert (high << 64) + low == xxhash.xxh3_128_intdigest("naïve text".encode())


def test_keys_are_the_same_for_ever():
    # Caches on disk are found by these numbers.
    assert content_keys(["a"]).tolist() == [[-6237574061787879372, -1817709641818812897]]
    assert content_keys(["a"], ["b"]).tolist() == [[2918933627513616002, -9110021310222506789]]


@given(st.lists(st.text(), min_size=1), st.randoms())
def test_a_key_does_not_depend_on_the_order(texts, random):
    order = list(range(len(texts)))
    random.shuffle(order)
    shuffled = content_keys([texts[position] for position in order])
    np.testing.assert_array_equal(shuffled, content_keys(texts)[order])


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_pairs_differ_where_their_fields_do(a, b, c, d):
    keys = content_keys([a, c], [b, d])
    assert (keys[0] == keys[1]).all() == ((a, b) == (c, d))


def test_where_the_first_text_ends_matters():
    keys = content_keys(["ab", "a", "abc", "", "a\0b"], ["c", "bc", "", "abc", "c"])
    alone = content_keys(["abc", "ab\0c"])
    assert len({tuple(key) for key in np.concatenate([keys, alone]).tolist()}) == 7


def test_a_lone_surrogate_has_a_key():
    assert content_keys(["\ud800"]).shape == (1, 2)


def reference_hash(high, low, stream):
    """hash_keys in Python's unbounded integers."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
        return x ^ (x >> 31)

    state = mix(high % WORD) ^ (low % WORD)
    for word in stream:
        state = mix((state + 0x9E3779B97F4A7C15) % WORD) ^ (word % WORD)
    return mix(mix((state + 0x9E3779B97F4A7C15) % WORD))


int64 = st.integers(-(2**63), 2**63 - 1)


@given(int64, int64, st.lists(int64, max_size=4))
def test_hashes_equal_unbounded_arithmetic(high, low, stream):
    hashed = hash_keys(torch.tensor([high, low]), *stream).item()
    assert hashed % WORD == reference_hash(high, low, tuple(stream))
    assert hash_keys(np.array([[high, low]]), *stream).tolist() == [hashed], "numpy's are the same"


def test_uniform_numbers_are_uniform_and_streams_independent():
    keys = torch.from_numpy(content_keys([f"text {number}" for number in range(20_000)]))
    streams = torch.stack([uniform(keys, 0), uniform(keys, 1), uniform(keys, 0, 1)])
    assert streams.dtype == torch.float64 and ((streams >= 0) & (streams < 1)).all()
    for numbers in streams:
        counts = torch.histc(numbers, bins=50, min=0, max=1)
        # chi-square with 49 degrees of freedom: 99.9% lie below 85.4
        assert ((counts - 400) ** 2 / 400).sum() < 85.4
    correlations = torch.corrcoef(streams)
    assert (correlations - torch.eye(3)).abs().max() < 0.03  # 4 standard errors


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), max_size=40),
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), max_size=40),
)
def test_distinct_keys_are_those_that_numpy_finds(some, others):
    """Also where two keys share their first half. numpy's own takes four times as long."""
    keys, more = (np.array(rows, dtype=np.int64).reshape(-1, 2) for rows in (some, others))
    _, first, numbers = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    np.testing.assert_array_equal(distinct_keys(keys), first)
    np.testing.assert_array_equal(numbered_keys(keys), numbers.reshape(-1))
    assert among_keys(keys, more).tolist() == [row in others for row in some]
