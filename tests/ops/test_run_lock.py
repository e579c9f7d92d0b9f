"""Two processes never work in one run folder, and a dead one does not keep it."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlhf.errors import ConfigError
from rlhf.ops.run_lock import only_process_in

HOLD = """
import io, sys, time
from pathlib import Path
from rich.console import Console
from rlhf.ops.run_lock import only_process_in
with only_process_in(Path(sys.argv[1]), Console(file=io.StringIO())):
    print("held", flush=True)
    time.sleep(60)
"""


def console() -> Console:
    return Console(file=io.StringIO())


def test_a_second_process_is_refused_and_kill_9_frees_the_folder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use: process {holder.pid} works in it"), only_process_in(tmp_path, console()):
            pass
        holder.send_signal(signal.SIGKILL)
    with only_process_in(tmp_path, console()):
        pass


def test_a_child_that_outlives_the_run_does_not_keep_it(tmp_path: Path) -> None:
    with only_process_in(tmp_path, console()):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with only_process_in(tmp_path, console()):
            pass
    finally:
        child.kill()
        child.wait()


def test_it_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), only_process_in(tmp_path, console()):
        raise RuntimeError
    with only_process_in(tmp_path, console()):
        pass
