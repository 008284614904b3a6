"""linear_kl's memory against the eager path that makes both logits."""

import json
from pathlib import Path

import pytest
from cases import INTERPRETED
from processes import python

pytestmark = pytest.mark.skipif(INTERPRETED, reason="measures the CPU reference and the GPU")

SCRIPT = """
import json, os, resource, sys, threading, time
import torch
import torch.nn.functional as F
from ds_kernels import linear_kl

how, rows, vocabulary, wide, narrow = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(2)
torch.manual_seed(0)
teacher, student = torch.randn(rows, wide), torch.randn(rows, narrow, requires_grad=True)
head, own = torch.randn(vocabulary, wide), torch.randn(vocabulary, narrow, requires_grad=True)
with torch.no_grad():
    head *= 0.05
    own *= 0.05
indices = torch.arange(0, rows, 20)
indices = torch.cat([indices, indices + 1, indices + 2])
indices = indices[indices < rows].sort().values  # 15%
page = os.sysconf("SC_PAGE_SIZE")

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * page

# What the first call imports is not the path's memory.
tiny = torch.randn(2, 4, requires_grad=True)
linear_kl(tiny, tiny, tiny.detach(), tiny.detach()).backward()
torch.mm(teacher[:8], head[:64].T)
before, peak, stop = resident(), [0], threading.Event()

def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
if how == "fused":
    loss = linear_kl(student, own, teacher, head, indices)
else:
    t = F.linear(teacher, head).log_softmax(-1)
    s = F.linear(student, own).log_softmax(-1)
    mask = torch.zeros(rows).index_fill(0, indices, 1.0)
    loss = (F.kl_div(s, t, reduction="none", log_target=True).sum(-1) * mask).sum() / len(indices)
retained = resident() - before
loss.backward()
stop.set()
thread.join()
print(json.dumps({"loss": loss.item(), "retained": retained, "peak": peak[0] - before,
                  "gradient": own.grad.norm().item()}))
"""


def measure(how, *sizes):
    done = python(SCRIPT, how, *sizes, timeout=None)
    return json.loads(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_cpu_memory_is_below_an_eighth():
    """N = 2048, 15% counted, V = 128100, D = 1024 and 768, each path in a fresh process."""
    sizes = (2048, 128100, 1024, 768)
    fused, eager = measure("fused", *sizes), measure("eager", *sizes)
    print(fused, eager)
    assert fused["loss"] == pytest.approx(eager["loss"], rel=1e-3)
    assert fused["gradient"] == pytest.approx(eager["gradient"], rel=1e-3)
    assert fused["peak"] < eager["peak"] / 8
    assert fused["retained"] < eager["retained"] / 8
