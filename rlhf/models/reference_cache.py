"""Log-probs of responses under a reference, kept on disk between runs.

An entry is one response: its key hashes the prompt's and the response's token ids, so template, truncation and tokenizer are part of it
and the layout, the batch and the rest of the data are not: a subset or a superset of the data finds its entries again. A folder holds the
entries of one reference function in one precision. Files are written whole under the hash of their content and never changed, so any
number of processes may share a cache.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlhf.errors import DataError, GuardError, StorageError
from rlhf.records import TokenRun

KEY_BYTES = 16
Scores = tuple[float, ...]
"""Summed log-probs in nats, one a response."""


def response_key(prompt: Sequence[int], response: Sequence[int]) -> bytes:
    """Lengths are hashed too, so that a token cannot move over the boundary unseen."""
    ids = np.asarray([len(prompt), len(response), *prompt, *response], dtype="<i8")
    return hashlib.sha256(ids.tobytes()).digest()[:KEY_BYTES]


class ReferenceScores:
    """Scores of one reference: `folder/FINGERPRINT-DTYPE/*.npz`. `fingerprint` is the reference's, `dtype` the one it is computed in."""

    def __init__(self, folder: Path, *, fingerprint: str, dtype: str) -> None:
        self.folder = folder / f"{fingerprint[:32]}-{dtype}"
        self._scores: dict[bytes, float] = {}
        for path in sorted(self.folder.glob("*.npz")):
            self._scores.update(_read(path))

    def lookup(self, runs: Sequence[TokenRun]) -> list[Scores | None]:
        """A tuple a run, in the order of its responses; None where any of them is not in the cache."""
        found: list[Scores | None] = []
        for run in runs:
            scores = [self._scores.get(response_key(run.prompt, response)) for response in run.responses]
            known = tuple(score for score in scores if score is not None)
            found.append(known if len(known) == len(scores) else None)
        return found

    def store(self, runs: Sequence[TokenRun], scores: Sequence[Scores]) -> None:
        """Add what is not there yet and write it before returning. A response scored before keeps its score. Raises StorageError."""
        new: dict[bytes, float] = {}
        for run, values in zip(runs, scores, strict=True):
            for response, value in zip(run.responses, values, strict=True):
                if not math.isfinite(value):
                    raise GuardError(f"row {run.id}: the reference gives a response the log-probability {value}; its weights are broken")
                key = response_key(run.prompt, response)
                if key not in self._scores:
                    new[key] = value
        if new:
            _write(self.folder, new)
            self._scores |= new

    def complete(self, runs: Sequence[TokenRun], score: Callable[[Sequence[TokenRun]], Sequence[Scores]], *, chunk: int = 2048,
                 ) -> list[Scores]:
        """Scores of all runs. Those not in the cache go to `score`, each once, at most `chunk` at a time, and are stored as they come."""
        missing = {tuple(response_key(run.prompt, response) for response in run.responses): run
                   for run, known in zip(runs, self.lookup(runs), strict=True) if known is None}
        waiting = list(missing.values())
        for first in range(0, len(waiting), chunk):
            part = waiting[first : first + chunk]
            self.store(part, score(part))
        return [known for known in self.lookup(runs) if known is not None]


def _read(path: Path) -> dict[bytes, float]:
    try:
        with np.load(path, allow_pickle=False) as arrays:     # a zip: its checksums catch damage
            keys, values = arrays["keys"], arrays["values"]
        return {key.tobytes(): float(value) for key, value in zip(keys.reshape(-1, KEY_BYTES), values, strict=True)}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} of the reference cache is damaged ({error}). Delete it; its scores are computed again.") from error


def _write(folder: Path, entries: dict[bytes, float]) -> None:
    keys = sorted(entries)
    key_bytes = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), KEY_BYTES)
    values = np.asarray([entries[key] for key in keys], dtype=np.float64)
    target = folder / f"{hashlib.sha256(key_bytes.tobytes() + values.tobytes()).hexdigest()[:32]}.npz"
    partial: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            np.savez(file, keys=key_bytes, values=values)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise StorageError(f"{target} could not be written ({error}). The rest of the cache is intact. Free some space, then start again."
                           ) from error
