"""Progress with an ETA for anything that takes longer than two seconds: a bar in a terminal, a line every ten seconds elsewhere.

The console is one on stderr, so that the output of `--json` stays clean; `None` shows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""
SILENT_SECONDS = 2.0
"""What is over sooner than this leaves no line behind."""


class Bar(Protocol):
    def advance(self, n: int = 1, **fields: float | str) -> None:
        """So many more are done; `fields` (loss=0.69) are shown beside the bar until the next call that gives any."""


def clock_time(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_fields(fields: Mapping[str, float | str]) -> str:
    return "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in fields.items())


class SilentBar:
    def advance(self, n: int = 1, **fields: float | str) -> None:
        """Nobody watches."""


class LineBar:
    """Plain lines for log files: `tokenise 300/1000 (30 %), 0:09 left`."""

    def __init__(self, console: Console, title: str, total: int, *, now: Callable[[], float], done: int = 0) -> None:
        self.console, self.title, self.total, self.now = console, title, total, now
        self.done, self.done_at_start, self.fields = done, done, ""
        self.started = self.last_line = now()

    def advance(self, n: int = 1, **fields: float | str) -> None:
        self.done += n
        self.fields = f"  {shown_fields(fields)}" if fields else self.fields
        if self.now() - self.last_line >= LINE_SECONDS:
            self.last_line = self.now()
            speed = (self.done - self.done_at_start) / (self.last_line - self.started)
            left = f", {clock_time((self.total - self.done) / speed)} left" if speed else ""
            self._say(f"{self.title} {self.done}/{self.total} ({self.done / max(1, self.total):.0%}){left}{self.fields}")

    def finish(self) -> None:
        if (seconds := self.now() - self.started) >= SILENT_SECONDS:
            self._say(f"{self.title} {self.done}/{self.total} in {clock_time(seconds)}{self.fields}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class TerminalBar:
    def __init__(self, display: Progress, title: str, total: int, *, done: int = 0) -> None:
        self.display = display
        self.task = display.add_task(title, total=total, completed=done, fields="")

    def advance(self, n: int = 1, **fields: float | str) -> None:
        self.display.advance(self.task, n)
        if fields:
            self.display.update(self.task, fields=shown_fields(fields))


@contextmanager
def progress(console: Console | None, title: str, total: int, *, done: int = 0, now: Callable[[], float] = time.monotonic) -> Iterator[Bar]:
    """Shows how far a loop is: `with progress(console, "score", len(rows)) as bar: ...; bar.advance(8)`. Bars may be nested.

    `done` is what an earlier run had finished: it counts as done, not as speed.
    """
    if console is None:
        yield SilentBar()
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
                   TimeRemainingColumn(), TextColumn("{task.fields[fields]}", markup=False))
        with Progress(*columns, console=console) as display:
            yield TerminalBar(display, title, total, done=done)
    else:
        lines = LineBar(console, title, total, now=now, done=done)
        yield lines
        lines.finish()
