"""Examples that belong together are on one side of every split, and are drawn together; a
split that both fits and chooses is split in two."""

from types import SimpleNamespace

import kinds
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_distill.data import groups
from ds_distill.data.batches import Units
from ds_distill.data.groups import Groups, assigned, components, copy_marks, few_groups, strata_of
from ds_distill.data.open_source import open_source
from ds_distill.errors import UserError
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import SingleLabel
from ds_distill.routing.comparison import compare
from ds_distill.training.setup import validation_of
from ds_distill.types import Signals


def written(folder, **splits):
    for split, rows in splits.items():
        kinds.write(folder / f"{split}.jsonl", rows)
    return folder


def read(folder, split="train", **data):
    task = SingleLabel(data={"path": str(folder), **data}, labels=["a", "b"])
    return open_source(task, folder / "cache").read(split)


# ------------------------------------------------------------------------------ what belongs


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("The patient is well.", "the PATIENT  is well.", True),
        ("“Fine”, she said…", "fine she said", False),
        ("I love it :)", "I love it :(", False),
        ("C#", "c", False),
        ("-1", "1", False),
        ("\uff21\uff22\uff23 \ufb01ne\u00a0day", "abc fine day", True),  # compatibility forms
        ("STRASSE", "Straße", True),
        ("good 😀", "good 😡", False),
        ("a 1", "a 2", False),
        ("C++", "C", False),
        ("हिन्दी", "हन्द", False),
        ("!!!", "???", False),
        ("", " ", False),
        ("don't", "dont", False),
    ],
)
def test_near_copies_differ_in_case_and_white_space_alone(one, other, same):
    marks = copy_marks([one, other])
    assert (marks[0] == marks[1]) == same


def test_of_pairs_both_texts_count():
    marks = copy_marks(["A b", "a", "a b", "a b"], ["c", "b c", "C", "d"])
    assert marks[0] == marks[2] and len(set(marks.tolist())) == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 12)] * 2), max_size=30), st.randoms())
def test_a_group_is_all_that_a_chain_of_marks_joins(pairs, random):
    marks = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    wanted = list(range(len(pairs)))  # the slow way: joined until nothing changes
    for _ in pairs:
        for i, a in enumerate(pairs):
            for j, b in enumerate(pairs):
                if a[0] == b[0] or a[1] == b[1]:
                    wanted[i] = wanted[j] = min(wanted[i], wanted[j])
    found = components(marks)
    assert len(set(zip(wanted, found.tolist(), strict=True))) == len(set(wanted)) == len(set(found))
    order = list(range(len(pairs)))
    random.shuffle(order)
    keys = content_keys([str(number) for number in range(len(pairs))])
    whole, other = Groups(keys, marks), Groups(keys[order], marks[order])
    np.testing.assert_array_equal(whole.group_keys[order], other.group_keys)


def test_a_column_of_the_recipe_names_groups(tmp_path):
    rows = [
        {"text": "One  thing", "label": "a", "patient": 7},
        {"text": "another", "label": "b", "patient": "7"},
        {"text": "one thing", "label": "a", "patient": "x"},
        {"text": "alone", "label": "a", "patient": None},
        {"text": "alone, too", "label": "b"},
        {"text": "last", "label": "b", "patient": "x"},
    ]
    folder = written(tmp_path, train=rows, transfer=[{"text": "One Thing"}])
    columns = {"columns": {"group": "patient"}}
    for data, wanted in ((columns, [0, 0, 0, 3, 4, 0]), ({}, [0, 1, 0, 3, 4, 5])):
        number = components(Groups.of(read(folder, **data)).marks)
        firsts = [number.tolist().index(each) for each in number]
        assert firsts == wanted
    transfer = read(folder, "transfer", **columns)  # without labels a split need not name any
    assert Groups.of(read(folder, **columns)).touch(Groups.of(transfer)).tolist() == [
        *[True] * 3,
        *[False] * 2,
        True,
    ]
    with pytest.raises(UserError, match=r"'pateint' \(task.data.columns.group\).*patient"):
        read(folder, columns={"group": "pateint"})
    written(folder, train=[*rows, {"text": "odd", "label": "a", "patient": [1]}])
    with pytest.raises(UserError, match=r"train.jsonl:7: the group .* must be a name or a whole"):
        read(folder, **columns)


# ------------------------------------------------------------------------------ into parts


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(2, 7), st.integers(1, 5), st.integers(0, 2**31))
def test_parts_have_as_many_of_each_class_and_groups_are_whole(count, parts, size, seed):
    draw = np.random.default_rng(seed)
    group = draw.integers(0, max(1, count // size), count)
    keys = content_keys([str(number) for number in group])
    strata = draw.integers(-1, 3, count)
    part = assigned(keys, strata, parts, seed)
    assert len(set(zip(group.tolist(), part.tolist(), strict=True))) == len(set(group.tolist()))
    order = draw.permutation(count)
    np.testing.assert_array_equal(assigned(keys[order], strata[order], parts, seed), part[order])
    alone = assigned(content_keys([str(number) for number in range(count)]), strata, parts, seed)
    for stratum in range(-1, 3):
        sizes = np.bincount(alone[strata == stratum], minlength=parts)
        assert sizes.max() - sizes.min() <= 1
    sizes = np.bincount(alone, minlength=parts)
    assert sizes.max() - sizes.min() <= 1


def test_large_groups_are_spread_and_another_seed_spreads_them_anew():
    sizes = [2**number for number in range(8)] * 2
    group = np.repeat(np.arange(16), sizes)
    keys = content_keys([str(number) for number in group])
    found = {}
    for seed in range(20):
        part = assigned(keys, np.zeros(len(group), dtype=np.int64), 2, seed)
        assert abs(part.mean() - 0.5) == 0, "two of each size"
        found[part.tobytes()] = seed
    assert len(found) > 15


def test_strata_are_sets_of_classes():
    assert strata_of(np.array([2, -1, 0]), np.arange(4)).tolist() == [2, -1, 0]
    many = strata_of(np.array([[0, 1], [1, 1], [0, 1], [-1, -1], [0, 0]]), np.arange(6))
    assert many[0] == many[2] != many[1] and many[3] == -1 and len(set(many.tolist())) == 4
    words = strata_of(np.array([0, 1, 0, 1, 1, 0, -1, 0]), np.array([0, 2, 3, 3, 6, 7, 8]))
    assert words[0] == words[3] and words[1] == words[5] and words[0] != words[1]
    assert words[2] == words[4] == -1, "without words, or with none that counts"


# ---------------------------------------------------------------------------------- the fault


def near_copies(text):
    return [text, text.upper(), f"  {text} ", text.replace(" ", "\t")]


@pytest.mark.parametrize("seed", range(2))
def test_a_gate_that_memorises_near_copies_is_not_chosen(tmp_path, seed):
    """Labels are by lot, and each text stands there four times. A gate that read a copy knows the
    label: it was right in 85 to 94% of cases, and chosen."""
    generator = torch.Generator().manual_seed(seed)
    texts, labels = 60, torch.randint(2, (60,), generator=generator).tolist()
    rows = [
        {"text": copy, "label": "ab"[label]}
        for number, label in enumerate(labels)
        for copy in near_copies(f"text of number {number}")
    ]
    examples = Units.of(read(written(tmp_path, train=rows)))
    assert len(np.unique(examples.group_keys.numpy(), axis=0)) == texts
    signals = {}
    for name in ("first", "second"):
        own = torch.randn(texts, 40, generator=generator).repeat_interleave(4, dim=0)
        states = own + 0.1 * torch.randn(4 * texts, 40, generator=generator)
        signals[name] = Signals(torch.randn(4 * texts, 2, generator=generator), {-1: states})
    given = signals, examples.labels, examples.keys, ["a", "b"]
    alone = compare(*given, seed=seed)
    assert alone.choice == "gate" and alone.policies["gate"].score > 0.8, "there is a leak to find"
    found = compare(*given, seed=seed, group_keys=examples.group_keys)
    assert found.choice == "average" and 0.3 < found.policies["gate"].score < 0.7
    widths = [high - low for low, high in (one.policies["gate"].interval for one in (alone, found))]
    assert widths[1] > 1.5 * widths[0], "groups are drawn, not texts"
    fits = fitting_part(examples, "validation", seed)
    chooses = choosing_part(examples, {"validation": examples}, seed)
    assert not set(fits // 4) & set(chooses // 4) and len(fits) + len(chooses) == 4 * texts
    shares = [examples.labels[part].mean() for part in (fits, chooses)]
    assert abs(shares[0] - shares[1]) <= 0.05


def test_a_group_is_in_one_fold_over_all_splits(tmp_path):
    splits = ("train", "validation", "test")
    rows = [
        {"text": f"{split} {number}", "label": "ab"[number % 2], "thread": number // 3}
        for split in splits
        for number in range(60)
    ]
    folder = written(tmp_path, **{s: rows[60 * n : 60 * (n + 1)] for n, s in enumerate(splits)})
    threads = []
    for fold in range(1, 4):
        folds = {"number": 3, "fold": fold, "of": [*splits]}
        data = {"folds": folds, "columns": {"group": "thread"}}
        found = {s: Groups.of(read(folder, s, **data)) for s in splits}
        assert sum(map(len, found.values())) == 180
        assert not found["test"].touch(Groups.joined([found["train"], found["validation"]])).any()
        threads.append({int(text.split()[1]) // 3 for text in read(folder, "test", **data)["text"]})
    assert set.union(*threads) == set(range(20)) and sum(map(len, threads)) == 20


def test_few_groups_are_noted():
    keys = np.arange(180).reshape(90, 2)
    assert few_groups("test", keys // 6) is None
    note = few_groups("test", keys // 18)
    assert note is not None and "split test has 10 groups of examples" in note and "89%" in note
    assert "29 examples," in str(few_groups("test", keys[:29]))


CHOOSING = "validation"


def examples_of(texts, labels=None, groups=None):
    keys = torch.from_numpy(content_keys(texts))
    labels = np.zeros(len(texts), dtype=np.int64) if labels is None else np.asarray(labels)
    if groups is not None:
        groups = np.tile(np.array(groups)[:, None], (1, 2))
    return Units.plain(keys, labels, groups)


def fitting_part(examples, split, seed):
    return groups.fitting_part(examples.strata, examples.groups, split, seed)


def choosing_part(examples, fitted, seed):
    others = {split: one.groups for split, one in fitted.items()}
    return groups.choosing_part(examples.strata, examples.groups, others, seed)


def numbered(count, **options):
    return examples_of([f"text {number}" for number in range(count)], **options)


@settings(max_examples=40, deadline=None)
@given(st.integers(120, 400), st.integers(0, 2**31 - 1), st.booleans())
def test_each_labelled_example_fits_or_chooses_whatever_the_order(count, seed, grouped):
    draw = np.random.default_rng(seed)
    numbers = draw.integers(0, count, count)  # some stand twice
    texts = [f"text {number}" for number in numbers]
    labels = draw.integers(-1, 3, count)
    labels[:100] = 0
    groups = (numbers // 3).tolist() if grouped else None
    examples = examples_of(texts, labels, groups)
    fits = fitting_part(examples, CHOOSING, seed)
    chooses = choosing_part(examples, {CHOOSING: examples}, seed)
    assert not set(fits) & set(chooses)
    assert set(np.flatnonzero(labels >= 0)) <= set(fits) | set(chooses)
    assert (labels[fits] >= 0).all()
    assert not {texts[i] for i in fits} & {texts[i] for i in chooses}, "a text is in one part"
    if grouped:
        assert not {groups[i] for i in fits} & {groups[i] for i in chooses}
    order = draw.permutation(count)
    chosen = choosing_part(examples.at(order), {CHOOSING: examples.at(order)}, seed)
    assert set(order[chosen]) == set(chooses)


def test_the_parts_are_halves_and_another_seed_deals_anew():
    examples = numbered(4000)
    parts = [set(fitting_part(examples, CHOOSING, seed)) for seed in (0, 1)]
    for part in parts:
        assert len(part) == 2000
    assert abs(len(parts[0] & parts[1]) - 1000) < 4 * 750**0.5


def test_a_split_of_its_own_fits_whole_and_all_of_validation_chooses_but_what_it_holds():
    validation = examples_of(["a", "b", "c", "b", "d"])
    fitted = numbered(30)
    assert len(fitting_part(fitted, "train", 0)) == 30
    np.testing.assert_array_equal(choosing_part(validation, {}, 0), range(5))
    np.testing.assert_array_equal(choosing_part(validation, {"train": fitted}, 0), range(5))
    fitted = examples_of(["b", "z", "d", *map(str, range(30))])
    np.testing.assert_array_equal(choosing_part(validation, {"train": fitted}, 0), [0, 2])
    # Two expertise phases: what neither fitted on.
    validation = numbered(60)
    fitted = validation.at(np.arange(0, 60, 3))
    both = choosing_part(validation, {"train": fitted, CHOOSING: validation}, 0)
    alone = choosing_part(validation, {CHOOSING: validation}, 0)
    assert list(both) == [i for i in alone if i % 3] and len(both) < len(alone)


def test_too_few_examples_are_refused_with_the_counts():
    with pytest.raises(UserError, match=r"'train' has 19 labelled examples, but .* at least 20"):
        fitting_part(numbered(19), "train", 0)
    assert len(fitting_part(numbered(20), "train", 0)) == 20
    with pytest.raises(UserError, match=r"'validation' has 25 .* of which 1\d may be fitted on"):
        fitting_part(numbered(25), CHOOSING, 0)
    examples = numbered(30)
    with pytest.raises(UserError, match=r"all of its 30 examples .*none is left to choose"):
        choosing_part(examples, {"train": examples}, 0)


@pytest.mark.parametrize(("labels", "chooses"), [([-1] * 60, False), ([-1] * 59 + [0], True)])
def test_a_split_without_labels_does_not_choose(labels, chooses):
    """`keep: last` was refused at the end of the first epoch."""
    examples = numbered(60, labels=labels)
    data = SimpleNamespace(has_split=lambda split: True, examples=lambda split: examples)
    recipe = SimpleNamespace(seed=0, fitted_splits=lambda task: [])
    metric = SimpleNamespace(name="accuracy")
    run = SimpleNamespace(
        data=data,
        recipe=recipe,
        task_name="task",
        task=SimpleNamespace(reads_labels=True, over="classes", metric=metric),
        kind=SimpleNamespace(hidden_words=lambda *_: None),
        collator=lambda *_: None,
    )
    assert (validation_of(run, {}) is not None) is chooses
