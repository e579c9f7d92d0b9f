"""What annotators said, one line a statement, never changed: an append-only log on the disk. docs/verdicts.md has its format.

A changed response is a new line that supersedes the older one of the same annotator and task; a response that was taken back is a line
that says so. Nothing is ever removed, so that the log tells how a label came to be. Standard library only.
"""

from __future__ import annotations

import fcntl
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from annotation.append_only import append_entries, read_entries
from rlhf.errors import DataError, StorageError
from rlhf.records import content_hash

Kind = Literal["submitted", "discarded", "withdrawn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One annotator's statement about one task."""

    task_id: str
    annotator: str
    """User name."""
    kind: Kind
    """submitted: a vote. discarded: seen and refused, no vote. withdrawn: an earlier vote was deleted or made a draft again."""
    ranks: tuple[int, ...] = ()
    """Of a submitted one: as given, in the order of the task's `responses`; 1 is best, equal ranks are ties. Else empty."""
    order: tuple[int, ...] = ()
    """order[place] is the index of the response that was shown at that place."""
    confidence: int | None = None
    reason: str | None = None
    comment: str | None = None
    began: str = ""
    """When the server first stored a response of this annotator to this task, ISO 8601 in UTC."""
    at: str = ""
    """When the server stored this one, ISO 8601 in UTC."""
    guideline: str = ""
    """Version of the guidelines that were shown at that time."""
    response_id: str = ""
    """The server's id of the response; stays the same when it is changed."""
    schema: Literal["verdict/1"] = "verdict/1"

    def __post_init__(self) -> None:
        if self.kind == "submitted" and not (self.ranks and len(self.ranks) == len(self.order)):
            raise DataError(f"a submitted verdict on task {self.task_id} needs {len(self.order)} ranks, one a place, got {self.ranks}")
        if self.kind != "submitted" and self.ranks:
            raise DataError(f"a {self.kind} verdict on task {self.task_id} is no vote but has ranks {self.ranks}")

    @property
    def content_id(self) -> str:
        """Two readings of one statement are one: the id of what was said, by whom, about what, and when."""
        return content_hash(self.schema, self.task_id, self.annotator, self.kind, self.ranks, self.confidence, self.reason, self.comment,
                            self.at, self.response_id)

    @property
    def about(self) -> Statement:
        """Task and annotator: of all verdicts about the same, one stands."""
        return self.task_id, self.annotator


Statement = tuple[str, str]
KINDS = get_args(Kind)
FIELDS = tuple(field.name for field in fields(Verdict))
VALUES = attrgetter(*FIELDS)


def standing(verdicts: Iterable[Verdict]) -> dict[Statement, Verdict]:
    """The verdict that holds, for each task and annotator: the latest by the server's time. Of one time, the last in the order given:
    what was withdrawn after it was said carries the time at which it was said, where the server does not tell another.
    """
    latest: dict[Statement, Verdict] = {}
    for verdict in verdicts:
        before = latest.get(verdict.about)
        if before is None or verdict.at >= before.at:
            latest[verdict.about] = verdict
    return latest


class VerdictLog:
    """The file `verdicts.jsonl` of a project.

    What was read is kept, and read again only when the file has another size than this object left it with: a log that is followed for
    days costs one look at its size. Reading never waits for a writer, and a line that is being written is not there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_off_bytes = 0
        """Of torn last lines, left by a process that was killed while it wrote, which this object has removed."""
        self._verdicts: list[Verdict] = []
        self._size = 0
        self._alone = False

    def read(self) -> list[Verdict]:
        """Every verdict, in the order in which they were written. Raises DataError that names the line of one that cannot be read."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self._size:
            self._verdicts = [_verdict_of(self.path, entry.number, entry.values) for entry in read_entries(self.path)]
            self._size = size
        return list(self._verdicts)

    def current(self) -> list[Verdict]:
        """The standing verdict of each annotator on each task, also where it is no vote: see `standing`."""
        return list(standing(self.read()).values())

    def append(self, verdicts: Iterable[Verdict]) -> int:
        """Write down those that are not there yet, by content id, and return how many they were, once they survive a power cut.

        Raises StorageError where the disk is full or another process is writing; the log is as it was then.
        """
        with self.alone():
            history: defaultdict[Statement, set[str]] = defaultdict(set)
            given = list(verdicts)
            asked = {verdict.about for verdict in given}
            for verdict in self.read():
                if verdict.about in asked:
                    history[verdict.about].add(verdict.content_id)
            new = []
            for verdict in given:
                if verdict.content_id not in history[verdict.about]:
                    history[verdict.about].add(verdict.content_id)
                    new.append(verdict)
            self.cut_off_bytes += append_entries(self.path, map(_entry_of, new))
            self._verdicts += new
            self._size = self.path.stat().st_size
            return len(new)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only process that writes. The system ends it when the process ends, however it ends. May be nested.

        Raises StorageError where another process is writing.
        """
        if self._alone:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(f"another process is writing {self.path}: an `annotation pull` that is still running, or one with "
                                   "--watch. Wait for it or stop it, then run the same command again; nothing was changed.") from None
            self._alone = True
            try:
                yield
            finally:
                self._alone = False


def _entry_of(verdict: Verdict) -> dict[str, Any]:
    return {"id": verdict.content_id, **dict(zip(FIELDS, VALUES(verdict), strict=True))}


def _verdict_of(path: Path, number: int, values: Mapping[str, Any]) -> Verdict:
    """The id is checked: a line that was changed by hand is no longer what an annotator said."""
    try:
        rest = dict(values)
        written = rest.pop("id")
        if rest["schema"] != "verdict/1":
            raise DataError(f"schema {rest['schema']!r} is not verdict/1; it was written by another version")
        if rest["kind"] not in KINDS:
            raise DataError(f"kind {rest['kind']!r} is none of {', '.join(KINDS)}")
        rest["ranks"], rest["order"] = tuple(rest["ranks"]), tuple(rest["order"])
        verdict = Verdict(**rest)
        if verdict.content_id != written:
            raise DataError(f"its id is {written}, that of its content {verdict.content_id}")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}:{number} is no verdict: {type(error).__name__} {error}. The line was changed by hand, or the disk is "
                        "faulty: restore the file from a backup (`annotation restore`), or delete that line; the next `annotation pull` "
                        "then reads again what the server still has.") from error
    return verdict
