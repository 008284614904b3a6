"""Windows of long texts: nothing is lost, each fits every tokenizer, none could be longer."""

import gzip

import numpy as np
import pytest
from unit.test_windows import check_all, dataset, real, tokens  # noqa: F401

from ds_distill.data.tokenizer import share_cut
from ds_distill.data.windows import split_long


@pytest.mark.parametrize("corpus", ["raw_biomed/biomed_cased_valid", "raw_general/wikitext2_test"])
def test_windows_of_real_documents(corpus, real, shared_data):
    with gzip.open(shared_data / f"{corpus}.txt.gz", "rt", encoding="utf-8") as file:
        many = [line.strip() for line in file if line.strip()][:20]
    chosen = [real[name] for name in ("bert-base-cased", "roberta-base", "deberta-v3-base")]
    data = split_long(dataset(many), chosen, 128)
    check_all(many, data, chosen, 128)
    lengths = np.array([[tokens(t, window) for t in chosen] for window in data["text"][:]])
    assert lengths.max() == 128 and len(data) > len(many)


@pytest.mark.parametrize(
    ("corpus", "least", "most"),
    [("raw_biomed/biomed_cased_train", 0.5, 0.8), ("raw_general/wikipedia_en_train", 0.6, 0.9)],
)
def test_most_of_a_real_corpus_is_cut(corpus, least, most, real, shared_data):
    with gzip.open(shared_data / f"{corpus}.txt.gz", "rt", encoding="utf-8") as file:
        many = [line.strip() for _, line in zip(range(200), file, strict=False) if line.strip()]
    assert least < share_cut(dataset(many), real["bert-base-cased"], 128) < most
