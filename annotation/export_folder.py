"""An export as a new folder: it appears whole or not at all, and never in the place of another one.

    OUT/
      manifest.json        policy, parameters, counts, hashes, guideline versions, annotators, agreement; the only file that knows the time
      train/, holdout/
        rankings.jsonl     a ranking a task, whole
        pairs.jsonl        a preference a decided pair, with its own votes, agreement and smoothing
        ties.jsonl         tasks whose responses are all equally good: data for a reward model, never a DPO pair
      disputes.jsonl       tasks without a ranking or a tie: why, the texts, the votes

The lines of train and holdout are `dataclasses.asdict` of rlhf.records. The same verdicts and settings give the same bytes, so that two
exports are equal if their `content_id` is.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from annotation.export import SIDES, Export, ExportSettings, Side
from annotation.verdicts import Verdict
from annotation.votes import PairVote
from rlhf.errors import ConfigError, DataError, StorageError
from rlhf.progress import Bar, progress
from rlhf.records import Record, content_hash
from rlhf.whole_files import sync_to_disk

MANIFEST = "manifest.json"
SCHEMA = "export/1"


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file of an export, as the manifest names it."""

    rows: int
    sha256: str
    """Of its bytes."""
    records: str
    """Hash over the sorted content ids of its records: equal for the same judgements, whatever their votes and order. Of disputes: ""."""


def require_new(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} is there already, and an export never overwrites anything. Name a new folder.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to write into; leaving the block without an error brings it to the disk and gives it the name `folder`.

    Raises ConfigError if something is there already, StorageError if writing fails; then nothing is left behind.
    """
    require_new(folder)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in (*sorted(partial.rglob("*")), partial):
            sync_to_disk(path)
        partial.rename(folder)
        sync_to_disk(folder.parent)
    except OSError as error:
        raise StorageError(f"{folder} could not be written ({error}). Nothing was left behind. Free some space or name another folder, "
                           "then run again.") from error
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def origin_of(project: str, settings: ExportSettings, standing: Iterable[Verdict]) -> dict[str, Any]:
    """What a manifest says of where the export comes from, when, and how it can be made again."""
    return {"project": project, "made_at": datetime.now(UTC).isoformat(timespec="seconds"), "prefloop": version("prefloop"),
            "settings": asdict(settings), "verdicts_id": content_hash(*sorted(verdict.content_id for verdict in standing))}


def write_export(export: Export, out: Path, *, origin: Mapping[str, Any], console: Console | None = None) -> dict[str, Any]:
    """Write the folder and return its manifest: `origin_of` the export, what was counted, and what the files hold.

    Raises ConfigError if something is there already, DataError if there is nothing to write, StorageError if writing fails.
    """
    if not any(side.rankings or side.pairs or side.ties for side in export.sides.values()):
        found = ", ".join(f"{count} {kind}" for kind, count in export.tasks.items() if count)
        raise DataError(f"no task gave a record ({found or 'there are no tasks'}), so nothing was written. Pull the verdicts, wait for "
                        "more of them, or ask for less with --min-votes or another --policy.")
    rows = len(export.disputes) + sum(len(records) for side in export.sides.values() for records in _files_of(side).values())
    counts = counts_of(export)
    files: dict[str, WrittenFile] = {}
    with new_folder(out) as folder, progress(console, "write", rows) as bar:
        for name in SIDES:
            (folder / name).mkdir()
            for kind, records in _files_of(export.sides[name]).items():
                written = write_rows(folder / name / kind, map(asdict, records), bar)
                ids = content_hash(*sorted(record.content_id for record in records))
                files[f"{name}/{kind}"] = WrittenFile(rows=len(records), sha256=written, records=ids)
        written = write_rows(folder / "disputes.jsonl", export.disputes, bar)
        files["disputes.jsonl"] = WrittenFile(rows=len(export.disputes), sha256=written, records="")
        manifest = {"schema": SCHEMA, "content_id": content_hash(SCHEMA, {name: file.sha256 for name, file in files.items()}), **origin,
                    **counts, "files": {name: asdict(file) for name, file in files.items()}}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def counts_of(export: Export) -> dict[str, Any]:
    agreement = export.strict_agreement
    return {"tasks": {"all": sum(export.tasks.values()), **export.tasks}, "pairs": {"all": sum(export.pairs.values()), **export.pairs},
            "verdicts": {"all": sum(export.verdicts.values()), **export.verdicts}, "annotators": export.rankings_by_annotator,
            "guidelines": export.guidelines,
            "alpha": alpha_of(export.votes), "strict_agreement": {**agreement._asdict(), "error_rate": agreement.error_rate}}


def alpha_of(votes: Sequence[PairVote]) -> float | None:
    """Krippendorff's alpha of the counted votes, nominal: units are pairs of responses, values are first, second and tie."""
    from annotation.vote_table import vote_table  # imports torch, which nothing else here needs
    from rlhf.maths.agreement import krippendorff_alpha
    return krippendorff_alpha(vote_table(votes).choices, level="nominal")


def _files_of(side: Side) -> dict[str, tuple[Record, ...]]:
    return {"rankings.jsonl": side.rankings, "pairs.jsonl": side.pairs, "ties.jsonl": side.ties}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], bar: Bar) -> str:
    """One JSON object a line; returns the SHA-256 of the bytes."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"
            digest.update(line)
            file.write(line)
            bar.advance()
    return digest.hexdigest()
