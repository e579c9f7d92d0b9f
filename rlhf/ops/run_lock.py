"""One process at a time in a run folder: two would write over each other's checkpoints and logs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from rlhf.errors import ConfigError

LOCK = ".lock"


@contextmanager
def only_process_in(run: Path, console: Console) -> Iterator[None]:
    """Hold the run folder. The system lets go of it when the process ends, however it ends. Raises ConfigError while another has it."""
    with (run / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(f"{run} is in use: process {file.read().strip() or 'unknown'} works in it. Wait until it has ended, or "
                              "choose another output.") from None
        except OSError as error:
            console.print(f"[yellow]{run} cannot be locked ({error}): do not start a second run in it")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
