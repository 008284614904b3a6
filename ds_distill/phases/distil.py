"""Train students on teacher signals: one student per routing policy."""

from __future__ import annotations

from dataclasses import replace

from ds_distill.caching.cached_signals import cached_signals
from ds_distill.engine.placement import sharded_loading
from ds_distill.engine.precision import computes_bf16, is_half
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import load_config, pools_all_tokens
from ds_distill.models.reference import label_maps_of
from ds_distill.recipe.phases import Distil
from ds_distill.recipe.policies import Routing
from ds_distill.records import Trained, read_object
from ds_distill.routing import Router
from ds_distill.routing.held_out import routing_of_candidate
from ds_distill.routing.multi_label import check_states
from ds_distill.run.run import Run
from ds_distill.training.loop import train_each
from ds_distill.training.setup import Job, terms_of, trainable_model, validation_of


def distil(phase: Distil, number: int, name: str, run: Run) -> Trained:
    """Distil the teachers into one student per routing."""
    routings = dict(zip(phase.outputs, phase.routing, strict=True))
    teachers = run.teachers(number)
    if phase.follow is None and len(teachers) < len(run.recipe.teachers):
        run.log.info(f"  teachers that were not left out: {', '.join(teachers)}")
    return train_each(
        number,
        phase.trainings,
        lambda outputs: job_of(phase, number, routings[outputs[0]], outputs[0], run),
        run,
    )


def job_of(phase: Distil, number: int, routing: Routing, output: str, run: Run) -> Job:
    """All that one student's training needs: models, terms, data and the teacher signals."""
    teachers = [run.reference(teacher, number) for teacher in run.teachers(number)]
    start = run.reference(phase.start, number)
    student = trainable_model(run, start, phase)
    if routing.policy == "chosen":
        compared = read_object(run.comparison, "Name another --folder.")
        routing = routing_of_candidate(compared["choice"])
        run.log.info(f"  {output}: the chosen policy is {routing.policy}")
    router = None  # a lone teacher's signals are the target as they are
    if len(teachers) > 1 or not routing.keeps_lone_teacher:
        fitted = run.fitted if routing.needs.expertise else None
        router = Router(routing, temperature=phase.temperature, seed=run.recipe.seed, fitted=fitted)
    if router is not None and router.layers and not run.task.of_words:
        configs = (load_config(teacher.model, teacher.revision) for teacher in teachers)
        if any(map(pools_all_tokens, configs)):
            check_states(run.fitted)
    examples = run.data.examples(phase.split)
    terms = terms_of(phase, run, student, examples, teachers)
    config = run.deepspeed(phase)
    live = phase.teachers == "live"
    # bf16 halves a teacher's time where the device has it, also beside an fp32 student.
    autocast = run.world.device.type == "cuda" and not is_half(config) and computes_bf16()
    running = teachers if live else []
    half = autocast or is_half(config)
    packed = [p.name for p in running if run.packed(p, half=half) is not None]
    if packed:
        run.log.info(f"  runs without padding: {', '.join(packed)}")
    with sharded_loading(config):
        loaded = {
            reference.name: run.model(reference, packed=reference.name in packed)
            for reference in running
        }
    bundle = Bundle(
        student,
        loaded,
        terms,
        router,
        label_maps=label_maps_of(running),
        tokens=run.data.taught_tokens(running),
        teacher_autocast=autocast,
    )
    references = [replace(start, name="student"), *running]
    tables = run.data.tables(phase.split, references)
    cached = None if live else cached_signals(run, phase.split, number, examples)
    return Job(
        number=number,
        outputs={"student": output},
        settings=phase,
        bundle=bundle,
        starts={"student": start},
        examples=examples,
        collate=run.collator(
            examples, tables, references, cached, packed, every_token=bundle.every_token
        ),
        validation=validation_of(run, {"student": start}),
    )
