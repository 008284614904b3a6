"""What is wrong with a recipe's models: configurations, tokenizers, headers of weights, and the
vocabularies that its phases expand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ds_distill.data.pretrained import Unreachable
from ds_distill.data.tokenizer import check_vocabulary, load_tokenizer, same_tokens
from ds_distill.data.word_pieces import rules_of_word_pieces
from ds_distill.errors import Mistake, UserError, collecting
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
from ds_distill.recipe.context import Model
from ds_distill.recipe.lineage import Step, steps
from ds_distill.recipe.metrics.tokens import WordLoss
from ds_distill.recipe.part import imported
from ds_distill.recipe.phase import PhaseSettings, TrainingPhase
from ds_distill.recipe.phases import PHASES, Cache
from ds_distill.recipe.policies import Routing
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

    def mistakes(self) -> list[Mistake]:
        """One for each rule and model."""
        given: dict[str, Teacher | Student] = {
            **{f"teachers.{name}": self.recipe.teachers[name] for name in self.recipe.encoders},
            "student": self.recipe.student,
        }
        found: list[Mistake] = []
        for location, model in given.items():
            try:
                found += self._of_model(location, model)
            except Unreachable as error:
                at = f"{location}.model={error.reference}"
                found += [Mistake(at, what) for _, what in error.mistakes]
        found += self._too_long()
        if self.recipe.padding == "never":
            found += self._padded()
        compares = _token_by_token(self.recipe)
        if compares is not None:
            found += vocabulary_mistakes(self._vocabularies, compares)
        if (student := self.configs.get("student")) is not None:
            with collecting(found):  # in place of that of its `model`
                self.configs["student"] = student_of(student, self.recipe.student)
        found += [*self._layer_maps(), *self._cached_layers(), *self._attention()]
        found += self._hidden_words()
        with collecting(found):
            found += expanded_mistakes(self.recipe, self.configs, self._vocabularies)
        return [*found, *self._shared_heads()]

    def teachers(self) -> dict[str, PreTrainedConfig]:
        """Configurations of the teachers that could be read, by name."""
        return {n: c for n in self.recipe.teachers if (c := self.configs.get(f"teachers.{n}"))}

    def student_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The student's tokenizer, if it could be read."""
        found = self._vocabularies.get("student")
        return found and found[0]

    def _of_model(self, location: str, model: Teacher | Student) -> list[Mistake]:
        """Raises Unreachable."""
        assert model.model is not None
        found: list[Mistake] = []
        try:
            reference = resolve_model(model.model, self.recipe.models_folder)
            config = load_config(reference, model.revision)
            check_encoder(reference, config)
        except Unreachable:
            raise
        except UserError as error:
            return [Mistake(location, str(one)) for one in error.mistakes]
        self.configs[location] = config
        with collecting(found, location):
            of_words = any(task.predicts == "tag" for task in self.recipe.tasks_by_name.values())
            tokenizer = load_tokenizer(reference, model.revision, of_words=of_words)
            check_vocabulary(reference, config, tokenizer)
            for checks in self._checks():
                checks(reference, config, tokenizer)
            self._vocabularies[location] = tokenizer, config.vocab_size
        if Path(reference).is_dir() and not (isinstance(model, Student) and model.is_random):
            with collecting(found, location):
                check_weights(reference, config)
        return found

    def _checks(self) -> list[Callable[..., None]]:
        """What the tasks' kinds check of each model."""
        kinds = {task.type: TASKS[task.type] for task in self.recipe.tasks_by_name.values()}
        return [imported(kind.checks_model) for kind in kinds.values() if kind.checks_model]

    def _too_long(self) -> Iterator[Mistake]:
        limits = {location: usable_length(config) for location, config in self.configs.items()}
        for task in self.recipe.tasks_by_name.values():
            wanted, at = task.max_length, f"{task.location}.max_length"
            short = {location: n for location, n in limits.items() if n is not None and n < wanted}
            if short:
                limit = min(short.values())
                [location, *_] = (location for location, n in short.items() if n == limit)
                yield Mistake(
                    f"{at}={wanted}",
                    f"{location} takes at most {limit} tokens. Set {at}={limit} or less.",
                )

    def _padded(self) -> Iterator[Mistake]:
        for location, config in self.configs.items():
            fix = "Leave padding out: each model then runs as it can."
            if imported("ds_distill.models.packing:takes_packed")(config):
                if not (self._on_gpu and lacks_flashdeberta(config)):
                    continue
                fix = "Install flashdeberta (pip install flashdeberta), or leave padding out."
            yield Mistake(
                "padding=never",
                f"{location} ({config.model_type}) cannot run without padding. {fix}",
            )

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

    def _layer_maps(self) -> Iterator[Mistake]:
        """Terms that compare layers which the models do not have, or states of unlike widths."""
        for name, phase, own, teacher, config in self._taught():
            for key, part in phase.parts():
                if not isinstance(part, LayeredTerm):
                    continue
                try:
                    part.pairs(own.num_hidden_layers, config.num_hidden_layers)
                except ValueError as error:
                    at = f"phases.{name}.{key}.layers={part.layers}"
                    yield Mistake(at, f"with {teacher}, {error}.")
                widths = own.hidden_size, config.hidden_size
                if isinstance(part, HiddenMSELoss) and not part.map and len({*widths}) > 1:
                    yield Mistake(
                        f"phases.{name}.{key}.map=false",
                        "compares states as they are, and the "
                        f"student's states are {widths[0]} wide and those of {teacher} "
                        f"{widths[1]}. Take the key out: a trained map then brings them together.",
                    )

    def _cached_layers(self) -> Iterator[Mistake]:
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
                    yield Mistake(
                        f"phases.{step.name}.hidden={hidden}",
                        f"{teacher} has {depth} layers, and "
                        f"none is {beyond[0]}. Name layers from 1 to {depth}, 0 for the embeddings "
                        "or -1 for the last.",
                    )
                    break

    def _attention(self) -> Iterator[Mistake]:
        """Terms on attention that the models' own cannot be compared by."""
        for name, phase, own, teacher, config in self._taught():
            for key, part in phase.parts():
                if isinstance(part, AttentionSettings):
                    heads = part.heads if isinstance(part, RelationKLLoss) else None
                    for mistake in _unlike_attention({teacher: config, "student": own}, heads):
                        fix = f"Take {part.part_name} out, or choose other models."
                        yield Mistake(f"phases.{name}.{key}", f"{mistake} {fix}")

    def _hidden_words(self) -> Iterator[Mistake]:
        """Tokenizers whose pieces do not say where a word begins."""
        for task in self.recipe.tasks_by_name.values():
            if task.metric.name == WordLoss.name:
                at = f"{task.location}.metric=word_loss"
                yield from hidden_word_mistakes(at, self._vocabularies)

    def _shared_heads(self) -> Iterator[Mistake]:
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


def one_head_mistakes(setting: str, configs: Mapping[str, PreTrainedConfig]) -> Iterator[Mistake]:
    """Why models cannot be trained through one head. configs: by location."""
    unknown = {n: c.model_type for n, c in configs.items() if c.model_type not in CLASSIFIER_HEADS}
    for location, kind in unknown.items():
        yield Mistake(
            setting,
            f"where {location} ({kind}) has the layers of its head is not known here. "
            f"Take a model of one of these types: {', '.join(CLASSIFIER_HEADS)}.",
        )
    widths = {n: getattr(c, "pooler_hidden_size", c.hidden_size) for n, c in configs.items()}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{location} {width}" for location, width in widths.items())
        yield Mistake(
            setting,
            "one pooling layer fits states of one width, and these have several: "
            f"{listed}. Choose teachers of one width, or fine-tune them without shared_head.",
        )


def _token_by_token(recipe: Recipe) -> str | None:
    """What in the recipe compares models token by token, if anything does."""
    for task in recipe.tasks_by_name.values():
        if TASKS[task.type].needs.same_tokens:
            return f"{task.location}.type={task.type}"
    for name, phase in recipe.named_phases():
        for key, part in phase.parts():
            if part.all_needs().same_tokens:
                return f"phases.{name}.{key}"
    return None


def vocabulary_mistakes(
    models: dict[str, tuple[PreTrainedTokenizerBase, int]], compares: str
) -> Iterator[Mistake]:
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
            yield Mistake(
                f"{location}.model",
                f"its tokenizer ({len(tokenizer)} tokens) splits or numbers text "
                f"in another way than the student's ({len(student)}). With {compares} all models "
                "must have the same vocabulary, because they are compared token by token. Choose "
                "models of one family, e.g. all of BERT's; a student gets more tokens than its "
                "teachers by an expand-vocabulary phase.",
            )


def hidden_word_mistakes(
    at: str, models: Mapping[str, tuple[PreTrainedTokenizerBase, int]]
) -> Iterator[Mistake]:
    """Models that have no WordPiece vocabulary; see `vocabulary_mistakes`."""
    for location, (tokenizer, _) in models.items():
        try:
            rules_of_word_pieces(tokenizer)
        except UserError:
            yield Mistake(
                at,
                f"hidden words are those of a WordPiece vocabulary, and {location} has "
                "another. Set loss.",
            )


def lacks_flashdeberta(config: PreTrainedConfig) -> bool:
    """Whether a GPU cannot run this model without padding, for want of a package."""
    return config.model_type == "deberta-v2" and find_spec("flashdeberta") is None


EXPANDED = ("bert", "distilbert", "electra")
"""Model types whose vocabulary may grow: new rows were found right in their input and output."""


def expanded_mistakes(
    recipe: Recipe,
    configs: Mapping[str, PreTrainedConfig],
    vocabularies: Mapping[str, tuple[PreTrainedTokenizerBase, int]],
) -> Iterator[Mistake]:
    """Vocabularies that cannot grow, and what cannot be done with a model of which one has, where
    models are compared token by token.

    configs, vocabularies: of the recipe's models that could be read, by location; of a vocabulary
        the tokenizer, and the rows of the model's embeddings.
    """
    for step in steps(recipe):
        if step.phase.vocabulary is not None:
            start = step.model(step.phase.starts[0])
            at = "student" if start.origin == "student" else f"teachers.{start.origin}"
            if at in vocabularies:
                tokenizer, rows = vocabularies[at]
                rows = start.vocabulary or rows
                size = step.phase.vocabulary
                yield from expansion_mistakes(
                    f"phases.{step.name}", configs[at], tokenizer, rows, size
                )
        if not TASKS[recipe.tasks_by_name[step.task_name].type].needs.same_tokens:
            continue
        if PHASES[step.phase.kind].makes == "student":
            yield from _of_teachers(step)
        elif PHASES[step.phase.kind].makes == "evaluation":
            yield from _of_evaluated(step)


def expansion_mistakes(
    location: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    size: int,
) -> Iterator[Mistake]:
    """A student whose vocabulary cannot grow to `size`, from `rows` of its embeddings."""
    if config.model_type not in EXPANDED:
        yield Mistake(
            location,
            f"the vocabulary of a model of type {config.model_type} cannot be expanded "
            f"here. Choose a student of one of these types: {', '.join(EXPANDED)}.",
        )
    found: list[Mistake] = []
    with collecting(found, location):
        rules_of_word_pieces(tokenizer)
    yield from found
    if not config.tie_word_embeddings:
        yield Mistake(
            location,
            "the student's input and output embeddings are not tied, and new rows of "
            "its input would learn nothing: new words are always masked, so that they are never "
            "read. Choose a student with tie_word_embeddings.",
        )
    if size <= rows:
        yield Mistake(
            f"{location}.size={size}", f"the student has {rows} tokens already. Set more than that."
        )


def _of_teachers(step: Step) -> Iterator[Mistake]:
    """Of a phase that distils: teachers of tokens that its start lacks, and what of the start's
    cannot be learnt from those that it has."""
    phase, location = step.phase, f"phases.{step.name}"
    start = step.model(phase.starts[0])
    teachers = [step.model(name) for name in step.teachers]
    names = ", ".join(step.teachers)
    more = [one for one in teachers if not _begins_with(start, one)]
    if more:
        yield Mistake(
            location,
            f"teacher {more[0].name!r} predicts tokens that {_by(step, more[0])} has "
            f"added, and {start.name} does not have them. Start from a model of that expansion "
            "(start: NAME), or follow other teachers.",
        )
        return
    if not start.expanded:
        return
    if phase.cached_split is not None:
        yield Mistake(
            f"{location}.teachers=cached",
            "what a cache holds is of the teachers' own tokens, and "
            f"those of {start.name} are others since its vocabulary was expanded. Set "
            "teachers=live.",
        )
    if len(teachers) > 1:
        yield Mistake(
            location,
            f"{start.name}, whose vocabulary was expanded, learns from one teacher, "
            f"and here are {names}. Name one with follow.",
        )
    if all(one.expanded == start.expanded for one in teachers):
        return
    for key, part in phase.parts():
        needs = part.all_needs()
        if needs.labels and (needs.teachers or isinstance(part, Routing)):
            yield Mistake(
                f"{location}.{key}",
                "asks the teacher about each masked token, also about words "
                f"that {start.name} has since its vocabulary was expanded, and {names} does not "
                f"know them. Take {part.part_name} out.",
            )


def _of_evaluated(step: Step) -> Iterator[Mistake]:
    """Models of vocabularies that were expanded apart: no tokens are the same for all."""
    recipe = step.recipe
    given = [step.model(name) for name in recipe.teachers if name not in step.found]
    trained = [
        model
        for model in step.found.values()
        if model.made_by is not None and PHASES[recipe.phases[model.made_by].kind].makes != "start"
    ]
    models = [one for one in (*given, *trained) if one.head in (None, step.task_name)]
    if not models:
        return
    largest = max(models, key=lambda one: len(one.expanded))
    apart = next((one for one in models if not _begins_with(largest, one)), None)
    if apart is not None:
        first, second = sorted((largest, apart), key=models.index)
        yield Mistake(
            f"phases.{step.name}",
            "models are compared on the same tokens, and those of "
            f"{first.name}, {second.name} were added apart from each other, by {_by(step, first)} "
            f"and {_by(step, second)}. Expand once, and let all students start from that.",
        )


def _begins_with(model: Model, other: Model) -> bool:
    """Whether the first tokens of a model's vocabulary are all that another one has."""
    return model.expanded[: len(other.expanded)] == other.expanded


def _by(step: Step, model: Model) -> str:
    """The phase that has expanded a model's vocabulary."""
    return f"phases.{step.recipe.phase_names()[model.expanded[-1]]}"
