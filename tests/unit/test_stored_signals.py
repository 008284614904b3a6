"""What a cache stores of a masked-LM teacher is decoded where and when it is needed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import engine_of, terms_of
from families import built
from transformers import AutoModelForMaskedLM
from waits import Waits

from ds_distill.cache.codecs import CompactCodec, StoredLogits, VocabularyCodec
from ds_distill.cache.schema import SignalSchema
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.losses import TermInputs
from ds_distill.models.bundle import Bundle
from ds_distill.types import Batch, Signals
from ds_distill.views import PaddedView

V, ROWS, MICRO_STEPS = 500, 4, 8
COMPACT = CompactCodec(V, 0.01).to_json()


def batch_of(rows: int, seed: int, codec: dict[str, Any] | None) -> Batch:
    """A batch of masked tokens and a teacher's logits, as a cache gives them."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, V, (rows, 4), generator=draw)
    at = torch.arange(rows)
    view = PaddedView(ids, torch.ones_like(ids), torch.zeros_like(ids), positions=at * 4)
    schema = SignalSchema(
        dtype="float16", classes=V, codec=codec, temperature=codec and 1.0, mask_variants=2
    )
    logits = 3 * torch.randn(rows, V, generator=draw)
    signals = schema.decode(schema.encode(Signals(logits)).columns, as_stored=True)
    labels = torch.zeros(rows, dtype=torch.int64)
    return Batch.from_views({"student": view}, labels, signals={"t": signals})


def engine_with(world: World) -> Engine:
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1}
    student = built("bert", AutoModelForMaskedLM, "sdpa", **sizes)
    bundle = Bundle(student, {}, terms_of({"kl": {}}, TermInputs(16)))
    return engine_of(world, bundle, "zero1_fp32", rate=1e-3, decay=0.0, micro_steps=MICRO_STEPS)


@pytest.fixture
def new_objects_alone() -> Iterator[None]:
    """`gc` looks at nothing that was imported before: half a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def decoded_rows() -> int:
    """Rows of float32 [n, V] that are alive, the student's left out."""
    gc.collect()
    return sum(
        len(one)
        for one in gc.get_objects()
        if isinstance(one, torch.Tensor)
        and one.shape[1:] == (V,)
        and one.dtype == torch.float32
        and not one.requires_grad
    )


@pytest.mark.parametrize("codec", [COMPACT, None])
@pytest.mark.usefixtures("new_objects_alone")
def test_one_micro_batch_is_decoded_at_a_time(world: World, codec: dict[str, Any] | None) -> None:
    """Whatever a step's batch: decoded, it is [rows, V] in float32. The losses are the same."""
    micro_batches = [batch_of(ROWS, seed, codec) for seed in range(MICRO_STEPS)]
    engine, alive = engine_with(world), []
    hook = engine.bundle.register_forward_pre_hook(lambda *_: alive.append(decoded_rows()))
    losses = [engine.train_step(micro_batches)["loss"] for _ in range(2)]
    assert {*alive} == {ROWS}
    hook.remove()
    engine.close()

    other = engine_with(world)
    whole = [batch.to("cpu") for batch in micro_batches]
    assert all(batch.signals["t"].logits.dtype == torch.float32 for batch in whole)
    assert losses == [other.train_step(whole)["loss"] for _ in range(2)]
    other.close()


@pytest.mark.parametrize("codec", [COMPACT, None])
def test_moving_is_not_decoding(codec: dict[str, Any] | None) -> None:
    batch = batch_of(3, 0, codec)
    moved = batch.moved("cpu", {})
    with pytest.raises(ValueError, match="decode them"):
        _ = moved.signals["t"].logits
    assert len(moved.signals["t"]) == 3
    assert torch.equal(
        moved.decoded("cpu").signals["t"].logits, batch.to("cpu").signals["t"].logits
    )
    decoded = batch.to("cpu")
    assert (
        decoded.moved("cpu", {}).decoded("cpu").signals["t"].logits is decoded.signals["t"].logits
    )


FITTED = CompactCodec(V, 0.01).fit([3 * torch.randn(64, V, generator=torch.manual_seed(0))])


@pytest.mark.parametrize("codec", [FITTED, CompactCodec(V)])
def test_decoding_waits_for_nothing(
    codec: VocabularyCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked and counted was so before the bytes were pinned, and the codec's tables are
    on the device."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    cpu, copied = torch.device("cpu"), []
    stored = StoredLogits(codec.encode(3 * torch.randn(40, V)), codec, 2.0)
    pinned = stored.pin_memory().moved(cpu)
    wanted = stored.to(cpu)
    moves = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if isinstance(args[0], torch.device):
            copied.append(id(tensor))
        return moves(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", to)
    with Waits() as waits:
        found = pinned.to(cpu)
    assert waits.found == []
    own = [one for one in (pinned.encoded.payload, pinned.encoded.lengths) if one is not None]
    assert {*copied} == {*map(id, own)}
    for one, other in zip(tensors(found), tensors(wanted), strict=True):
        assert torch.equal(one, other)


def tensors(decoded: Any) -> list[torch.Tensor]:
    held = [decoded] if isinstance(decoded, torch.Tensor) else vars(decoded).values()
    return [one for one in held if isinstance(one, torch.Tensor)]
