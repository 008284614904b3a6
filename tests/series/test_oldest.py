"""The lower bounds of pyproject.toml are versions that the tests ran on."""

from ci.test_oldest import oldest


def test_the_oldest_versions_pass():
    assert oldest.run({**oldest.OLDEST, **oldest.COMPANIONS}) == 0
