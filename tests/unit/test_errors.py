"""Mistakes that are told together."""

from __future__ import annotations

import pytest

from ds_distill.errors import UserError, located, refuse


def test_several_mistakes_are_numbered_and_each_is_told_once() -> None:
    with pytest.raises(UserError) as error:
        refuse(["a: wrong.", "b: wrong.", "a: wrong."])
    assert error.value.mistakes == ("a: wrong.", "b: wrong.")
    assert str(error.value) == "2 mistakes:\n1. a: wrong.\n2. b: wrong.\nNothing was started."
    refuse([])


def test_where_they_are_stands_before_each() -> None:
    with pytest.raises(UserError) as error, located("phase teach"):
        raise UserError("a: wrong.", "b: wrong.")
    assert error.value.mistakes == ("phase teach: a: wrong.", "phase teach: b: wrong.")
    with pytest.raises(UserError, match=r"^phase teach: a: wrong\.$"), located("phase teach"):
        raise UserError("a: wrong.")
