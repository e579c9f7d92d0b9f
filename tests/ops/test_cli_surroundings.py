"""What the machine around a command may do to it: launchers, signals, full and read-only places, packages that are missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf.cli import LAUNCHERS, main
from rlhf.commands import FROM_OUTSIDE, QUIET

PAIRS = [{"prompt": f"w{2 + number} w3 ", "chosen": f"w{4 + number % 9} w7", "rejected": f"w{20 + number % 9}"} for number in range(24)]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets variables for its process; here that process goes on."""
    for name in QUIET:
        monkeypatch.setenv(name, os.environ[name] if name in os.environ else QUIET[name])


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command that would train, if its model existed."""
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return ["sft", "model.name=no/such-model", f"sft.data.train={tmp_path / 'pairs.jsonl'}", "sft.optim.learning_rate=1e-4",
            f"output={tmp_path / 'run'}"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_several_processes_are_refused_before_anything_is_written(name: str, words: list[str], tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch,
                                                                  capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(name, "2")
    assert main([*words, "--json"]) == 2
    assert "started 2 processes" in json.loads(capfd.readouterr().out)["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed here")
def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(words: list[str], tmp_path: Path,
                                                                             capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "sft.loop.trackers=[tensorboard, mlflow]"]) == 2
    assert "sft.loop.trackers: mlflow is not installed; pip install 'prefloop[mlflow]'" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("output", ["/dev/null/run", "x" * 300])
def test_a_place_that_cannot_be_written_is_no_fault_of_the_program(output: str, words: list[str], tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch,
                                                                   capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, f"output={output}", "--json"]) == 2
    shown = capfd.readouterr()
    assert output[:20] in json.loads(shown.out)["error"]
    assert "Traceback" not in shown.err


def test_errors_of_places_are_few() -> None:
    """A missing file (ENOENT) is not among them: it may as well be a fault of the program."""
    assert {os.strerror(number) for number in FROM_OUTSIDE} >= {"No space left on device", "Read-only file system", "Permission denied"}
    assert "No such file or directory" not in {os.strerror(number) for number in FROM_OUTSIDE}


def test_sigterm_ends_a_run_like_an_interrupt_and_takes_its_script_along(tmp_path: Path) -> None:
    (tmp_path / "prepare.py").write_text("import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\n"
                                         "print('ready', flush=True)\ntime.sleep(60)\n")
    (tmp_path / "slow.yaml").write_text("model: {name: m}\nprepare: {script: prepare.py}\n")
    code = "import sys\nfrom rlhf.cli import main\nsys.exit(main(['run', 'slow.yaml', '--json']))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        answer, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in json.loads(answer)["error"]
    assert "Traceback" not in said
    script = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(script, 0)
            time.sleep(0.05)


def test_libraries_say_nothing_on_stdout_when_they_are_imported() -> None:
    code = "from rlhf.cli import main\nmain(['--help'])\nprint('help ends here')\nimport deepspeed, rlhf.ops.pipeline"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("help ends here\n")


def test_a_reader_that_goes_away_is_no_fault_of_the_program() -> None:
    line = f"{sys.executable} -m rlhf.cli sft --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "141"
    assert done.stderr == ""
