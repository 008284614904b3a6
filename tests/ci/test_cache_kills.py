"""A build that is killed at any moment goes on where it was, and ends with the same blocks, byte
for byte, as if nothing had been; only the files that they lie in are others."""

from unit.test_cache_builds import Series


def test_fifty_kills_at_random_calls_change_nothing(tmp_path):
    series = Series(tmp_path, seed=1)
    made = series.run(kills=50, ranks=lambda: 2, among_blocks=20)
    series.check_equal(made)
    assert len(made) >= 4
    print(f"kills: {dict(series.stages)} in {len(made)} builds")
    assert series.stages["before the plan"]
    assert series.stages["finishing"] + series.stages["cleaning up"] >= 2
