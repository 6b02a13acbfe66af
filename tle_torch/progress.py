"""Progress of long work on the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["check_progress", "progress_of"]

# Below this a model is patched before anybody has read the bar.
_WORTH_SHOWING = 2**30


def check_progress(wanted: object) -> None:
    """Raises TypeError unless `progress_of` can take it."""
    if not callable(wanted) and wanted not in (True, False, None):
        raise TypeError(f"progress must be True, False, None or a function, got {type(wanted).__name__}")


@contextlib.contextmanager
def progress_of(
    wanted: bool | Callable[[int, int, str], None] | None, size: int, total: int
) -> Iterator[Callable[[str], None]]:
    """Yields `advance(name)`, to be called as each of `total` pieces of work begins.

    Args:
        wanted: True or False: a bar on stderr, or nothing. None: a bar if `size` bytes are worth one. A function: it is
            called with (pieces begun before this one, total, name).
    """
    if callable(wanted):
        done = iter(range(total))
        yield lambda name: wanted(next(done), total, name)
        return
    if wanted is False or (wanted is None and size < _WORTH_SHOWING):
        yield lambda name: None
        return
    columns = (TextColumn("patching"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[name]}"))
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task("", total=total, name="")

        def advance(name: str) -> None:
            bar.update(task, completed=advance.begun, name=name)
            advance.begun += 1

        advance.begun = 0
        yield advance
        bar.update(task, completed=total, name="")
