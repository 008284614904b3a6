"""What an encoder says about a view."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_distill.types import PaddedView, Signals


def read_signals(model: PreTrainedModel, view: PaddedView, *, hidden: bool = False) -> Signals:
    """Run a model on a view.

    Without `view.rows` the model is a sequence classifier and each example is a row. With
    rows it is a masked-LM, and its head runs on the rows alone: no [B, S, V] logits.

    hidden: also return the last layer's state at each row.
    """
    if view.rows is None:
        output = model(**view.model_inputs(), output_hidden_states=hidden)
        state = output.hidden_states[-1][:, 0] if hidden else None
        return Signals(output.logits, state)
    states = model.base_model(**view.model_inputs()).last_hidden_state
    rows = states.flatten(0, 1)[view.rows]
    return Signals(masked_lm_logits(model, rows), rows if hidden else None)


def masked_lm_logits(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Vocabulary logits [n, V] of hidden states [n, H], by the model's own masked-LM head.

    Raises TypeError for a model whose head is not known: none of the families below.
    """
    for name in ("cls", "lm_head"):  # BERT, ELECTRA and legacy DeBERTa; RoBERTa and kin
        head = getattr(model, name, None)
        if isinstance(head, nn.Module):
            return head(rows)
    if hasattr(model, "lm_predictions"):  # DeBERTa
        return model.lm_predictions(rows, model.deberta.embeddings.word_embeddings)
    if hasattr(model, "vocab_projector"):  # DistilBERT
        rows = model.vocab_layer_norm(model.activation(model.vocab_transform(rows)))
        return model.vocab_projector(rows)
    raise TypeError(f"{type(model).__name__} has no masked-LM head that is known here")
