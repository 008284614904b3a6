"""What each phase of a recipe finds, against plain walks backwards over the phases."""

from hypothesis import given
from hypothesis import strategies as st

from ds_distill.phases.evaluate import models_to_evaluate
from ds_distill.recipe import Recipe
from ds_distill.recipe.lineage import model_at, steps, trained_on
from ds_distill.recipe.load import validate
from ds_distill.recipe.phases import Cache, Expertise

TEACHERS, TASKS, SPLITS = ("a", "b"), ("one", "other"), ("train", "validation")
NAMES = ("student", *TEACHERS, "made", "kept", "nobody")
NAME, MADE = st.sampled_from(NAMES), st.sampled_from(NAMES[3:5])
OF = {"task": st.sampled_from(TASKS), "split": st.sampled_from(SPLITS)}
LOSSES = st.just({"cross_entropy": {}})
# those that are there from the start
FOLLOW = {
    "follow": st.lists(st.sampled_from(NAMES[:3]), min_size=1, max_size=2, unique=True) | st.none()
}


def phase(kind, **keys):
    return st.fixed_dictionaries({kind: st.fixed_dictionaries({**OF, **keys})})


PHASE = st.one_of(
    phase("fine-tune", models=st.lists(NAME, min_size=1, max_size=2, unique=True)),
    phase("fine-tune", models=NAME, save_as=MADE),
    phase("distil", start=NAME, save_as=MADE | st.none(), losses=LOSSES, **FOLLOW),
    phase("distil", start=NAME, routing=st.just(["average", "random"]), losses=LOSSES),
    phase("expand-vocabulary", start=NAME, save_as=MADE, size=st.sampled_from([100, 200])),
    phase("evaluate"),
    phase("expertise", states=st.booleans()),
    st.fixed_dictionaries(
        {
            "cache": st.fixed_dictionaries(
                {
                    "task": st.sampled_from(TASKS),
                    "splits": st.lists(st.sampled_from(SPLITS), max_size=2, unique=True),
                    "hidden": st.sampled_from([[], [-1]]),
                    **FOLLOW,
                }
            )
        }
    ),
)
PHASES = st.lists(PHASE, min_size=1, max_size=10)


def recipe_of(phases):
    model = {"model": "some/model"}
    task = {"type": "masked-lm", "data": {"path": "data"}}
    return validate(
        Recipe,
        {
            "name": "lineage",
            "tasks": dict.fromkeys(TASKS, task),
            "teachers": dict.fromkeys(TEACHERS, model),
            "student": model,
            "phases": phases,
        },
    )


def last_that_made(recipe, name, number):
    earlier = [at for at in range(number) if name in recipe.phases[at].outputs]
    return max(earlier, default=None)


def origin(recipe, name, number):
    made_by = last_that_made(recipe, name, number)
    if made_by is None:
        return name
    return origin(recipe, recipe.phases[made_by].start_of(name), made_by)


def vocabulary(recipe, name, number):
    made_by = last_that_made(recipe, name, number)
    if made_by is None:
        return None
    made = recipe.phases[made_by]
    return made.vocabulary or vocabulary(recipe, made.start_of(name), made_by)


def seen(recipe, name, number):
    made_by = last_that_made(recipe, name, number)
    if made_by is None:
        return set()
    made = recipe.phases[made_by]
    here = {(recipe.task_name(made), split) for split in made.learns_from}
    return here | seen(recipe, made.start_of(name), made_by)


@given(phases=PHASES)
def test_a_model_is_what_the_last_phase_that_made_it_left(phases):
    recipe = recipe_of(phases)
    for number in range(len(phases) + 1):
        for name in (*NAMES, "average", "random"):
            made_by = last_that_made(recipe, name, number)
            model = model_at(recipe, name, number)
            assert model.name == name and model.made_by == made_by
            assert model.head == (None if made_by is None else phases_task(phases[made_by]))
            assert model.origin == origin(recipe, name, number)
            assert model.vocabulary == vocabulary(recipe, name, number)
            assert model.seen == seen(recipe, name, number)
            if number < len(phases):
                assert steps(recipe)[number].model(name) == model


def phases_task(phase):
    [settings] = phase.values()
    return str(settings["task"])


@given(phases=PHASES)
def test_those_trained_on_a_split_come_in_the_order_of_their_first_training(phases):
    recipe = recipe_of(phases)
    names = list(dict.fromkeys(name for phase in recipe.phases for name in phase.outputs))
    for task in TASKS:
        for split in SPLITS:
            on = [name for name in names if (task, split) in seen(recipe, name, len(phases))]
            assert trained_on(recipe, task, split) == on


def versions(recipe, number):
    """Of each model as phase `number` finds it: which phase made it."""
    return {name: last_that_made(recipe, name, number) for name in NAMES}


def held(recipe, number, split):
    """The cache phase that phase `number` would read."""
    found, reader = None, recipe.phases[number]
    now = versions(recipe, number)
    for at, phase in enumerate(recipe.phases[:number]):
        if isinstance(phase, Cache) and phase.task == reader.task and split in phase.splits:
            has = {n for n in recipe.teachers_of(phase) if versions(recipe, at)[n] == now[n]}
            found = at if has >= {*recipe.teachers_of(reader)} else found
    return found


@given(phases=PHASES)
def test_what_is_kept_of_teachers_counts_while_they_are_as_they_were(phases):
    recipe = recipe_of(phases)
    for step in steps(recipe):
        now, fits, states = versions(recipe, step.number), None, False
        for split in SPLITS:
            at = held(recipe, step.number, split)
            assert step.held(split) is (None if at is None else recipe.phases[at])
        for at, phase in enumerate(recipe.phases[: step.number]):
            if isinstance(phase, Expertise) and phase.task == step.task_name:
                then = versions(recipe, at)
                fits = at if all(then[name] == now[name] for name in TEACHERS) else None
                cache = held(recipe, at, phase.split)
                kept = None if cache is None else recipe.phases[cache]
                states = phase.states and (kept is None or kept.hidden == [-1])
        assert (None if step.expertise is None else step.expertise.number) == fits
        assert step.fitted_states == (fits is not None and states)


def test_a_model_is_evaluated_on_the_task_that_made_it_last():
    trained = {"models": "student", "save_as": "made", "task": "one"}
    grown = {"start": "made", "save_as": "made", "size": 100, "task": "other"}
    tests = [{"evaluate": {"task": task}} for task in TASKS]
    recipe = recipe_of([{"fine-tune": trained}, *tests, {"expand-vocabulary": grown}, *tests])
    found = [models_to_evaluate(recipe, number).get("made") for number in (1, 2, 4, 5)]
    assert found == ["control", None, None, "control"]


def test_a_cache_that_no_student_reads_is_not_there():
    """`only_if_read`: an expertise phase reads a cache that there is, and makes none."""
    cache = {"cache": {"task": "one", "splits": ["train"], "only_if_read": True}}
    fits = {"expertise": {"task": "one", "split": "train"}}
    for teachers, there in (("live", False), ("cached", True)):
        distil = {"task": "one", "teachers": teachers, "losses": {"kl": {}}}
        recipe = recipe_of([cache, fits, {"distil": distil}])
        assert (steps(recipe)[1].held("train") is not None) == there
