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
    kind = type(model).__name__
    if kind.endswith("ForMaskedLM"):  # others have parts of the same names that do other things
        for name in ("cls", "lm_head", "predictions"):  # BERT and legacy DeBERTa; RoBERTa; ALBERT
            head = getattr(model, name, None)
            if isinstance(head, nn.Module):
                return head(rows)
        if hasattr(model, "lm_predictions"):  # DeBERTa
            return model.lm_predictions(rows, model.deberta.embeddings.word_embeddings)
        if hasattr(model, "generator_lm_head"):  # ELECTRA
            return model.generator_lm_head(model.generator_predictions(rows))
        if hasattr(model, "vocab_projector"):  # DistilBERT
            rows = model.vocab_layer_norm(model.activation(model.vocab_transform(rows)))
            return model.vocab_projector(rows)
    raise TypeError(
        f"{kind} has no masked-LM head that is known here: BERT, RoBERTa, DeBERTa, ALBERT, ELECTRA "
        "and DistilBERT models ForMaskedLM have one"
    )
