"""What a run's console prints is escaped, as `process.terminal` does with other texts."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment

from ds_distill.process.terminal import escaped


class Escaping(RenderHook):
    """Escapes what a console of rich prints, but not what rich adds."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderable) for renderable in renderables]


class _Escaped:
    def __init__(self, within: RenderableType) -> None:
        self._within = within

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for segment in console.render(self._within, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)
