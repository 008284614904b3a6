"""Live teachers run once a step over all of its micro-batches, and say what they would have said of
each; what they read is prefetched, whatever else runs in between. What a cache stores of one is
decoded where and when it is needed."""

import gc
import json
from collections import Counter
from dataclasses import replace

import engines
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from engines import make_batch, make_student, terms_of
from families import built
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
)
from unit.test_routing import make_fitted, make_table
from waits import Waits

from ds_distill.cache.codecs import CompactCodec, StoredLogits
from ds_distill.cache.schema import SignalSchema
from ds_distill.engine.config import LAYERS_WHOLE, deepspeed_config, micro_batches_together
from ds_distill.engine.engine import Engine
from ds_distill.engine.placement import sharded_loading
from ds_distill.losses import TermInputs
from ds_distill.models import packed_deberta
from ds_distill.models.bundle import Bundle
from ds_distill.models.labels import LabelMap
from ds_distill.models.load import layers_of
from ds_distill.models.packed import ATTENTION
from ds_distill.routing import Router
from ds_distill.types import Batch, Signals
from ds_distill.views import PackedView, PaddedView, join

PADDING = 1
"""RoBERTa's, which numbers positions by it."""


def view_of(lengths, rows, seed=0):
    """Examples of tokens from 5 on; `rows`: `examples`, `tokens` or `answers`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, 40, mask.shape, generator=generator)
    ids = torch.where(mask.bool(), ids, PADDING)
    positions = candidates = None
    if rows == "tokens":
        chosen = mask.flatten() * (torch.rand(mask.numel(), generator=generator) < 0.5)
        positions = chosen.nonzero()[:, 0]
    if rows == "answers":
        candidates = torch.where(mask.bool(), torch.arange(width), -1)
    return PaddedView(ids, mask, torch.zeros_like(ids), positions, candidates)


@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["examples", "tokens", "answers"]),
    st.booleans(),
)
def test_joined_views_have_the_examples_and_rows_of_each(batches, rows, packed):
    padded = [view_of(lengths, rows, seed) for seed, lengths in enumerate(batches)]
    views = [PackedView.of(view) for view in padded] if packed else [*padded]
    whole = join(views)
    assert isinstance(whole, PackedView if packed else PaddedView)
    tokens = [ids.tolist() for view in views for ids in view.tokens()]
    assert [ids.tolist() for ids in whole.tokens()] == tokens
    if isinstance(whole, PackedView):
        assert whole.host_cu_seqlens == (*whole.cu_seqlens.tolist(),)
    before, examples = 0, []
    for view in views:
        examples += (before + view.example_indices).tolist()
        before += view.num_examples
    assert whole.example_indices.tolist() == examples
    if rows == "tokens":
        read = [view.input_ids.flatten()[view.positions] for view in views]
        assert torch.equal(whole.input_ids.flatten()[whole.positions], torch.cat(read))
    if rows == "answers":
        of_each = [row[row >= 0].tolist() for row in whole.candidates]
        assert of_each == [list(range(length)) for lengths in batches for length in lengths]


SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
}
TEACHERS = {
    "examples": ("bert", AutoModelForSequenceClassification, "examples"),
    "partial": ("bert", AutoModelForSequenceClassification, "examples"),
    # The longest example fills all positions but those that RoBERTa leaves out.
    "roberta": ("roberta", AutoModelForSequenceClassification, "examples"),
    "masked-lm": ("bert", AutoModelForMaskedLM, "tokens"),
    "answers": ("bert", AutoModelForQuestionAnswering, "answers"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", TEACHERS)
def test_teachers_say_of_each_batch_what_they_say_of_it_alone(kind, packed):
    family, head, rows = TEACHERS[kind]
    more = {} if head is AutoModelForQuestionAnswering else {"num_labels": 3}
    more |= {"pad_token_id": PADDING} if family == "roberta" else {}
    teacher = built(family, head, ATTENTION if packed else "sdpa", **SIZES, **more)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.normal_(0, 0.5)
    maps = {"t": LabelMap(((0, 2), (1,)), (0, 3))} if kind == "partial" else None
    terms = terms_of({"cosine": {}, "kl": {}})
    bundle = Bundle(make_student(0.0), {"t": teacher}, terms, label_maps=maps)
    batches = []
    for seed, lengths in enumerate([[3, 10, 2], [5, 1], [4, 4, 4, 7]]):
        view = view_of(lengths, rows, seed)
        batches.append(replace(make_batch(), views={"t": PackedView.of(view) if packed else view}))
    for batch, found in zip(batches, bundle(batches), strict=True):
        [alone] = bundle([batch])
        together, expected = found["t"], alone["t"]
        assert (together.head is None) == (expected.head is None) == (kind != "masked-lm")
        torch.testing.assert_close(together.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert together.logits.shape == expected.logits.shape
        torch.testing.assert_close(together.hidden[-1], expected.hidden[-1], rtol=1e-4, atol=1e-4)
        if maps:
            assert together.classes.tolist() == [0, 3]
        with pytest.raises(ValueError, match="no view for model 't'"):
            bundle([replace(batch, views={})])


# -------------------------------------------------------------------------------- in the engine


MICRO_STEPS = 4


def engine_of(world, config="zero3_fp32", router=None, **options):
    teachers = {name: make_student(0.3) for name in ("first", "second")}
    for number, teacher in enumerate(teachers.values()):
        with torch.no_grad():
            teacher.classifier.weight.mul_(torch.tensor([[1.0], [1.0 + number], [0.5]]))
    settings = {"kl": {}, "cross_entropy": {}, "hidden_mse": {}}
    terms = terms_of(settings, TermInputs(8, dict.fromkeys(teachers, 8)))
    bundle = Bundle(make_student(0.3), teachers, terms, router or Router("average"))
    return engines.engine_of(world, bundle, config, decay=0.1, micro_steps=MICRO_STEPS, **options)


def micro_batches(step):
    """Of unlike lengths."""
    found = []
    for number in range(MICRO_STEPS):
        lengths = [3 + (step + number + row) % 3 for row in range(4)]
        views = dict.fromkeys(("student", "first", "second"), view_of(lengths, "examples", step))
        rows = {"all": torch.arange(4), "labelled": torch.arange(4)}
        found.append(replace(make_batch(), views=views, row_sets=rows))
    return found


class Gathers:
    """Counts how often each weight is gathered, ahead of the module that needs it or not, and the
    records of what to prefetch that DeepSpeed drops."""

    def __init__(self, monkeypatch, engine):
        self.ahead = Counter()
        self.late = Counter()
        self.dropped = 0
        own = PartitionedParameterCoordinator
        gather, fetch, drop = (
            own._PartitionedParameterCoordinator__all_gather_params,
            own.fetch_sub_module,
            own._invalidate_trace,
        )

        def watched_fetch(coordinator, module, **options):
            self.module = module
            fetch(coordinator, module, **options)

        def watched_gather(coordinator, weights, forward):
            leaf = getattr(self.module, "_z3_leaf", False)
            here = set(self.module.parameters(recurse=leaf))
            counter = self.late if set(weights) <= here else self.ahead
            counter.update(weight for weight in weights if weight.ds_status.name != "AVAILABLE")
            gather(coordinator, weights, forward)

        def watched_drop(coordinator):
            self.dropped += 1
            drop(coordinator)

        monkeypatch.setattr(
            own, "_PartitionedParameterCoordinator__all_gather_params", watched_gather
        )
        monkeypatch.setattr(own, "fetch_sub_module", watched_fetch)
        monkeypatch.setattr(own, "_invalidate_trace", watched_drop)
        self._teachers = list(engine.bundle.teachers.parameters())

    def of_teachers(self):
        found = [self.ahead[weight] + self.late[weight] for weight in self._teachers]
        self.ahead.clear()
        self.late.clear()
        return found


@pytest.mark.parametrize(("max_length", "times"), [(8, 1), (2**13, 2), (2**16, 4)])
def test_a_teachers_weights_are_gathered_once_a_step(world, monkeypatch, max_length, times):
    """Or once for every TOKENS_AT_ONCE."""
    together = micro_batches_together(3, 4, MICRO_STEPS, max_length)
    engine = engine_of(world, together=together)
    gathers = Gathers(monkeypatch, engine)
    for step in range(3):
        engine.train_step(micro_batches(step))
        found = gathers.of_teachers()
        assert set(found) == {times}, step
    engine.close()


def test_each_kind_of_pass_is_prefetched(world, monkeypatch):
    engine = engine_of(world, student_resident=False)
    gathers = Gathers(monkeypatch, engine)
    student = list(engine.bundle.students["student"].parameters())
    first = micro_batches(0)[0]
    for step in range(3):
        gathers.of_teachers()
        engine.train_step(micro_batches(step))
        if step:  # in the first one DeepSpeed looks at what is read
            assert sum(gathers.ahead[weight] for weight in student) > len(student)
            assert len([w for w in gathers._teachers if gathers.ahead[w]]) > len(student)
        gathers.of_teachers()
        engine.predict(first, ["first"])
        engine.predict(first, ["student", "second"])
        if step:
            assert sum(gathers.ahead.values()) > len(student)
    assert gathers.dropped == 0
    engine.close()


def test_a_prediction_releases_what_a_step_would_keep(world):
    """For its backward pass."""
    engine = engine_of(world, student_resident=False)
    for step in range(2):
        engine.train_step(micro_batches(step))
        for _ in range(2):
            engine.predict(micro_batches(step)[0], ["student"])
        assert {p.ds_status.name for p in engine.bundle.parameters()} == {"NOT_AVAILABLE"}, step
    engine.close()


def test_a_head_that_a_prediction_reads_is_no_surprise_to_other_passes(world):
    """DeepSpeed counts it among the bundle's own weights from then on, which the records of other
    kinds of pass lack: it raised an error."""
    config = BertConfig(**SIZES)
    student, teacher = BertForMaskedLM(config), BertForMaskedLM(config)
    bundle = Bundle(student, {"t": teacher}, terms_of({"kl": {}}, TermInputs(16)))
    engine = engines.engine_of(
        world, bundle, "zero3_fp32", decay=0.1, micro_steps=2, student_resident=False
    )
    views = dict.fromkeys(("student", "t"), view_of([5, 7, 3, 4], "tokens"))
    batch = Batch.from_views(views)
    losses = []
    for step in range(4):
        losses.append(float(engine.train_step([batch, batch])["loss"]))
        if step:
            engine.predict(batch, ["t"])
            engine.predict(batch, ["student"])
    engine.close()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("resident", [True, False])
def test_linear_layers_are_torchs_unless_the_student_is_sharded(
    world, resident, tmp_path, monkeypatch
):
    """DeepSpeed's hold no gathered weight for the backward pass. They add the bias by itself, which
    rounds twice in bf16, and stay in the place of torch's as long as the process runs."""
    plain = torch._C._nn.linear
    monkeypatch.setattr(functional, "linear", plain)
    with sharded_loading(deepspeed_config("zero3_bf16", None, 1)):
        AutoModelForSequenceClassification.from_config(BertConfig(**SIZES))
    deep_engine(world, tmp_path, packed=False).close()
    assert functional.linear is plain
    engine_of(world, "zero3_bf16", student_resident=resident).close()
    assert (functional.linear is plain) == resident


def losses_of_three_steps(engine):
    torch.manual_seed(1)
    found = []
    for first in range(0, 3, engine.steps_ahead):
        steps = [micro_batches(step) for step in range(first, first + engine.steps_ahead)]
        found += [engine.train_step(batches) for batches in engine.read_ahead(steps)]
    engine.close()
    return found


@pytest.mark.parametrize("config", ["zero1_fp32", "zero3_fp32"])
def test_losses_are_those_of_a_pass_per_micro_step(world, config):
    """Of a quarter of the teachers' passes, or a twelfth. The student drops out the same, since
    teachers draw nothing."""
    found = []
    for together, passes in ((3 * MICRO_STEPS, 1), (MICRO_STEPS, 3), (1, 3 * MICRO_STEPS)):
        engine, calls = engine_of(world, config, together=together), []
        for teacher in engine.bundle.teachers.values():
            teacher.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        found.append(losses_of_three_steps(engine))
        assert len(calls) == 2 * passes  # teachers
    for *ways, expected in zip(*found, strict=True):
        for ours in ways:
            assert ours.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_a_gate_reads_the_states_of_each_micro_batch(world, monkeypatch):
    names = ("first", "second")
    table = make_table({name: [1] * 3 for name in names}, [1] * 3, names)
    router = Router("gate", fitted=make_fitted(table, width=8))
    together = losses_of_three_steps(engine_of(world, router=router))
    average = losses_of_three_steps(engine_of(world))
    monkeypatch.setattr(Engine, "_signalled", lambda _, batches: iter(batches))
    live = losses_of_three_steps(engine_of(world, router=router))
    for step, expected in enumerate(live):
        assert abs(average[step]["kl"] - expected["kl"]) > 0.01 * expected["kl"], step
        for name, value in expected.items():
            torch.testing.assert_close(together[step][name], value, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------- how much is whole at once


LAYERS = 8


def deep_engine(world, folder, packed, *, stage=3, **zero):
    """To predict with a teacher of LAYERS layers. packed: a DeBERTa that reads packed views."""
    file = folder / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage, **zero}}))
    sizes = {**SIZES, "num_hidden_layers": LAYERS}
    config = BertConfig(**sizes)
    if packed:
        config = DebertaV2Config(
            **sizes, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4
        )
    teacher = AutoModelForSequenceClassification.from_config(config).eval()
    return Engine(Bundle(None, {"t": teacher}), deepspeed_config(str(file), None, 1), world)


def most_whole(engine, batch):
    """How many layers' weights are whole or on the way at once, at most, and how often DeepSpeed's
    hooks ran; in the third pass, when it knows what comes."""
    layers = layers_of(engine.bundle.teachers["t"])
    weights = [weight for layer in layers for weight in layer.parameters()]
    found, fetches = 0, 0

    def look(*_):
        nonlocal found
        whole = [weight.ds_numel for weight in weights if weight.ds_status.name != "NOT_AVAILABLE"]
        found = max(found, sum(whole))

    own = engine._engine.optimizer.get_param_coordinator()
    fetch = own.fetch_sub_module

    def counted(*arguments, **options):
        nonlocal fetches
        fetches += 1
        fetch(*arguments, **options)

    for _ in range(2):
        engine.predict(batch, ["t"])
    hooks = [
        add(look)
        for layer in layers
        for part in (layer.intermediate, layer.output)
        for add in (part.register_forward_pre_hook, part.register_forward_hook)
    ]
    own.fetch_sub_module = counted
    engine.predict(batch, ["t"])
    for hook in hooks:
        hook.remove()
    return found / sum(weight.ds_numel for weight in weights) * LAYERS, fetches


@pytest.mark.parametrize("packed", [False, True])
def test_few_layers_of_a_teacher_are_whole_at_once(world, tmp_path, packed):
    """Of 8; and the layers are gathered in one piece, or in few. What a user's config says goes
    before."""
    view = view_of([5, 9, 2, 3], "examples")
    batch = replace(make_batch(), views={"t": PackedView.of(view) if packed else view})
    engine = deep_engine(world, tmp_path, packed)
    whole, fetches = most_whole(engine, batch)
    assert 1.5 < whole < LAYERS_WHOLE + 0.5  # a weight more, where it is on the way
    assert fetches < (10 if packed else 4) * LAYERS
    engine.close()
    free = deep_engine(
        world, tmp_path, packed, stage3_max_live_parameters=10**9, stage3_prefetch_bucket_size=10**9
    )
    assert most_whole(free, batch)[0] > LAYERS_WHOLE + 2
    free.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_position_tables_are_kept_of_whole_weights_alone(world, tmp_path, stage):
    view = PackedView.of(view_of([5, 9, 2, 3], "examples"))
    engine = deep_engine(world, tmp_path, packed=True, stage=stage)
    engine.predict(replace(make_batch(), views={"t": view}), ["t"])
    encoder = engine.bundle.teachers["t"].base_model.encoder
    assert (encoder in packed_deberta._kept) is (stage == 0)
    engine.close()


def test_a_step_does_not_wait_for_the_device(world, monkeypatch):
    """DeepSpeed's throughput timer did, twice a micro-step; a user may want it."""
    waits = 0

    def wait(*_):
        nonlocal waits
        waits += 1

    monkeypatch.setattr(get_accelerator(), "synchronize", wait)
    for config in ("zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3_fp32"):
        engine = engine_of(world, config)
        for step in range(3):
            if step:
                waits = 0
            engine.train_step(micro_batches(step))
        assert waits == 0, config
        engine.close()


@pytest.fixture
def pinned(monkeypatch):
    """The tensors that were pinned since: copies, as there is no pinned memory without a GPU."""
    found = []

    def pin(tensor):
        found.append(tensor.clone())
        return found[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return found


def test_a_batch_is_pinned_whole(pinned):
    batch = micro_batches(0)[0]
    padded = batch.views["first"]
    batch = replace(
        batch,
        views={"student": padded, "first": padded, "second": PackedView.of(padded)},
        signals={"t": Signals(torch.zeros(4, 2), {-1: torch.zeros(4, 8)}, torch.tensor([0, 2]))},
        counts={"all": torch.tensor(4.0)},
    ).pin_memory()
    assert batch.views["student"] is batch.views["first"]
    tensors = tensors_of(batch)
    assert len(tensors) >= 16 and {*map(id, tensors)} <= {*map(id, pinned)}


@pytest.mark.parametrize("dummy", [False, True])
def test_what_a_cache_stores_is_pinned(pinned, dummy):
    """Also where no token is masked: then it is a dummy row's logits."""
    codec = CompactCodec(16)
    signals = Signals(StoredLogits(codec.encode(torch.zeros(3, 16)), codec, 1.0))
    if dummy:
        signals = signals.dummy()
    output = signals.pin_memory().output
    if isinstance(output, StoredLogits):
        assert {id(output.encoded.payload), id(output.encoded.lengths)} == {*map(id, pinned)}
    else:
        assert len(output) == 1 and [id(output)] == [*map(id, pinned)]


def tensors_of(value):
    """All that can be reached from a value."""
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
    return [tensor for one in inside for tensor in tensors_of(one)]


V, ROWS, STORED_STEPS = 500, 4, 8
COMPACT = CompactCodec(V, 0.01).to_json()


def batch_of(rows, seed, codec):
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


def engine_with(world):
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1}
    student = built("bert", AutoModelForMaskedLM, "sdpa", **sizes)
    bundle = Bundle(student, {}, terms_of({"kl": {}}, TermInputs(16)))
    return engines.engine_of(
        world, bundle, "zero1_fp32", rate=1e-3, decay=0.0, micro_steps=STORED_STEPS
    )


@pytest.fixture
def new_objects_alone():
    """`gc` looks at nothing that was imported before: half a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def decoded_rows():
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
def test_one_micro_batch_is_decoded_at_a_time(world, codec):
    """Whatever a step's batch: decoded, it is [rows, V] in float32. The losses are the same."""
    micro_batches = [batch_of(ROWS, seed, codec) for seed in range(STORED_STEPS)]
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
def test_moving_is_not_decoding(codec):
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
def test_decoding_waits_for_nothing(codec, monkeypatch):
    """What is checked and counted was so before the bytes were pinned, and the codec's tables are
    on the device."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    cpu, copied = torch.device("cpu"), []
    stored = StoredLogits(codec.encode(3 * torch.randn(40, V)), codec, 2.0)
    pinned = stored.pin_memory().moved(cpu)
    wanted = stored.to(cpu)
    moves = torch.Tensor.to

    def to(tensor, *args, **options):
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


def tensors(decoded):
    held = [decoded] if isinstance(decoded, torch.Tensor) else vars(decoded).values()
    return [one for one in held if isinstance(one, torch.Tensor)]
