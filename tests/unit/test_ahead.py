"""Batches are made while the ones before them are used."""

import threading

import pytest

from ds_distill.data.schedule import prefetch


def test_items_come_in_order_and_from_another_thread():
    made = list(prefetch(lambda item: (item * 2, threading.get_ident()), range(5)))
    assert [value for value, _ in made] == [0, 2, 4, 6, 8]
    assert {thread for _, thread in made} != {threading.get_ident()}
    assert list(prefetch(lambda item: item, [])) == []


def test_the_next_item_is_made_while_one_is_held_and_no_more():
    begun = [threading.Event() for _ in range(4)]

    def make(item):
        begun[item].set()
        return item

    for item in prefetch(make, range(4)):
        if item < 3:
            assert begun[item + 1].wait(10)
        assert not any(event.is_set() for event in begun[item + 2 :])


def test_an_item_is_taken_one_ahead_where_the_items_are_used():
    taken = []

    def items():
        for item in range(3):
            taken.append((item, threading.get_ident()))
            yield item

    for item in prefetch(lambda item: item, items()):
        assert taken == [(n, threading.get_ident()) for n in range(min(item + 2, 3))]


def test_an_error_is_raised_where_its_item_is_taken():
    def make(item):
        if item == 2:
            raise ValueError("no batch")
        return item

    taken = []
    with pytest.raises(ValueError, match="no batch"):
        taken.extend(prefetch(make, range(4)))
    assert next(prefetch(make, range(4))) == 0
    items = prefetch(make, range(4))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError):
        next(items)
