"""Planned bytes of a step's collectives against DeepSpeed's communication log: within 2%."""

import json
from collections import Counter
from pathlib import Path

from passes import planned as planned_model
from ranks import run_ranks
from transformers import BertConfig

from ds_distill.losses import TermInputs, build_terms
from ds_distill.models.active_weights import weight_groups
from ds_distill.models.bundle import Bundle
from ds_distill.planning.memory import Zero
from ds_distill.planning.times import sent_in_training
from ds_distill.recipe.terms import losses_of

HERE = Path(__file__).parents[1] / "distributed"
SIZES = {"num_hidden_layers": 2, "vocab_size": 1500, "max_position_embeddings": 64}
STUDENT = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
TEACHER = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
LOGGED = {"all_gather_into_tensor": "all_gather"}
LOGGED |= {"reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}
CASES = [
    {
        "stage": stage,
        "live": live,
        "micro_steps": micro_steps,
        "precision": "fp32" if micro_steps == 1 else "bf16",
        "resident": resident,
        "ahead": ahead,
    }
    for stage in range(4)
    for live in (True, False)
    for micro_steps in (1, 4)
    for resident in ((True, False) if stage == 3 else (True,))
    for ahead in ((1, 3) if stage == 3 and live else (1,))
]


def planned(folder, case, ranks):
    student, teacher = (planned_model(folder / part, 4) for part in ("student", "teacher"))
    terms = build_terms(losses_of({"kl": {}}), TermInputs(128))
    _, groups = weight_groups(Bundle(student.build(device="cpu"), {}, terms))
    trained = [[weight.numel() for weight in group.weights] for group in groups]
    numels = teacher.numels()
    teachers = {"one": numels, "two": numels} if case["live"] else {}
    config = {"zero_optimization": {"stage": case["stage"]}}
    size = 2 if case["precision"] == "bf16" else 4
    layer = teacher.layer_numel() if case["live"] else 0
    zero = Zero.of(config, ranks, size, case["resident"], layer)
    return sent_in_training(trained, [], teachers, zero, case["micro_steps"], 1 / case["ahead"])


def test_planned_bytes_are_what_deepspeed_sends(tmp_path, warm):
    check_planned_bytes(2, tmp_path, warm)


def check_planned_bytes(ranks, tmp_path, warm):
    for model, size in (("student", STUDENT), ("teacher", TEACHER)):
        BertConfig(**SIZES, **size).save_pretrained(tmp_path / model)
    (tmp_path / "cases.json").write_text(json.dumps(CASES))
    worker = str(HERE / "communication_worker.py")
    run_ranks([worker, str(tmp_path)], ranks, warm, tmp_path, timeout=900)
    results = json.loads((tmp_path / "results.json").read_text())
    errors = []
    for case, logged in zip(CASES, results, strict=True):
        real = Counter()
        for name, sizes in logged.items():
            # The log has the share of a rank that is gathered.
            shares = ranks if LOGGED[name] == "all_gather" else 1
            total = sum(int(size) * times for size, times in sizes.items()) * shares
            if total > 1000:  # else counts of rows and norms
                real[LOGGED[name]] += total
        plan = Counter()
        for one in planned(tmp_path, case, ranks):
            plan[one.collective] += case["ahead"] * one.bytes
        wrong = {
            name: (plan[name], real[name])
            for name in {*plan, *real}
            if abs(plan[name] - real[name]) > 0.02 * real[name]
        }
        if wrong:
            errors.append((case, wrong))
    assert not errors, "\n".join(map(str, errors))
