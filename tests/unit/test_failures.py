"""What ranks record of their failures: the first of its own kind leads, whoever wrote it."""

import pytest

from ds_distill.process.failures import (
    Failure,
    clear_failures,
    failures,
    first_failure,
    record_failure,
)


def failure(rank, time, kind="fault", message="broke"):
    return Failure(rank, f"host-{rank}", time, kind, message)


def test_the_first_by_time_that_is_no_consequence_leads(tmp_path):
    assert first_failure(tmp_path / "run") is None
    folder = tmp_path / "run"  # of a rank that failed before anything was written
    record_failure(folder, failure(0, 9.0, "lost", "rank 2 is gone"))
    assert first_failure(folder) == failure(0, 9.0, "lost", "rank 2 is gone")
    record_failure(folder, failure(3, 12.0))
    record_failure(folder, failure(2, 11.0, "mistake", "labels: ünknown"))
    assert first_failure(folder) == failure(2, 11.0, "mistake", "labels: ünknown")
    assert [found.rank for found in failures(folder)] == [0, 2, 3]
    assert str(first_failure(folder)) == "rank 2 on host-2: labels: ünknown"


def test_a_ranks_first_record_stays(tmp_path):
    record_failure(tmp_path, failure(1, 5.0, message="the cause"))
    record_failure(tmp_path, failure(1, 4.0, message="what it led to"))
    assert failures(tmp_path) == [failure(1, 5.0, message="the cause")]


@pytest.mark.parametrize(
    ("kind", "code"), [("mistake", 2), ("stopped", 75), ("fault", 1), ("lost", 1)]
)
def test_exit_codes(kind, code):
    assert failure(0, 0.0, kind).exit_code == code


def test_a_damaged_record_hides_no_other(tmp_path):
    record_failure(tmp_path, failure(1, 5.0))
    for rank, text in enumerate(("", "[]", '{"rank": 1}', "\x00"), 2):
        (tmp_path / "failures" / f"rank-{rank:05d}.json").write_text(text)
    assert failures(tmp_path) == [failure(1, 5.0)]
    clear_failures(tmp_path)
    assert not tmp_path.exists()


def test_records_of_an_earlier_start_are_removed(tmp_path):
    folder = tmp_path / "run"
    record_failure(folder, failure(0, 5.0))
    record_failure(folder, failure(1, 50.0))
    clear_failures(folder, before=20.0)
    assert failures(folder) == [failure(1, 50.0)]
    clear_failures(folder)
    assert not folder.exists(), "there was nothing else in it"
    folder.mkdir()
    (folder / "recipe.yaml").touch()
    record_failure(folder, failure(0, 5.0))
    clear_failures(folder)
    assert [path.name for path in folder.iterdir()] == ["recipe.yaml"]
