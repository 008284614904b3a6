"""Makes a rank misbehave, where it is imported or stands as its sitecustomize.py: with
DS_DISTILL_TEST_PLANT=hang:1:5 rank 1 hangs at step 5. With `slow` it is slow to look what the run
has done before, and with `late` it sees files late."""

import os
import sys
import threading
import time


def plant():
    what, rank, step = os.environ["DS_DISTILL_TEST_PLANT"].split(":")
    if rank != os.environ.get("RANK"):
        return
    if what == "die":  # as soon as the ranks have met
        while "torch.distributed" not in sys.modules:
            time.sleep(0.01)
        time.sleep(0.5)
        import torch.distributed

        while not torch.distributed.is_initialized():
            time.sleep(0.001)
        os.kill(os.getpid(), 9)
    while "ds_distill.training.loop" not in sys.modules:
        time.sleep(0.01)
    if what == "slow":
        from ds_distill.run.folder import RunFolder

        read = RunFolder.read_record
        RunFolder.read_record = lambda *given: time.sleep(0.2) or read(*given)
        return
    if what == "late":
        late()
        return
    time.sleep(0.2)
    from ds_distill.training.loop import _Training

    collate = _Training._collate

    def planted(self, epoch, item):
        if item[0] == int(step):
            if what == "hang":
                planted_hang()
            if what == "hold":
                import ctypes

                ctypes.PyDLL(None).sleep(600)  # without giving the interpreter free
            if what == "memory":
                import torch

                torch.empty(1 << 60, dtype=torch.uint8)
            raise ValueError("planted here")
        return collate(self, epoch, item)

    _Training._collate = planted


def late():  # that a file was not there is remembered for a while, as NFS does
    import ds_distill.phases.cache as cache
    from ds_distill.training.checkpoints import Checkpoints

    known, complete, absent, looked = cache.known_teachers, Checkpoints._complete, {}, []

    def known_late(path):
        if path in absent and time.monotonic() - absent[path] < 30:
            return {}
        found = known(path)
        if not found:
            absent.setdefault(path, time.monotonic())
        return found

    def complete_late(self):
        looked.append(self)
        return complete(self)[: -1 if len(looked) < 3 else None]

    cache.known_teachers, Checkpoints._complete = known_late, complete_late


def planted_hang():
    while True:
        time.sleep(0.01)


if "DS_DISTILL_TEST_PLANT" in os.environ:
    threading.Thread(target=plant, daemon=True).start()
