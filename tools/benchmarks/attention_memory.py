"""Peak memory of a step of attention and relation terms on the last layers, of a teacher as large
as BERT-large (24 layers, random weights) and a student of six of such layers: ours against
TextBrewer 0.2.1.post1, the last on PyPI. One process each, in turn.

    pip install textbrewer
    python tools/benchmarks/attention_memory.py --output tests/results/attention-memory.json

The peak is resident memory above that with both models loaded: activations, gradients, what a loss
makes. There is no optimizer, and no dropout. Ours has `attention_kl` and `relation_kl` of values,
sdpa attention, and a masked-LM head at 15% of the tokens, without logits. TextBrewer is used as
documented: models give all attention maps (so eager attention), the losses are `attention_ce`, and
`mmd` of states, which is the nearest that it has to relations; its models have no head. Every
tensor that an operation makes is looked at, to find the largest that holds maps.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import BertConfig, BertForMaskedLM, BertModel

from ds_distill.data.masking import _with_every_token
from ds_distill.files import write_json
from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.reads import TOKENS
from ds_distill.recipe.terms import losses_of
from ds_distill.run.inputs import describe_environment
from ds_distill.types import Batch
from ds_distill.views import PaddedView

WAYS = ("ours", "textbrewer")
LAYERS = {"teacher": 24, "student": 6}


class LargestMap(TorchDispatchMode):
    """The most elements of a tensor whose last two sizes are those of a map of a text's tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.elements = length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-2:] == (self.length,) * 2:
                # A mask that is spread over examples and heads has no memory of its own.
                own = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, min(tensor.numel(), own))
        return made


def config_of(model: str, length: int, attention: str) -> BertConfig:
    return BertConfig(
        vocab_size=30522,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        num_hidden_layers=LAYERS[model],
        max_position_embeddings=max(512, length),
        attn_implementation=attention,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def ours(ids: torch.Tensor) -> Any:
    """A step of ours: a function of no arguments."""
    length = ids.shape[1]
    student, teacher = (
        BertForMaskedLM(config_of(one, length, "sdpa")) for one in ("student", "teacher")
    )
    losses = {"attention_kl": {}, "relation_kl": {"of": ["values"]}}
    inputs = TermInputs(1024, {"teacher": 1024}, LAYERS["student"], {"teacher": LAYERS["teacher"]})
    bundle = Bundle(student, {"teacher": teacher.eval()}, build_terms(losses_of(losses), inputs))
    masked = torch.arange(0, ids.numel(), 7)
    view = PaddedView(ids, torch.ones_like(ids), positions=masked)
    view, labels, rows = _with_every_token(view, ids.flatten()[masked])
    sets = {"all": rows, TOKENS: torch.arange(len(labels))}
    batch = Batch.from_views({"student": view, "teacher": view}, labels, row_sets=sets)
    return lambda: bundle(batch)["loss"].backward()


def textbrewer(ids: torch.Tensor) -> Any:
    import textbrewer as rival  # may not be installed

    student, teacher = (
        BertModel(config_of(one, ids.shape[1], "eager"), add_pooling_layer=False)
        for one in ("student", "teacher")
    )
    at = (LAYERS["student"], LAYERS["teacher"])
    matches = [
        {
            "feature": "attention",
            "loss": "attention_ce",
            "weight": 1,
            "layer_S": at[0] - 1,
            "layer_T": at[1] - 1,
        },
        {
            "feature": "hidden",
            "loss": "mmd",
            "weight": 1,
            "layer_S": [at[0]] * 2,
            "layer_T": [at[1]] * 2,
        },
    ]

    def adaptor(batch: dict[str, torch.Tensor], output: Any) -> dict[str, Any]:
        return {
            "attention": output.attentions,
            "hidden": output.hidden_states,
            "inputs_mask": batch["attention_mask"],
        }

    distiller = rival.GeneralDistiller(
        rival.TrainingConfig(device="cpu", output_dir=tempfile.mkdtemp()),
        rival.DistillationConfig(intermediate_matches=matches),
        teacher.eval(),
        student.train(),
        adaptor,
        adaptor,
    )
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    args = {"output_attentions": True, "output_hidden_states": True}
    return lambda: distiller.train_on_batch(batch, args)[0].backward()


def measure(way: str, examples: int, length: int) -> dict[str, float]:
    torch.manual_seed(0)
    ids = torch.randint(1000, 30000, (examples, length))
    step = {"ours": ours, "textbrewer": textbrewer}[way](ids)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, largest = time.process_time(), LargestMap(length)
    with largest:
        step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "peak_mb": peak / 1024,
        "models_mb": before / 1024,
        "largest_map": largest.elements / (examples * length**2),
        "cpu_seconds": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--runs", type=int, default=1, help="of each way, in turn")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON")
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.examples, given.length)))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    sizes = ["--examples", str(given.examples), "--length", str(given.length)]
    for _ in range(given.runs):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, *sizes]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[way].append(json.loads(out.splitlines()[-1]))
            print(way, found[way][-1], flush=True)
    peaks = {way: statistics.median(run["peak_mb"] for run in runs) for way, runs in found.items()}
    environment = describe_environment(1, "cpu")
    environment["packages"]["textbrewer"] = version("textbrewer")
    content = {
        "settings": {"examples": given.examples, "length": given.length, "layers": LAYERS},
        "runs": found,
        "ours / textbrewer, medians": peaks["ours"] / peaks["textbrewer"],
        "largest_map": "elements, as a multiple of one head's map of each example",
        "environment": environment,
    }
    print(json.dumps(content["ours / textbrewer, medians"]))
    if given.output:
        write_json(given.output, content)


if __name__ == "__main__":
    main()
