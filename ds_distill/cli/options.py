"""The command line, and arguments and options that several of its commands have.

Those that belong together are a dataclass, which a command takes as one parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from ds_distill.cli.loading import go_offline

if TYPE_CHECKING:
    from ds_distill.recipe import Recipe

app = typer.Typer(
    name="ds-distill",
    help="Distil large encoder teachers into a small student, in one DeepSpeed engine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a built-in recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Change keys of the recipe, e.g. training.epochs=1 phases.distil.teachers=live",
    ),
]
SmallOption = Annotated[
    bool,
    typer.Option(
        "--small", help="Lay the recipe's small form over it: small/FILE beside its file."
    ),
]
FolderOption = Annotated[
    Path | None, typer.Option(help="The run's folder.", show_default="runs/NAME")
]
SplitOption = Annotated[str, typer.Option(help="The split that judges.")]
TaskOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which task, where the recipe has several.")
]
CacheArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A cache's folder, or a run's with caches in it.")
]


class Resumable(TyperCommand):
    """A command with `--resume`, to which a value may be given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--resume=yes" if a == "--resume" else a for a in args])


def _resume(value: Any) -> Any:
    if value not in (known := {"yes": True, "auto": "auto", False: False}):
        raise typer.BadParameter(f"{value!r} is not auto")
    return known[value]


ResumeOption = Annotated[
    Any,
    typer.Option(
        "--resume",
        parser=_resume,
        metavar="[=auto]",
        show_default=False,
        help="Continue the run in the folder where it stopped; with =auto where there is one, and "
        "after a run that has the folder still.",
    ),
]


@dataclass(frozen=True)
class Given:
    """A recipe as the command line gives it."""

    recipe: RecipeArgument
    overrides: Overrides = None
    small: SmallOption = False

    def load(self, models: Sequence[str] = (), more: Sequence[str] = ()) -> Recipe:
        """Read it. Before what imports transformers or datasets: see `go_offline`.

        models: others that the command will read. more: further overrides.
        """
        from ds_distill.recipe import load_recipe

        loaded = load_recipe(self.recipe, [*(self.overrides or []), *more], self.small)
        data = [task.data.path for task in loaded.tasks_by_name.values()]
        named = [loaded.student.model, *loaded.encoders.values(), *models]
        go_offline([*named, *data], loaded.models_folder)
        return loaded


def command(
    example: str, app: typer.Typer = app, **more: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command. more: as typer takes it."""

    def make(function: Callable[..., None]) -> Callable[..., None]:
        app.command(epilog=f"Example: {example}", **more)(_with_options(function))
        return function

    return make


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an argument or option for each field of parameters that are dataclasses."""
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if not is_dataclass(parameter.annotation):
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[name] = parameter.annotation
        hints = get_type_hints(parameter.annotation, include_extras=True)
        for field in inspect.signature(groups[name]).parameters.values():
            hint = hints[field.name]
            flat.append(field.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint))

    def run(**named: Any) -> None:
        for name, group in groups.items():
            named[name] = group(**{field.name: named.pop(field.name) for field in fields(group)})
        command(**named)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {one.name: one.annotation for one in flat}
    vars(run)["__signature__"] = own.replace(parameters=flat)
    return run
