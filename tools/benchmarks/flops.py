"""Floating-point operations of an encoder's forward pass: 2 for each multiplication of its
matrix products, as torch's FlopCounterMode counts them. Element-wise work is left out."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedConfig


def encoder_flops(config: PreTrainedConfig, lengths: np.ndarray) -> float:
    """Of a BERT, RoBERTa or DeBERTa-v3 body, without padding and without a head.

    lengths: int [N], tokens of each example.
    """
    layers, width, wide = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    tokens, pairs = float(lengths.sum()), float(np.square(lengths, dtype=np.float64).sum())
    total = layers * (tokens * (8 * width**2 + 4 * width * wide) + 4 * width * pairs)
    if config.model_type == "deberta-v2":  # content to position and position to content
        slots = 2 * config.position_buckets
        total += layers * 4 * slots * width * tokens
    return total
