"""The same tests run on the CPU reference, on a GPU where there is one, and, in a process with
TRITON_INTERPRET=1 (see test_interpreter.py), on the Triton kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import cases
import pytest
import torch


@pytest.fixture(params=cases.DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, so that 37 columns or positions are three tiles with a ragged last one."""
    if cases.INTERPRETED:
        for module in cases.MODULES.values():
            if hasattr(module, "row_tile"):
                monkeypatch.setattr(module, "row_tile", lambda *sizes, **options: (16, 1))
        monkeypatch.setattr(cases.MODULES["_scores"], "score_tile", lambda *sizes: (16, 4, 2))


@pytest.fixture(autouse=True)
def kernels_on_few_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where plain PyTorch takes as few logits as most tests have."""
    monkeypatch.setattr(cases.MODULES["masked_kl"], "FEW", -1)


@pytest.fixture(autouse=True)
def expected_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that runs an op ran it on the path its device calls for."""
    cases.MODULES["_shared"]._path = "none"
    yield
    device = (
        request.node.callspec.params.get("device") if hasattr(request.node, "callspec") else None
    )
    used = cases.MODULES["_shared"].last_path()
    if device is not None and used != "none":
        assert used == ("triton" if device == "cuda" or cases.INTERPRETED else "reference")
