"""Exported models compute what transformers' do, and a file that loses too much is refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from families import VOCABULARY, built

from ds_distill.export.onnx_model import OnnxModel, make_program, quantised, save
from ds_distill.export.student import logit_difference
from ds_distill.models.encoder import read_signals
from ds_distill.views import PaddedView

CASES = [
    ("bert", "TokenClassification"),
    ("roberta", "SequenceClassification"),
    ("electra", "TokenClassification"),
    ("electra", "Regression"),
    ("distilbert", "QuestionAnswering"),
    ("deberta-v3", "QuestionAnswering"),
    ("deberta-v3", "SequenceClassification"),
    ("modernbert", "SequenceClassification"),
]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
ids = numpy.load(sys.argv[2])
given = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": 0 * ids}
names = [one.name for one in session.get_inputs()]
assert all(isinstance(size, str) for one in session.get_inputs() for size in one.shape), "free"
[logits] = session.run(None, {name: given[name] for name in names})
numpy.save(sys.argv[3], logits)
"""


def small_model(kind, head):
    auto = "SequenceClassification" if head == "Regression" else head
    more = {"num_labels": 1 + (head != "Regression"), "max_position_embeddings": 514}
    return built(kind, getattr(transformers, f"AutoModelFor{auto}"), attention=None, **more)


def view_of(head, batch, length, with_types):
    """Random tokens; examples of unlike lengths, the first the longest."""
    random = torch.Generator().manual_seed(batch * 1000 + length)
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=random)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=random)
    lengths[0] = length
    mask = (torch.arange(length) < lengths).long()
    types = (torch.arange(length) >= lengths // 2).long() * mask if with_types else None
    rows = {}
    if head == "TokenClassification":
        rows["positions"] = mask.flatten().nonzero()[:, 0]
    if head == "QuestionAnswering":
        where = torch.arange(length).expand(batch, -1)
        rows["candidates"] = where.masked_fill(mask == 0, -1)
    return PaddedView(ids, mask, types, **rows)


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_a_file_computes_what_the_model_does(kind, head, tmp_path):
    model = small_model(kind, head)
    with_types = getattr(model.config, "type_vocab_size", 0) > 1
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if with_types else [])]
    program = make_program(model, inputs)
    file, small = tmp_path / "model.onnx", tmp_path / "small.onnx"
    save(program, file)
    save(quantised(program), small)
    exported, in_int8 = OnnxModel(file, model.config), OnnxModel(small, model.config)
    found = []
    of_int8 = []
    for batch, length in ((1, 1), (1, 300), (3, 17), (7, 5), (2, 2), (5, 128)):
        view = view_of(head, batch, length, with_types)
        with torch.no_grad():
            wanted = read_signals(model, view).logits
        found.append(logit_difference(wanted, exported.logits(view)))
        of_int8.append(logit_difference(wanted, in_int8.logits(view)))
    (largest, scale), (largest_of_int8, _) = (map(max, *found)), (map(max, *of_int8))
    assert largest < 1e-4 * scale
    assert 0 < largest_of_int8 < 0.5 * scale, "int8 is near, and is not the same file"
    assert small.stat().st_size < file.stat().st_size
    if kind == "bert":
        arguments = [str(path) for path in (file, tmp_path / "ids.npy", tmp_path / "logits.npy")]
        view = view_of(head, 3, 17, False)
        np.save(arguments[1], view.input_ids.numpy())
        subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *arguments], check=True)
        with torch.no_grad():
            wanted = model(view.input_ids).logits
        assert np.abs(np.load(arguments[2]) - wanted.numpy()).max() < 1e-4
