"""Packed views: without padding, and with the same outputs as padded ones."""

import contextlib
import copy
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
import transformers as tr
from families import LAYERS, VOCABULARY, WIDTH, built, config_of, padded_view
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from waits import Waits

from ds_distill.models import encoder, packed_deberta, packing
from ds_distill.models.capture import Captured
from ds_distill.models.configuration import SEEN_FAMILIES
from ds_distill.models.encoder import classifier_logits, read_signals
from ds_distill.models.packed import ATTENTION, _flash, attend, packed_states
from ds_distill.models.packing import packed_attention, packed_backend, takes_packed
from ds_distill.reads import Reads
from ds_distill.views import PackedView

FAMILIES = [
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "modernbert"),
    *("modernbert of means", "eurobert", "eurobert of means", "eurobert of fewer keys"),
    *("nomic_bert", "gte", "jina_embeddings_v3", "deberta-v2", "deberta-v2 without buckets"),
    "deberta-v3",
]
HEADS = [tr.AutoModelForSequenceClassification, tr.AutoModelForMaskedLM]
CPU = torch.device("cpu")
OF_LAYERS = (0, 1, -1)


def models(family, kind):
    """The same weights for padded and for packed views."""
    attentions = ("eager", packed_attention(config_of(family)))
    return [built(family, kind, attention, num_labels=3) for attention in attentions]


def difference(family, kind, view):
    """The largest one of logits, states and what attention reads, as a share of the largest number
    where that is above 1: logits of so wide random weights reach 5."""
    padded, packed = models(family, kind)
    seen = (1, -1) if family in SEEN_FAMILIES else ()
    reads = Reads(OF_LAYERS, queries=seen, keys=seen, values=seen)
    with torch.no_grad():
        wanted = read_signals(padded, view, reads)
        outputs = read_signals(packed, PackedView.of(view), reads)
        pairs = [(outputs.logits, wanted.logits)]
        pairs += [(outputs.hidden[layer], wanted.hidden[layer]) for layer in OF_LAYERS]
    assert outputs.attention.keys() == wanted.attention.keys() == {*seen}
    for layer, of in wanted.attention.items():
        own, real = outputs.attention[layer], of.mask[:, None, :, None]
        assert torch.equal(own.mask, of.mask) and own.scale == of.scale
        parts = ("queries", "keys", "values")
        pairs += [(getattr(own, part) * real, getattr(of, part) * real) for part in parts]
    assert all(one.shape == other.shape for one, other in pairs)
    return max(
        float((one - other).abs().max()) / max(1.0, float(other.abs().max()))
        for one, other in pairs
    )


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_outputs_are_the_padded_ones(family, kind):
    types = family in ("bert", "electra")
    view = padded_view([9, 1, 30, 12, 2], types=types, rows=kind is HEADS[1])
    assert difference(family, kind, view) < 1e-5


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 36), min_size=1, max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("family", ["roberta", "deberta-v3"])
def test_packed_outputs_are_the_padded_ones_for_all_lengths(family, lengths, seed):
    view = padded_view(lengths, seed=seed, rows=True)
    assert difference(family, HEADS[1], view) < 1e-5


def before_and_after(model, device=CPU):
    """Logits of three examples, twice: the tokens of the second one change between."""
    view = PackedView.of(padded_view([7, 12, 5])).to(device)
    ids = view.input_ids.clone()
    ids[7:19] = 5 + (ids[7:19] - 4) % (VOCABULARY - 5)
    other = PackedView(ids, view.position_ids, view.cu_seqlens, view.max_seqlen)
    with torch.no_grad():
        return [read_signals(model, each).logits for each in (view, other)]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_does_not_see_its_neighbours(family):
    one, two = before_and_after(models(family, HEADS[0])[1])
    assert torch.equal(one[[0, 2]], two[[0, 2]])
    assert not torch.allclose(one[1], two[1])


@pytest.mark.parametrize("family", [name for name in FAMILIES if packed_attention(config_of(name))])
def test_no_map_of_all_tokens_is_made(family):
    """A mask [T, T] of 32,768 tokens would be a GiB."""
    masks = []

    def watched(module, query, key, value, mask, **options):
        masks.append(mask)
        return attend(module, query, key, value, mask, **options)

    _, model = models(family, HEADS[0])
    view = PackedView.of(padded_view([7, 12, 5]))
    tr.AttentionInterface.register(ATTENTION, watched)
    try:
        with torch.no_grad(), patch.object(encoder, "layers_to_run_flat", lambda _: []):
            read_signals(model, view)
    finally:
        tr.AttentionInterface.register(ATTENTION, attend)
    assert len(masks) == LAYERS and all(mask is None or mask.numel() == 0 for mask in masks)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    types=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_a_packed_view_holds_the_same_examples_and_rows(lengths, types, seed):
    view = padded_view(lengths, types=types, rows=True, seed=seed)
    packed = PackedView.of(view).to(CPU)
    assert packed.max_seqlen == max(lengths) and packed.cu_seqlens.dtype == torch.int32
    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    assert packed.cu_seqlens.tolist() == [*packed.host_cu_seqlens] == ends
    for example, length in enumerate(lengths):
        own = slice(packed.cu_seqlens[example], packed.cu_seqlens[example + 1])
        assert torch.equal(packed.input_ids[own], view.input_ids[example, :length])
        assert torch.equal(packed.position_ids[own], torch.arange(length))
        if types:
            assert torch.equal(packed.token_type_ids[own], view.token_type_ids[example, :length])
    assert torch.equal(packed.input_ids[packed.positions], view.input_ids.flatten()[view.positions])
    assert torch.equal(packed.example_indices, view.example_indices)


@pytest.mark.parametrize("family", ["bert", "deberta-v3"])
def test_a_model_for_packed_views_takes_padded_ones_too(family):
    padded, packed = models(family, HEADS[0])
    view = padded_view([4, 9])
    with torch.no_grad():
        torch.testing.assert_close(
            read_signals(packed, view).logits, read_signals(padded, view).logits
        )


@pytest.mark.parametrize("lengths", [[4, 9], [9, 9]], ids=["padded", "full"])
@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("family", FAMILIES[:6])
def test_a_padded_pass_waits_for_no_device(family, kind, lengths, monkeypatch, tmp_path):
    """transformers looks whether a batch has padding, which must run first. What it then computes,
    and its gradients, are the same bit for bit."""
    view = replace(padded_view(lengths, rows=True), is_full=lengths[0] == 9)
    view = view if kind is HEADS[1] else replace(view, positions=None)
    masks, computed = [], []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def attention(*tensors, attn_mask=None, **options):
        masks.append(attn_mask is not None)
        return sdpa(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    for name in ("sdpa", ATTENTION):
        model = built(family, kind, name).train()
        before = len(masks)
        read_signals(model, view)  # the first pass looks whether it needs the modules
        del masks[before:]
        torch.manual_seed(1)  # of dropout
        with Waits() as waits:
            outputs = read_signals(model, view)
        outputs.logits.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        computed.append([outputs.logits, *gradients])
    assert waits.found == []
    assert masks == [lengths[0] < 9] * (2 * LAYERS)
    assert all(torch.equal(one, other) for one, other in zip(*computed, strict=True))
    model.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text(), "it is of no other program"


@pytest.mark.parametrize(
    "model",
    [
        built("bert", HEADS[0], "sdpa"),
        built("deberta-v2 with a convolution", HEADS[0]),
        built("albert", HEADS[0]),
    ],
    ids=["loaded for padded views", "a convolution", "a family that is not known"],
)
def test_a_model_that_would_mix_examples_is_refused(model):
    with pytest.raises(ValueError, match="would mix the examples of a packed view"):
        read_signals(model, PackedView.of(padded_view([3, 2])))


@pytest.mark.parametrize(
    "kind", ["ultrabert", "nomic_bert", "modernbert", "eurobert", "gte", "jina_embeddings_v3"]
)
def test_what_says_the_same_packed_takes_packed_views(kind):
    """Of the configurations as they are published, whose windows are longer than small texts."""
    assert takes_packed(tr.AutoConfig.for_model(kind))


@pytest.mark.parametrize("kind", ["big_bird", "mpnet", "megatron-bert", "albert", "ernie"])
def test_what_says_another_thing_packed_keeps_its_padding(kind):
    """It mixes examples; or, as Albert, has a head that is not known here."""
    assert not takes_packed(tr.AutoConfig.for_model(kind))


def test_a_model_is_asked_once(monkeypatch):
    asked = []

    def answer(config):
        asked.append(config.model_type)
        return True

    monkeypatch.setattr(packing, "_same_packed", answer)
    monkeypatch.setattr(packing, "_found", {})
    for config in (tr.BertConfig(), tr.BertConfig(vocab_size=99), tr.BertConfig(is_decoder=True)):
        assert takes_packed(config)
    assert asked == ["bert", "bert"], "its vocabulary decides nothing"


def test_attention_that_forgets_its_window_is_found(monkeypatch):
    """As of a ModernBERT whose window were not passed on."""

    def forgets(*given, **options):
        return attend(*given, **{**options, "sliding_window": None})

    monkeypatch.setattr(packing, "_found", {})
    tr.AttentionInterface.register(ATTENTION, forgets)
    try:
        assert not takes_packed(config_of("modernbert"))
        assert takes_packed(config_of("bert"))
    finally:
        tr.AttentionInterface.register(ATTENTION, attend)


def test_a_classification_head_that_is_not_known_is_refused():
    with pytest.raises(TypeError, match=r"Albert.* has no classification head that is known"):
        classifier_logits(built("albert", HEADS[0]), torch.zeros(2, WIDTH))


def test_no_dropout_in_training_on_packed_views():
    _, model = models("bert", HEADS[0])
    with pytest.raises(AssertionError, match="no dropout"):
        read_signals(model.train(), PackedView.of(padded_view([3, 2])))


def test_backends(monkeypatch):
    capability = [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    plain, gpu = "example by example", torch.device("cuda")
    convolution = config_of("deberta-v2 with a convolution")
    bert, deberta = config_of("bert", num_attention_heads=2), config_of("deberta-v3")
    for device, half in ((CPU, False), (CPU, True), (gpu, False)):  # kernels compute in 16 bits
        assert packed_backend(bert, device, half=half) == plain
        assert packed_backend(deberta, device, half=half) == plain
        assert packed_backend(convolution, device, half=half) is None
    assert packed_backend(config_of("albert"), CPU, half=True) is None
    # A build for CUDA may call itself 2.14.1+cu130, and be installed as 2.14.1.
    name, _, found = packed_backend(bert, gpu, half=True).rpartition(" ")
    assert name == "varlen_attn of torch"
    assert Version(found).release == Version(torch.__version__).release
    there = find_spec("flashdeberta") is not None
    found = packed_backend(deberta, gpu, half=True)
    assert (found is not None and found.startswith("flashdeberta ")) == there
    narrow = config_of("deberta-v2", num_attention_heads=4)
    assert packed_backend(narrow, gpu, half=True) is None
    for width in (26, 288):  # of a head; 26: TinyBERT's with 312 in all
        other = config_of("bert", hidden_size=4 * width)
        assert packed_backend(other, gpu, half=True) is None
    capability[0] = (7, 5)  # FlashAttention runs on none before Ampere
    assert packed_backend(bert, gpu, half=True) is None
    assert packed_attention(bert) == ATTENTION
    assert packed_attention(deberta) is None


def attentions_differ():
    """flashdeberta's kernel against the plain attention, in both arrangements."""
    largest = 0.0
    for family in ("deberta-v3", "deberta-v2 without buckets"):
        module = built(family).encoder.layer[0].attention.self
        view = PackedView.of(padded_view([9, 1, 30, 17]))
        generator = torch.Generator().manual_seed(0)
        heads, slots = 2, 2 * module.pos_ebd_size
        q, k, v = (torch.randn(57, heads, 16, generator=generator) for _ in range(3))
        tables = [torch.randn(heads, slots, 16, generator=generator) for _ in range(2)]
        if module.pos_att_type[0] == "c2p":
            tables[1] = None
        both = [
            attend(q, k, v, *tables, view, module, 0.15)
            for attend in (packed_deberta.flash_attention, packed_deberta.plain_attention)
        ]
        largest = max(largest, float((both[0] - both[1]).abs().max()))
    return largest


def passes_differ():
    """Whole passes likewise, with a map of tiles that is made once."""
    _, model = models("deberta-v3", tr.AutoModel)
    view = PackedView.of(padded_view([9, 1, 30, 70]))
    with torch.no_grad():
        plain = packed_states(model, view, Captured(Reads(), LAYERS))
        packed_deberta._on_kernel = lambda states: True
        return float((packed_states(model, view, Captured(Reads(), LAYERS)) - plain).abs().max())


def tile_maps(monkeypatch, lengths, device, passes=1):
    """The maps that flashdeberta's launches are given, where nothing is computed."""
    ops = pytest.importorskip("flashdeberta.ops.flash_attention_varlen")
    found = []

    def launch(kernel, key, config, make_launch):
        (count, _), args, _ = make_launch(*config[:2])
        found.append((*args[11:13], count, config[0]))

    monkeypatch.setattr(ops, "launch", launch)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(packed_deberta, "_on_kernel", lambda states: True)
    model = built("deberta-v3").to(device)
    view = PackedView.of(padded_view(lengths)).to(device)
    with torch.no_grad():
        for _ in range(passes):
            packed_states(model, view, Captured(Reads(), LAYERS))
    assert not ops._mid_tensor_cache
    return found


@pytest.mark.skipif(find_spec("flashdeberta") is None, reason="flashdeberta is not installed")
def test_flashdeberta_asks_no_device_for_lengths(monkeypatch):
    """Where tensors have no numbers, and asking is an error; the map is made once a pass."""
    found = tile_maps(monkeypatch, [9, 1, 30], "meta", passes=2)
    assert len(found) == 2 * LAYERS and len({id(one[0]) for one in found}) == 2


@pytest.mark.skipif(find_spec("flashdeberta") is None, reason="flashdeberta is not installed")
@pytest.mark.parametrize("lengths", [[1], [64, 64], [130, 1, 65, 63], [3, 200]])
def test_the_map_of_tiles_is_flashdebertas_own(monkeypatch, lengths):
    ops = pytest.importorskip("flashdeberta.ops.flash_attention_varlen")
    ends = (0, *accumulate(lengths))
    for example, start, count, tile in tile_maps(monkeypatch, lengths, "cpu"):
        own = ops._get_mid_cached(ends, len(lengths), tile)
        assert (tuple(example.tolist()), tuple(start.tolist()), count) == own
        assert example.dtype == start.dtype == torch.int64


def tables_made(model, view):
    """The last states, and how often relative embeddings were projected for them."""
    encoder, counted = model.base_model.encoder, []
    rows = encoder.rel_embeddings.num_embeddings
    hooks = [
        part.register_forward_hook(lambda _, given, __: counted.append(len(given[0]) == rows))
        for part in encoder.modules()
        if isinstance(part, torch.nn.Linear)
    ]
    states = packed_states(model, view, Captured(Reads(), LAYERS))
    for hook in hooks:
        hook.remove()
    return states, sum(counted)


def other_weights(model):
    state = model.state_dict()
    model.load_state_dict({name: weight * 1.01 for name, weight in state.items()})


CHANGES = {
    "nothing": (lambda model: None, 0),
    "other weights": (other_weights, 1),
    "another type": (lambda model: model.double(), 1),
    "its head": (lambda model: model.classifier.weight.mul_(2), 0),
    "its table": (lambda model: model.base_model.encoder.rel_embeddings.weight.mul_(2), 1),
    "trained": (lambda model: model.requires_grad_(True), 1),
    "trained in part": (lambda model: model.base_model.encoder.rel_embeddings.requires_grad_(), 1),
}


@pytest.mark.parametrize("family", [name for name in FAMILIES if "deberta" in name])
@pytest.mark.parametrize("change", CHANGES)
def test_position_tables_of_frozen_weights_are_made_once(family, change):
    """Outputs are to the bit those of a model that makes them in this pass."""
    _, model = models(family, HEADS[0])
    model.requires_grad_(False)
    view = PackedView.of(padded_view([9, 1, 14]))
    projections = LAYERS * len(model.config.pos_att_type)
    assert tables_made(model, view)[1] == projections
    make, again = CHANGES[change]
    with torch.no_grad():
        make(model)
    for made in (again * projections, projections if "trained" in change else 0):
        states, count = tables_made(model, view)
        own, _ = tables_made(copy.deepcopy(model), view)
        assert count == made and torch.equal(states, own)


def test_position_tables_are_those_of_a_pass_in_another_precision():
    _, model = models("deberta-v3", HEADS[0])
    model.requires_grad_(False)
    view = PackedView.of(padded_view([9, 1, 14]))
    for cast in (False, True, False):
        own = copy.deepcopy(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cast):
            assert torch.equal(tables_made(model, view)[0], tables_made(own, view)[0])


def test_position_tables_of_inference_mode_take_no_part_in_training():
    _, model = models("deberta-v3", HEADS[0])
    model.requires_grad_(False)
    view = PackedView.of(padded_view([9, 1, 14]))
    with torch.inference_mode():
        tables_made(model, view)
    model.base_model.embeddings.requires_grad_(True)
    tables_made(model, view)[0].sum().backward()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_flash_attention_without_gradients_is_the_operation_itself(gradients, window):
    """On tensors without numbers: which operations run, and with what windows."""
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            called.append((str(op), kwargs or {}, args))
            if "_flash_attention_forward" in str(op):
                return (args[0],) * 5
            return op(*args, **(kwargs or {}))

    q, k, v = (torch.empty(9, 2, 16, device="meta", dtype=torch.bfloat16) for _ in "qkv")
    cu_seqlens = torch.empty(3, device="meta", dtype=torch.int32)
    with torch.set_grad_enabled(gradients), Watch():
        context = _flash(q, k, v, cu_seqlens, 7, 0.5, window)
    assert context.shape == (9, 2, 16)
    wrapped = [one for one in called if "varlen" in one[0]]
    assert bool(wrapped) is gradients
    if not gradients:
        [(_, named, given)] = called
        side = -1 if window is None else 4
        assert named == {"scale": 0.5, "window_size_left": side, "window_size_right": side}
        assert given[5:8] == (7, 7, 0.0)


def test_check_asks_what_runs_without_padding_where_nothing_has_imported_torch(toy_recipe):
    """It ended in a NameError."""
    command = ["-m", "ds_distill", "check", str(toy_recipe), "padding=never"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0 and "no mistakes found" in done.stdout, done.stderr
