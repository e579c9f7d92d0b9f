"""The command line: exit codes, one JSON object, help that explains every key, and an environment that keeps quiet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.cli import main, split_arguments
from rlhf.commands import QUIET
from rlhf.config import STAGES, StageKind
from rlhf.errors import ConfigError
from rlhf.key_help import recipe_rows

RECIPE = "model: {name: no/such-model}\nsft:\n  data: {train: rows.jsonl}\n  optim: {learning_rate: 1e-4}\n"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets variables for its process; here that process goes on."""
    for name in QUIET:
        monkeypatch.setenv(name, os.environ[name] if name in os.environ else QUIET[name])


def recipe_in(folder: Path, text: str = RECIPE) -> str:
    (folder / "tiny.yaml").write_text(text, encoding="utf-8")
    return str(folder / "tiny.yaml")


@pytest.mark.parametrize("kind", [None, "sft", "dpo", "evaluate"])
def test_help_names_every_key_with_what_it_does(kind: StageKind | None, capsys: pytest.CaptureFixture[str],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main([kind or "run", "--help"]) == 0
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    rows = list(recipe_rows(kind))
    assert {row.path.split(".")[0] for row in rows} >= (set(STAGES) if kind is None else {kind, "model", "seed"})
    for row in rows:
        assert f"{row.path} " in shown
        assert row.key.text in shown
        assert row.key.unit == "-" or f"[{row.key.unit}]" in shown
        assert row.key.source in shown or row.key.source == "this project"
    assert "Exit codes: 0 done" in shown


def test_a_line_of_the_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    main(["dpo", "--help"])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("dpo.beta "))
    assert line.split()[1] == "0.1"
    assert re.search(r"larger keeps the policy nearer the reference; .*: a number \[1/nat\] \(Rafailov et al\. 2023", line)


@pytest.mark.parametrize(("words", "code"), [
    (["--help"], 0), ([], 0), (["nosuch"], 2), (["run"], 2), (["run", "--nosuch"], 2), (["run", "nowhere.yaml"], 2), (["run", "seed=1"], 2),
    (["sft", "a.yaml", "b.yaml"], 2), (["dpo", "model.name=m"], 2), (["check", "nowhere.yaml"], 1), (["check", "seed=1"], 2),
    (["report", "a", "b"], 2), (["check", "x.jsonl", "--max-length", "3"], 2)])
def test_exit_codes_and_no_traceback(words: list[str], code: int, capfd: pytest.CaptureFixture[str], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    assert (shown.err == "") == (code < 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "code"), [
    (["nosuch"], 2), (["run"], 2), (["run", "nowhere.yaml"], 2), (["check", "{recipe}", "sft.optim.lr=1"], 1), (["export", "a", "b"], 2),
    (["check", "{recipe}"], 1)])
def test_json_is_one_object_on_stdout(words: list[str], code: int, capfd: pytest.CaptureFixture[str], tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_in(tmp_path)
    assert main([*(word.format(recipe=recipe) for word in words), "--json"]) == code
    shown = capfd.readouterr()
    answer = json.loads(shown.out)
    assert answer["ok"] is False
    assert shown.out.count("\n") == 1
    assert shown.err.strip()


def test_check_lists_problems_by_path_in_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", recipe_in(tmp_path), "sft.optim.lr=1", "sft.data.limit=0", "--json"]) == 1
    assert [problem["where"] for problem in json.loads(capfd.readouterr().out)["problems"]] == ["sft.optim.lr", "sft.data.limit"]


def test_json_keeps_stdout_clean_of_child_processes(tmp_path: Path) -> None:
    """Whatever writes to file descriptor 1 meanwhile, libraries in C and scripts of a recipe, ends up on stderr."""
    code = ("import os, subprocess, sys\nfrom rlhf.commands import stdout_for_one_answer\n"
            "with stdout_for_one_answer() as answer:\n    print('library'); subprocess.run(['echo', 'child']); os.write(1, b'raw')\n"
            "    answer.write('{}')\nprint('after')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{}after\n"
    assert all(word in done.stderr for word in ("library", "child", "raw"))


def test_check_reads_the_files_that_a_shell_makes_of_a_pattern(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"prompt": f"p{number}", "chosen": "c", "rejected": "r"}) + "\n", encoding="utf-8")
    assert main(["check", *map(str, files), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (answer["rows"], list(answer["files"])) == (2, [str(file) for file in files])


def test_check_of_data_reads_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Question {number}?", "chosen": "yes, it is", "rejected": "no"} for number in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["check", str(tmp_path / "pairs.jsonl"), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["ok"] is True
    assert answer["rows"] == 30
    (tmp_path / "ties.jsonl").write_text("".join(json.dumps(row | {"rejected": row["chosen"]}) + "\n" for row in rows), encoding="utf-8")
    assert main(["check", str(tmp_path / "ties.jsonl")]) == 1
    shown = capfd.readouterr()
    assert "identical" in shown.out
    assert shown.err == ""


def test_an_unexpected_error_shows_its_traceback_and_is_code_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A link to itself is read by nobody's rule: Python's own error must not look like wrong input."""
    recipe = tmp_path / "loop.yaml"
    recipe.symlink_to(recipe)
    assert main(["run", str(recipe)]) == 3
    shown = capfd.readouterr().err
    assert "Traceback" in shown
    assert "not of your input" in shown


def test_an_interrupt_is_code_130(tmp_path: Path) -> None:
    code = ("import os, signal, sys, threading\nfrom rlhf.cli import main\nfrom pathlib import Path\n"
            "os.mkfifo('pipe.yaml')\n"    # reading waits for a writer that never comes
            "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\nprint(main(['run', 'pipe.yaml']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "130\n"
    assert "interrupted" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_environment_is_quiet_unless_the_user_has_said_otherwise() -> None:
    code = ("import os\nfrom rlhf.cli import main\nmain(['--help'])\nfrom huggingface_hub import constants\n"
            "print('telemetry off', constants.HF_HUB_DISABLE_TELEMETRY, os.environ['TRANSFORMERS_VERBOSITY'])")
    clean = {name: value for name, value in os.environ.items() if name not in QUIET}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env=clean | {"TRANSFORMERS_VERBOSITY": "info"})
    assert "telemetry off True info" in done.stdout


def test_overrides_and_files_are_told_apart() -> None:
    words = ["dpo.beta=0.2", "a/b=c/recipe.yaml", "model.name=x=y"]
    assert split_arguments(words) == (Path("a/b=c/recipe.yaml"), ["dpo.beta=0.2", "model.name=x=y"])
    with pytest.raises(ConfigError, match="one recipe at a time"):
        split_arguments(["a.yaml", "b.yaml"])
