"""The console of the terminal: it shows names and texts of others as they are."""

import functools
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from lockstep.printable import printable


class Console(rich.console.Console):
    """A console of rich that escapes control characters, which a terminal would obey, and reads no markup.

    `rich.panel.Panel` and `rich.progress.TextColumn` read it by themselves: give them a `rich.text.Text`, or
    ``markup=False``.

    Args:
        markup: Whether ``[bold]`` in a text means something; names and texts of others have to be escaped then.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, highlight=False, **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The pieces of a text or table, as `rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


@functools.cache
def console() -> Console:
    """The console of stdout. All share it, so that a bar and a line do not write over each other."""
    return Console()
