"""Mistakes that are told together."""

import pytest

from ds_distill.errors import Mistake, UserError, located, refuse


def test_several_mistakes_are_numbered_and_each_is_told_once():
    with pytest.raises(UserError) as error:
        refuse([Mistake("a=1", "wrong."), Mistake("b", "odd."), Mistake("c", "wrong.")] * 2)
    assert error.value.mistakes == [("a=1, c", "wrong."), ("b", "odd.")]
    assert str(error.value) == "2 mistakes:\n1. a=1, c: wrong.\n2. b: odd.\nNothing was started."
    refuse([])


def test_where_they_are_stands_before_each():
    with pytest.raises(UserError) as error, located("phase teach"):
        raise UserError(Mistake("a", "wrong."), "b: wrong.")
    assert [*map(str, error.value.mistakes)] == ["phase teach: a: wrong.", "phase teach: b: wrong."]
    with pytest.raises(UserError, match=r"^phase teach: a: wrong\.$"), located("phase teach"):
        raise UserError("a: wrong.")


def test_the_line_of_a_key_stands_before_it():
    with pytest.raises(UserError) as error:
        found = [Mistake("a.b=c=d", "x"), Mistake("a.c", "x"), Mistake("data.csv:9", "y")]
        refuse(found, {"a.b": "f.yaml:7", "a.c": "f.yaml:8"}.get)
    assert error.value.mistakes == [("f.yaml:7  a.b=c=d, a.c", "x"), ("data.csv:9", "y")]
