"""linear_kl's memory against the eager path that makes both logits."""

import pytest
import torch
from cases import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="measures the CPU reference and the GPU")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_memory_is_below_an_eighth():
    """N = 8192, 15% counted, V = 128100, bfloat16, by the allocator."""
    import torch.nn.functional as F

    from ds_kernels import linear_kl

    results = {}
    for how in ("fused", "eager"):
        torch.cuda.empty_cache()
        make = dict(device="cuda", dtype=torch.bfloat16)
        teacher, head = torch.randn(8192, 1024, **make), torch.randn(128100, 1024, **make) * 0.05
        student = torch.randn(8192, 768, **make).requires_grad_()
        own = (torch.randn(128100, 768, **make) * 0.05).requires_grad_()
        indices = torch.arange(0, 8192, 7, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if how == "fused":
            loss = linear_kl(student, own, teacher, head, indices)
        else:
            t = F.linear(teacher, head).float().log_softmax(-1)
            s = F.linear(student, own).float().log_softmax(-1)
            mask = torch.zeros(8192, device="cuda").index_fill(0, indices, 1.0)
            loss = (F.kl_div(s, t, reduction="none", log_target=True).sum(-1) * mask).sum()
            del s, t
        retained = torch.cuda.memory_allocated() - before
        loss.backward()
        results[how] = (torch.cuda.max_memory_allocated() - before, retained)
        del loss, student, own
    assert all(a < b / 8 for a, b in zip(results["fused"], results["eager"], strict=True))
