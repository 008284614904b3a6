"""The plan of a recipe: what it counts, says and refuses."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kinds import jsonl
from passes import planned as planned_model
from passes import untraced
from runs import command_line, written

from ds_distill.errors import UserError
from ds_distill.planning import facts as planning
from ds_distill.planning import models
from ds_distill.planning.facts import SplitFacts, split_facts
from ds_distill.planning.gpus import GPUS, find_device, gpu_named
from ds_distill.planning.memory import Zero, inference_states, training_states
from ds_distill.planning.models import shipped_configs
from ds_distill.planning.plan import Choice
from ds_distill.planning.planner import Planner
from ds_distill.planning.table import plan_text
from ds_distill.planning.units import GIB, rate
from ds_distill.recipe import load_recipe
from ds_distill.recipe.phases import Cache
from ds_distill.recipe.tasks import Data, MaskedLM

BERT = "google/bert_uncased_L-4_H-256_A-4"
TINY = "google/bert_uncased_L-2_H-128_A-2"
LARGER = {"model": str(shipped_configs()[BERT])}
CLASSES = {"data": {"path": "data"}, "labels": ["a", "b", "c"], "max_length": 32}
MASKED = {"type": "masked-lm", "data": {"path": "data"}, "max_length": 64}
NUMBERED = MASKED | {"masking": {"variants": 2}}
TRACED = models._traced
STUDENT, TEACHER = 4_386_307, 11_171_587  # weights, with heads of three classes


@pytest.fixture(autouse=True)
def _no_data(monkeypatch):
    untraced(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    facts = lambda recipe, task, split: SplitFacts(split, 1000, 20.0)  # noqa: E731
    monkeypatch.setattr(planning, "split_facts", facts)


@pytest.fixture
def traced(monkeypatch, _no_data):
    """Passes cost what they do: tests without it take a tenth of the time."""
    monkeypatch.setattr(models, "_traced", TRACED)


def recipe_file(folder, **changes):
    """Two live teachers and a student, of configurations that come with ds_distill."""
    data = {
        "task": CLASSES,
        "teachers": dict.fromkeys(("one", "two"), LARGER),
        "student": {"model": str(shipped_configs()[TINY])},
        "training": {"batch_size": 16, "epochs": 2},
        "phases": [
            {"cache": {"splits": "train", "hidden": [-1], "only_if_read": True}},
            {"distil": {"teachers": "live", "losses": {"kl": {}, "hidden_mse": {}}}},
        ],
        "deepspeed": "zero3_bf16",
        **changes,
    }
    return written(data, folder, "mine")


def planned(folder, *overrides, gpus=4, gpu="l4", **changes):
    recipe = load_recipe(recipe_file(folder, **changes), overrides)
    return Planner(recipe, find_device(gpu, gpus), gpus).plan()


def distilled(losses, *before, task=MASKED, **more):
    """What a recipe has of one teacher and one distillation."""
    phases = [*before, {"distil": {"losses": losses, **more}}]
    return {"task": task, "teachers": {"one": LARGER}, "phases": phases}


def both_ways(plan):
    """The chosen placement with live and with cached teachers."""
    [job] = plan.jobs
    return [job.placement(kind, job.chosen.choice) for kind in ("live", "cached")]


def test_a_slow_rate_is_not_0():
    assert [rate(speed) for speed in (0.034, 2.0, 12.3, 45_678.9)] == ["0.034", "2", "12", "45,679"]


def test_what_each_placement_holds(tmp_path):
    """16 bytes for each weight of the student and its two projections; of teachers 2, which are
    sharded at stage 3 alone."""
    plan = planned(tmp_path)
    [job] = plan.jobs
    states, trained = job.chosen.states, STUDENT + 2 * 128 * 256
    assert states.optimizer == pytest.approx(12 * trained / 4, rel=0.001)
    assert states.gradients == pytest.approx(2 * trained / 4, rel=0.001)
    assert states.student == pytest.approx(2 * trained * 5 / 4, rel=0.001)  # whole, and its share
    # Live or cached, four stages, checkpointing or not.
    assert len({other.choice for other in job.others}) == len(job.others) == 16
    for other in job.others:
        held, choice = sum(other.states.teachers.values()), other.choice
        share = 4 if choice.stage == 3 else 1
        whole = 2 * 2 * TEACHER * (choice.teachers == "live")
        assert held == pytest.approx(whole / share, rel=0.001)
        assert (other.step.teachers > 0) == (choice.teachers == "live")
    assert plan.caches == []  # no phase reads it
    [cache] = planned(tmp_path, "phases.distil.teachers=cached").caches
    assert cache.bytes_per_example == 2 * (3 + 256) * 2 + 16
    assert cache.bytes == 1000 * cache.bytes_per_example
    assert cache.fits and cache.build_seconds == pytest.approx(1000 / cache.examples_per_second)


@pytest.mark.parametrize(
    ("chooses", "examples"),
    [({"per_class": 10}, 30), ({"focus": {"classes": ["a", "b"]}, "per_class": 25}, 50)],
)
def test_steps_are_of_the_examples_that_a_phase_trains_on(tmp_path, chooses, examples):
    """Of 40 of each class, where a phase chooses among them: all of the split were counted."""
    rows = [{"text": f"{label} {n}", "label": label} for label in "abc" for n in range(40)]
    file = tmp_path / "train.jsonl"
    file.write_text(jsonl(rows))
    phases = [{"fine-tune": {"models": "student", **chooses}}]
    [job] = planned(tmp_path, task=CLASSES | {"data": {"path": str(file)}}, phases=phases).jobs
    assert job.steps == 2 * -(-examples // 16)


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not(tmp_path):
    sizes = ["task.max_length=512", "deepspeed=zero0_bf16"]

    def chosen(size):
        batch = f"training.batch_size={size}"
        return planned(tmp_path, *sizes, batch, gpus=1, gpu="t4").jobs[0].chosen

    largest = chosen(16).largest_micro_batch
    assert largest > 100
    assert chosen(round(0.98 * largest)).fits and not chosen(round(1.02 * largest)).fits


def test_a_plan_says_where_a_gpu_waits_for_python(tmp_path, traced):
    small, large = (
        planned(tmp_path, f"training.batch_size={size}", "deepspeed=zero1_bf16")
        for size in (8, 16384)
    )
    own = [plan.jobs[0].chosen for plan in (small, large)]
    assert own[0].computing < 0.2 * own[0].step.total
    assert own[1].computing > 0.8 * own[1].step.total
    assert ["waits for Python" in plan_text(plan) for plan in (small, large)] == [True, False]
    assert small.to_json()["jobs"][0]["chosen"]["computing"] == own[0].computing


@pytest.mark.parametrize("teachers", ["live", "cached"])
def test_teachers_that_are_files_alone_are_neither_live_nor_cached(tmp_path, teachers):
    """`plan`, and `profile` after all that it had measured, divided by a rate of 0."""
    parts = distilled({"kl": {}}, {"cache": {"splits": "train"}}, task=CLASSES, teachers=teachers)
    plan = planned(tmp_path, **parts | {"teachers": {"file": {"predictions": "mine.jsonl"}}})
    [job] = plan.jobs
    assert {one.choice.teachers for one in job.others} == {None} and len(job.others) == 8
    assert plan.break_even == plan.caches == []
    assert plan_text(plan).startswith("mine: ")  # without advice of how to run them


def test_a_row_of_a_codec_takes_what_was_measured():
    """`codec.threshold` was not looked at, and a sweep was refused for a disk that was large
    enough."""
    task = MaskedLM(data=Data(path="x"))

    def row_bytes(rows, **codec):
        return Cache(splits="train", codec=codec).example_bytes(task, 768, None, 30522, rows)

    results = Path(__file__).parents[1] / "results" / "codecs.json"
    measured = json.loads(results.read_text())["temperatures"]
    seen = 0
    for temperature, found in measured.items():
        for one in found["codecs"]:
            name, _, key = one["name"].partition(" ")
            if name == "compact":
                given = {"threshold": float(key), "temperature": float(temperature)}
                row = row_bytes(1 / 0.15, name=name, **given)
                # In the code to 0.1 bytes.
                assert row == pytest.approx(one["bytes_per_row"], rel=0.01), one["name"]
                seen += 1
    assert seen == 10
    sizes = [row_bytes(100.0, name="compact", threshold=t) for t in (1e-6, 5e-4, 7e-4, 1e-3, 0.5)]
    assert sizes == sorted(sizes, reverse=True) and len({*sizes}) == 4


def test_what_is_decoded_of_a_cache_is_in_the_plan(tmp_path):
    """Of one micro-batch its logits in fp32, and states of all micro-batches."""

    def of(micro_batch):
        cache = {"cache": {"splits": "train", "hidden": [-1]}}
        losses = {"kl": {}, "hidden_mse": {}}
        parts = distilled(losses, cache, task=NUMBERED, teachers="cached")
        shape = "training.batch_size=128", f"training.micro_batch_size={micro_batch}"
        return planned(tmp_path, *shape, **parts, gpus=1).jobs[0].chosen

    tokens, states = 0.15 * 64, round(0.15 * 64 * 128) * 256 * 4
    assert of(8).signals == round(tokens * 8) * 30522 * 4 + states
    assert of(32).signals == round(tokens * 32) * 30522 * 4 + states


GROWS = {"expand-vocabulary": {"size": 31000, "save_as": "grown"}}
UNCACHEABLE = {
    "mask variants that are not numbered": (distilled({"kl": {}}), "task.masking.variants"),
    "every token": (distilled({"kl": {"rows": "tokens"}}, task=NUMBERED), "what no cache"),
    "layers by the teachers' depths": (
        distilled({"hidden_mse": {"layers": "uniform"}}, task=CLASSES),
        "by number",
    ),
    "a vocabulary that has grown": (
        distilled({"kl": {}}, GROWS, task=NUMBERED, start="grown", save_as="small"),
        "was expanded",
    ),
}
"""A recipe's parts, and what `check` says of a cache."""


@pytest.mark.parametrize("why", UNCACHEABLE)
def test_a_cache_that_check_refuses_is_not_planned(tmp_path, monkeypatch, why):
    """It was recommended, and asked for it ended in a StopIteration."""
    parts, says = UNCACHEABLE[why]
    plan = planned(tmp_path, **parts)
    [job] = plan.jobs
    assert {one.choice.teachers for one in job.others} == {"live"} and not plan.break_even
    *before, distil = parts["phases"]
    phases = [*before, {"cache": {"splits": "train"}}, distil]
    with pytest.raises(UserError, match=says):
        planned(tmp_path, "phases.distil.teachers=cached", **parts | {"phases": phases})


@pytest.mark.parametrize(
    ("task", "distil", "signals"),
    [
        (NUMBERED, {"losses": {"kl": {"temperature": 3.0}}}, 4 * 30522),
        (CLASSES, {"losses": {"kl": {}, "cosine": {"layers": {1: 3}}}}, 4 * (3 + 256)),
        (CLASSES, {"losses": {"kl": {}}, "routing": "gate"}, 4 * (3 + 256)),
    ],
)
def test_a_cache_that_check_takes_is_planned(tmp_path, monkeypatch, task, distil, signals):
    """Without a cache phase: one that could stand there, with what the phase reads."""
    names = ["one", "two"] if "routing" in distil else ["one"]
    before = [{"expertise": {"split": "train"}}] * (len(names) - 1)
    parts = {"teachers": dict.fromkeys(names, LARGER), "phases": [*before, {"distil": distil}]}
    plan = planned(tmp_path, "training.micro_batch_size=1", gpus=1, task=task, **parts)
    [_], (_, cached) = plan.break_even, both_ways(plan)
    rows = round(0.15 * 64) if task is NUMBERED else 1
    states = 15 * len(names) * 4 * 256 * (task is CLASSES)  # of the other micro-batches
    assert cached.signals == rows * len(names) * signals + states


def test_questions_are_planned(tmp_path):
    """It ended in an AssertionError. Of each window a start and an end over all its tokens."""
    task = MASKED | {"type": "extractive-qa"}
    parts = distilled({"kl": {}, "cross_entropy": {}}, task=task)
    plan = planned(tmp_path, "training.micro_batch_size=4", gpus=1, **parts)
    [pays], (live, cached) = plan.break_even, both_ways(plan)
    assert live.head == cached.head == 0
    assert live.steps_ahead == 8
    assert live.signals == 8 * 16 * 2 * 64 * 2  # of each four micro-batches, in bf16
    assert cached.signals == 4 * 2 * 64 * 4  # of one, in fp32
    assert pays.passes < pays.in_recipe == 2


def test_large_logits_are_in_the_plan(tmp_path, traced):
    parts = {"task": MASKED | {"max_length": 512}, "phases": [{"fine-tune": {"models": "student"}}]}
    [job] = planned(tmp_path, "training.batch_size=1024", **parts).jobs
    # Of cross-entropy alone some at a time, each number in fp32, and as fp16 or bf16.
    assert job.chosen.head < round(0.15 * 256 * 512) * 30522 * 2
    assert job.chosen.head == (4 + 2) * ((5 << 28) // 8 + 30522 * 128)
    plan = planned(tmp_path, "training.batch_size=256", **distilled({"kl": {}}, task=NUMBERED))
    (live, cached), rows = both_ways(plan), round(0.15 * 64 * 64)
    # Two models' logits in fp32 and the derivative in bf16; a decoder's gradient in fp32.
    assert live.head == rows * 30522 * (8 + 2) + 4 * 30522 * 128
    assert cached.head > rows * 30522 * 4


def teacher_peak(examples):
    """Of its four layers; see `untraced`."""
    return 4 * 10**6 * examples


@pytest.mark.parametrize("padding", ["always", "never"])
def test_what_terms_read_of_every_token_is_in_the_plan(tmp_path, padding):
    """Beside a teacher: its states and the inputs of its attention, until the loss; of the steps
    that it reads at once, where nothing is padded."""

    def of(losses):
        overrides = "training.batch_size=256", f"padding={padding}"
        [job] = planned(tmp_path, *overrides, **distilled(losses)).jobs
        return job.placement("live", Choice(0, "live", False))

    losses = {"kl": {}, "hidden_mse": {"rows": "tokens"}}
    more = {"attention_kl": {"layers": {1: 2}}, "relation_kl": {"layers": {1: 2, 2: 4}}}
    alone, beside, examples = of(losses), of({**losses, **more}), 256 // 4
    # Of layers 2 and 4 queries, keys and values, in bf16.
    taken = 6 * examples * 64 * 256 * 2
    assert beside.steps_ahead == (4 if padding == "never" else 1)  # of 16,384 tokens
    if padding == "never":
        assert beside.signals - alone.signals == 4 * taken
        assert beside.activations == alone.activations == 4 * teacher_peak(examples)
    else:
        assert beside.activations - alone.activations == taken
    masked, every = of({"kl": {}}), of({"kl": {"rows": "tokens"}})
    assert masked.head == alone.head and masked.total < alone.total
    assert every.head > 4 * masked.head


@pytest.mark.parametrize(("gpu", "trained"), [("cpu", False), ("l4", True)])
def test_what_is_trained_on_a_cpu_has_the_plain_attention(tmp_path, monkeypatch, gpu, trained):
    passes, plain = [], models._traced

    def traced(model, layers, of):
        passes.append((of.trains, of.fused))
        return plain(model, layers, of)

    monkeypatch.setattr(models, "_traced", traced)
    planned(tmp_path, gpu=gpu)
    assert {*passes} == {(True, trained), (False, True)}


def test_inputs_of_attention_stay_beside_what_is_computed_again(tmp_path):
    """Of a teacher that is as large as the student."""
    parts = distilled({"kl": {}, "relation_kl": {"layers": {1: 1}}})
    parts["teachers"] = {"one": {"model": str(shipped_configs()[TINY])}}
    [job] = planned(tmp_path, "training.batch_size=256", "padding=always", **parts).jobs
    found = [job.placement("live", Choice(0, "live", again)) for again in (False, True)]
    plain, again = (one.activations for one in found)
    assert again - plain == 64 * 64 * 3 * 128 * 2


def test_no_micro_batch_fits_where_the_teachers_pass_does_not(tmp_path):
    """Over the micro-batches that they read at once, however small one is."""
    overrides = "training.batch_size=256", "padding=never"
    recipe = load_recipe(recipe_file(tmp_path, **distilled({"kl": {}})), overrides)
    small = replace(GPUS["l4"], memory=4 * teacher_peak(64))
    [job] = Planner(recipe, small, 4).plan().jobs
    assert job.chosen.largest_micro_batch == 0
    assert not job.chosen.fits


def test_what_is_whole_of_shards():
    states = training_states([[60, 40]], 7, {}, Zero(1, 2, 4))
    assert states.student == (100 + 7) * 4
    assert states.gradients == 100 * 4  # of rank 1: 10 of the first and all of the second
    assert states.optimizer == 50 * 12
    for ranks, max_live, whole in [(1, 0, 0), (2, 0, 100), (2, 10, 110), (2, 16, 115)]:
        zero = Zero(3, ranks, 4, max_live=max_live)
        assert inference_states({"one": [10, 5], "two": [100]}, zero).buffers == whole * 4


def test_fp16_is_planned_as_bf16_is_but_not_at_stage_0(tmp_path):
    half, brain = (planned(tmp_path, f"deepspeed=zero3_{name}") for name in ("fp16", "bf16"))
    assert {other.choice.stage for other in half.jobs[0].others} == {1, 2, 3}
    assert half.jobs[0].chosen == brain.jobs[0].chosen
    assert not planned(tmp_path, "deepspeed=zero3_fp16", gpu="t4").notes
    assert "fp16 or fp32" in planned(tmp_path, gpu="t4").notes[0]


def test_checkpointing_takes_less_memory_and_more_time(tmp_path, traced):
    [job] = planned(tmp_path, "task.max_length=256", "training.batch_size=512").jobs
    assert not job.chosen.choice.checkpointing
    more = job.placement("cached", job.chosen.choice)
    less = job.placement("cached", replace(job.chosen.choice, checkpointing=True))
    assert less.activations < 0.8 * more.activations and less.step.student > more.step.student
    [job] = planned(tmp_path, "training.activation_checkpointing=true").jobs
    assert job.chosen.choice.checkpointing
    albert = {"model": str(shipped_configs()["albert/albert-base-v2"])}
    with pytest.raises(UserError, match=r"phases\.distil\.activation_checkpointing=true"):
        planned(tmp_path, "training.activation_checkpointing=true", student=albert)


def passes(folder, *overrides, **parts):
    """How many of a live teacher's passes a cache costs."""
    [pays] = planned(folder, "deepspeed=zero1_bf16", *overrides, **parts).break_even
    assert pays.in_recipe == 2
    return pays.passes


def test_what_a_cache_costs(tmp_path, monkeypatch, traced):
    """About a pass of the teachers where micro-batches are as large as its own, or of as many
    tokens at once; small ones of live teachers are slow. Of mask variants a pass each, and another
    task's cache does not count."""
    padded = "training.batch_size=256", "padding=always"
    assert passes(tmp_path, *padded) == pytest.approx(1.0, abs=0.1)
    assert passes(tmp_path, "training.batch_size=4", "padding=always") < 0.5
    assert passes(tmp_path, "training.batch_size=2048") == pytest.approx(1.0, abs=0.1)
    untraced(monkeypatch)
    one, six = (
        passes(tmp_path, **distilled({"kl": {}}, task=MASKED | {"masking": {"variants": number}}))
        for number in (1, 6)
    )
    assert six == pytest.approx(6 * one)
    own, other = (
        {"cache": {"name": name, "task": name, "splits": "train", "batch_size": size}}
        for name, size in (("one", 64), ("two", 1))
    )
    tasks = {"task": None, "tasks": {"one": CLASSES, "two": CLASSES}}
    parts = [distilled({"kl": {}}, *order, task=None)["phases"] for order in ((own, other), (own,))]
    both, alone = (
        passes(tmp_path, "phases.distil.task=one", **tasks, phases=phases) for phases in parts
    )
    assert both == alone


def test_weights_that_rest_are_groups_of_their_own(tmp_path):
    """Of three ranks' shares each is padded by itself."""
    losses = {"hidden_mse": {"until": 0.5}, "kl": {"from": 0.5}}
    parts = distilled(losses, task=CLASSES, teachers="live", keep="last")
    parts["teachers"] = dict.fromkeys(("one", "two"), LARGER)
    [job] = planned(tmp_path, "deepspeed=zero1_fp32", gpus=3, **parts).jobs
    model = planned_model(shipped_configs()[TINY], 3).build()
    numels = Counter({(True, "projections"): 2 * 128 * 256})
    for name, weight in model.named_parameters():
        part = "head" if name.startswith(("bert.pooler", "classifier")) else "encoder"
        numels[weight.ndim > 1, part] += weight.numel()
    assert len(numels) == 5
    assert job.chosen.states.optimizer == 12 * sum(-(-one // 6) * 2 for one in numels.values())


# ------------------------------------------------------------------------- command


def test_the_command_shows_and_writes(tmp_path):
    told = tmp_path / "plan.json"
    command = ["plan", recipe_file(tmp_path), "--gpus", "2", "--gpu", "H100"]
    done = command_line(*command, "--json", told)
    assert "2 x h100" in done.output and "  live stage 3" in done.output
    assert "cached stage 1" not in done.output and "--all" in done.output
    heads, row = (
        line for line in done.output.splitlines() if line.startswith(("run as", "  live"))
    )
    shown = dict(zip(heads.split()[2:], row.split()[3:], strict=False))  # a step has a unit
    [chosen] = (one["chosen"] for one in json.loads(told.read_text())["jobs"])
    held = {**chosen["states"], **{key: chosen[key] for key in ("activations", "signals", "total")}}
    held |= {"teachers": sum(held["teachers"].values()), "logits": chosen["head"]}
    assert {name: f"{size / GIB:.2f}" for name, size in held.items()}.items() <= shown.items()
    whole = command_line(*command, "--all").output
    assert "* live stage 3" in whole and "cached stage 1" in whole
    assert "Cache for distil: pays" in done.output
    plan = json.loads(told.read_text())
    [job] = plan["jobs"]
    assert job["chosen"]["fits"] and job["chosen"]["total"] > job["chosen"]["activations"]
    assert plan["device"]["name"] == "h100" and plan["ranks"] == 2
    assert plan["models"]["student"]["parameters"] == STUDENT


def test_what_cannot_be_planned_is_refused(tmp_path):
    with pytest.raises(UserError, match="model 'nobody/has-this' cannot be planned"):
        planned(tmp_path, "student.model=nobody/has-this")
    narrow = f"teachers.two.model={shipped_configs()[TINY]}"
    shared = "phases=[{fine-tune: {models: [one, two], shared_head: true}}]"
    with pytest.raises(UserError, match=r"shared_head=true: one pooling layer fits states of one"):
        planned(tmp_path, narrow, shared)


def test_what_is_assumed_is_told(tmp_path, monkeypatch, in_this_process):
    """Two labels were, of data that the plan had read; and a hub's error ended in "could not be
    loaded: C"."""
    rows = [{"text": f"text {number}", "label": "abc"[number % 3]} for number in range(9)]
    (tmp_path / "train.jsonl").write_text(jsonl(rows))
    task = {"data": {"path": str(tmp_path / "train.jsonl")}, "max_length": 32}
    plan = planned(tmp_path, task=task)
    assert {model.classes for model in plan.models} == {3} and not plan.notes
    nowhere = {**task, "data": {"path": "nobody/has-this"}}
    plan = planned(tmp_path, "student.model=google-bert/bert-large-cased", task=nowhere)
    labels, shipped = plan.notes
    assert {model.classes for model in plan.models} == {2}
    assert "2 are assumed (task.data.path=nobody/has-this: " in labels
    assert "come with ds_distill" in shipped and "bert-large-cased" in shipped
    recipe = load_recipe(recipe_file(tmp_path, task=nowhere))
    why = split_facts(recipe, recipe.tasks_by_name["task"], "train").why_not
    assert why is not None and "could not be loaded: Couldn't" in why
    assert why.endswith(("or give a local path.", " ..."))


@pytest.mark.parametrize(
    ("called", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-pcie"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA RTX A1000", 7.7, None),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
    ],
)
def test_a_gpu_is_known_by_whole_words_and_has_the_memory_that_it_reports(called, gib, known):
    """Parts of names made an A100 of the RTX A1000, an L4 of the L40 and 80 GiB of the 40."""
    found = gpu_named(called, int(gib * GIB))
    assert found == (None if known is None else replace(GPUS[known], memory=int(gib * GIB)))


def test_a_gpu_of_this_machine_that_is_not_known_is_not_planned_as_its_cpu(monkeypatch):
    about = SimpleNamespace(name="NVIDIA L40", total_memory=44 * GIB)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: about.name)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: about)
    with pytest.raises(UserError, match=r"NVIDIA L40\).*--gpu: b200, h200"):
        find_device(None, 1)
    about.name = "NVIDIA L40S"
    assert find_device(None, 1) == replace(GPUS["l40s"], memory=44 * GIB)
