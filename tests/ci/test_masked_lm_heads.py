"""Masked-LMs whose heads have parts of their own, as teachers and students: MobileBERT's weight of
two parts, ModernBERT's and EuroBERT's without a bias, at stage 0 and sharded on two ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from runs import run_here
from toys import TINY, toy_vocabulary

SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
}
OWN: dict[str, dict[str, Any]] = {
    "mobilebert": {
        "embedding_size": 16,
        "true_hidden_size": 32,
        "intra_bottleneck_size": 32,
        "hidden_size": 48,
    },
    "modernbert": {"decoder_bias": False, "local_attention": 4},
    "eurobert": {"num_key_value_heads": 2},
}


@pytest.fixture(scope="module")
def models(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Masked-LMs of the toy vocabulary, by family."""
    root = tmp_path_factory.mktemp("heads")
    for family, own in OWN.items():
        sizes = {**TINY, **SPECIAL, "max_position_embeddings": 128, **own}
        config = tr.AutoConfig.for_model(family, vocab_size=len(toy_vocabulary()), **sizes)
        torch.manual_seed(0)
        model = tr.AutoModelForMaskedLM.from_config(config)
        model.save_pretrained(root / family)
        for file in tiny_models["toy"].glob("*token*"):
            shutil.copy(file, root / family)
    return {family: str(root / family) for family in OWN}


def distilled(settings: dict[str, Any], teacher: str, student: str) -> dict[str, Any]:
    return {
        **settings,
        "teachers": {"large": {"model": teacher}},
        "student": {"model": student, "layers": [0]},
        "training": {**settings["training"], "keep": "last", "learning_rate": 3e-3},
        "phases": [
            {"fine-tune": {"models": "large", "epochs": 1}},
            {"distil": {"losses": {"cross_entropy": {}, "kl": {}, "hidden_mse": {}}, "epochs": 1}},
            {"evaluate": {"split": "test"}},
        ],
    }


def test_a_modernbert_learns_from_a_mobilebert(
    models: dict[str, str], masked_lm_settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = distilled(masked_lm_settings, models["mobilebert"], models["modernbert"])
    folder = run_here(settings, tmp_path, "training.steps=4")
    student = tr.AutoModelForMaskedLM.from_pretrained(folder / "student")
    assert (type(student).__name__, len(student.model.layers)) == ("ModernBertForMaskedLM", 1)
