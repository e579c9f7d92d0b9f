"""Following projects: what annotators do is in the log, and on the screen, seconds later."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.console import Console

from annotation.backend import Backend
from annotation.home import Home
from annotation.project import load_project
from annotation.pull import Puller, PullReport
from annotation.verdicts import Verdict, VerdictLog
from rlhf.errors import BackendError, StorageError

LONGEST_PAUSE = 60.0
"""Seconds between two attempts when something has been out of order for a while."""
SHORTEST_PAUSE = 1.0
"""Seconds between two looks, however many hints there are."""


class Watch:
    """Pulls projects again and again. The connection is made anew after an outage: a server that was started again may be elsewhere."""

    def __init__(self, home: Home, names: Sequence[str] | None, connect: Callable[[], Backend], console: Console) -> None:
        """Without names: every project, also those that are made later."""
        self.home, self.names, self.connect, self.console = home, names, connect, console
        self.counts: dict[str, Counter[str]] = {}
        """Project -> what was pulled since the start, as PullReport.counts."""
        self._pullers: dict[str, Puller] = {}
        self._backend: Backend | None = None
        self._said: set[tuple[str, str]] = set()

    def look(self) -> None:
        """Pull once. Raises as Puller.pull does."""
        if self._backend is None:
            self._backend = self.connect()
        try:
            for name in self.names or self.home.projects():
                project = load_project(self.home, name)
                first = name not in self._pullers
                puller = self._pullers.setdefault(name, Puller(VerdictLog(project.verdicts_file)))
                self._report(puller.pull(project, self._backend, self.console if first else None))
        except BackendError:
            self.close()
            raise

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _report(self, report: PullReport) -> None:
        first = report.project not in self.counts
        self.counts.setdefault(report.project, Counter()).update(report.counts())
        if first:
            caught_up = ", ".join(f"{number} {kind}" for kind, number in report.counts().items() if kind != "read")
            self.say(f"{report.project}: caught up ({caught_up})")
        else:
            for verdict in report.verdicts:
                self.say(f"{report.project}  {line_of(verdict)}")
        for problem in report.problems:
            if problem not in self._said:
                self._said.add(problem)
                self.say(f"{report.project}: {problem.where}: {problem.what}")


def follow(look: Callable[[], None], rung: threading.Event, *, every: float, say: Callable[[str], None]) -> NoReturn:
    """Look now, whenever it rings, and every so many seconds. Ends with whatever interrupts it.

    A server that is away, a disk that is full, another pull: said once, tried again after 2, 4, 8, ... up to 60 s, until it works.
    Between two looks there is as much time as the last one took: watching a large project costs the server half of its time at most.
    """
    failures = 0
    while True:
        rung.clear()
        started = time.monotonic()
        try:
            look()
        except (BackendError, StorageError) as error:
            if failures == 0:
                say(f"{error}\nIt is tried again until it works; Ctrl-C ends it.")
            failures += 1
        else:
            if failures:
                say("it works again")
            failures = 0
        if failures:
            time.sleep(min(LONGEST_PAUSE, 2.0**failures))
        else:
            least = max(SHORTEST_PAUSE, time.monotonic() - started)
            time.sleep(least)
            rung.wait(max(0.0, every - least))


def line_of(verdict: Verdict) -> str:
    """2026-12-01 10:31:02  ann1  ranked 1a2b3c4d5e6f7081: 2 > 1 = 3. Responses have the numbers that the annotator saw."""
    said = {"submitted": "ranked", "discarded": "discarded", "withdrawn": "withdrew"}[verdict.kind]
    ranking = f": {shown_ranking(verdict)}" if verdict.kind == "submitted" else ""
    return f"{verdict.at[:10]} {verdict.at[11:19]}  {verdict.annotator}  {said} {verdict.task_id}{ranking}"


def shown_ranking(verdict: Verdict) -> str:
    by_rank: dict[int, list[str]] = {}
    for place, index in enumerate(verdict.order):
        by_rank.setdefault(verdict.ranks[index], []).append(str(place + 1))
    return " > ".join(" = ".join(by_rank[rank]) for rank in sorted(by_rank))
