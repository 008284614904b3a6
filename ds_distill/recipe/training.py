"""How a phase trains: the section `training` of a recipe, and the same keys of each phase that
trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ds_distill.recipe.section import MAY_CHANGE, Count, Section, Share


class Training(Section):
    """How a phase trains. The recipe's `training` section sets it for all phases; a phase
    may differ."""

    gone: ClassVar[dict[str, tuple[object, str]]] = {
        "not_finite": (
            "stop",
            "a loss that is not finite ends the run, and bf16 and fp16 skip a step whose gradients "
            "are not",
        )
    }

    epochs: Count = 3
    """Passes over the split."""
    steps: Count | None = None
    """Optimizer steps to train for, in place of `epochs`; the last epoch ends where they do. Of
    `training` and a phase, the phase's own word holds, be it steps or epochs."""
    patience: Count | None = None
    """Epochs without a better validation score than the best so far, after which training ends; the
    learning rate follows the whole plan all the same. Needs keep=best: the last weights would be
    those that the patience was lost with."""
    batch_size: Count = 32
    """Examples per optimizer step, all ranks and micro-steps together."""
    micro_batch_size: Annotated[Count | None, MAY_CHANGE] = None
    """Examples per rank and forward pass. Default: batch_size divided by the ranks."""
    learning_rate: Annotated[float, Field(gt=0), MAY_CHANGE] = 5e-5
    """The highest one, of AdamW."""
    warmup: Share = 0.1
    """Share of all steps in which the learning rate rises linearly; then it falls to 0. Steps that
    fp16 skips count."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How it falls: in a line, or as half a cosine."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Of AdamW, on matrices alone."""
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Of AdamW: how much of its mean of squared gradients a step keeps. Masked-LMs are often
    trained with 0.98."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Of AdamW: what it adds to the root of that mean."""
    max_grad_norm: Annotated[float, Field(gt=0), MAY_CHANGE] = 1.0
    """Gradients whose norm is larger are scaled down to it."""
    freeze_embeddings: bool = False
    """Do not train the embeddings of words, positions and types, and their layer norm."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Dropout of the trained model, everywhere in it. Default: the model's own."""
    activation_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of storing them: less
    memory, about a third more time. `ds-distill plan` shows both."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: those of the epoch with the best score in the task's metric on
    validation (of several models trained together the best mean), or the last."""
    save_every: Annotated[Count | None, MAY_CHANGE] = None
    """Optimizer steps between checkpoints, beside those at the end of each epoch and by time."""
    save_minutes: Annotated[float, Field(gt=0), MAY_CHANGE] = 10.0
    """Minutes after a checkpoint until the next one, at the end of an optimizer step."""

    def inherited(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """What a phase with keys of its own takes of this section."""
        replaced = {"steps"} if "epochs" in own and "steps" not in own else set()
        return {key: getattr(self, key) for key in self.model_fields_set - replaced}
