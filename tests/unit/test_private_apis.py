"""What the package uses of its libraries that they do not promise to keep.

Private names, and modules that the libraries do not document, may change with any release: each
one is listed here with the reason why nothing public does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("ds_distill", "kernels/ds_kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "triton", "tokenizers", "accelerate")

PUBLIC_MODULES = {
    *LIBRARIES,
    *("torch.nn", "torch.nn.functional", "torch.nn.attention.varlen", "torch.autograd"),
    *("torch.autograd.forward_ad", "torch.utils.checkpoint"),
    *("torch.distributed", "torch.distributed.run"),
    *("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.rendezvous.api"),
    "torch.distributed.elastic.multiprocessing.errors",
    *("torch.utils.tensorboard", "torch.optim", "torch.profiler", "torch.utils.data"),
    *("deepspeed.accelerator", "deepspeed.comm", "deepspeed.utils"),
    *(
        "tokenizers.models",
        "tokenizers.trainers",
        "transformers.exporters",
        "transformers.integrations",
    ),
    "triton.language",
}
"""Modules that the libraries' own documentation imports from."""

PRIVATE = {
    "_C": "torch: where the next name stands",
    "_are_functorch_transforms_active": "torch: whether torch.func runs, whose derivatives of "
    "these ops would be wrong",
    "_disabled_torch_function_impl": "torch: operations on a subclass of Tensor then make plain "
    "tensors",
    "_external_params": "deepspeed: weights of other modules that a module reads",
    "_is_mkldnn_bf16_supported": "torch: the only word on whether a CPU computes in bf16",
    "_attn_implementation": "transformers: which attention a loaded model has",
    "_clear_trace_structures": "deepspeed: forgets what the last kind of pass read",
    "_commit_hash": "transformers: the commit of the hub that a configuration came from",
    "_current_frames": "sys: documented; where the threads of a rank that hangs are",
    "_flash_attention_forward": "torch: what varlen_attn calls, without its autograd layer",
    "_foreach_copy_": "torch: many tensors in few kernels; its own optimizers and FSDP call it so",
    "_indices": "datasets: the rows of a selection, which it gathers one by one",
    "_lazy_init_hp_params_optimizer_state": "deepspeed: links parameters to Adam's states, which "
    "it does by itself only for one of its groups",
    "_local_scalar_dense": "torch: the operator of Tensor.item(), which a trace answers",
    "_scaled_dot_product_flash_attention_for_cpu": "torch: the operator of fused attention that "
    "runs on the meta device",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch: its backward pass",
    "_mid_tensor_cache": "flashdeberta: where its map of tiles is looked up, in each layer",
    "_unsafe_view": "torch: an operator that moves nothing, which a trace must know",
    "_PartitionedParameterCoordinator__params_to_release": "deepspeed: a method's cache, which "
    "keeps every engine of stage 3",
    "_PACKAGED_DATASETS_MODULES": "datasets: names like csv that are loaders and no data sets",
}

MODULES = {
    "deepspeed.launcher": "the command `deepspeed`; how it reads hostfiles and filters",
    "deepspeed.runtime.zero.parameter_offload": "a list of models that DeepSpeed never shortens",
    "deepspeed.runtime.zero.partitioned_param_coordinator": "a cache that it never empties, "
    "and its record of what a pass reads, of which it has one for all kinds of pass",
    "torch.autograd.function": "once_differentiable: where torch documents it to be",
    "torch.utils._python_dispatch": "TorchDispatchMode: where torch documents it to be",
    "torch.utils.flop_counter": "the operations of each operator, by FlopCounterMode's rules",
    "torch.utils.weak": "WeakIdKeyDictionary: storages have no equality",
    "transformers.tokenization_utils_base": "VERY_LARGE_INTEGER: of a tokenizer without a longest "
    "input",
    "transformers.utils": "cached_file: a file of a model's folder, local or of the hub",
    "transformers.integrations.deepspeed": "unset_hf_deepspeed_config ends what HfDeepSpeedConfig "
    "begins",
    "transformers.masking_utils": "sdpa_mask: the mask of the attention that `attend` ends in",
    "transformers.modeling_outputs": "what the forward of an encoder gives its model",
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS: torch's attention for padded views",
    "transformers.models.auto.modeling_auto": "which kinds are encoders, without importing a model",
    "transformers.models.deberta_v2.modeling_deberta_v2": "DeBERTa's own buckets of distances",
}


def uses() -> Iterator[tuple[str, str]]:
    """(`name` or `module`, where) of what is private in a library."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    ours = {name for tree in trees.values() for name in defined(tree)}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            for name in private_names(node):
                if name not in ours:
                    yield name, place
            for module in modules(node):
                if module.split(".")[0] in LIBRARIES and module not in PUBLIC_MODULES:
                    yield module, place


def defined(tree: ast.Module) -> Iterator[str]:
    """Names that the package itself gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.ImportFrom) and (node.level or not library(node.module)):
            yield from (alias.name for alias in node.names)


def private_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        if node.attr != "_exit":  # of os, and documented
            yield from filter(is_private, [node.attr])
    elif isinstance(node, ast.ImportFrom) and library(node.module):
        yield from filter(is_private, [alias.name for alias in node.names])
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
        names = [n.value for n in node.args if isinstance(n, ast.Constant)]
        yield from (name for name in names if isinstance(name, str) and is_private(name))


def modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)


def library(module: str | None) -> bool:
    return (module or "").split(".")[0] in LIBRARIES


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.fixture(scope="module")
def used() -> list[tuple[str, str]]:
    return [*uses()]


def test_each_private_name_is_listed_with_its_reason(used: list[tuple[str, str]]) -> None:
    new = [(name, place) for name, place in used if name not in {**PRIVATE, **MODULES}]
    assert new == [], "use what is public, or list it here with the reason"


def test_nothing_is_listed_that_is_not_used(used: list[tuple[str, str]]) -> None:
    assert {**PRIVATE, **MODULES}.keys() - {name for name, _ in used} == set()


def test_a_new_use_is_found() -> None:
    code = "from torch._inductor import config\nx = model._private\ngetattr(y, '_hidden', None)"
    nodes = list(ast.walk(ast.parse(code)))
    assert {name for node in nodes for name in private_names(node)} == {"_private", "_hidden"}
    assert [module for node in nodes for module in modules(node)] == ["torch._inductor"]
