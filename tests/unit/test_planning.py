"""The plan of a recipe: what it counts, says and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from passes import untraced
from transformers import AutoConfig
from typer.testing import CliRunner

from ds_distill.cli import app
from ds_distill.errors import UserError
from ds_distill.planning import planner as planning
from ds_distill.planning.caches import example_bytes
from ds_distill.planning.gpus import GIB, GPUS, find_device, gpu_named
from ds_distill.planning.memory import Zero, inference_states, training_states
from ds_distill.planning.models import shipped_configs
from ds_distill.planning.plan import Placement, Plan
from ds_distill.planning.planner import Planner
from ds_distill.planning.split_sizes import SplitFacts, split_facts
from ds_distill.planning.table import plan_text
from ds_distill.planning.units import rate
from ds_distill.recipe import load_recipe
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import Data, MaskedLM

BERT = "google/bert_uncased_L-4_H-256_A-4"
TINY = "google/bert_uncased_L-2_H-128_A-2"
LARGER = {"model": str(shipped_configs()[BERT])}
CLASSES: dict[str, Any] = {"data": {"path": "data"}, "labels": ["a", "b", "c"], "max_length": 32}
MASKED: dict[str, Any] = {"type": "masked-lm", "data": {"path": "data"}, "max_length": 64}
NUMBERED = MASKED | {"masking": {"variants": 2}}


def no_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        planning, "split_facts", lambda recipe, task, split: SplitFacts(split, 1000, 20.0)
    )


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    no_data(monkeypatch)


def recipe_file(folder: Path, **changes: Any) -> Path:
    """Two live teachers and a student, of configurations that come with ds_distill."""
    data = {
        "task": {"data": {"path": "data"}, "labels": ["a", "b", "c"], "max_length": 32},
        "teachers": {name: {"model": str(shipped_configs()[BERT])} for name in ("one", "two")},
        "student": {"model": str(shipped_configs()[TINY])},
        "training": {"batch_size": 16, "epochs": 2},
        "phases": [
            {"cache": {"splits": "train", "hidden": [-1], "only_if_read": True}},
            {"distil": {"teachers": "live", "losses": {"kl": {}, "hidden_mse": {}}}},
        ],
        "deepspeed": "zero3_bf16",
        **changes,
    }
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def planned(folder: Path, *overrides: str, gpus: int = 4, gpu: str = "l4", **changes: Any) -> Plan:
    recipe = load_recipe(recipe_file(folder, **changes), overrides)
    return Planner(recipe, find_device(gpu, gpus), gpus).plan()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of the recipe as it stands."""
    with pytest.MonkeyPatch.context() as patch:
        no_data(patch)
        return planned(tmp_path_factory.mktemp("plain"))


def test_a_slow_rate_is_not_0() -> None:
    assert [rate(speed) for speed in (0.034, 2.0, 12.3, 45_678.9)] == ["0.034", "2", "12", "45,679"]


def test_frozen_teachers_have_no_gradient_and_no_optimizer(plain: Plan) -> None:
    """16 bytes for each weight of the student and its two projections; of teachers 2, sharded."""
    [job] = plain.jobs
    student, teacher = 4_386_307, 11_171_587
    states, trained = job.chosen.states, student + 2 * 128 * 256
    assert states.optimizer == pytest.approx(12 * trained / 4, rel=0.001)
    assert states.gradients == pytest.approx(2 * trained / 4, rel=0.001)
    assert states.student == pytest.approx(2 * trained * 5 / 4, rel=0.001)  # whole, and its share
    for share in states.teachers.values():
        assert share == pytest.approx(2 * teacher / 4, rel=0.001)


def test_live_teachers_are_whole_below_stage_3_and_a_cache_has_none(plain: Plan) -> None:
    [job] = plain.jobs
    assert len(job.others) == 16  # live or cached, four stages, checkpointing or not
    for other in job.others:
        held = sum(other.states.teachers.values())
        choice = other.choice
        if choice.teachers == "cached":
            assert held == 0 and other.step.teachers == 0
        else:
            share = 4 if choice.stage == 3 else 1
            assert held == pytest.approx(2 * 2 * 11_171_587 / share, rel=0.001)
            assert other.step.teachers > 0
    assert len({other.choice for other in job.others}) == 16


def test_a_cache_that_no_phase_reads_is_not_planned(plain: Plan, tmp_path: Path) -> None:
    assert plain.caches == []
    [cache] = planned(tmp_path, "phases.distil.teachers=cached").caches
    assert cache.bytes_per_example == 2 * (3 + 256) * 2 + 16
    assert cache.bytes == 1000 * cache.bytes_per_example
    assert cache.fits and cache.build_seconds == pytest.approx(1000 / cache.examples_per_second)


@pytest.mark.parametrize(
    ("chooses", "examples"),
    [
        ({}, 1000),
        ({"per_class": 10}, 30),
        ({"focus": {"classes": ["a", "b"]}}, 80),
        ({"focus": {"classes": ["a", "b"]}, "per_class": 25}, 50),
    ],
)
def test_steps_are_of_the_examples_that_a_phase_trains_on(
    tmp_path: Path, chooses: dict[str, Any], examples: int
) -> None:
    """Of 40 of each class, where a phase chooses among them: all of the split were counted."""
    rows = [{"text": f"{label} {n}", "label": label} for label in "abc" for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"data": {"path": str(file)}, "labels": ["a", "b", "c"], "max_length": 32}
    phases = [{"fine-tune": {"models": "student", **chooses}}]
    [job] = planned(tmp_path, task=task, phases=phases).jobs
    assert job.steps == 2 * -(-examples // 16)


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(tmp_path: Path) -> None:
    sizes = ["task.max_length=512", "deepspeed=zero0_bf16"]
    [job] = planned(tmp_path, *sizes, gpus=1, gpu="t4").jobs
    largest = job.chosen.largest_micro_batch
    assert largest > 100

    def with_batch(size: int) -> bool:
        batch = [f"training.batch_size={size}"]
        return planned(tmp_path, *sizes, *batch, gpus=1, gpu="t4").jobs[0].chosen.fits

    assert with_batch(round(0.98 * largest))
    assert not with_batch(round(1.02 * largest))


def test_a_plan_says_where_a_gpu_waits_for_python(tmp_path: Path) -> None:
    small = planned(tmp_path, "training.batch_size=8", "deepspeed=zero1_bf16")
    large = planned(tmp_path, "training.batch_size=16384", "deepspeed=zero1_bf16")
    own = [plan.jobs[0].chosen for plan in (small, large)]
    assert own[0].computing < 0.2 * own[0].step.total
    assert own[1].computing > 0.8 * own[1].step.total
    said = "waits for Python in the rest: more examples in a micro-batch take little longer."
    assert [said in plan_text(plan) for plan in (small, large)] == [True, False]
    assert small.to_json()["jobs"][0]["chosen"]["computing"] == own[0].computing


@pytest.mark.parametrize("teachers", ["live", "cached"])
def test_teachers_that_are_files_alone_are_neither_live_nor_cached(
    tmp_path: Path, teachers: str
) -> None:
    """`plan`, and `profile` after all that it had measured, divided by a rate of 0."""
    files = {"file": {"predictions": "mine.jsonl"}}
    distil = {"distil": {"teachers": teachers, "losses": {"kl": {}}}}
    plan = planned(tmp_path, teachers=files, phases=[{"cache": {"splits": "train"}}, distil])
    [job] = plan.jobs
    assert {one.choice.teachers for one in job.others} == {None} and len(job.others) == 8
    assert plan.break_even == plan.caches == []
    assert plan_text(plan).startswith("mine: ")  # without advice of how to run them


def test_a_row_of_a_codec_takes_what_was_measured() -> None:
    """`codec.threshold` was not looked at, and a sweep was refused for a disk that was large
    enough."""
    task, config = MaskedLM(data=Data(path="x")), AutoConfig.for_model("bert")
    results = Path(__file__).parents[1] / "results" / "codecs.json"
    measured = json.loads(results.read_text())["temperatures"]
    seen = 0
    for temperature, found in measured.items():
        for one in found["codecs"]:
            name, _, key = one["name"].partition(" ")
            if name not in ("compact", "topk"):
                continue
            given = {"threshold": float(key)} if name == "compact" else {"entries": int(key)}
            codec = {"name": name, "temperature": float(temperature), **given}
            row = example_bytes(Cache(splits="train", codec=codec), task, config, None, 1 / 0.15)
            # Compact rows differ, and are in the code to 0.1 bytes; topk has a head of its own.
            rel = 0.01 if name == "compact" else 0.15
            assert row == pytest.approx(one["bytes_per_row"], rel=rel), one["name"]
            seen += 1
    assert seen == 18

    def bytes_at(threshold: float) -> float:
        cache = Cache(splits="train", codec={"name": "compact", "threshold": threshold})
        return example_bytes(cache, task, config, None, 100.0)

    sizes = [bytes_at(threshold) for threshold in (1e-6, 5e-4, 7e-4, 1e-3, 0.5)]
    assert sizes == sorted(sizes, reverse=True) and len({*sizes}) == 4


def test_what_is_decoded_of_a_cache_is_in_the_plan(tmp_path: Path) -> None:
    """Of one micro-batch: its logits in fp32, or top entries; and states, of all micro-batches."""
    task = NUMBERED
    teachers = {"one": {"model": str(shipped_configs()[BERT])}}
    losses: dict[str, Any] = {"kl": {}, "hidden_mse": {}}
    distil = {"distil": {"teachers": "cached", "losses": losses}}

    def of(codec: str, micro_batch: int) -> Placement:
        cache = {"cache": {"splits": "train", "hidden": [-1], "codec": {"name": codec}}}
        parts = {"task": task, "teachers": teachers, "phases": [cache, distil]}
        shape = "training.batch_size=128", f"training.micro_batch_size={micro_batch}"
        [job] = planned(tmp_path, *shape, **parts, gpus=1).jobs
        return job.chosen

    tokens, states = 0.15 * 64, round(0.15 * 64 * 128) * 256 * 4
    compact, more, topk = of("compact", 8), of("compact", 32), of("topk", 8)
    assert compact.signals == round(tokens * 8) * 30522 * 4 + states
    assert more.signals == round(tokens * 32) * 30522 * 4 + states
    assert topk.signals == round(tokens * 8) * (64 * (4 + 8) + 4) + states
    assert topk.largest_micro_batch > 1.1 * compact.largest_micro_batch


UNCACHEABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mask variants that are not numbered": (MASKED, {"kl": {}}, "task.masking.variants"),
    "every token": (NUMBERED, {"kl": {"rows": "tokens"}}, "reads of the teachers what no cache"),
    "layers by the teachers' depths": (CLASSES, {"hidden_mse": {"layers": "uniform"}}, "by number"),
    "attention": (NUMBERED, {"attention_kl": {"layers": {1: 2}}}, "what no cache"),
    "a vocabulary that has grown": (NUMBERED, {"kl": {}}, "was expanded"),
}
"""Task, losses, and what `check` says of a cache."""


@pytest.mark.parametrize("why", UNCACHEABLE)
def test_a_cache_that_check_refuses_is_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It was recommended, and asked for it ended in a StopIteration."""
    untraced(monkeypatch)
    task, losses, says = UNCACHEABLE[why]
    phases: list[dict[str, Any]] = [{"distil": {"losses": losses}}]
    if "vocabulary" in why:
        phases = [
            {"expand-vocabulary": {"size": 31000, "save_as": "grown"}},
            {"distil": {"losses": losses, "start": "grown", "save_as": "small"}},
        ]
    parts = {"task": task, "teachers": {"one": LARGER}, "phases": phases}
    plan = planned(tmp_path, **parts)
    [job] = plan.jobs
    assert {one.choice.teachers for one in job.others} == {"live"} and not plan.break_even
    parts["phases"] = [*phases[:-1], {"cache": {"splits": "train"}}, phases[-1]]
    with pytest.raises(UserError) as refusal:
        planned(tmp_path, "phases.distil.teachers=cached", **parts)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("task", "distil", "signals"),
    [
        ("masked", {"losses": {"kl": {"temperature": 3.0}}}, 4 * 30522),
        ("masked", {"losses": {"kl": {"divergence": "reverse_kl"}}}, 4 * 30522),
        ("classes", {"losses": {"kl": {}, "cosine": {"layers": {1: 3}}}}, 4 * (3 + 256)),
        ("classes", {"losses": {"kl": {}}, "routing": "gate"}, 4 * (3 + 256)),
    ],
)
def test_a_cache_that_check_takes_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, distil: dict[str, Any], signals: int
) -> None:
    """Without a cache phase: one that could stand there, with what the phase reads."""
    untraced(monkeypatch)
    parts = {"task": NUMBERED if task == "masked" else CLASSES}
    phases: list[dict[str, Any]] = [{"distil": distil}]
    names = ["one"]
    if "routing" in distil:
        phases, names = [{"expertise": {"split": "train"}}, *phases], ["one", "two"]
    parts |= {"teachers": dict.fromkeys(names, LARGER), "phases": phases}
    plan = planned(tmp_path, "training.micro_batch_size=1", gpus=1, **parts)
    [job], [_] = plan.jobs, plan.break_even
    cached = job.placement("cached", job.chosen.choice)
    assert cached is not None
    rows = round(0.15 * 64) if task == "masked" else 1
    states = 15 * len(names) * 4 * 256 * (task == "classes")  # of the other micro-batches
    assert cached.signals == rows * len(names) * signals + states


def test_questions_are_planned(tmp_path: Path) -> None:
    """It ended in an AssertionError. Of each window a start and an end over all its tokens."""
    task = {"type": "extractive-qa", "data": {"path": "data"}, "max_length": 64}
    phases = [{"distil": {"losses": {"kl": {}, "cross_entropy": {}}}}]
    parts = {"task": task, "teachers": {"one": LARGER}, "phases": phases}
    plan = planned(tmp_path, "training.micro_batch_size=4", gpus=1, **parts)
    [job], [pays] = plan.jobs, plan.break_even
    live, cached = (job.placement(kind, job.chosen.choice) for kind in ("live", "cached"))
    assert live is not None and cached is not None
    assert live.head == cached.head == 0
    assert live.signals == 16 * 2 * 64 * 2  # of four micro-batches, in bf16
    assert cached.signals == 4 * 2 * 64 * 4  # of one, in fp32
    assert pays.passes < pays.in_recipe == 2


def test_large_logits_of_cross_entropy_alone_are_made_some_at_a_time(tmp_path: Path) -> None:
    task = {"type": "masked-lm", "data": {"path": "data"}, "max_length": 512}
    parts = {"task": task, "phases": [{"fine-tune": {"models": "student"}}]}
    [job] = planned(tmp_path, "training.batch_size=1024", **parts).jobs
    rows = round(0.15 * 256 * 512)
    assert job.chosen.head < rows * 30522 * 2
    # Each number in fp32, and as fp16 or bf16.
    assert job.chosen.head == (4 + 2) * ((5 << 28) // 8 + 30522 * 128)


def test_weights_across_a_boundary_are_whole_on_both_sides() -> None:
    states = training_states([[60, 40]], 0, {}, Zero(1, 2, 4))
    assert states.gradients == 100 * 4  # of rank 1: 10 of the first and all of the second
    assert states.optimizer == 50 * 12


@pytest.mark.parametrize(
    ("ranks", "max_live", "whole"), [(1, 0, 0), (2, 0, 100), (2, 10, 110), (2, 16, 115)]
)
def test_of_sharded_teachers_the_bound_and_the_one_that_passes_it_are_whole(
    ranks: int, max_live: int, whole: int
) -> None:
    zero = Zero(3, ranks, 4, max_live=max_live)
    states = inference_states({"one": [10, 5], "two": [100]}, zero)
    assert states.buffers == whole * 4


# ------------------------------------------------------------------------- command


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result


def test_the_command_shows_and_writes(tmp_path: Path) -> None:
    file = str(recipe_file(tmp_path))
    told = tmp_path / "plan.json"
    done = run(file, "--gpus", "2", "--gpu", "H100", "--json", str(told))
    assert done.exit_code == 0, done.output
    assert "2 x h100" in done.output and "  live stage 3" in done.output
    assert "cached stage 1" not in done.output and "--all" in done.output
    whole = run(file, "--gpus", "2", "--gpu", "H100", "--all").output
    assert "* live stage 3" in whole and "cached stage 1" in whole
    assert "Cache for distil: pays" in done.output
    plan = json.loads(told.read_text())
    [job] = plan["jobs"]
    assert job["chosen"]["fits"] and job["chosen"]["total"] > job["chosen"]["activations"]
    assert plan["device"]["name"] == "h100" and plan["ranks"] == 2
    assert plan["models"]["student"]["parameters"] == 4_386_307


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h10"), "--gpu h10: not a GPU that is known here. Did you mean `h100`?"),
        (("--gpus", "0"), "--gpus 0: a plan is for 1 GPU or more"),
        (("student.model=nobody/has-this",), "model 'nobody/has-this' cannot be planned"),
        (
            ("phases.distil.losses.hidden_mse.layers={1: 9}",),
            "has 2 layers and the teacher 4. Name layers that there are.",
        ),
        (
            ("phases.distil.losses.hidden_mse.layers=every",),
            "phases.distil.losses: the student has 2 layers and the teacher 4",
        ),
        (
            ("phases=[{fine-tune: {models: student, focus: {classes: [c, q]}}}]",),
            "phases.fine-tune.focus.classes: 'q' is no label of the task, which has a, b, c.",
        ),
        (
            (
                f"teachers.two.model={shipped_configs()[TINY]}",
                "phases=[{fine-tune: {models: [one, two], shared_head: true}}]",
            ),
            "phases.fine-tune.shared_head=true: one pooling layer fits states of one width",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gpu = [] if "--gpu" in arguments else ["--gpu", "l4"]
    done = run(str(recipe_file(tmp_path)), *gpu, *arguments)
    assert isinstance(done.exception, UserError)  # main() prints it and exits with 2
    assert said in str(done.exception)


def test_the_labels_of_the_data_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    """Two were assumed, of data that the plan had read."""
    rows = [{"text": f"text {number}", "label": "abc"[number % 3]} for number in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"data": {"path": str(tmp_path / "train.jsonl")}, "max_length": 32}
    plan = planned(tmp_path, task=task)
    assert {model.classes for model in plan.models} == {3} and not plan.notes
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plan = planned(tmp_path, task={**task, "data": {"path": "nobody/has-this"}})
    [note] = plan.notes
    assert {model.classes for model in plan.models} == {2}
    assert "2 are assumed (task.data.path=nobody/has-this: " in note


def test_a_hub_error_is_not_cut_within_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: None
) -> None:
    """It ended in "could not be loaded: C"."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task = {"data": {"path": "nobody/has-this"}, "labels": ["a", "b"], "max_length": 32}
    recipe = load_recipe(recipe_file(tmp_path, task=task))
    why = split_facts(recipe, recipe.tasks_by_name["task"], "train").why_not
    assert why is not None and "could not be loaded: Couldn't" in why
    assert why.endswith(("or give a local path.", " ..."))


def test_known_devices_make_sense() -> None:
    for device in GPUS.values():
        assert 8 < device.memory / 2**30 < 200
        assert device.half_flops > device.full_flops > 1e12
        assert 1e11 < device.bandwidth < 1e13


@pytest.mark.parametrize(
    ("called", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-pcie-40gb"),
        ("Tesla V100-PCIE-16GB", 15.8, "v100-pcie"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA RTX A1000", 7.7, None),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA B200", 178.4, "b200"),
        ("AMD Instinct MI300X", 191.5, None),
        ("NVIDIA A10G", 22.0, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("Tesla T4", 14.6, "t4"),
    ],
)
def test_a_gpu_is_known_by_whole_words_and_has_the_memory_that_it_reports(
    called: str, gib: float, known: str | None
) -> None:
    """Parts of names made an A100 of the RTX A1000, an L4 of the L40 and 80 GiB of the 40."""
    found = gpu_named(called, int(gib * GIB))
    if known is None:
        assert found is None
    else:
        assert found == replace(GPUS[known], memory=int(gib * GIB))


def test_a_gpu_of_this_machine_that_is_not_known_is_not_planned_as_its_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = SimpleNamespace(name="NVIDIA L40", total_memory=44 * GIB)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: about.name)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: about)
    with pytest.raises(UserError, match=r"NVIDIA L40\).*--gpu: b200, h200"):
        find_device(None, 1)
    about.name = "NVIDIA L40S"
    assert find_device(None, 1) == replace(GPUS["l40s"], memory=44 * GIB)
