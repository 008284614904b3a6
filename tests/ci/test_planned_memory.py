"""Planned bytes of weights, gradients and optimizer against what engines hold: within 2%."""

import json
from pathlib import Path

import pytest
from passes import planned as planned_model
from ranks import run_ranks
from transformers import BertConfig, DebertaV2Config, RobertaConfig

from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.active_weights import weight_groups
from ds_distill.models.bundle import Bundle
from ds_distill.planning.memory import Zero, training_states
from ds_distill.recipe.terms import losses_of

HERE = Path(__file__).parents[1] / "distributed"
BUCKET = 100_000
SIZES = {"num_hidden_layers": 2, "vocab_size": 1500, "max_position_embeddings": 64}
STUDENT = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
TEACHER = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
ARCHITECTURES = {
    "bert": ("bf16", BertConfig, {}),
    "roberta": ("fp32", RobertaConfig, {"type_vocab_size": 1}),
    "deberta": ("bf16", DebertaV2Config, DEBERTA),
}
CASES = [*((stage, live, True) for stage in range(4) for live in (True, False)), (3, True, False)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Configurations, no weights: a plan needs none."""
    root = tmp_path_factory.mktemp("planned")
    for name, (_, kind, more) in ARCHITECTURES.items():
        for model, size in (("student", STUDENT), ("teacher", TEACHER)):
            pooler = {"pooler_hidden_size": size["hidden_size"]} if name == "deberta" else {}
            kind(**SIZES, **size, **more, **pooler).save_pretrained(root / name / model)
    cases = {name: (precision, CASES) for name, (precision, *_) in ARCHITECTURES.items()}
    (root / "cases.json").write_text(json.dumps(cases))
    return root


@pytest.fixture(scope="module", params=[1, 2])
def held(request, folder, warm):
    ranks = request.param
    (folder / "results.json").unlink(missing_ok=True)
    run_ranks([str(HERE / "planned_worker.py"), str(folder)], ranks, warm, folder, timeout=900)
    return ranks, json.loads((folder / "results.json").read_text())


def planned(folder, name, stage, live, resident, ranks):
    student, teacher = (planned_model(folder / name / part, 4) for part in ("student", "teacher"))
    losses = build_terms(losses_of({"kl": {}}), TermInputs(128))
    _, groups = weight_groups(Bundle(student.build(device="cpu"), {}, losses))
    trained = [[weight.numel() for weight in group.weights] for group in groups]
    numels = teacher.numels()
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET}}
    size = 2 if ARCHITECTURES[name][0] == "bf16" else 4
    zero = Zero.of(config, ranks, size, resident)
    return training_states(trained, 0, {"teacher": numels} if live else {}, zero)


def test_planned_bytes_are_what_engines_hold(held, folder):
    ranks, results = held
    assert len(results) == len(CASES) * len(ARCHITECTURES)
    errors = {}
    for key, result in results.items():
        name, stage, live, resident = json.loads(key)
        states = planned(folder, name, stage, live, resident, ranks)
        size = 2 if ARCHITECTURES[name][0] == "bf16" else 4
        bucket = BUCKET * size if stage == 3 else 0
        weights = states.student + sum(states.teachers.values())
        others = states.gradients + states.optimizer + bucket
        fullest = [max(column) for column in zip(*result["ranks"], strict=True)]
        for what, plan, real in zip(("weights", "others"), (weights, others), fullest, strict=True):
            if abs(plan / real - 1) > 0.02:
                errors[f"{key} {what}"] = round(plan / real, 3)
    assert not errors


def test_the_student_is_in_the_engines_dtype(held):
    """Also beside sharded teachers, where DeepSpeed does not see to it."""
    for key, result in held[1].items():
        name, *_ = json.loads(key)
        dtype = "torch.bfloat16" if ARCHITECTURES[name][0] == "bf16" else "torch.float32"
        assert result["dtypes"] == [dtype], key
