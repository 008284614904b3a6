"""Two ranks, of which one does not come, hangs, is stopped or killed, or fails: the other one ends
in a stated time, the rank that was to blame is named once, and the run goes on afterwards."""

from ci.test_ranks import (
    HOST,
    last,
    ranks,  # noqa: F401
    results,
)


def test_a_rank_that_holds_the_interpreter_shows_its_stack_itself(ranks, tmp_path):
    """None of its threads can answer; it is the launcher's to kill."""
    started = ranks.start(tmp_path / "run", plant="hold:1:5")
    [(code, _, errors)] = results(started[:1], 400)
    assert code == 1 and f"rank 1 on {HOST}: it has given no sign for" in last(errors), errors
    started[1].kill()
    _, errors = started[1].communicate()
    assert "Timeout (" in errors and "in planted" in errors
