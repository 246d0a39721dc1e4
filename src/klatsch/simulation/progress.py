"""A progress bar for people, and nothing at all for pipes and files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Advance = Callable[[int], None]


@contextmanager
def progress_bar(wanted: bool | Advance | None, total: int, done: int, title: str) -> Iterator[Advance]:
    """Give a function that is told how many rounds are done.

    Args:
        wanted: True or False; None for a bar if a terminal is attached; or the function itself, for a bar elsewhere.
        total: rounds in all.
        done: rounds that were done before.
        title: what stands beside the bar.
    """
    if callable(wanted):
        wanted(done)
        yield wanted
    elif wanted or (wanted is None and sys.stderr.isatty()):
        with bars() as progress:
            task = progress.add_task(title, total=total, completed=done)
            yield lambda rounds: progress.advance(task, rounds)
    else:
        yield lambda rounds: None


def bars() -> Any:
    """A rich progress display with rounds per second and time left."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError as error:
        raise ValueError("a progress bar needs rich: pip install rich, or progress=False") from error

    class Speed(TextColumn):
        def render(self, task: Any) -> Any:
            speed = task.finished_speed or task.speed
            task.fields["pace"] = f"{speed:,.0f} rounds/s" if speed else ""
            return super().render(task)

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Speed("{task.fields[pace]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
