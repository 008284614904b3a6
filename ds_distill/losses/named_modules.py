"""Modules by the names that a recipe gives them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView

from torch import nn


class NamedModules(nn.ModuleDict):
    """A ModuleDict whose keys may be names of a module's own attributes, such as `half` or
    `training`: a teacher may be called so, and torch would refuse it. These are registered under
    another name, which no recipe can have; all others as in a ModuleDict."""

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(_registered(key))

    def __setitem__(self, key: str, module: nn.Module) -> None:
        super().__setitem__(_registered(key), module)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and super().__contains__(_registered(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> KeysView[str]:
        return dict(self.items()).keys()

    def items(self) -> ItemsView[str, nn.Module]:
        return {name.removeprefix(_MARK): module for name, module in super().items()}.items()


_MARK = "="

_TAKEN = frozenset(dir(nn.ModuleDict()))


def _registered(name: str) -> str:
    return _MARK + name if name in _TAKEN else name
