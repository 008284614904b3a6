"""A masked-LM teacher's signals are cached per mask variant, and a student trains from the cache as
from the live teacher."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import yaml
from e2e.test_masked_lm_cache import LOSSES, VARIANTS, cache, curve, distil, recipe, run  # noqa: F401

from ds_distill.cache.reader import CacheReader


def test_ranks_with_a_sharded_teacher_and_padding_write_the_same_signals(
    run: Path, recipe: dict[str, Any], ds_distill: Any
) -> None:
    [teacher] = (run / "run" / "models").glob("00-*")
    short = copy.deepcopy(recipe)
    short["teachers"]["bert"]["model"] = str(teacher)
    short["phases"] = [recipe["phases"][2], recipe["phases"][3]]
    short["padding"] = "always"
    (run / "two.yaml").write_text(yaml.safe_dump(short, sort_keys=False))
    command = ["cache", "build", "two.yaml", "deepspeed=zero3_fp32", "--num-gpus", "2"]
    done = ds_distill(*command, "--folder", run / "two", cwd=run)
    assert done.returncode == 0, done.stdout + done.stderr
    one = CacheReader(run / "run" / "cache" / "02-whole")
    two = CacheReader(run / "two" / "cache" / "00-whole")
    keys = torch.from_numpy(one._index.keys)
    assert two.holds(keys).all() and len(keys) == two.manifest.examples
    attention = [reader.manifest.teachers["bert"].fingerprint["attention"] for reader in (one, two)]
    assert attention == ["example by example", "padded"]
    for variant in range(VARIANTS):
        outputs = [
            reader.read("bert", reader.indices(keys), variant).logits for reader in (one, two)
        ]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
