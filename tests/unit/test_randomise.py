"""Random texts: drawn as the real words occur, as long as the real texts, and no copy of them."""

from collections import Counter

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from ds_distill.data.open_source import Unigrams, questions, randomised
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.data import Randomise

VOCABULARY = [f"w{rank}" for rank in range(40)]


def texts_like_language(count, seed=0):
    """Texts of Zipf's law in which each word determines the next: 5-grams repeat much."""
    generator = np.random.default_rng(seed)
    chances = 1 / np.arange(1, 41)
    found = []
    for _ in range(count):
        words = []
        while len(words) < generator.integers(20, 60):
            first = generator.choice(40, p=chances / chances.sum())
            words += [VOCABULARY[(first + step * 7) % 40] for step in range(6)]
        found.append(" ".join(words))
    return found


def dataset(**columns):
    return datasets.Dataset.from_dict(columns)


def ngrams(texts, n):
    lists = [text.split() for text in texts]
    return Counter(tuple(w[at : at + n]) for w in lists for at in range(len(w) - n + 1))


@pytest.fixture(scope="module")
def real():
    return texts_like_language(1500)


def test_words_are_drawn_as_often_as_they_occur(real, tmp_path):
    data = randomised(dataset(text=real), Randomise(seed=3), tmp_path)
    assert [len(text.split()) for text in data["text"][:]] == [len(t.split()) for t in real]
    counts, drawn = ngrams(real, 1), ngrams(data["text"][:], 1)
    words = sorted(counts)
    assert set(drawn) <= set(words)
    observed = [drawn[word] for word in words]
    assert chisquare(observed, [counts[word] for word in words]).pvalue > 0.01
    # What would be wrong is found: all words alike, or each text's own words.
    alike = np.full(len(words), sum(observed) / len(words))
    assert chisquare(observed, alike).pvalue < 1e-9


def test_no_run_of_words_is_more_frequent_than_by_chance(real, tmp_path):
    drawn = randomised(dataset(text=real), Randomise(), tmp_path)["text"][:]
    total = sum(ngrams(real, 1).values())
    share = {word: count / total for (word,), count in ngrams(real, 1).items()}
    source, random = ngrams(real, 5), ngrams(drawn, 5)
    places = sum(random.values())
    expected = np.array([places * np.prod([share[word] for word in run]) for run in source])
    observed = np.array([random[run] for run in source])
    assert sum(source.values()) > 10 * expected.sum()  # the real texts do repeat them
    deviation = (observed.sum() - expected.sum()) / np.sqrt(expected.sum())
    assert abs(deviation) < 4
    assert (observed - expected).max() < 6 * np.sqrt(expected.max()) + 6


def test_questions_begin_with_a_starter_and_use_the_passage(real, tmp_path):
    settings = Randomise(starters=["is", "how"], words=5)
    data = randomised(dataset(text=["?"] * len(real), text_b=real), settings, tmp_path)
    assert data.column_names == ["text", "text_b", "label", "key_hi", "key_lo"]
    assert set(data["label"][:]) == {-1}
    starters = Counter()
    places = []
    for question, passage in zip(data["text"][:], data["text_b"][:], strict=True):
        starter, *words = question.split()
        starters[starter] += 1
        assert len(words) == 5 and set(words) <= set(passage.split())
        places.append(words[0] == passage.split()[0])
    assert starters["is"] + starters["how"] == len(real) and abs(starters["is"] - 750) < 100
    assert np.mean(places) < 0.3  # drawn, not copied from the beginning
    keys = content_keys(data["text"][:], data["text_b"][:])
    np.testing.assert_array_equal(keys, np.stack([data["key_hi"], data["key_lo"]], axis=1))


def test_texts_differ_by_seed_and_number(real, tmp_path):
    first, second = (
        randomised(dataset(text=real[:200]), Randomise(seed=seed), tmp_path)["text"][:]
        for seed in (0, 1)
    )
    assert len({*first, *second}) == 400
    assert randomised(dataset(text=real[:200]), Randomise(seed=0), tmp_path)["text"][:] == first


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(st.text("ab \n", max_size=12), min_size=1, max_size=12),
    number=st.integers(0, 11),
    seed=st.integers(0, 2**31 - 1),
)
def test_a_text_is_a_function_of_seed_and_number(texts, number, seed):
    unigrams = Unigrams.of(dataset(text=texts), "text")
    assert unigrams.lengths.tolist() == [len(text.split()) for text in texts]
    everything = unigrams.passages(np.arange(len(texts)), seed)
    number %= len(texts)
    assert unigrams.passages(np.array([number]), seed) == [everything[number]]
    settings = Randomise(seed=seed)
    asked = questions(everything, np.arange(len(texts)), settings)
    alone = questions([everything[number]], np.array([number]), settings)
    assert alone == [asked[number]]
    # The order of the texts changes their lengths, not the words that are drawn.
    turned = Unigrams.of(dataset(text=texts[::-1]), "text").passages(np.arange(len(texts)), seed)
    shorter = min(len(turned[number]), len(everything[number]))
    assert turned[number][:shorter] == everything[number][:shorter]


def test_no_space_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        randomised(dataset(text=["a b"]), Randomise(), tmp_path / "file" / "cache")
