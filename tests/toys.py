"""The toy task, which is learnt in seconds, and tiny models of it. Not in conftest.py: a test that
imports that may get another folder's."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from string import Template
from typing import Any

import yaml

TOY_LABELS = ["animal", "food", "weather"]
TOY_WORDS = {
    "animal": "cat dog horse tiger sparrow whale fox rabbit wolf bear",
    "food": "bread soup apple cheese rice noodle cake salad bean olive",
    "weather": "rain snow wind storm fog hail thunder cloud frost sun",
}
TOY_FILLERS = (
    "the a we they saw had near after before under with of some very old new big small day "
    "night morning today again never often house road river and but then there was is"
)
TOY_SIZES = {"train": 200, "validation": 60, "test": 60, "transfer": 200}

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,  # so narrow a model hardly learns from the usual 0.02
}


def toy_vocabulary() -> list[str]:
    """Tokens of a WordPiece vocabulary that knows the toy task's words, and pieces for others."""
    words = [*TOY_FILLERS.split(), *" ".join(TOY_WORDS.values()).split()]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *words, *letters, *(f"##{letter}" for letter in letters), *".,?!"]
    return list(dict.fromkeys(pieces))


TOY_SPM: dict[str, dict[str, Any]] = {
    "deberta-v3-base/spm.model": {
        **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "byte_fallback": True},
        **{"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    },
    "albert-base/spiece.model": {
        **{"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1},
        "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
    },
    "t5/spiece.model": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
"""What SentencePiece is told, so that special pieces are where the published files have them."""


def write_toy_vocabs(folder: Path) -> Path:
    """Files of small vocabularies in the folders, and of the kinds, that the published ones have:
    WordPiece, byte-level BPE, unigrams of SentencePiece."""
    from sentencepiece import SentencePieceTrainer
    from tokenizers import ByteLevelBPETokenizer

    draw = random.Random(0)
    texts = [f"{toy_text(draw.choice(TOY_LABELS), draw).capitalize()}." for _ in range(400)]
    capitals = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    words = toy_vocabulary()
    pieces = {
        "bert-base-uncased": words,
        "bert-base-cased": [*words, *capitals, *(f"##{letter}" for letter in capitals)],
        "pubmedbert-uncased": [*words[:5], *(w for w in words if len(w.strip("#")) == 1)],
    }
    for name, vocabulary in pieces.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    for name, first in {"roberta-base": special, "gpt2": ["<|endoftext|>"]}.items():
        (folder / name).mkdir()
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, 400, special_tokens=first, show_progress=False)
        bpe.save_model(str(folder / name))
    for file, options in TOY_SPM.items():
        (folder / file).parent.mkdir()
        with (folder / file).open("wb") as model:
            SentencePieceTrainer.Train(
                sentence_iterator=iter(texts),
                model_writer=model,
                vocab_size=500,
                hard_vocab_limit=False,  # so few texts have no 500 pieces
                num_threads=1,
                minloglevel=2,
                **options,
            )
    return folder


def make_tiny_bert(folder: Path, vocabulary: list[str], **config: Any) -> Path:
    from transformers import BertConfig, BertModel, BertTokenizer

    sizes = {**TINY, "max_position_embeddings": 128, **config}
    save_tiny(folder, BertModel, BertConfig(vocab_size=len(vocabulary), **sizes))
    ids = {token: number for number, token in enumerate(vocabulary)}
    BertTokenizer(vocab=ids).save_pretrained(folder)
    return folder


def make_toy_classifier(folder: Path, broken_word: str | None = None) -> Path:
    """A teacher of the toy task with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    words, labels = toy_vocabulary(), dict(enumerate(TOY_LABELS))
    config = BertConfig(
        vocab_size=len(words),
        max_position_embeddings=128,
        id2label=labels,
        label2id={label: number for number, label in labels.items()},
        **TINY,
    )
    make_tiny_bert(folder, words)
    save_tiny(folder, BertForSequenceClassification, config)
    if broken_word is not None:
        break_word(folder, BertForSequenceClassification, broken_word)
    return folder


def break_word(folder: Path, kind: Any, word: str) -> None:
    """Make a word's embedding NaN: texts with it are answered with NaN, and no others."""
    import torch

    model = kind.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[toy_vocabulary().index(word)] = float("nan")
    model.save_pretrained(folder)


def make_tiny_roberta(folder: Path, vocabulary: Path) -> Path:
    from transformers import RobertaConfig, RobertaModel, RobertaTokenizer

    files = (str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    tokenizer = RobertaTokenizer(*files)
    config = RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=130, type_vocab_size=1, **TINY
    )
    save_tiny(folder, RobertaModel, config)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_deberta(folder: Path, vocabulary: Path) -> Path:
    """As DeBERTa-v3 is built: relative positions only, shared keys, an spm vocabulary."""
    from transformers import AutoTokenizer, DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=128_100,
        max_position_embeddings=128,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        type_vocab_size=0,
        pooler_hidden_size=TINY["hidden_size"],
        **TINY,
    )
    save_tiny(folder, DebertaV2Model, config)
    shutil.copyfile(vocabulary / "spm.model", folder / "spm.model")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    return folder


def save_tiny(folder: Path, kind: Any, config: Any) -> None:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)


def toy_text(label: str, draw: random.Random) -> str:
    """A sentence with two words of its class among fillers."""
    words = draw.choices(TOY_WORDS[label].split(), k=2)
    words += draw.choices(TOY_FILLERS.split(), k=draw.randint(3, 9))
    draw.shuffle(words)
    return " ".join(words)


def write_toy_task(folder: Path, sizes: dict[str, int] = TOY_SIZES) -> Path:
    """train, validation and test with labels, transfer without, and labels.json."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, size in sizes.items():
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            for number in range(size):
                label = TOY_LABELS[number % len(TOY_LABELS)]
                row = {"text": toy_text(label, draw)}
                if split != "transfer":
                    row["label"] = label
                file.write(json.dumps(row) + "\n")
    (folder / "labels.json").write_text(json.dumps(TOY_LABELS))
    return folder


def recipe_of(name: str, **places: str | Path) -> dict[str, Any]:
    """Of ci/recipes.yaml. places: what stands there behind a $."""
    text = Path(__file__).with_name("ci").joinpath("recipes.yaml").read_text(encoding="utf-8")
    recipes = yaml.safe_load(Template(text).safe_substitute(places))
    return copy.deepcopy(
        {"name": name, **recipes[name]}
        | {key: of for key, of in recipes["default"].items() if key not in recipes[name]}
    )


TOY_TAGS = ["O", "B-animal", "I-animal", "B-food", "I-food"]


def write_toy_words(folder: Path) -> Path:
    """Words, of which some are one or two of an entity. The first sentence of test ends beyond the
    maximum of the model that reads letters."""
    folder.mkdir()
    draw = random.Random(0)
    for split, size in {"train": 240, "validation": 80, "test": 80, "transfer": 240}.items():
        rows = []
        for number in range(size):
            tagged = [(word, "O") for word in draw.choices(TOY_FILLERS.split(), k=3)]
            for kind in draw.sample(["animal", "food"], k=draw.randint(0, 2)):
                words = draw.choices(TOY_WORDS[kind].split(), k=draw.randint(1, 2))
                tagged += zip(words, [f"B-{kind}", f"I-{kind}"][: len(words)], strict=True)
                tagged.append((draw.choice(TOY_FILLERS.split()), "O"))
            tagged += [("sparrow", "B-animal")] * (10 if number == 0 else 0)
            tokens, tags = zip(*tagged, strict=True)
            rows.append({"tokens": tokens, **({"tags": tags} if split != "transfer" else {})})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
    (folder / "labels.json").write_text(json.dumps(TOY_TAGS))
    return folder
