"""How far the pulls of a project have come: `pulled.json`. It only saves work; without it everything is read again, and nothing is doubled.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from annotation.backend import utc
from annotation.home import PULLED_FILE
from annotation.project import Project
from rlhf.errors import DataError
from rlhf.whole_files import replace_file

NOTHING_SEEN = utc(datetime(2000, 1, 1, tzinfo=UTC))
"""Before any response."""


def earlier(moment: str, seconds: float) -> str:
    """A time as `backend.utc` writes it, so many seconds before."""
    return utc(datetime.fromisoformat(moment) - timedelta(seconds=seconds))


def age_seconds(moment: str) -> float:
    """From a time of this machine until now."""
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


@dataclass(frozen=True, kw_only=True)
class SheetMark:
    seen_until: str
    """Server's time up to which whatever was stored has been read."""
    whole_at: str
    """This machine's time when every response was last read, old ones too."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    at: str
    """This machine's time of the last pull that came to its end."""
    verdicts: int
    """Lines of the log at that time. A log with fewer is not the one that was marked."""
    sheets: Mapping[str, SheetMark]


def load_mark(project: Project) -> Mark | None:
    """None before the first pull has come to its end. Raises DataError for a file that cannot be read."""
    path = project.folder / PULLED_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Mark(at=values["at"], verdicts=values["verdicts"],
                    sheets={name: SheetMark(**sheet) for name, sheet in values["sheets"].items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__} {error}. Delete it: the next pull then reads every response "
                        "again, and doubles none.") from error


def save_mark(project: Project, mark: Mark) -> None:
    replace_file(project.folder / PULLED_FILE, json.dumps(asdict(mark), indent=2) + "\n")
