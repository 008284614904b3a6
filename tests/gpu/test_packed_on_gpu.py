"""On a GPU: packed views through the kernels that runs use there."""

from importlib.util import find_spec

import pytest
import torch
from families import config_of
from unit.test_packed import FAMILIES, HEADS, before_and_after, models, padded_view

from ds_distill.models.encoder import read_signals
from ds_distill.models.packing import packed_backend
from ds_distill.views import PackedView

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
GPU = torch.device("cuda")
LENGTHS = [9, 1, 30, 12, 2, 31, 33]


@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_bf16_is_as_near_to_fp32_as_padded_bf16(family, kind):
    if packed_backend(config_of(family), GPU, half=True) is None:
        pytest.skip("flashdeberta is not installed, or the GPU is before Ampere")
    padded, packed = (model.to(GPU) for model in models(family, kind))
    view = padded_view(LENGTHS, rows=kind is HEADS[1]).to(GPU)
    with torch.no_grad():
        exact = read_signals(padded, view).logits
        padded, packed = padded.bfloat16(), packed.bfloat16()
        rounded = read_signals(padded, view).logits.float()
        outputs = read_signals(packed, PackedView.of(view)).logits.float()
    error, usual = (outputs - exact).abs().max(), (rounded - exact).abs().max()
    assert error < 2 * usual + 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_an_example_does_not_see_its_neighbours(family):
    if packed_backend(config_of(family), GPU, half=True) is None:
        pytest.skip("flashdeberta is not installed, or the GPU is before Ampere")
    model = models(family, HEADS[0])[1].to(GPU).bfloat16()
    one, two = before_and_after(model, GPU)
    assert torch.equal(one[[0, 2]], two[[0, 2]])
    assert not torch.equal(one[1], two[1])


@pytest.mark.skipif(find_spec("flashdeberta") is None, reason="flashdeberta is not installed")
def test_flashdebertas_kernel_is_the_plain_attention_at_real_widths():
    from large_teachers import configurations

    from ds_distill.models import packed_deberta

    config = configurations()["deberta-v3-large"]
    config.num_hidden_layers = 1
    from transformers import AutoModel

    module = AutoModel.from_config(config).encoder.layer[0].attention.self
    lengths = [512, 3, 200, 64, 65]
    view = PackedView.of(padded_view(lengths)).to(GPU)
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), 16, 64)
    q, k, v = (torch.randn(shape, generator=generator).to(GPU, torch.bfloat16) for _ in range(3))
    tables = [torch.randn(16, 512, 64, generator=generator).to(GPU, torch.bfloat16) for _ in "qk"]
    given = (view, module, 1 / (3 * 64) ** 0.5)
    flash = packed_deberta.flash_attention(q, k, v, *tables, *given)
    plain = packed_deberta.plain_attention(*(x.float() for x in (q, k, v, *tables)), *given)
    assert (flash.float() - plain).abs().max() < 0.05
