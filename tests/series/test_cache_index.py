"""The index at ten million keys: built in one process, searched in a fresh one."""

import json
import os
from pathlib import Path

from processes import python

from ds_distill.files import write_json
from ds_distill.run.inputs import describe_environment

RESULTS = Path(__file__).parents[1] / "results" / "cache-index.json"
KEYS = 10_000_000

BEGIN = """
import json, resource, statistics, sys, time
from pathlib import Path
import numpy as np
from ds_distill.cache.format import KeyIndex, write_index
from ds_distill.files import checksum

file, count, rng = Path(sys.argv[1]), int(sys.argv[2]), np.random.default_rng(0)
draw = lambda count: rng.integers(-2**63, 2**63, size=(count, 2), dtype=np.int64)
memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
"""
BUILD = f"""{BEGIN}
keys, rows = draw(count), np.arange(count, dtype=np.uint32)
before, begin = memory(), time.perf_counter()
write_index(file, keys, rows)
seconds = time.perf_counter() - begin
print(json.dumps({{"build_seconds": round(seconds, 2), "build_memory_mib": memory() - before}}))
"""
ASK = f"""{BEGIN}
found = checksum(file)
before, begin, seconds = memory(), time.perf_counter(), []
index = KeyIndex(file.parent, file.name, found)
opened = time.perf_counter() - begin
# The same keys again, a part at a time, so that little memory is taken beside the index.
for part in range(200):
    keys = draw(256)
    begin = time.perf_counter()
    rows = index.find(keys)
    seconds.append(time.perf_counter() - begin)
    assert (rows == np.arange(256 * part, 256 * (part + 1))).all()
assert (index.find(keys + 1) == -1).all()
median = round(1e6 * statistics.median(seconds))
print(json.dumps({{"open_seconds": round(opened, 2), "microseconds_for_256_keys": median,
                  "memory_mib": memory() - before}}))
"""


def measure(code, file):
    done = python(code, file, KEYS, timeout=900)
    return json.loads(done.stdout)


def test_the_index_is_small_and_answers(tmp_path):
    """Sizes are asserted; times are only written down."""
    file = tmp_path / "index.arrow"
    found = {"keys": KEYS, **measure(BUILD, file)}
    found |= {"file_mib": round(file.stat().st_size / 2**20, 1), **measure(ASK, file)}
    print(found)
    assert file.stat().st_size <= 20 * KEYS + 1024
    assert found["file_mib"] < 400 and found["memory_mib"] < 400
    if os.environ.get("DS_DISTILL_WRITE_RESULTS") == "1":
        what = "DS_DISTILL_WRITE_RESULTS=1 pytest tests/series/test_cache_index.py"
        write_json(RESULTS, {"command": what, **found, **describe_environment(1, "cpu")})
