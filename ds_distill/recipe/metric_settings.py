"""Settings of the metrics: what a recipe may say of each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ds_distill.recipe.section import Count, Section


class MetricSettings(Section):
    """Settings of a metric."""

    name: str


class Accuracy(MetricSettings):
    """Share of the examples, of the words, or of the masked tokens, that are predicted right."""

    name: Literal["accuracy"] = "accuracy"


class OfOneClass(MetricSettings):
    positive: str | None = None
    """The label that it is about. Default: of two labels, the last."""


class F1(OfOneClass):
    """Of one class: harmonic mean of precision and recall."""

    name: Literal["f1"] = "f1"


class Precision(OfOneClass):
    """Of one class: share of those predicted that are of it."""

    name: Literal["precision"] = "precision"


class Recall(OfOneClass):
    """Of one class: share of its examples that are predicted."""

    name: Literal["recall"] = "recall"


class AUC(OfOneClass):
    """Of one class: how often an example of it has a larger probability of it than an example of
    another class (area under the ROC curve)."""

    name: Literal["auc"] = "auc"


class Micro(MetricSettings):
    leave_out: list[str] = Field(default_factory=list)
    """Labels that do not count, such as the class of examples without a relation. To predict one of
    these is no prediction."""


class MicroF1(Micro):
    """F1 of the predictions of all classes together."""

    name: Literal["micro_f1"] = "micro_f1"


class MicroPrecision(Micro):
    """Share of the predictions, of all classes together, that are right."""

    name: Literal["micro_precision"] = "micro_precision"


class MicroRecall(Micro):
    """Share of the labels, of all classes together, that are predicted."""

    name: Literal["micro_recall"] = "micro_recall"


class MacroF1(MetricSettings):
    """Mean of the classes' F1. A class that is neither there nor predicted is not part of it."""

    name: Literal["macro_f1"] = "macro_f1"


class MacroPrecision(MetricSettings):
    """Mean of the classes' precision, which is 0 of a class that is there and never predicted."""

    name: Literal["macro_precision"] = "macro_precision"


class MacroRecall(MetricSettings):
    """Mean of the classes' recall, which is 0 of a class that is predicted and not there."""

    name: Literal["macro_recall"] = "macro_recall"


class MacroAUC(MetricSettings):
    """Mean of the labels' AUC. A label that all examples have, or none, is not part of it."""

    name: Literal["macro_auc"] = "macro_auc"


class ECE(MetricSettings):
    """Expected calibration error: how far the probability of the predicted class is from the share
    of right predictions, in bins of equal width (Guo et al. 2017)."""

    name: Literal["ece"] = "ece"
    bins: Count = 15
    """So many."""


class OfEntities(MetricSettings):
    mode: Literal["default", "strict"] = "default"
    """How tags make entities, as seqeval has it: `default` lets an I- tag without a B- before it
    begin an entity, as conlleval does; `strict` does not."""


class EntityF1(OfEntities):
    """F1 of the entities of all types together: right are those whose type and both ends are."""

    name: Literal["entity_f1"] = "entity_f1"


class EntityPrecision(OfEntities):
    """Share of the predicted entities that are right."""

    name: Literal["entity_precision"] = "entity_precision"


class EntityRecall(OfEntities):
    """Share of the entities that are predicted."""

    name: Literal["entity_recall"] = "entity_recall"


class WordF1(MetricSettings):
    """Mean over the entity types of the F1 of their words, B- and I- alike (how BLURB scores EBM
    PICO); over the tags but O, where they are none of entities. A type that is neither there nor
    predicted is not part of it."""

    name: Literal["word_f1"] = "word_f1"


class CharacterF1(MetricSettings):
    """F1 of the characters of all contexts together: right are those that are both in a right
    answer and in a predicted span (micro)."""

    name: Literal["character_f1"] = "character_f1"


class CharacterPrecision(MetricSettings):
    """Share of the characters in predicted spans that are in a right answer."""

    name: Literal["character_precision"] = "character_precision"


class CharacterRecall(MetricSettings):
    """Share of the characters in right answers that are in a predicted span."""

    name: Literal["character_recall"] = "character_recall"


class SpanF1(MetricSettings):
    """F1 of the spans of all contexts together: right are those whose first and last character
    are."""

    name: Literal["span_f1"] = "span_f1"


class ExactMatch(MetricSettings):
    """Share of the questions whose answer is one of the right ones, but for case, punctuation,
    articles and white space (SQuAD's exact match)."""

    name: Literal["exact_match"] = "exact_match"


class SquadF1(MetricSettings):
    """Mean over the questions of the F1 of the answer's words, with that right answer which gives
    the most (SQuAD's F1)."""

    name: Literal["squad_f1"] = "squad_f1"


class StrictAccuracy(MetricSettings):
    """Share of the questions whose best answer is one of the right ones, but for case and white
    space (BioASQ, factoid questions)."""

    name: Literal["strict_accuracy"] = "strict_accuracy"


class LenientAccuracy(MetricSettings):
    """Share of the questions of which one of the five best answers is right (BioASQ),
    compared likewise."""

    name: Literal["lenient_accuracy"] = "lenient_accuracy"


class MRR(MetricSettings):
    """Mean reciprocal rank: mean over the questions of 1 / the rank of the first right one among
    the five best answers, 0 without one (BioASQ), compared likewise."""

    name: Literal["mrr"] = "mrr"


class Loss(MetricSettings):
    """Mean cross-entropy of the masked tokens, in nats."""

    name: Literal["loss"] = "loss"


class Perplexity(MetricSettings):
    """The exponential of the mean cross-entropy of the masked tokens."""

    name: Literal["perplexity"] = "perplexity"


class WordLoss(MetricSettings):
    """Mean negative log-probability of hidden words, in nats, each predicted piece by piece from
    the left: comparable between WordPiece vocabularies. Takes a forward pass for each piece of the
    longest."""

    name: Literal["word_loss"] = "word_loss"


class Pearson(MetricSettings):
    """Pearson's correlation of predictions and labels. Where all predictions are the same number,
    it is not defined."""

    name: Literal["pearson"] = "pearson"


class Spearman(MetricSettings):
    """Spearman's correlation: Pearson's of the ranks, where equal numbers share the mean of
    theirs."""

    name: Literal["spearman"] = "spearman"


class MSE(MetricSettings):
    """Mean squared error of the predictions."""

    name: Literal["mse"] = "mse"
