"""Ranks of DeepSpeed's launcher and of torchrun end when that is killed."""

import os
import signal

from processes import python


def test_ranks_of_others_have_no_such_signal(monkeypatch):
    """That of the kernel comes when a thread of the parent ends, not the parent."""
    code = (
        "import ctypes, os\n"
        "from ds_distill.process.launcher import end_with_launcher\n"
        "end_with_launcher()\n"
        "found = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)\n"
        "print(found.value)"
    )

    def signal_of(**variables):
        return int(python(code, env={**os.environ, **variables}).stdout)

    for name in ("RANK", "TORCHELASTIC_RUN_ID", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert signal_of() == 0
    assert signal_of(RANK="0") == 0
    assert signal_of(RANK="0", TORCHELASTIC_RUN_ID="x") == signal.SIGKILL
