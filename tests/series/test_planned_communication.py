"""On four ranks what is gathered is in more parts."""

from ci.test_planned_communication import check_planned_bytes


def test_planned_bytes_are_what_deepspeed_sends(tmp_path, warm):
    check_planned_bytes(4, tmp_path, warm)
