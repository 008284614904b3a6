"""What an encoder says about a view."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_distill.models.capture import capturing
from ds_distill.models.configuration import pools_all_tokens
from ds_distill.models.flat import flat, layers_to_run_flat
from ds_distill.models.load import seeded
from ds_distill.models.packed import attend_tokens, packed_states, padded_inputs
from ds_distill.reads import Reads
from ds_distill.types import LACKING, Signals, VocabularyHead
from ds_distill.views import PackedView, PaddedView, View

ALONE = Reads()
"""Logits and nothing else."""


def read_signals(model: PreTrainedModel, view: View, reads: Reads = ALONE) -> Signals:
    """Run a model on a view. One that is given a packed view was loaded for it, and is in eval
    mode.

    Without `view.positions` the model is a sequence classifier and each example is a row, with the
    state that its head reads: the first token's, or the mean of all tokens'. With positions it is a
    token classifier or a masked-LM, and its head is computed at these positions alone; a
    masked-LM's logits only if somebody asks for them. With `view.candidates` it finds answers: each
    example has two rows, start and end, with logits float32 [2B, K] over the candidates, LACKING
    where an example has fewer, and with the state of the first token.

    reads: what is asked for beside logits, or in their place.
    """
    layers, attend = layers_to_run_flat(model), None
    if isinstance(view, PackedView):
        attend = partial(attend_tokens, cu_seqlens=view.cu_seqlens, longest=view.max_seqlen)
    with capturing(model, reads) as captured, flat(model, layers, captured, attend):
        if isinstance(view, PackedView):
            logits, last = None, packed_states(model, view, captured, bool(layers))
        elif view.positions is None and view.candidates is None and reads.logits:
            logits, last = model(**padded_inputs(model, view)).logits, None
        else:
            output = model.base_model(**padded_inputs(model, view))
            logits, last = None, output.last_hidden_state.flatten(0, 1)
    states = {layer: _at_rows(model, state, view) for layer, state in captured.states.items()}
    if reads.logits and last is not None:
        logits = _head(model, last, view)
    return Signals(logits, states, attention=captured.attention(view))


def _head(model: PreTrainedModel, last: torch.Tensor, view: View) -> torch.Tensor | VocabularyHead:
    """What a model's head makes of the last states [T, H] of a view's tokens, without the dropout
    of a sequence classifier."""
    if view.candidates is not None:
        return _span_rows(span_logits(model, last), _first_tokens(view), view.candidates)
    if view.positions is None:
        if getattr(model.config, "classifier_pooling", None) == "late":  # EuroBERT
            return _means(classifier_logits(model, last), view)
        return classifier_logits(model, _pooled_of_packed(model, last, view))
    if type(model).__name__.endswith("ForTokenClassification"):
        return token_logits(model, last[view.positions])
    return vocabulary_head(model, last[view.positions])


def logits_at_rows(outputs: Mapping[str, torch.Tensor], view: PaddedView) -> torch.Tensor:
    """What a model's forward gives for all tokens, by its names, at the rows of a view: [n, C]; see
    `read_signals`. For a model that is run whole, as an exported one is."""
    if view.candidates is not None:
        both = torch.stack([outputs["start_logits"], outputs["end_logits"]], dim=-1)
        return _span_rows(both.flatten(0, 1), _first_tokens(view), view.candidates)
    logits = outputs["logits"]
    return logits if view.positions is None else logits.flatten(0, 1)[view.positions]


def _first_tokens(view: View) -> torch.Tensor:
    """int64 [B]: where each example begins among a view's tokens."""
    if isinstance(view, PackedView):
        return view.cu_seqlens[:-1].long()
    every = torch.arange(view.num_examples, device=view.input_ids.device)
    return every * view.input_ids.shape[1]


def _at_rows(model: PreTrainedModel, states: torch.Tensor, view: View) -> torch.Tensor:
    """A layer's states at the rows: [B, S, H], or [1, T, H] of a packed view, to [n, H]."""
    if view.positions is not None:
        return states.flatten(0, 1)[view.positions]
    if view.candidates is not None:
        return states.flatten(0, 1)[_first_tokens(view)].repeat_interleave(2, 0)
    if isinstance(view, PackedView):
        return _pooled_of_packed(model, states[0], view)
    return _pooled(model, states, view)


def _pooled(model: PreTrainedModel, states: torch.Tensor, view: PaddedView) -> torch.Tensor:
    """What a sequence classifier's head reads of the states [B, S, H] of a layer: [B, H]."""
    if not pools_all_tokens(model.config):
        return states[:, 0]
    mask = view.attention_mask[:, :, None]
    return (states * mask).sum(dim=1) / mask.sum(dim=1)


def _pooled_of_packed(model: PreTrainedModel, states: torch.Tensor, view: View) -> torch.Tensor:
    """The same, of states [T, H]."""
    if pools_all_tokens(model.config) and isinstance(view, PackedView):
        return _means(states, view)
    return states[_first_tokens(view)]


def _means(rows: torch.Tensor, view: View) -> torch.Tensor:
    """Of each example of a packed view the mean of its rows [T, C]: [B, C]."""
    assert isinstance(view, PackedView)
    lengths = view.cu_seqlens.diff().long()
    numbers = torch.arange(len(lengths), device=rows.device)
    example = numbers.repeat_interleave(lengths, output_size=len(rows))
    return (
        rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, example, rows) / lengths[:, None]
    )


def read_weights(model: PreTrainedModel, reads: Reads) -> set[nn.Parameter]:
    """The weights to train that what is asked for is made of: all but those of the layers above,
    and of the head, which is left aside. Takes a pass through the model, on one short text."""
    ids = torch.ones(1, 8, dtype=torch.int64, device=model.device)
    view = PaddedView(ids, torch.ones_like(ids))
    with torch.enable_grad(), seeded(0):  # dropout draws
        with capturing(model, reads) as captured:
            model.base_model(**view.model_inputs())
        attention = captured.attention(view).values()
    taken = [*captured.states.values()]
    taken += [
        part
        for one in attention
        for part in (one.queries, one.keys, one.values)
        if part is not None
    ]
    left = [tensor.grad_fn for tensor in taken]
    found, seen = set(), set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # a leaf, which accumulates a gradient
            found.add(node.variable)
        left += [before for before, _ in node.next_functions]
    return found


def classifier_logits(model: PreTrainedModel, first: torch.Tensor) -> torch.Tensor:
    """A sequence classifier's own head, without dropout, at the states that it reads, of first
    tokens or means: [B, H] to [B, C].

    Raises TypeError for a model whose head is not known: none of the families below.
    """
    kind, sequences = type(model).__name__, first[:, None]  # heads look for the first token
    if kind.endswith("ForSequenceClassification"):
        for body in ("bert", "nomic_bert", "gte"):
            if hasattr(model, body):
                pooled = model.get_submodule(body).pooler(sequences)
                return cast(torch.Tensor, model.classifier(pooled))
        if hasattr(model, "head"):  # ModernBERT
            return cast(torch.Tensor, model.classifier(model.head(first)))
        if hasattr(model, "dense"):  # EuroBERT
            return cast(torch.Tensor, model.classifier(model.activation(model.dense(first))))
        if hasattr(model, "roberta") or hasattr(model, "electra"):
            return cast(torch.Tensor, model.classifier(sequences))
        if hasattr(model, "deberta"):
            return cast(torch.Tensor, model.classifier(model.pooler(sequences)))
        if hasattr(model, "pre_classifier"):  # DistilBERT
            return cast(torch.Tensor, model.classifier(model.pre_classifier(first).relu()))
    raise TypeError(
        f"{kind} has no classification head that is known here: BERT, RoBERTa, DeBERTa, ELECTRA, "
        "DistilBERT, ModernBERT and EuroBERT models ForSequenceClassification have one"
    )


def token_logits(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """A token classifier's own head at last states [n, H]: [n, C]; see `_projected`."""
    return _projected(
        model, states, ("classifier",), "token classification head", "parts dropout and classifier"
    )


def _span_rows(logits: torch.Tensor, first: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Logits of a batch's tokens [T, 2] to those of the candidates: float32 [2B, K].

    first: int64 [B], the first token of each example. candidates: int64 [B, K], from there on.
    """
    rows = logits[first[:, None] + candidates.clamp(min=0)].float()
    rows = rows.masked_fill((candidates < 0)[:, :, None], LACKING)
    return rows.transpose(1, 2).flatten(0, 1)


def span_logits(model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
    """The logits of an answer's start and end by a model's own head at last states [..., H]:
    [..., 2]; see `_projected`."""
    lasts = ("qa_outputs", "classifier")
    return _projected(model, states, lasts, "head for extractive questions", "part qa_outputs")


def _projected(
    model: PreTrainedModel, states: torch.Tensor, lasts: tuple[str, ...], head: str, has: str
) -> torch.Tensor:
    """What a model's own head of dropout and a projection makes of states [..., H].

    lasts: the names that the projection may have. head, has: for the message.

    Raises TypeError for a model whose head is not known: other than dropout and a projection,
    ModernBERT's with a layer before them.
    """
    parts = {name: part for name, part in model.named_children() if name != model.base_model_prefix}
    last = {*lasts} & parts.keys()
    if len(last) != 1 or not parts.keys() <= {*last, "head", "drop", "dropout"}:
        raise TypeError(
            f"{type(model).__name__} has no {head} that is known here: encoders such as BERT, "
            f"RoBERTa, DeBERTa and ModernBERT have one, with the {has}"
        )
    for name in ("head", "drop", "dropout", *last):
        states = parts[name](states) if name in parts else states
    return states


def vocabulary_head(model: PreTrainedModel, positions: torch.Tensor) -> VocabularyHead:
    """A masked-LM's own head at hidden states [n, H], up to its last projection.

    Raises TypeError for a model whose head is not known: none of the families below.
    """
    kind = type(model).__name__
    if kind.endswith("ForMaskedLM"):  # others have parts of the same names that do other things
        if hasattr(model, "vocab_projector"):  # DistilBERT
            features = model.vocab_layer_norm(model.activation(model.vocab_transform(positions)))
            return VocabularyHead(features, model.vocab_projector, model.vocab_projector)
        if hasattr(model, "cls"):  # BERT, legacy DeBERTa, MobileBERT
            head = model.cls.predictions
            more = head.dense if model.config.model_type == "mobilebert" else None
            return VocabularyHead(head.transform(positions), head.decoder, head.decoder, more)
        if model.config.model_type == "modernbert":
            return VocabularyHead(model.head(positions), model.decoder, model.decoder)
        if model.config.model_type == "eurobert":
            return VocabularyHead(positions, model.lm_head, model.lm_head)
        if hasattr(model, "lm_head"):  # RoBERTa and kin
            head = model.lm_head
            features = head.layer_norm(nn.functional.gelu(head.dense(positions)))
            return VocabularyHead(features, head.decoder, head.decoder)
        if hasattr(model, "predictions"):  # ALBERT
            head = model.predictions
            features = head.LayerNorm(head.activation(head.dense(positions)))
            return VocabularyHead(features, head.decoder, head.decoder)
        if hasattr(model, "lm_predictions"):  # DeBERTa
            head = model.lm_predictions.lm_head
            features = head.LayerNorm(head.transform_act_fn(head.dense(positions)))
            return VocabularyHead(features, model.get_input_embeddings(), head)
        if hasattr(model, "generator_lm_head"):  # ELECTRA
            features = model.generator_predictions(positions)
            return VocabularyHead(features, model.generator_lm_head, model.generator_lm_head)
    raise TypeError(
        f"{kind} has no masked-LM head that is known here: BERT, RoBERTa, DeBERTa, ALBERT, "
        "ELECTRA, DistilBERT, MobileBERT, ModernBERT and EuroBERT models ForMaskedLM have one"
    )
