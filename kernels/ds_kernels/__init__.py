"""Fused distillation losses: Triton kernels on CUDA, a PyTorch reference on CPU."""

from ._shared import last_path
from .attention_kl import attention_kl
from .linear_cross_entropy import linear_cross_entropy
from .linear_kl import linear_kl
from .masked_cosine import masked_cosine
from .masked_kl import masked_kl
from .relation_kl import relation_kl
from .topk_kl import topk_kl

__all__ = [
    "attention_kl",
    "last_path",
    "linear_cross_entropy",
    "linear_kl",
    "masked_cosine",
    "masked_kl",
    "relation_kl",
    "topk_kl",
]
