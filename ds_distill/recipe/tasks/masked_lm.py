"""The task of predicting masked tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ds_distill.recipe.entry import Needs, TaskEntry
from ds_distill.recipe.metrics import one_metric
from ds_distill.recipe.metrics.classes import Accuracy
from ds_distill.recipe.metrics.metric import MetricSettings
from ds_distill.recipe.section import Count, Section
from ds_distill.recipe.tasks.base import COMPARED, Predicts, Rows, TaskSettings


class MaskSettings(Section):
    """Which tokens are masked. A token that a teacher does not know always is, and shown as the
    mask token (VE-KD)."""

    renamed: ClassVar[dict[str, str]] = {"draws": "variants"}

    rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    """Share of the tokens that are masked, special tokens apart."""
    shown: Literal["bert", "mask"] = "bert"
    """What the masked ones are shown as. `bert`: 80% as the mask token, 10% as a random token and
    10% as they are; `mask`: all as the mask token."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """A seed of its own, so that runs with different `seed`s can share a cache."""
    variants: Count | None = None
    """How many masked variants of each example there are: epoch e takes number e mod variants. A
    cache needs it, and stores them all. Default: every epoch has its own."""


class MaskedLM(TaskSettings):
    """Predict the masked tokens of a text. Needs no labels; the cross_entropy term's label is the
    token that was masked. All models must have the same tokens;
    rows of embeddings that pad a vocabulary, to a multiple of 64 in ModernBERT, do not count."""

    rows: ClassVar[Rows] = "text"
    predicts: ClassVar[Predicts] = "token"

    type: Literal["masked-lm"] = "masked-lm"
    long: Literal["split", "cut"] = "cut"
    """What becomes of texts longer than `max_length`: `split` makes windows of them, each an
    example of its own; `cut` throws the rest away."""
    masking: MaskSettings = MaskSettings()
    metric: Annotated[MetricSettings, one_metric("masked tokens"), COMPARED] = Accuracy.Settings()

    @property
    def cuts(self) -> bool:
        return self.long == "cut"

    @property
    def row_share(self) -> float:
        return self.masking.rate

    @property
    def variants(self) -> int:
        return self.masking.variants or 1

    def not_cacheable(self) -> str | None:
        if self.masking.variants is not None:
            return None
        return (
            f"a cache holds a number of mask variants of each example. Set {self.location}.masking."
            "variants, e.g. to the number of epochs: epoch e takes number e mod variants."
        )


def _usage(task: MaskedLM, pairs: bool) -> list[str]:
    """On a text longer than the model's maximum. It fills a pair as it fills one text."""
    options = f'{{"truncation": True, "max_length": {task.max_length}}}'
    return [
        'fill = pipeline("fill-mask", model=".")',
        'text = f"a text with a {fill.tokenizer.mask_token} in it; " + "of any length " * 1000',
        f"fill(text, tokenizer_kwargs={options})",
    ]


ENTRY = TaskEntry(
    name="masked-lm",
    settings=MaskedLM,
    implementation="ds_distill.tasks.masked_lm:MaskedLMKind",
    needs=Needs(same_tokens=True),
    over="masked tokens",
    heads=("ForMaskedLM", "BertForPreTraining"),
    noun="masked-LM",
    checks_model="ds_distill.models.configuration:check_masked_lm",
    pipeline="fill-mask",
    usage=_usage,
)
