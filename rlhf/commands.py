"""What the console commands share: one answer, exit codes, `--json`, interruption, errors as messages, and no telemetry.

This file, and the commands themselves, are the only ones that read or set environment variables.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import typer
from rich.console import Console
from typer.exceptions import Abort, TyperException

from rlhf.errors import ConfigError, Problem, RlhfError

INTERRUPTED = 130
BROKEN_PIPE = 141
"""As a shell counts a process that SIGPIPE ended."""
FROM_OUTSIDE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EIO})
"""System errors of a place that cannot be read or written: a full or read-only disk, missing permissions."""
EXIT_CODES = """Exit codes: 0 done; 1 the check found problems; 2 wrong input or a run that stopped itself (the message says what to do);
3 an unexpected error, with its traceback; 130 interrupted."""

QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",    # asked by TRL, transformers, datasets and the hub client
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive the forks of data loaders
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "WANDB_SILENT": "true",
}
"""No telemetry, and no bars and notes of libraries between our own; what the user has set already stays."""


@dataclass(frozen=True)
class Outcome:
    """What a command answers with `--json`, and its exit code."""

    answer: Mapping[str, Any]
    code: int = 0


@dataclass(frozen=True)
class Program:
    """A console command: its name, its subcommands, and what is said when it is interrupted."""

    name: str
    app: typer.Typer
    interrupted: str

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run a command and return its exit code."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))    # said on stdout
        words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
        with terminated_like_interrupted():
            return self._run(words)

    def _run(self, words: list[str]) -> int:
        if "--json" not in words:
            return self._outcome(words).code
        with stdout_for_one_answer() as answer:
            outcome = self._outcome(words)
            answer.write(json.dumps(_json_value(outcome.answer), allow_nan=False) + "\n")
        return outcome.code

    def _outcome(self, words: list[str]) -> Outcome:
        try:
            result = self.app(words, prog_name=self.name, standalone_mode=False)
            if result == INTERRUPTED:
                raise KeyboardInterrupt
            return result if isinstance(result, Outcome) else Outcome({})    # no outcome: --help
        except TyperException as error:
            return self._failure(f"{error.format_message()}\nSee {self.name} --help, {self.name} COMMAND --help.", (), 2)
        except RlhfError as error:
            return self._failure(str(error), error.problems if isinstance(error, ConfigError) else (), 2)
        except (KeyboardInterrupt, Abort):
            return self._failure(f"interrupted; {self.interrupted}", (), INTERRUPTED)
        except OSError as error:
            if error.errno not in FROM_OUTSIDE:
                return self._unexpected(error)
            return self._failure(f"{error.filename or 'a file'}: {error.strerror}. What was written before is kept: make room, set "
                                 "permissions, or name another place; then start again.", (), 2)
        except (Exception, SystemExit) as error:
            if isinstance(error.__context__ or error, BrokenPipeError):     # `| head`: nobody reads any more; rich then raises SystemExit
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return Outcome({}, BROKEN_PIPE)
            return self._unexpected(error)

    def _unexpected(self, error: BaseException) -> Outcome:
        traceback.print_exception(error)
        return self._failure(f"unexpected {type(error).__name__}: {error}\nThis is a fault of the program, not of your input; "
                             "please report it with the lines above.", (), 3)

    def _failure(self, message: str, problems: Sequence[Problem], code: int) -> Outcome:
        Console(stderr=True).print(f"{self.name}: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
        return Outcome({"ok": False, "error": message, "problems": as_rows(problems)}, code)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which schedulers send, ends a command as Ctrl-C does: with a message, its files closed, and no child left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stdout_for_one_answer() -> Iterator[TextIO]:
    """The real stdout; meanwhile whatever else writes there, libraries and child processes too, ends up on stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as answer:
            yield answer
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def as_rows(problems: Sequence[Problem]) -> list[dict[str, str]]:
    return [problem._asdict() for problem in problems]


def _json_value(value: Any) -> Any:
    """What JSON can say of a value: paths are text, non-finite numbers are null."""
    if is_dataclass(value) and not isinstance(value, type):
        return _json_value(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
