"""A toy WordPiece vocabulary, before it grows by a corpus's words and after."""

from __future__ import annotations

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertTokenizer, PreTrainedTokenizerFast

from ds_distill.data.word_pieces import expand_tokenizer

OLD = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef()", *(f"##{one}" for one in "abcde")]
OLD += ["ab", "##ab", "cab", "##ef", "bee"]
"""`##f` is in a piece, and is none."""
CORPUS = ["abcab fed abcab", "decaf (decaf) ef", "beecab fed fade abcab", "αβ αβ abef abef"] * 3
KNOWN = len(OLD) + 3
"""Rows of the embeddings: three belong to no token."""


def old_tokenizer() -> BertTokenizer:
    backend = Tokenizer(
        models.WordPiece({token: n for n, token in enumerate(OLD)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = ("pad", "unk", "cls", "sep", "mask")
    names = {f"{name}_token": f"[{name.upper()}]" for name in special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


BEFORE = old_tokenizer()
AFTER, NEW = expand_tokenizer(BEFORE, CORPUS, 200, KNOWN)
UNKNOWN = BEFORE.unk_token_id

hostile = st.text(
    st.sampled_from([*"abcdefABCDEF() #[]", *"αβéß", "\u0301", "\u200b", "中", "\U0001f600", "\n"])
    | st.characters(exclude_categories=["Cs"]),
    max_size=30,
)

BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
