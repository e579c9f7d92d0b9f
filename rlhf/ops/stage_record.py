"""`stage.json`: what a stage was given, how far it got and what came out. A finished stage with the same inputs is not run again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import CheckpointError
from rlhf.records import content_hash

NAME = "stage.json"
WHOLE_FILE_BYTES = 16 << 20
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    kind: str
    status: Literal["running", "finished"]
    inputs: dict[str, str]
    """Everything the result depends on, by name: configuration, files, code version, identities of the stages before."""
    results: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def identity(self) -> str:
        return content_hash(self.kind, self.inputs)

    def write(self, folder: Path) -> None:
        """Replace the file as a whole, on disk before it is visible."""
        partial = folder / f"{NAME}.partial"
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"kind": self.kind, "status": self.status, "identity": self.identity, "seconds": self.seconds,
                       "inputs": self.inputs, "results": self.results}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / NAME)


def read_record(folder: Path) -> StageRecord | None:
    """The record of a stage folder, or None where no stage ever started."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return StageRecord(kind=content["kind"], status=content["status"], inputs=content["inputs"], results=content["results"],
                           seconds=content["seconds"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); run again with --fresh, or move the folder away") from error


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Names of the inputs that changed, appeared or went."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def file_hash(path: Path) -> str:
    """SHA-256 of a file; of a large one its size and samples from its start, middle and end."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode("ascii"))
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            digest.update(file.read())
        else:
            for offset in (0, size // 2, size - SAMPLE_BYTES):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def path_hash(path: Path) -> str:
    """Of a file, or of all files below a folder by name."""
    if path.is_file():
        return file_hash(path)
    return content_hash(*[(str(file.relative_to(path)), file_hash(file)) for file in sorted(path.rglob("*")) if file.is_file()])
