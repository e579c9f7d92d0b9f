"""What annotators said, one line a statement, never changed: an append-only log on the disk.

A changed response is a new line that supersedes the older one of the same annotator and task; a response that was taken back is a line
that says so. Nothing is ever removed, so that the log tells how a label came to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf.errors import DataError
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
