"""Everything that can be wrong with a recipe, found before a model is loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ds_distill.data.sources import Source
from ds_distill.engine.config import deepspeed_config
from ds_distill.errors import UserError
from ds_distill.files import read_json
from ds_distill.models.load import (
    check_labels,
    check_masked_lm,
    check_vocabulary,
    load_config,
    load_tokenizer,
    usable_length,
)
from ds_distill.models.packed import packed_backend
from ds_distill.phases.check_masked_lm import (
    check_codec,
    check_masked_lm_phases,
    check_one_vocabulary,
)
from ds_distill.recipe import Recipe
from ds_distill.recipe.phases import Cache, Distil, Evaluate, Expertise, FineTune, Training
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.schema import MaskedLM, Student, Teacher


def check_recipe(recipe: Recipe, num_ranks: int = 1) -> None:
    """Phases, DeepSpeed config and the models' configurations and tokenizers. Reads no data
    and no weights. Raises UserError."""
    _check_names(recipe)
    if isinstance(recipe.task, MaskedLM):
        check_masked_lm_phases(recipe)
    _check_phases(recipe)
    _check_logging(recipe)
    for phase in recipe.phases:
        if isinstance(phase, Training):
            deepspeed_config(recipe.deepspeed, phase, num_ranks)
    _check_models(recipe)


def check_data(recipe: Recipe, source: Source) -> None:
    """The splits that phases use, their labels, and teachers' labels against the task's.
    Raises UserError."""
    labels = source.labels
    masked_lm = isinstance(recipe.task, MaskedLM)
    for name, phase in zip(recipe.phase_names(), recipe.phases, strict=True):
        for split, need_labels in _splits_of(phase):
            if split not in source.splits:
                raise UserError(
                    f"phases.{name}: there is no split {split!r} in {recipe.task.data.path}; it "
                    f"has {', '.join(source.splits)}. Choose one with phases.{name}.split=NAME, or "
                    f"say where it is with task.data.splits.{split}=NAME."
                )
            source.read(split, need_labels and not masked_lm)
        if isinstance(phase, Training) and phase.keep == "best":
            if "validation" not in source.splits:
                raise UserError(
                    f"phases.{name}: keep=best needs a validation split, and "
                    f"{recipe.task.data.path} has {', '.join(source.splits)}. Add one, or set "
                    "training.keep=last."
                )
            source.read("validation", not masked_lm)
        if isinstance(phase, FineTune) and phase.focus is not None:
            for label in phase.focus.classes:
                if label not in labels:
                    raise UserError(
                        f"phases.{name}.focus.classes: there is no label {label!r}; the task has "
                        f"{', '.join(labels)}. Name classes of the task."
                    )
    for name, first in _untrained_teachers(recipe).items():
        teacher = recipe.teachers[name]
        reference = resolve_model(teacher.model, recipe.models_folder)
        config = load_config(reference, teacher.revision)
        try:
            _check_has_head(reference, config, masked_lm=masked_lm)
            if not masked_lm:
                check_labels(reference, config, labels)
        except UserError as error:
            raise UserError(
                f"teachers.{name} is used by phase {first!r} as it is: {error}"
            ) from None


def _check_names(recipe: Recipe) -> None:
    if "student" in recipe.teachers:
        raise UserError("teachers.student: `student` names the student. Rename the teacher.")
    for number, output in recipe.trained_models():
        phase = recipe.phases[number]
        retrained = isinstance(phase, FineTune) and not phase.save_as
        if output in recipe.teachers and not retrained:
            raise UserError(
                f"phases.{recipe.phase_names()[number]}: its model would be called {output!r}, and "
                "a teacher has that name. Choose another with save_as, or rename the teacher."
            )


def _check_phases(recipe: Recipe) -> None:
    known = {"student", *recipe.teachers}
    cached: dict[str, Cache] = {}  # split -> the cache phase that holds it
    measured: Expertise | None = None
    states_read = False  # whether the gate that was learnt last reads states
    for name, phase in zip(recipe.phase_names(), recipe.phases, strict=True):
        place = f"phases.{name}"
        if isinstance(phase, Distil | Cache | Expertise) and not recipe.teachers:
            raise UserError(f"{place}: the recipe has no teachers. Add teachers: {{NAME: ...}}.")
        _check_not_empty(phase, place)
        if isinstance(phase, FineTune):
            for model in phase.models:
                if model not in known:
                    raise UserError(
                        f"{place}.models: no model {model!r} here. There are: "
                        f"{', '.join(sorted(known))}."
                    )
            if set(phase.outputs) & set(recipe.teachers):
                cached, measured = {}, None
            known |= set(phase.outputs)
        elif isinstance(phase, Expertise):
            measured = phase
            held = cached.get(phase.split)
            states_read = phase.states and (held is None or -1 in held.hidden)
        elif isinstance(phase, Cache):
            cached |= dict.fromkeys(phase.splits, phase)
        elif isinstance(phase, Distil):
            _check_distil(phase, place, known, cached)
            _check_routing(phase, place, cached, measured, states_read)
            if phase.teachers == "cached" and isinstance(recipe.task, MaskedLM):
                check_codec(recipe, phase, place, cached[phase.split].codec)
            known |= set(phase.outputs)


def _check_not_empty(phase: object, place: str) -> None:
    lists: dict[str, list[str]] = {}
    if isinstance(phase, FineTune):
        lists["models"] = phase.models
        if phase.focus is not None:
            lists["focus.classes"] = phase.focus.classes
    elif isinstance(phase, Cache):
        lists["splits"] = phase.splits
    for key, items in lists.items():
        if not items:
            raise UserError(f"{place}.{key}=[]: the list is empty. Name at least one.")
        for item in items:
            if items.count(item) > 1:
                raise UserError(f"{place}.{key}: {item!r} stands twice. Keep it once.")


def _check_distil(phase: Distil, place: str, known: set[str], cached: dict[str, Cache]) -> None:
    if phase.start not in known:
        raise UserError(
            f"{place}.start: no model {phase.start!r} before this phase. There are: "
            f"{', '.join(sorted(known))}."
        )
    if phase.teachers == "cached" and phase.split not in cached:
        raise UserError(
            f"{place}: teachers=cached, and no cache phase before it holds what the teachers, as "
            f"they are then, say about split {phase.split!r}. Add - cache: {{splits: "
            f"{phase.split}}} before it (after the last fine-tuning of a teacher), or set "
            "teachers=live."
        )
    if (
        phase.teachers == "cached"
        and phase.losses.hidden_mse
        and -1 not in cached[phase.split].hidden
    ):
        raise UserError(
            f"{place}.losses.hidden_mse: needs the last layer's states, and the cache of split "
            f"{phase.split!r} keeps logits alone. Set hidden: [-1] in its cache phase, or "
            f"{place}.teachers=live."
        )


def _check_routing(
    phase: Distil,
    place: str,
    cached: dict[str, Cache],
    measured: Expertise | None,
    states_read: bool,
) -> None:
    for routing in phase.routing:
        if routing.needs_expertise and measured is None:
            raise UserError(
                f"{place}.routing: {routing.policy} needs what an expertise phase learns of the "
                "teachers as they are then. Add - expertise: {split: validation} before it (after "
                "the last fine-tuning of a teacher)."
            )
        if (
            routing.may_read_states
            and states_read
            and phase.teachers == "cached"
            and -1 not in cached[phase.split].hidden
        ):
            may = "reads" if routing.policy == "gate" else "may choose the gate, which reads"
            raise UserError(
                f"{place}.routing: {routing.policy} {may} the teachers' last states, and the cache "
                f"of split {phase.split!r} keeps logits alone. Set hidden: [-1] in its cache "
                "phase, or states: false in the expertise phase for a gate of logits."
            )


def _check_models(recipe: Recipe) -> None:
    given: dict[str, Teacher | Student] = {**recipe.teachers, "student": recipe.student}
    vocabularies: dict[str, tuple[PreTrainedTokenizerBase, int]] = {}
    for name, model in given.items():
        place = "student" if name == "student" else f"teachers.{name}"
        try:
            reference = resolve_model(model.model, recipe.models_folder)
            config = load_config(reference, model.revision)
            tokenizer = load_tokenizer(reference, model.revision)
            _check_has_words(reference, tokenizer)
            check_vocabulary(reference, config, tokenizer)
            if isinstance(recipe.task, MaskedLM):
                check_masked_lm(reference, config, tokenizer)
            vocabularies[place] = tokenizer, config.vocab_size
            if Path(reference).is_dir():
                _check_weights(Path(reference))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        limit = usable_length(config)
        if limit is not None and recipe.task.max_length > limit:
            raise UserError(
                f"task.max_length={recipe.task.max_length}: {place} ({model.model}) takes at most "
                f"{limit} tokens. Set task.max_length={limit} or less."
            )
        if recipe.padding == "never":
            _check_padding(place, config)
    if isinstance(recipe.task, MaskedLM):
        check_one_vocabulary(vocabularies)
    layers = recipe.student.layers
    if layers is not None:
        _check_layers(
            layers, load_config(resolve_model(recipe.student.model, recipe.models_folder))
        )


def _check_layers(layers: list[int], config: PreTrainedConfig) -> None:
    total = config.num_hidden_layers
    if not layers or max(layers) >= total or len(set(layers)) < len(layers):
        raise UserError(
            f"student.layers={layers}: the model has layers 0 to {total - 1}. Name some of them, "
            "each once."
        )


def _check_weights(folder: Path) -> None:
    """Refuse a folder without safetensors, or with damaged or missing ones. Reads headers."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"model '{folder}': the folder has no safetensors weights. Convert it: load it with "
            "transformers and call save_pretrained."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            listed = set(read_json(index)["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: not readable: {error}. Copy the model again.") from error
        for name in sorted(listed - {file.name for file in files}):
            raise UserError(f"{index} lists {name}, which is not there. Copy the model again.")
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file}: not readable as safetensors: {error}. Copy the model again."
            ) from error


def _check_padding(place: str, config: PreTrainedConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if packed_backend(config, device) is not None:
        return
    mend = "Leave padding out: each model is then asked as it can be."
    if packed_backend(config, torch.device("cpu")) is not None:
        mend = "Install flashdeberta (pip install flashdeberta), or leave padding out."
    raise UserError(
        f"padding=never: {place} ({config.model_type}) cannot be asked without padding. {mend}"
    )


def _check_has_words(reference: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """transformers makes an empty tokenizer, without a word, where the vocabulary is missing."""
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"model {reference!r}: its tokenizer has no words, only {len(tokenizer)} special "
            "tokens: the vocabulary (tokenizer.json, vocab.txt or the like) is missing. Put it in "
            "the model's folder."
        )


def _check_has_head(reference: str, config: PreTrainedConfig, *, masked_lm: bool) -> None:
    """Refuse a checkpoint that says it has no trained head of the task on top."""
    kinds = getattr(config, "architectures", None) or []
    endings = ("ForMaskedLM", "BertForPreTraining") if masked_lm else "ForSequenceClassification"
    if kinds and not any(kind.endswith(endings) for kind in kinds):
        noun = "masked-LM" if masked_lm else "classifier"
        raise UserError(
            f"model {reference!r} holds {', '.join(kinds)}, which is no trained {noun}. "
            "Fine-tune it first (a fine-tune phase before), or give a fine-tuned checkpoint."
        )


def _check_logging(recipe: Recipe) -> None:
    if recipe.logging.tensorboard and find_spec("tensorboard") is None:
        raise UserError(
            "logging.tensorboard=true: the package tensorboard is not installed. Run pip install "
            "tensorboard, or set logging.tensorboard=false."
        )
    if recipe.logging.wandb and os.environ.get("WANDB_MODE", "online") in ("online", "run"):
        import wandb

        if not wandb.login(prompt=False):
            raise UserError(
                f"logging.wandb={recipe.logging.wandb}: wandb has no API key here. Run `wandb "
                "login`, set WANDB_MODE=offline to keep the log in the run's folder, or take the "
                "key out."
            )


def _splits_of(phase: object) -> list[tuple[str, bool]]:
    """(split, whether it needs labels) that a phase reads."""
    if isinstance(phase, FineTune | Expertise | Evaluate):
        return [(phase.split, True)]
    if isinstance(phase, Cache):
        return [(split, False) for split in phase.splits]
    if isinstance(phase, Distil):
        needs = phase.losses.cross_entropy is not None
        return [(phase.split, needs or any(routing.needs_labels for routing in phase.routing))]
    return []


def _untrained_teachers(recipe: Recipe) -> dict[str, str]:
    """Teachers that a phase asks before any phase trains them, and the first such phase."""
    trained: set[str] = set()
    found: dict[str, str] = {}
    for name, phase in zip(recipe.phase_names(), recipe.phases, strict=True):
        if isinstance(phase, FineTune):
            trained |= set(phase.outputs)
        else:
            for teacher in recipe.teachers:
                if teacher not in trained:
                    found.setdefault(teacher, name)
    return found
