"""train_log.jsonl: one JSON line a step, one an evaluation, one an alarm, each on the disk before the next step begins.

Figures are written with every digit a float has, so that two runs can be compared bit for bit.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from rlhf.errors import GuardError, StorageError
from rlhf.whole_files import replace_file

Line = Mapping[str, float | int | str]

TIMING = frozenset({"seconds", "tokens_per_second", "eta_seconds", "memory_mb"})
"""Figures that differ from run to run on the same machine."""


class LogLines(NamedTuple):
    lines: list[dict[str, float | int | str]]
    torn: int
    """Lines that could not be read: at most the last one after a kill."""


def read_log(path: Path) -> LogLines:
    """Every whole line of a log, in the order of writing. A file that does not exist has none."""
    lines: list[dict[str, float | int | str]] = []
    torn = 0
    for text in path.read_bytes().split(b"\n") if path.exists() else []:
        if not text:
            continue
        try:
            line = json.loads(text)
        except ValueError:
            torn += 1
            continue
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
        else:
            torn += 1
    return LogLines(lines, torn)


def first_evaluation(lines: list[dict[str, float | int | str]]) -> dict[str, float | int | str]:
    """The evaluation before the first step; empty when nothing was held out."""
    found = [line for line in lines if line["step"] == 0 and any(name.startswith("eval_") for name in line)]
    return found[0] if found else {}


def step_lines(lines: list[dict[str, float | int | str]]) -> list[dict[str, float | int | str]]:
    """The lines of training steps: without evaluations and alarms."""
    return [line for line in lines if "loss" in line]


def exact_figures(line: Line) -> dict[str, float | int | str]:
    """What must be the same, bit for bit, in a run that was interrupted: everything but times and memory."""
    return {name: value for name, value in line.items() if name not in TIMING}


def peak_memory_mb() -> float:
    """Most memory allocated on the GPU so far, or by the process where there is none, in MiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def cut_log(path: Path, *, after: int) -> list[dict[str, float | int | str]]:
    """Remove the lines after a step, and a half-written one; all of them for step 0. What remains is returned."""
    written = path.read_bytes() if path.exists() else b""
    kept = [line for line in read_log(path).lines if after > 0 and int(line["step"]) <= after]
    text = "".join(_encoded(line) for line in kept)
    if text.encode("ascii") != written:
        replace_file(path, text)
    return kept


def _encoded(line: Line) -> str:
    return json.dumps(line, ensure_ascii=True, allow_nan=False) + "\n"


class StepLog(TrainerCallback):  # type: ignore[misc]
    """Writes what the Trainer logs, with time, tokens and memory. Goes before `CheckpointSeal` in the list of callbacks: a checkpoint must
    not be ahead of its log. Process 0 writes; the others get `path=None`.
    """

    def __init__(self, path: Path | None, *, tokens_of: Callable[[int], int], resume_step: int) -> None:
        """`tokens_of(i)`: tokens forwarded in step i, counted from 0. Lines after `resume_step` are cut, as is a torn one; 0: a new run."""
        self.path, self.tokens_of = path, tokens_of
        self.earlier: list[dict[str, float | int | str]] = []
        """Lines of earlier starts of the run."""
        self._file: FileIO | None = None
        if path is not None:
            self.earlier = cut_log(path, after=resume_step)
            self._file = path.open("ab", buffering=0)
        self._first_step = 0
        self._run_started = self._step_started = self._step_seconds = 0.0

    def write(self, line: Line) -> None:
        """Append a line. Raises GuardError for a figure that is not finite, StorageError when the disk does not take the whole line."""
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise GuardError(f"step {line['step']}: {name} is {value}. Look at the lines before it in {self.path}, then at the rows of "
                                 "this step, or lower the learning rate.")
        if self._file is None:
            return
        encoded = _encoded(line).encode("ascii")
        try:
            written = self._file.write(encoded)
        except OSError as error:
            raise StorageError(f"{self.path} could not be written at step {line['step']}: {error}; free some space, start again") from error
        if written != len(encoded):
            raise StorageError(f"{self.path}: the disk took {written} of {len(encoded)} bytes at step {line['step']}; "
                               "free some space, start again")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @override
    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._first_step, self._run_started = state.global_step, time.perf_counter()

    @override
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._step_started = time.perf_counter()

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self._step_seconds = time.perf_counter() - self._step_started

    @override
    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Mapping[str, float], **_: object) -> None:
        if "loss" in logs:
            self.write({"step": state.global_step, **logs, **self._speed(state)})
        elif any(name.startswith("eval_") for name in logs):
            line = {"step": state.global_step, **logs}
            if line not in self.earlier:    # a run killed after its last evaluation evaluates again
                self.write(line)

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def _speed(self, state: TrainerState) -> dict[str, float | int]:
        """The ETA is over everything since the start: evaluations and saves are part of what remains, too."""
        tokens = self.tokens_of(state.global_step - 1)
        a_step = (time.perf_counter() - self._run_started) / (state.global_step - self._first_step)
        return {
            "tokens": tokens,
            "tokens_per_second": tokens / max(self._step_seconds, 1e-9),
            "seconds": self._step_seconds,
            "eta_seconds": a_step * (state.max_steps - state.global_step),
            "memory_mb": peak_memory_mb(),
        }
