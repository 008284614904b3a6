"""Masked-LM: a row per masked token, logits over the vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from ds_distill.data.batches import Collator, RowsOf, Units
from ds_distill.data.masking import HiddenWords, HiddenWordsCollator, Masking, masked_rows
from ds_distill.data.schedule import plan_once
from ds_distill.data.tokenise import TokenTable
from ds_distill.data.windows import split_long
from ds_distill.data.word_pieces import rules_of_word_pieces
from ds_distill.engine.predict import ModelRunner, score_tokens, score_words
from ds_distill.evaluation.predictions import TokenScores, Unigram
from ds_distill.models.labels import LabelMap
from ds_distill.models.reference import ModelReference
from ds_distill.recipe.metrics.tokens import WordLoss
from ds_distill.recipe.tasks import MaskedLM
from ds_distill.tasks.kind import Codec, PredictInputs, TaskData, TaskKind, Tokenizers, Vocabulary


class MaskedLMKind(TaskKind[MaskedLM, TokenScores]):
    """Predictions are sums per example: logits over a vocabulary are too large to collect."""

    def prepare(
        self, examples: datasets.Dataset, tokenizers: Tokenizers, file: Path
    ) -> datasets.Dataset:
        return split_long(examples, tokenizers(), self.settings.max_length, file)

    def examples(self, examples: Units) -> Units:
        """A window of a text is an example of its own."""
        return replace(examples, number=np.arange(len(examples)))

    def rows(self, vocabulary: Vocabulary, every_token: bool) -> RowsOf:
        settings = self.settings.masking
        tokenizer, known = vocabulary()
        masking = Masking.of(tokenizer, settings.rate, settings.seed, known, settings.shown)
        return masked_rows(masking, settings.variants, every_token=every_token)

    def fingerprint(self, label_map: LabelMap | None) -> dict[str, Any]:
        found = self.settings.masking.model_dump()
        if found["shown"] == "bert":
            del found["shown"]  # caches of before do not have it
        return {"masking": found}

    def stored(self, vocabulary: int, codec: Codec, label_map: LabelMap | None) -> dict[str, Any]:
        return {
            "classes": vocabulary,
            "codec": codec(vocabulary),
            "mask_variants": self.settings.masking.variants,
        }

    def predict(self, runner: ModelRunner, inputs: PredictInputs) -> dict[str, TokenScores]:
        """On the first mask variant, the same masked tokens for all models."""
        words, how = inputs.words, (inputs.models, inputs.batch_size)
        found = score_tokens(runner, inputs.collate, *how, inputs.bar)
        for name, losses in score_words(runner, words, inputs.batch_size).items():
            found[name] = replace(found[name], word_loss=losses, words=words[name].counts)
        return found

    def hidden_words(
        self,
        data: TaskData,
        examples: Units,
        tables: Mapping[str, TokenTable],
        references: Sequence[ModelReference],
        packed: Collection[str] = (),
    ) -> dict[str, HiddenWordsCollator]:
        tokenizers = {*map(data.tokenizer_fingerprint, references)}
        if not isinstance(self.metric, WordLoss) and len(tokenizers) == 1:
            return {}
        settings = self.settings.masking
        masks, found = {}, []
        for (name, table), reference in zip(tables.items(), references, strict=True):
            tokenizer = data.tokenizer(reference)
            rules_of_word_pieces(tokenizer)
            masks[name] = masking = Masking.of(tokenizer, settings.rate, settings.seed)
            length = self.settings.max_length
            found.append(HiddenWords.of(table, tokenizer, examples.keys, masking, length))
        return {
            name: HiddenWordsCollator(
                tables[name], words, examples.keys, masks[name].mask_id, name in packed
            )
            for name, words in zip(tables, HiddenWords.common(found), strict=True)
        }

    def finite(self, predictions: TokenScores) -> torch.Tensor:
        return torch.from_numpy(np.isfinite(predictions.loss))

    def counted(self, examples: Units) -> np.ndarray:
        return np.ones(len(examples), dtype=bool)

    def scored(self, predictions: TokenScores, examples: Units) -> TokenScores:
        return predictions

    def baseline(
        self, data: TaskData, split: str, examples: Units, references: list[ModelReference]
    ) -> tuple[TokenScores, dict[str, Any]]:
        """The training text's frequencies of tokens as a model, on the tokens that are masked for
        the others."""
        training = data.training_split or split
        first = [data.largest_vocabulary(references)]
        tokenizer = data.tokenizer(first[0])
        every = data.tables(training, first)[first[0].name].counts(len(tokenizer))
        counts = every.copy()
        counts[min(map(data.vocabulary, references)) :] = 0  # tokens that not all models know
        unigram = Unigram.of(counts, tuple(tokenizer.all_special_ids))
        vocabulary = partial(data.shared_tokens, references)
        collate = Collator(examples, data.tables(split, first), self.rows(vocabulary, False))
        tokens, owners = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for batch in plan_once(collate.lengths, 256):
            masked = collate(batch)
            counted = masked.row_sets["all"].numpy()
            tokens.append(masked.labels.numpy()[counted])
            owners.append(batch[masked.views[first[0].name].example_indices.numpy()[counted]])
        scores = unigram.score(np.concatenate(tokens), np.concatenate(owners), len(examples))
        own = {one.name: data.tables(split, [one])[one.name] for one in references}
        if words := self.hidden_words(data, examples, own, references).get(first[0].name):
            of_all = Unigram.of(every, tuple(tokenizer.all_special_ids))
            losses = of_all.score(*words.tokens(), len(examples)).loss
            scores = replace(scores, word_loss=losses, words=words.counts)
        answer = tokenizer.convert_ids_to_tokens(unigram.token)
        return scores, {"answer": answer, "rule": "the most frequent token", "split": training}
