"""What is wrong with a recipe's models: configurations, tokenizers, headers of weights, and the
vocabularies that its phases expand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ds_distill.data.tokenizer import Unreachable, check_vocabulary, load_tokenizer, same_tokens
from ds_distill.data.word_pieces import rules_of_word_pieces
from ds_distill.errors import Mistake, UserError, collecting
from ds_distill.models.configuration import (
    CLASSIFIER_HEADS,
    WIDEST_HEAD,
    check_encoder,
    load_config,
    unseen_attention,
    usable_length,
)
from ds_distill.models.student import student_of
from ds_distill.models.weights import check_weights
from ds_distill.recipe import Recipe
from ds_distill.recipe.context import Model
from ds_distill.recipe.lineage import Step, steps
from ds_distill.recipe.metrics.tokens import WordLoss
from ds_distill.recipe.part import imported
from ds_distill.recipe.phases import Cache, TrainingPhase
from ds_distill.recipe.policies import Routing
from ds_distill.recipe.references import resolve_model
from ds_distill.recipe.schema import Student, Teacher
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
                self._read(location, model, found)
            except Unreachable as error:
                at = f"{location}.model={error.reference}"
                found += [Mistake(at, what) for _, what in error.mistakes]
        found += self._too_long()
        if self.recipe.padding == "never":
            found += self._padded()
        if (compares := _token_by_token(self.recipe)) is not None:
            found += vocabulary_mistakes(self._vocabularies, compares)
        if (student := self.configs.get("student")) is not None:
            with collecting(found):  # in place of that of its `model`
                self.configs["student"] = student_of(student, self.recipe.student)
        found += [*self._compared_layers(), *self._cached_layers(), *self._hidden_words()]
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

    def _read(self, location: str, model: Teacher | Student, found: list[Mistake]) -> None:
        """Raises Unreachable."""
        assert model.model is not None
        try:
            reference = resolve_model(model.model, self.recipe.models_folder)
            config = load_config(reference, model.revision)
            check_encoder(reference, config)
        except Unreachable:
            raise
        except UserError as error:
            found += [Mistake(location, str(one)) for one in error.mistakes]
            return
        self.configs[location] = config
        tasks = self.recipe.tasks_by_name.values()
        with collecting(found, location):
            of_words = any(task.of_words for task in tasks)
            tokenizer = load_tokenizer(reference, model.revision, of_words=of_words)
            check_vocabulary(reference, config, tokenizer)
            for checks in dict.fromkeys(task.checks_model for task in tasks if task.checks_model):
                imported(checks)(reference, config, tokenizer)
            self._vocabularies[location] = tokenizer, config.vocab_size
        if Path(reference).is_dir() and not (isinstance(model, Student) and model.is_random):
            with collecting(found, location):
                check_weights(reference, config)

    def _too_long(self) -> Iterator[Mistake]:
        limits = {
            location: limit
            for location, config in self.configs.items()
            if (limit := usable_length(config)) is not None
        }
        for task in self.recipe.tasks_by_name.values():
            at = f"{task.location}.max_length"
            if limits and (limit := min(limits.values())) < task.max_length:
                location = next(location for location, most in limits.items() if most == limit)
                yield Mistake(
                    f"{at}={task.max_length}",
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

    def _config_of(self, step: Step, name: str) -> PreTrainedConfig | None:
        """Of the model that a step finds under a name; None where it could not be read, as of
        predictions of a file."""
        origin = step.model(name).origin
        return self.configs.get("student" if origin == "student" else f"teachers.{origin}")

    def _compared_layers(self) -> Iterator[Mistake]:
        """Of each term on layers or attention, what the models that are taught in its phase and
        their teachers do not have, or have unlike each other."""
        for step in steps(self.recipe):
            if step.phase.makes != "student":
                continue
            taught = {
                step.model(start).origin: self._config_of(step, start)
                for start in step.phase.starts
            }
            for teacher in step.teachers:
                other = self._config_of(step, teacher)
                named = (
                    f"teachers.{teacher}"
                    if teacher in self.recipe.teachers
                    else f"model {teacher!r}"
                )
                for own in taught.values():
                    for key, part in step.phase.parts():
                        if isinstance(part, LayeredTerm) and own is not None and other is not None:
                            at = f"{step.location}.{key}"
                            yield from _layer_mistakes(part, at, own, named, other)

    def _cached_layers(self) -> Iterator[Mistake]:
        """Layers to cache that a teacher does not have."""
        for step in steps(self.recipe):
            hidden = step.phase.hidden if isinstance(step.phase, Cache) else []
            for teacher in step.teachers if hidden else ():
                if (config := self._config_of(step, teacher)) is None:
                    continue
                depth = config.num_hidden_layers
                beyond = [layer for layer in hidden if not -depth - 1 <= layer <= depth]
                if beyond:
                    yield Mistake(
                        f"{step.location}.hidden={hidden}",
                        f"{teacher} has {depth} layers, and none is {beyond[0]}. Name layers from "
                        f"1 to {depth}, 0 for the embeddings or -1 for the last.",
                    )
                    break

    def _hidden_words(self) -> Iterator[Mistake]:
        """Tokenizers whose pieces do not say where a word begins."""
        for task in self.recipe.tasks_by_name.values():
            if task.metric.name == WordLoss.name:
                at = f"{task.location}.metric=word_loss"
                yield from hidden_word_mistakes(at, self._vocabularies)

    def _shared_heads(self) -> Iterator[Mistake]:
        """Models that are trained through one head, and cannot be."""
        known = self.teachers()
        for name, phase in self.recipe.named_phases():
            for together in phase.trainings if isinstance(phase, TrainingPhase) else []:
                if len(together) > 1:
                    configs = {f"teachers.{n}": known[n] for n in together if n in known}
                    yield from one_head_mistakes(f"phases.{name}.shared_head=true", configs)


def _layer_mistakes(
    term: LayeredTerm, at: str, own: PreTrainedConfig, teacher: str, other: PreTrainedConfig
) -> Iterator[Mistake]:
    """own: the student's configuration. other: the teacher's."""
    try:
        term.pairs(own.num_hidden_layers, other.num_hidden_layers)
    except ValueError as error:
        yield Mistake(f"{at}.layers={term.layers}", f"with {teacher}, {error}.")
    widths = own.hidden_size, other.hidden_size
    if isinstance(term, HiddenMSELoss) and not term.map and len({*widths}) > 1:
        yield Mistake(
            f"{at}.map=false",
            f"compares states as they are, and the student's states are {widths[0]} wide and those "
            f"of {teacher} {widths[1]}. Take the key out: a trained map then brings them together.",
        )
    if isinstance(term, AttentionSettings):
        heads = term.heads if isinstance(term, RelationKLLoss) else None
        for mistake in _unlike_attention({teacher: other, "student": own}, heads):
            yield Mistake(at, f"{mistake} Take {term.part_name} out, or choose other models.")


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
    for location, config in configs.items():
        if config.model_type not in CLASSIFIER_HEADS:
            yield Mistake(
                setting,
                f"where {location} ({config.model_type}) has the layers of its head is not known "
                f"here. Take a model of one of these types: {', '.join(CLASSIFIER_HEADS)}.",
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
        if task.needs.same_tokens:
            return f"{task.location}.type={task.type}"
    parts = ((f"phases.{n}.{key}", one) for n, p in recipe.named_phases() for key, one in p.parts())
    return next((location for location, part in parts if part.all_needs().same_tokens), None)


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
        size = step.phase.vocabulary
        if size is not None:
            start = step.model(step.phase.starts[0])
            at = "student" if start.origin == "student" else f"teachers.{start.origin}"
            if at in vocabularies:
                tokenizer, rows = vocabularies[at]
                rows = start.vocabulary or rows
                yield from expansion_mistakes(step.location, configs[at], tokenizer, rows, size)
        if step.task.needs.same_tokens and step.phase.makes == "student":
            yield from _of_teachers(step)
        if step.task.needs.same_tokens and step.phase.makes == "evaluation":
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
            "the student's input and output embeddings are not tied, and new rows of its input "
            "would learn nothing: new words are always masked, so that they are never read. Choose "
            "a student with tie_word_embeddings.",
        )
    if size <= rows:
        what = f"the student has {rows} tokens already. Set more than that."
        yield Mistake(f"{location}.size={size}", what)


def _of_teachers(step: Step) -> Iterator[Mistake]:
    """Of a phase that distils: teachers of tokens that its start lacks, and what of the start's
    cannot be learnt from those that it has."""
    start, teachers = step.model(step.phase.starts[0]), [*map(step.model, step.teachers)]
    names, grown = ", ".join(step.teachers), f"{start.name}, whose vocabulary was expanded,"
    for teacher in teachers:
        if not _begins_with(start, teacher):
            yield Mistake(
                step.location,
                f"teacher {teacher.name!r} predicts tokens that {_by(step, teacher)} has added, "
                f"and {start.name} does not have them. Start from a model of that expansion "
                "(start: NAME), or follow other teachers.",
            )
            return
    if start.expanded and step.phase.cached_split is not None:
        yield Mistake(
            f"{step.location}.teachers=cached",
            f"what a cache holds is of the teachers' own tokens, and those of {start.name} are "
            "others since its vocabulary was expanded. Set teachers=live.",
        )
    if start.expanded and len(teachers) > 1:
        what = f"{grown} learns from one teacher, and here are {names}. Name one with follow."
        yield Mistake(step.location, what)
    if all(one.expanded == start.expanded for one in teachers):
        return
    for key, part in step.phase.parts():
        needs = part.all_needs()
        if needs.labels and (needs.teachers or isinstance(part, Routing)):
            yield Mistake(
                f"{step.location}.{key}",
                f"asks the teacher about each masked token, also about words that {start.name} has "
                f"since its vocabulary was expanded, and {names} does not know them. Take "
                f"{part.part_name} out.",
            )


def _of_evaluated(step: Step) -> Iterator[Mistake]:
    """Models of vocabularies that were expanded apart: no tokens are the same for all."""
    phases = step.recipe.phases
    given = [step.model(name) for name in step.given if name not in step.found]
    trained = [
        model
        for model in step.found.values()
        if model.made_by is not None and phases[model.made_by].makes != "start"
    ]
    models = [one for one in (*given, *trained) if one.head in (None, step.task_name)]
    largest = max(models, key=lambda one: len(one.expanded), default=None)
    for apart in models:
        if largest is not None and not _begins_with(largest, apart):
            first, second = sorted((largest, apart), key=models.index)
            yield Mistake(
                step.location,
                f"models are compared on the same tokens, and those of {first.name}, {second.name} "
                f"were added apart from each other, by {_by(step, first)} and {_by(step, second)}. "
                "Expand once, and let all students start from that.",
            )
            return


def _begins_with(model: Model, other: Model) -> bool:
    """Whether the first tokens of a model's vocabulary are all that another one has."""
    return model.expanded[: len(other.expanded)] == other.expanded


def _by(step: Step, model: Model) -> str:
    """The phase that has expanded a model's vocabulary."""
    return f"phases.{step.phase_names[model.expanded[-1]]}"
