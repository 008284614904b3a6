"""The ops' tests that `make test` does not interpret."""

from kernels.test_interpreter import MARKED, interpret

SCORES = "attention or relation"
"""Their kernels take as long as all others."""


def test_the_other_tests_of_kernels_in_the_interpreter():
    others = ["-m", f"not {MARKED}"]
    interpret([[*others, "-k", SCORES], [*others, "-k", f"not ({SCORES})"]])
