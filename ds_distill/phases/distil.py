"""Train students on what teachers say: one student per routing policy."""

from __future__ import annotations

from typing import Any

import torch

from ds_distill.engine.config import is_bf16
from ds_distill.engine.placement import sharded_loading
from ds_distill.files import read_json
from ds_distill.losses import build_terms
from ds_distill.models.bundle import Bundle
from ds_distill.models.configuration import load_config
from ds_distill.recipe.phases import Distil, Routing
from ds_distill.routing import Fitted, Router
from ds_distill.routing.comparison import CANDIDATES
from ds_distill.run.caches import cached_signals
from ds_distill.run.context import ModelReference, Run, columns_of
from ds_distill.run.training import Job, train, trainable_model
from ds_distill.run.validation import validation_of


def distil(phase: Distil, number: int, name: str, run: Run) -> dict[str, Any]:
    """Distil the teachers into one student per routing."""
    trained = []
    for routing, output in zip(phase.routing, phase.outputs, strict=True):
        done = run.folder.finished_training(number, output)
        if done is not None:
            trained.append(done)
            continue
        trained.append(train(job_of(phase, number, routing, output, run), run))
    return {"trained": trained}


def job_of(phase: Distil, number: int, routing: Routing, output: str, run: Run) -> Job:
    """All that one student's training needs: models, terms, data and the teachers' words."""
    teachers = [run.reference(teacher, number) for teacher in run.recipe.teachers]
    start = run.reference(phase.start, number)
    student = trainable_model(run, start, phase)
    if routing.policy == "chosen":
        routing = CANDIDATES[read_json(run.folder.comparison)["choice"]]
        run.log.say(f"  {output}: the chosen policy is {routing.policy}")
    widths = {
        reference.name: load_config(reference.model, reference.revision).hidden_size
        for reference in teachers
    }
    torch.manual_seed(run.recipe.seed)  # projections start the same on every rank
    terms = build_terms(phase.losses, student.config.hidden_size, widths)
    config = run.deepspeed(phase)
    live = phase.teachers == "live"
    # bf16 halves a teacher's time where the device has it, also beside an fp32 student.
    autocast = run.world.device.type == "cuda" and not is_bf16(config)
    asked = teachers if live else []
    bf16 = autocast or is_bf16(config)
    packed = [p.name for p in asked if run.packed(p, bf16=bf16) is not None]
    if packed:
        run.log.say(f"  asked without padding: {', '.join(packed)}")
    with sharded_loading(config):
        loaded = {
            reference.name: run.model(reference, packed=reference.name in packed)
            for reference in asked
        }
    # One teacher's words are the target as they are: over a vocabulary, without logits.
    alone = len(teachers) == 1 and not routing.changes_a_single_teacher
    bundle = Bundle(
        student,
        loaded,
        terms,
        None if alone else router_of(phase, routing, run),
        columns=columns_of(asked),
        teacher_autocast=autocast,
    )
    examples = run.examples(phase.split)
    references = [ModelReference("student", start.model, start.revision)]
    tables = run.tables(phase.split, references + asked)
    cached = None if live else cached_signals(run, phase.split, number, examples)
    return Job(
        number=number,
        output=output,
        settings=phase,
        bundle=bundle,
        start=start,
        examples=examples,
        collate=run.collator(examples, tables, cached, packed),
        validation=validation_of(run, start),
    )


def router_of(phase: Distil, routing: Routing, run: Run) -> Router:
    """A policy with what it needs of the run: the temperature, and what was fitted for it."""
    return Router(
        routing,
        temperature=phase.losses.kl.temperature if phase.losses.kl else 1.0,
        seed=run.recipe.seed,
        fitted=Fitted.load(run.folder.fitted) if routing.needs_expertise else None,
    )
