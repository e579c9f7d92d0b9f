"""Rows that are not used: each one named, counted by reason, written down, and limited by the recipe."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf.errors import DataError
from rlhf.whole_files import replace_file


@dataclass(frozen=True, slots=True)
class Reject:
    where: str
    """File and row, `pairs.jsonl:17`; rows count from 1."""
    reason: str
    """A slug from docs/data.md, for example `empty_response`."""
    detail: str
    """What was found, short; nothing of the text itself, which may be private."""


class RowError(DataError):
    """A row, or a part of one, cannot be used. The reader, who knows file and row, turns it into a Reject."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")

    def at(self, where: str) -> Reject:
        return Reject(where, self.reason, self.detail)


def count_reasons(rejects: Iterable[Reject]) -> dict[str, int]:
    """Rejected rows by reason, most frequent first."""
    return dict(Counter(reject.reason for reject in rejects).most_common())


def write_rejects(rejects: Iterable[Reject], path: Path) -> None:
    """One JSON line a row, replacing the file as a whole."""
    replace_file(path, "".join(json.dumps(asdict(reject), ensure_ascii=True) + "\n" for reject in rejects))


def counted_rows(rejected: int, *, rows: int, kept: int) -> int:
    """What a share of rejects is a share of. A ranking is one row that gives several pairs; then each pair counts as a row."""
    return max(rows, rejected + kept)


def require_share(rejects: Sequence[Reject], *, rows: int, at_most: float, rejects_file: Path | None = None) -> None:
    """Stop when more than the share `at_most` of the rows, as `counted_rows` counts them, was rejected."""
    share = len(rejects) / max(1, rows)
    if share > at_most:
        reasons = ", ".join(f"{count} {reason}" for reason, count in count_reasons(rejects).items())
        where = f" Every one is listed in {rejects_file}." if rejects_file else ""
        raise DataError(f"{len(rejects)} of {rows} rows were rejected ({share:.1%}, the recipe allows {at_most:.1%}): {reasons}.{where} "
                        "Repair the data, name a repair, or raise data.max_rejected.")
