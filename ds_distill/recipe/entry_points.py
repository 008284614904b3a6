"""Parts that other packages bring, found through Python's entry points.

A package that declares

    [project.entry-points."ds_distill.parts"]
    anything = "my_package.parts:ENTRIES"

brings the part, or the list of parts, of that name: entries, and classes of metrics. To install the
package is to consent to its code; a recipe names a part, never a module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from ds_distill.errors import UserError
from ds_distill.recipe.entry import ConfiguredEntry, Entry, PolicyEntry

if TYPE_CHECKING:
    from ds_distill.recipe.metrics.metric import MetricClass
    from ds_distill.recipe.registry import Kind

GROUP = "ds_distill.parts"


@functools.cache
def load_entry_points() -> None:
    """Add the parts of all installed packages to the dicts of their kinds, once per process.

    Raises UserError that names package and entry for what is no entry, for a name that is taken,
    and for a package whose parts cannot be imported.
    """
    found: dict[tuple[int, str], tuple[dict[str, Any], Entry | MetricClass]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.value, point.name)):
        for entry in _entries(point):
            for table in _tables(point, entry):
                if entry.name in table or (id(table), entry.name) in found:
                    raise _refused(point, f"the name {entry.name!r} is taken. Rename the part.")
                found[id(table), entry.name] = table, entry
    for table, entry in found.values():
        table[entry.name] = entry


def _entries(point: EntryPoint) -> Iterator[Any]:
    try:
        value = point.load()
    except Exception as error:  # whatever a package's code raises
        reason = f"{type(error).__name__}: {error}."
        raise _refused(point, f"{point.value} cannot be imported: {reason}") from error
    yield from value if isinstance(value, list | tuple) else [value]


def _tables(point: EntryPoint, entry: Any) -> list[dict[str, Any]]:
    """The dicts that the entry belongs into: that of its kind, or of a metric those of all that it
    is over. Raises UserError where it is no good entry."""
    from ds_distill.recipe.registry import KINDS

    kind = next((kind for kind in KINDS if kind.has(entry)), None)
    if kind is None:
        known = ", ".join(kind.entry.__name__ for kind in KINDS)
        raise _refused(point, f"{entry!r} is no entry. Give one of {known}, or a list of them.")
    is_metric = isinstance(entry, type)
    if is_metric:
        _check_metric(point, entry, kind)
    if not re.fullmatch(kind.names, entry.name):
        raise _refused(point, f"a {kind.name} cannot be called {entry.name!r}. Rename the part.")
    if isinstance(entry, ConfiguredEntry):
        _check_settings(point, entry, kind)
    return [kind.table[over] for over in entry.over] if is_metric else [kind.table]


def _check_metric(point: EntryPoint, metric: MetricClass, kind: Kind) -> None:
    wanted = [name for name in ("name", "over", "title") if not hasattr(metric, name)]
    wanted += sorted(metric.__abstractmethods__)
    if wanted:
        lacking = ", no ".join(wanted)
        raise _refused(point, f"the metric {metric.__name__} has no {lacking}. Add what it lacks.")
    if not isinstance(metric.over, tuple) or not {*metric.over} <= {*kind.table}:
        known = f"Give a tuple of some of {[*kind.table]}."
        raise _refused(point, f"{metric.name!r} is over {metric.over!r}. {known}")
    if not issubclass(metric.Settings, kind.settings):
        why = f"the Settings of {metric.name!r} are no MetricSettings. Derive them from it."
        raise _refused(point, why)


def _check_settings(point: EntryPoint, entry: ConfiguredEntry, kind: Kind) -> None:
    section = entry.settings
    if not issubclass(section, kind.settings):
        raise _refused(
            point,
            f"the settings of {entry.name!r}, {section.__name__}, are no {kind.settings.__name__}. "
            "Derive them from it.",
        )
    if isinstance(entry, PolicyEntry) and entry.needs.states:
        raise _refused(
            point,
            f"the policy {entry.name!r} needs states={entry.needs.states}, and policies get states "
            "by fitted_states alone. Say that.",
        )
    names = [c.name for c in entry.candidates] if isinstance(entry, PolicyEntry) else []
    for name in names:
        if name != entry.name and not name.startswith(f"{entry.name}, "):
            raise _refused(
                point,
                f"a candidate of {entry.name!r} is called {name!r}. Call it {entry.name!r}, or "
                f"'{entry.name}, AND HOW'.",
            )
    field = section.model_fields.get(kind.key) if kind.key else None
    if field is not None and field.default != entry.name:
        raise _refused(
            point,
            f"the settings of {entry.name!r}, {section.__name__}, do not name it. Add the field "
            f'{kind.key}: Literal["{entry.name}"] = "{entry.name}".',
        )


def _refused(point: EntryPoint, why: str) -> UserError:
    package = point.dist.name if point.dist is not None else "?"
    return UserError(
        f"package {package!r}, entry point {point.name!r} of {GROUP}: {why} Until then take the "
        f"package out: pip uninstall {package}"
    )
