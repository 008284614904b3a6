"""What is wrong with a recipe's models: configurations, tokenizers, headers of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ds_distill.check.expansions import expanded_mistakes
from ds_distill.data.pretrained import Unreachable
from ds_distill.data.tokenizer import check_vocabulary, load_tokenizer, same_tokens
from ds_distill.data.word_pieces import rules_of_word_pieces
from ds_distill.errors import UserError
from ds_distill.models.attention import WIDEST_HEAD, unseen_attention
from ds_distill.models.configuration import (
    CLASSIFIER_HEADS,
    check_encoder,
    load_config,
    usable_length,
)
from ds_distill.models.student import student_of
from ds_distill.models.weights import check_weights
from ds_distill.recipe import Recipe
from ds_distill.recipe.entry import imported
from ds_distill.recipe.lineage import steps
from ds_distill.recipe.metrics.tokens import WordLoss
from ds_distill.recipe.phases import PHASES, Cache
from ds_distill.recipe.phases.base import PhaseSettings, TrainingPhase
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.schema import Student, Teacher
from ds_distill.recipe.tasks import TASKS
from ds_distill.recipe.terms import AttentionSettings, HiddenMSELoss, LayeredTerm, RelationKLLoss


class Models:
    """The recipe's models, each read once."""

    def __init__(self, recipe: Recipe, *, on_gpu: bool) -> None:
        self.recipe = recipe
        self.configs: dict[str, PreTrainedConfig] = {}
        """By location in the recipe, those that could be read."""
        self._on_gpu = on_gpu
        self._vocabularies: dict[str, tuple[PreTrainedTokenizerBase, int]] = {}

    def mistakes(self) -> list[str]:
        """One for each rule and model; of several models with the same mistake, one for all."""
        given: dict[str, Teacher | Student] = {
            **{f"teachers.{name}": self.recipe.teachers[name] for name in self.recipe.encoders},
            "student": self.recipe.student,
        }
        locations: dict[str, list[str]] = {}  # what is wrong -> where
        unreachable: dict[str, dict[str, str]] = {}  # the reason -> where -> model
        for location, model in given.items():
            try:
                for mistake in self._of_model(location, model):
                    locations.setdefault(mistake, []).append(location)
            except Unreachable as error:
                unreachable.setdefault(error.reason, {})[location] = error.reference
            except UserError as error:
                locations.setdefault(str(error), []).append(location)
        for reason, of in unreachable.items():
            locations[Unreachable.of(list(dict.fromkeys(of.values())), reason)] = list(of)
        found = [f"{', '.join(where)}: {mistake}" for mistake, where in locations.items()]
        found += self._too_long()
        if self.recipe.padding == "never":
            found += self._padded()
        compares = _token_by_token(self.recipe)
        if compares is not None:
            found += vocabulary_mistakes(self._vocabularies, compares)
        found += [*_reported(self._shape), *self._layer_maps()]
        found += [*self._cached_layers(), *self._attention(), *self._hidden_words()]
        return [*found, *_reported(self._expanded), *self._shared_heads()]

    def teachers(self) -> dict[str, PreTrainedConfig]:
        """Configurations of the teachers that could be read, by name."""
        return {n: c for n in self.recipe.teachers if (c := self.configs.get(f"teachers.{n}"))}

    def student_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The student's tokenizer, if it could be read."""
        found = self._vocabularies.get("student")
        return found and found[0]

    def _of_model(self, location: str, model: Teacher | Student) -> Iterator[str]:
        assert model.model is not None
        reference = resolve_model(model.model, self.recipe.models_folder)
        config = load_config(reference, model.revision)
        check_encoder(reference, config)
        self.configs[location] = config

        of_words = any(task.predicts == "tag" for task in self.recipe.tasks_by_name.values())

        def vocabulary() -> Iterator[str]:
            tokenizer = load_tokenizer(reference, model.revision, of_words=of_words)
            check_vocabulary(reference, config, tokenizer)
            for checks in self._checks():
                checks(reference, config, tokenizer)
            self._vocabularies[location] = tokenizer, config.vocab_size
            yield from ()

        def weights() -> Iterator[str]:
            random = isinstance(model, Student) and model.is_random
            if Path(reference).is_dir() and not random:
                check_weights(reference, config)
            yield from ()

        yield from _reported(vocabulary)
        yield from _reported(weights)

    def _checks(self) -> list[Callable[..., None]]:
        """What the tasks' kinds check of each model."""
        kinds = {task.type: TASKS[task.type] for task in self.recipe.tasks_by_name.values()}
        return [imported(kind.checks_model) for kind in kinds.values() if kind.checks_model]

    def _too_long(self) -> Iterator[str]:
        limits = {location: usable_length(config) for location, config in self.configs.items()}
        for task in self.recipe.tasks_by_name.values():
            wanted, at = task.max_length, f"{task.location}.max_length"
            short = {location: n for location, n in limits.items() if n is not None and n < wanted}
            if short:
                limit = min(short.values())
                [location, *_] = (location for location, n in short.items() if n == limit)
                yield (
                    f"{at}={wanted}: {location} takes at most {limit} tokens. Set {at}={limit} or "
                    "less."
                )

    def _padded(self) -> Iterator[str]:
        for location, config in self.configs.items():
            fix = "Leave padding out: each model then runs as it can."
            if imported("ds_distill.models.packing:takes_packed")(config):
                if not (self._on_gpu and lacks_flashdeberta(config)):
                    continue
                fix = "Install flashdeberta (pip install flashdeberta), or leave padding out."
            yield (
                f"padding=never: {location} ({config.model_type}) cannot run without padding. {fix}"
            )

    def _shape(self) -> Iterator[str]:
        """Takes the student's configuration in place of that of its `model`."""
        if (given := self.configs.get("student")) is not None:
            self.configs["student"] = student_of(given, self.recipe.student)
        yield from ()

    def _taught(
        self,
    ) -> Iterator[tuple[str, PhaseSettings, PreTrainedConfig, str, PreTrainedConfig]]:
        """Of each phase in which models are taught, its name and settings, the configuration of one
        that is taught, and a teacher's location and configuration."""
        recipe = self.recipe
        configs = {name.removeprefix("teachers."): one for name, one in self.configs.items()}
        for step in steps(recipe):
            if PHASES[step.phase.kind].makes != "student":
                continue
            own = {step.model(start).origin for start in step.phase.starts} & configs.keys()
            for teacher in step.teachers:
                other = configs.get(step.model(teacher).origin)
                at = f"teachers.{teacher}" if teacher in recipe.teachers else f"model {teacher!r}"
                for student in own if other is not None else ():
                    yield step.name, step.phase, configs[student], at, other

    def _layer_maps(self) -> Iterator[str]:
        """Terms that compare layers which the models do not have, or states of unlike widths."""
        for name, phase, own, teacher, config in self._taught():
            for key, _, settings in phase.parts():
                if not isinstance(settings, LayeredTerm):
                    continue
                try:
                    settings.pairs(own.num_hidden_layers, config.num_hidden_layers)
                except ValueError as error:
                    at = f"phases.{name}.{key}.layers={settings.layers}"
                    yield f"{at}: with {teacher}, {error}."
                widths = own.hidden_size, config.hidden_size
                if isinstance(settings, HiddenMSELoss) and not settings.map and len({*widths}) > 1:
                    yield (
                        f"phases.{name}.{key}.map=false: compares states as they are, and the "
                        f"student's states are {widths[0]} wide and those of {teacher} "
                        f"{widths[1]}. Take the key out: a trained map then brings them together."
                    )

    def _cached_layers(self) -> Iterator[str]:
        """Layers to cache that a teacher does not have."""
        configs = {name.removeprefix("teachers."): one for name, one in self.configs.items()}
        for step in steps(self.recipe):
            hidden = step.phase.hidden if isinstance(step.phase, Cache) else []
            for teacher in step.teachers if hidden else ():
                config = configs.get(step.model(teacher).origin)
                if config is None:  # predictions of a file, or it could not be read
                    continue
                depth = config.num_hidden_layers
                beyond = [layer for layer in hidden if not -depth - 1 <= layer <= depth]
                if beyond:
                    yield (
                        f"phases.{step.name}.hidden={hidden}: {teacher} has {depth} layers, and "
                        f"none is {beyond[0]}. Name layers from 1 to {depth}, 0 for the embeddings "
                        "or -1 for the last."
                    )
                    break

    def _attention(self) -> Iterator[str]:
        """Terms on attention that the models' own cannot be compared by."""
        for name, phase, own, teacher, config in self._taught():
            for key, entry, settings in phase.parts():
                if isinstance(settings, AttentionSettings):
                    heads = settings.heads if isinstance(settings, RelationKLLoss) else None
                    for mistake in _unlike_attention({teacher: config, "student": own}, heads):
                        fix = f"Take {entry.name} out, or choose other models."
                        yield f"phases.{name}.{key}: {mistake} {fix}"

    def _hidden_words(self) -> Iterator[str]:
        """Tokenizers whose pieces do not say where a word begins."""
        for task in self.recipe.tasks_by_name.values():
            if task.metric.name == WordLoss.name:
                at = f"{task.location}.metric=word_loss"
                yield from hidden_word_mistakes(at, self._vocabularies)

    def _expanded(self) -> Iterator[str]:
        return expanded_mistakes(self.recipe, self.configs, self._vocabularies)

    def _shared_heads(self) -> Iterator[str]:
        """Models that are trained through one head, and cannot be."""
        recipe, known = self.recipe, self.teachers()
        for name, phase in recipe.named_phases():
            trainings = phase.trainings if isinstance(phase, TrainingPhase) else []
            for together in trainings:
                configs = {f"teachers.{n}": known[n] for n in together if n in known}
                if len(together) > 1:
                    yield from one_head_mistakes(f"phases.{name}.shared_head=true", configs)


def _unlike_attention(given: Mapping[str, PreTrainedConfig], heads: int | None) -> Iterator[str]:
    """Why the attention of models cannot be compared. heads: relation heads; None: their own."""
    for location, config in given.items():
        if (why := unseen_attention(config)) is not None:
            yield f"{location}: {why}."
        width = getattr(config, "true_hidden_size", config.hidden_size)
        if heads is not None and (width % heads or width // heads > WIDEST_HEAD):
            yield (
                f"{location} is {width} wide, which is not {heads} relation heads of at most "
                f"{WIDEST_HEAD}."
            )
    own = {location: config.num_attention_heads for location, config in given.items()}
    if heads is None and len({*own.values()}) > 1:
        listed = ", ".join(f"{location} has {count}" for location, count in own.items())
        yield f"heads are compared one to one, and {listed}."


def one_head_mistakes(setting: str, configs: Mapping[str, PreTrainedConfig]) -> Iterator[str]:
    """Why models cannot be trained through one head. configs: by location."""
    unknown = {n: c.model_type for n, c in configs.items() if c.model_type not in CLASSIFIER_HEADS}
    for location, kind in unknown.items():
        yield (
            f"{setting}: where {location} ({kind}) has the layers of its head is not known here. "
            f"Take a model of one of these types: {', '.join(CLASSIFIER_HEADS)}."
        )
    widths = {n: getattr(c, "pooler_hidden_size", c.hidden_size) for n, c in configs.items()}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{location} {width}" for location, width in widths.items())
        yield (
            f"{setting}: one pooling layer fits states of one width, and these have several: "
            f"{listed}. Choose teachers of one width, or fine-tune them without shared_head."
        )


def _token_by_token(recipe: Recipe) -> str | None:
    """What in the recipe compares models token by token, if anything does."""
    for task in recipe.tasks_by_name.values():
        if TASKS[task.type].needs.same_tokens:
            return f"{task.location}.type={task.type}"
    for name, phase in recipe.named_phases():
        for key, entry, settings in phase.parts():
            if entry.needs_of(settings).same_tokens:
                return f"phases.{name}.{key}"
    return None


def vocabulary_mistakes(
    models: dict[str, tuple[PreTrainedTokenizerBase, int]], compares: str
) -> Iterator[str]:
    """Models whose tokens are not the student's. Of a vocabulary that is padded to a multiple of 64
    the tokens count.

    models: location in the recipe -> tokenizer and size of the model's vocabulary.
    compares: what needs the same tokens.
    """
    if "student" not in models:
        return
    student, _ = models["student"]
    for location, (tokenizer, _) in models.items():
        if not same_tokens(student, tokenizer):
            yield (
                f"{location}.model: its tokenizer ({len(tokenizer)} tokens) splits or numbers text "
                f"in another way than the student's ({len(student)}). With {compares} all models "
                "must have the same vocabulary, because they are compared token by token. Choose "
                "models of one family, e.g. all of BERT's; a student gets more tokens than its "
                "teachers by an expand-vocabulary phase."
            )


def hidden_word_mistakes(
    at: str, models: Mapping[str, tuple[PreTrainedTokenizerBase, int]]
) -> Iterator[str]:
    """Models that have no WordPiece vocabulary; see `vocabulary_mistakes`."""
    for location, (tokenizer, _) in models.items():
        try:
            rules_of_word_pieces(tokenizer)
        except UserError:
            yield (
                f"{at}: hidden words are those of a WordPiece vocabulary, and {location} has "
                "another. Set loss."
            )


def lacks_flashdeberta(config: PreTrainedConfig) -> bool:
    """Whether a GPU cannot run this model without padding, for want of a package."""
    return config.model_type == "deberta-v2" and find_spec("flashdeberta") is None


def _reported(rule: Callable[[], Iterator[str]]) -> Iterator[str]:
    """A rule's mistakes; what it raises is one of them."""
    try:
        yield from rule()
    except UserError as error:
        yield str(error)
