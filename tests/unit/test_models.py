"""Loading models and reading what encoders say, family by family."""

import inspect
import json
import os
import sys

import pytest
import torch
import transformers as tr
from families import LAYERS, VOCABULARY, WIDTH, built, config_of
from kinds import change
from safetensors.torch import load_file, save_file
from torch import nn

from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.errors import UserError
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import load_config
from ds_distill.models.encoder import read_signals, vocabulary_head
from ds_distill.models.layers import NOT_CUT, check_layers
from ds_distill.models.load import (
    CLASSIFIER,
    freeze_embeddings,
    keep_layers,
    load_model,
    set_dropout,
)
from ds_distill.models.weights import check_weights
from ds_distill.reads import Reads
from ds_distill.recipe.references import resolve_model
from ds_distill.types import Batch
from ds_distill.views import PaddedView

FAMILIES = ["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "electra", "distilbert"]
FAMILIES += ["deberta-v2 with a convolution", "deberta-v3"]
each_family = pytest.mark.parametrize("family", FAMILIES)
LABELS = ["a", "b", "c"]


def classifier(family, **more):
    return built(family, tr.AutoModelForSequenceClassification, num_labels=3, **more)


def inputs(length=9, rows=3):
    ids = torch.randint(5, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(model, **options):
    with torch.no_grad():
        return model(**inputs(**options)).logits


# --------------------------------------------------------------------------------- layers


@each_family
@pytest.mark.parametrize("layers", [[0, 2], [2, 1]])
def test_kept_layers_are_those_of_a_model_built_by_hand(family, layers, tmp_path):
    whole = classifier(family)
    built = classifier(family, seed=1, num_hidden_layers=len(layers))
    stack = "transformer.layer." if family == "distilbert" else "encoder.layer."
    weights = {}
    for name, value in whole.state_dict().items():
        before, found, after = name.partition(stack)
        if not found:
            weights[name] = value
        elif int(after.split(".")[0]) in layers:
            number, rest = after.split(".", 1)
            weights[f"{before}{stack}{layers.index(int(number))}.{rest}"] = value
    built.load_state_dict(weights, strict=True)
    keep_layers(whole, layers)
    assert torch.equal(logits_of(whole), logits_of(built))
    assert whole.config.num_hidden_layers == len(layers)
    whole.save_pretrained(tmp_path)
    again = load_model(CLASSIFIER, str(tmp_path), LABELS, new_head=False, attention="eager").eval()
    assert torch.equal(logits_of(again), logits_of(built))


@pytest.mark.parametrize(
    "more", [{}, {"num_hidden_layers": 2, "num_hidden_groups": 2}, {"num_hidden_layers": 1}]
)
def test_shared_layers_are_refused(more):
    with pytest.raises(UserError, match=r"layers of the model \(albert\) share weights"):
        keep_layers(classifier("albert", **more), [0])


def test_layers_that_would_not_be_loaded_again_are_refused_by_their_configuration():
    with pytest.raises(UserError, match="Begin with layer 0"):
        check_layers(config_of("modernbert"), [1, 2])
    kinds = tr.BertConfig(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UserError, match=r"layers of the model \(bert\) are of different kinds"):
        check_layers(kinds, [1])
    for kind in sorted(NOT_CUT.keys() & {*tr.CONFIG_MAPPING}):  # an older transformers lacks some
        with pytest.raises(UserError, match=rf"\({kind}\) {NOT_CUT[kind]}"):
            check_layers(tr.AutoConfig.for_model(kind), [1])


# ------------------------------------------------------------------ embeddings and dropout


@each_family
def test_frozen_embeddings_stay_and_all_else_is_trained(family):
    model = classifier(family)
    freeze_embeddings(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    block = {name for name, _ in model.named_parameters() if ".embeddings." in name}
    assert frozen == block and any("word_embeddings" in name for name in frozen)
    model.train()
    model(**inputs()).logits.square().sum().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name in frozen)


def test_a_teacher_may_be_called_as_something_that_every_module_has():
    """`half`, `type` and `training` ended in a KeyError after the teachers were trained."""
    names = ("half", "type", "training", "sound")
    bundle = Bundle(classifier("bert"), {name: classifier("bert") for name in names})
    assert list(bundle.teachers) == list(names)
    assert bundle.train().training
    assert not any(bundle.teachers[name].training for name in names)
    assert "half" in bundle.teachers and "type_" not in bundle.teachers
    assert any(name.startswith("teachers.sound.") for name in bundle.state_dict()), "as before"
    view = PaddedView(**inputs())
    batch = Batch.from_views(dict.fromkeys(names, view))
    outputs = bundle(batch, predict=names)
    assert torch.equal(outputs["half"].logits, outputs["sound"].logits)


HALF = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}


@each_family
def test_dropout_is_set_everywhere_and_the_configuration_keeps_its_own(family, tmp_path):
    more = {"dropout": 0.5, "attention_dropout": 0.5} if family == "distilbert" else HALF
    model = classifier(family, **more)
    outputs = model.config.to_dict()
    wanted = logits_of(model)
    model.train()
    assert not torch.equal(logits_of(model), logits_of(model))
    set_dropout(model, 0.0)
    assert torch.equal(logits_of(model), wanted)  # in training mode, and nothing is dropped
    set_dropout(model, 0.7)
    assert not torch.equal(logits_of(model), logits_of(model))
    assert model.config.to_dict() == outputs
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {name: saved[name] for name in more} == more


# ---------------------------------------------------------------------------------- checks


# --------------------------------------------------------------------------------- loading


@pytest.fixture
def folder(tmp_path):
    """A classifier on disk; `edit` changes its config.json."""
    classifier("bert").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **changes):
    change(folder / "config.json", **changes)


def load(folder, labels=LABELS, **options):
    return load_model(CLASSIFIER, str(folder), labels, **{"new_head": False, **options})


def test_a_classifier_is_loaded_as_it_was_saved(folder):
    model = load(folder).eval()
    torch.testing.assert_close(logits_of(model), logits_of(classifier("bert")))
    assert model.config.id2label == dict(enumerate(LABELS))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_pass_reads_no_signature_anew(folder):
    """transformers asks for that of this method in each layer."""
    chunk = tr.models.bert.modeling_bert.BertLayer.feed_forward_chunk
    vars(chunk).pop("__signature__", None)  # of an earlier test
    load(folder)
    kept = vars(chunk).pop("__signature__")
    assert kept == inspect.signature(chunk)


def test_a_new_head_depends_on_the_seed_alone(tmp_path):
    classifier("bert").bert.save_pretrained(tmp_path)
    heads = []
    for seed in (3, 3, 4):
        torch.manual_seed(len(heads))  # what is drawn before, and after, does not matter
        before = torch.get_rng_state()
        heads.append(load(tmp_path, new_head=True, seed=seed).classifier.weight)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_head_of_another_size_is_replaced_when_a_new_one_is_requested(folder):
    model = load(folder, labels=["x", "y"], new_head=True)
    assert model.classifier.weight.shape == (2, WIDTH)
    whole = classifier("bert").bert.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in model.bert.state_dict().items())
    with pytest.raises(UserError, match=r"classifier\.weight with 2 labels"):
        load(folder, labels=["x", "y"])


@each_family
def test_a_new_head_takes_a_bias_of_its_logits_and_an_old_one_keeps_its_own(tmp_path, family):
    """Also where states are as wide as there are labels."""
    labels, bias = [f"label {number}" for number in range(WIDTH)], torch.arange(float(WIDTH))
    whole = built(family, tr.AutoModelForSequenceClassification, num_labels=WIDTH)
    whole.base_model.save_pretrained(tmp_path / "body")
    whole.save_pretrained(tmp_path / "whole")
    for part, added in {"body": bias, "whole": 0 * bias}.items():
        plain, moved = (
            load_model(CLASSIFIER, str(tmp_path / part), labels, new_head=True, output_bias=given)
            for given in (None, lambda: bias)
        )
        difference = logits_of(moved.eval()) - logits_of(plain.eval())
        torch.testing.assert_close(difference, added.expand(3, WIDTH))


@pytest.mark.parametrize("family", ["bert", "distilbert", "deberta-v2"])
def test_the_head_of_a_tagger_with_as_many_labels_keeps_its_bias(tmp_path, family):
    """A pooler is missing, and the last layer is there: a traceback said that no bias was found."""
    tagger = built(family, tr.AutoModelForTokenClassification, num_labels=len(LABELS))
    tagger.save_pretrained(tmp_path)
    model = load(tmp_path, new_head=True, output_bias=lambda: torch.full((len(LABELS),), 9.0))
    assert torch.equal(model.classifier.bias, tagger.classifier.bias)


@pytest.mark.parametrize("part", ["bert", "whole"])
def test_a_checkpoint_without_a_head_is_no_classifier(tmp_path, part):
    model = classifier("bert").bert if part == "bert" else None
    (model or tr.BertForMaskedLM(config_of("bert"))).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no weights for .*classifier\.weight.*Fine-tune it"):
        load(tmp_path)
    load(tmp_path, new_head=True)


@pytest.mark.parametrize("new_head", [False, True])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 70}, "word_embeddings"),
        ({"num_hidden_layers": 7}, rf"num_hidden_layers=7, .* of {LAYERS} layers"),
        ({"model_type": "roberta", "architectures": ["RobertaModel"]}, r"roberta\.embeddings"),
    ],
)
def test_weights_of_another_shape_never_leave_random_ones_behind(folder, changes, named, new_head):
    edit(folder, **changes)
    with pytest.raises(UserError, match=rf"does not fit its config\.json.*{named}"):
        load(folder, new_head=new_head)


def test_an_index_of_the_hub_is_judged_like_one_on_disk(folder, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "pytorch_model.bin")}))
    fetched = {index.name: str(index)}
    monkeypatch.setattr(
        "ds_distill.models.weights.cached_file", lambda reference, name, **_: fetched.get(name)
    )
    with pytest.raises(UserError, match=r"names 'pytorch_model\.bin'"):
        check_weights("someone/model", load_config(str(folder)))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "vocab.txt"])
@pytest.mark.parametrize("kind", ["a link to nothing", "no regular file"])
def test_a_pipe_in_a_models_folder_is_not_waited_for(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    if kind == "no regular file":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("nowhere")
    for read in (load_config, load_tokenizer, lambda reference: load(reference)):
        with pytest.raises(UserError, match=rf"{name}: is {kind}"):
            read(str(folder))


def test_a_program_is_no_package_with_a_model(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as of a script
    with pytest.raises(UserError, match="'__main__' is not installed"):
        resolve_model("pkg:__main__/model")


def rename(folder, change):
    """The weights in a model's folder under other names, or beside others."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def behind(prefix):
    return lambda weights: {f"{prefix}{name}": weight for name, weight in weights.items()}


def beside(*names):
    return lambda weights: {**weights, **{name: torch.ones(2) for name in names}}


LAYER = "encoder.layer.0.attention"


@pytest.mark.parametrize("body", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (behind("module."), "DistributedDataParallel names them, such as module"),
        (behind("module._orig_mod."), "without module"),
        (behind("_orig_mod."), r"torch\.compile names them, such as _orig_mod"),
        (
            lambda weights: {
                name.replace("layer.0.", "layer.0._orig_mod."): weight
                for name, weight in weights.items()
            },
            r"torch\.compile names them",
        ),
        (behind("base_model.model."), "weights of an adapter"),
        (beside(f"bert.{LAYER}.self.query.lora_A.weight"), "weights of an adapter"),
        (behind("model."), "parts of another module"),
        (behind("encoder."), "parts of another module"),
        (behind("net.bert."), r"without net\.bert\."),
        (
            beside(f"bert.encoder.layer.{LAYERS}.output.dense.bias"),
            f"num_hidden_layers={LAYERS}, .* of {LAYERS + 1} layers",
        ),
        (
            lambda weights: {
                name: weight
                for name, weight in weights.items()
                if f"layer.{LAYERS - 1}." not in name
            },
            f"num_hidden_layers={LAYERS}, .* of {LAYERS - 1} layers",
        ),
    ],
)
def test_names_that_do_not_fit_are_told_from_the_headers(tmp_path, change, says, body):
    """Of a checkpoint of the body alone, whose names are without its prefix, too."""
    model = classifier("bert")
    (model.bert if body else model).save_pretrained(tmp_path)

    def changed(weights):
        if not body:
            return change(weights)
        whole = change({f"bert.{name}": weight for name, weight in weights.items()})
        return {name.replace("bert.", "", 1): weight for name, weight in whole.items()}

    rename(tmp_path, changed)
    with pytest.raises(UserError, match=says.replace(r"net\.bert\.", r"net\.")):
        check_weights(str(tmp_path), load_config(str(tmp_path)))


@pytest.mark.parametrize("family", ["bert", "modernbert", "eurobert", "albert"])
def test_names_of_a_family_as_it_is_saved_are_its_own(family, tmp_path):
    """ModernBERT's and EuroBERT's layers stand in a `model`."""
    classifier(family).save_pretrained(tmp_path)
    check_weights(str(tmp_path), load_config(str(tmp_path)))


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        ([f"bert.{LAYER}.self.gate.weight"], r"1 weights of the encoder .*self\.gate\.weight"),
        (["bert.embeddings.gate", "bert.embeddings.more"], "2 weights of the encoder"),
        (["bert.embeddings.position_ids", "bert.pooler.more.weight", "loss_fct.weight"], None),
        (["cls.predictions.bias", "lm_head.bias", "mask_predictions.dense.bias"], None),
    ],
)
@pytest.mark.parametrize("body", [True, False])
def test_weights_that_the_encoder_has_not_are_refused(tmp_path, names, refused, body):
    """They would be dropped, and what is left would be another model. Other heads are."""
    model = classifier("bert")
    (model.bert if body else model).save_pretrained(tmp_path)
    rename(tmp_path, beside(*(name.removeprefix("bert." if body else "") for name in names)))
    if refused is None:
        load(tmp_path, new_head=body)
        return
    with pytest.raises(UserError, match=rf"does not fit its config\.json: .*{refused}"):
        load(tmp_path, new_head=body)


@each_family
@pytest.mark.parametrize("kind", ["whole", "body"])
def test_the_names_of_each_family_fit(tmp_path, family, kind):
    model = classifier(family)
    (model if kind == "whole" else model.base_model).save_pretrained(tmp_path)
    check_weights(str(tmp_path), load_config(str(tmp_path)))


def test_damaged_files_are_refused_in_a_sentence(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(UserError, match="not readable as safetensors"):
        load(folder)
    (folder / "config.json").write_text("{")
    for read in (load_config, load_tokenizer, lambda reference: load(reference)):
        with pytest.raises(UserError, match="JSON"):
            read(str(folder))


CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer
class TheirConfig(BertConfig): model_type = "theirs"
class TheirModel(BertForSequenceClassification): config_class = TheirConfig
class TheirTokenizer(BertTokenizer): pass
"""


@pytest.mark.parametrize("model_type", ["bert", "theirs"])
def test_a_models_own_code_never_runs(folder, model_type):
    marker = folder.parent / "their code ran"
    (folder / "theirs.py").write_text(CODE.format(marker=str(marker)))
    names = {"AutoConfig": "TheirConfig", "AutoModelForSequenceClassification": "TheirModel"}
    auto_map = {kind: f"theirs.{name}" for kind, name in names.items()}
    edit(folder, model_type=model_type, auto_map=auto_map)
    tokenizer = {"auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for read in (load_config, load_tokenizer, lambda reference: load(reference)):
        try:
            found = read(str(folder))
        except UserError:
            continue  # the refusal of a type that only their code knows
        assert type(found).__module__.startswith("transformers.models.bert")
    assert not marker.exists()


# --------------------------------------------------------------------------------- signals


@each_family
def test_a_classifiers_signals_are_its_logits_and_first_states(family):
    model = classifier(family)
    with torch.no_grad():
        output = model(**inputs(), output_hidden_states=True)
        signals = read_signals(model, PaddedView(**inputs()), Reads({-1}))
    assert torch.equal(signals.logits, output.logits)
    assert torch.equal(signals.hidden[-1], output.hidden_states[-1][:, 0])
    assert read_signals(model, PaddedView(**inputs())).hidden == {}


MEAN = [("modernbert", "mean"), ("modernbert", "cls"), ("eurobert", "mean"), ("eurobert", "late")]


def pooling(kind, pools, **more):
    return classifier(kind, classifier_pooling=pools, **more)


@pytest.mark.parametrize(("kind", "pools"), MEAN)
def test_a_state_is_what_the_head_reads(kind, pools):
    model, given = pooling(kind, pools), inputs()
    with torch.no_grad():
        signals = read_signals(model, PaddedView(**given), Reads({-1}))
        state = signals.hidden[-1]
        if pools == "late":  # each token's state is read, and their logits have a mean
            last = model.model(**given).last_hidden_state
            torch.testing.assert_close(state[1], last[1, :6].mean(dim=0))
            return
        parts = ("dense", "activation") if kind == "eurobert" else ("head", "drop")
        for name in (*parts, "classifier"):
            state = getattr(model, name)(state)
    torch.testing.assert_close(state, signals.logits)


@pytest.mark.parametrize("kind", ["modernbert", "eurobert"])
def test_dropout_is_set_where_a_rate_is_a_number(kind):
    """Attention's; with a rate of 0 ModernBERT has another layer in the place of a dropout."""
    drops = {"attention_dropout": 0.5}
    for model in (pooling(kind, "mean", **drops), pooling(kind, "mean")):
        wanted = logits_of(model)
        model.train()
        set_dropout(model, 0.0)
        assert torch.equal(logits_of(model), wanted)
        set_dropout(model, 0.7)
        rates = [
            rate
            for module in model.modules()
            for name, rate in vars(module).items()
            if name == "attention_dropout" or (name == "p" and isinstance(module, nn.Dropout))
        ]
        assert set(rates) == {0.7} and len(rates) >= 2
        assert not any(
            isinstance(child, nn.Identity)
            for module in model.modules()
            for name, child in module.named_children()
            if "drop" in name
        )


@pytest.mark.parametrize(
    "model",
    [
        tr.BertForNextSentencePrediction(config_of("bert")),
        tr.BertForPreTraining(config_of("bert")),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_head_that_is_not_known_is_refused(model):
    with pytest.raises(TypeError, match=rf"{type(model).__name__} has no masked-LM head"):
        vocabulary_head(model, torch.zeros(2, WIDTH))
