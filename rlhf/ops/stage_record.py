"""`stage.json`: what a stage was given, how far it got and what came out. A finished stage with the same inputs is not run again."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf.distributed.state import content_digest
from rlhf.errors import CheckpointError
from rlhf.records import content_hash
from rlhf.whole_files import replace_file

NAME = "stage.json"


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
        content = {"kind": self.kind, "status": self.status, "identity": self.identity, "seconds": self.seconds, "inputs": self.inputs,
                   "results": self.results}
        replace_file(folder / NAME, json.dumps(content, indent=2))


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


def path_hash(path: Path) -> str:
    """Of a file, every byte of it; of a folder (a model), all files below it by name, those over 64 MiB by a sample of blocks."""
    if path.is_file():
        return content_digest(path, whole_up_to=math.inf)[:16]
    return content_hash(*[(str(file.relative_to(path)), content_digest(file)[:16]) for file in sorted(path.rglob("*")) if file.is_file()])
