"""Options of a prepare script that name what an earlier stage made: they become paths, and what they name is an input of the stage."""

from __future__ import annotations

import io
from pathlib import Path
from textwrap import dedent

import pytest
from rich.console import Console

from rlhf.errors import ConfigError
from rlhf.ops.pipeline import run_recipe
from rlhf.recipe import load_recipe

MAKE = '''
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--text")
options = parser.parse_args()
(options.folder / "made.txt").write_text(options.text)
'''
COPY = '''
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--source", type=pathlib.Path)
parser.add_argument("--label")
options = parser.parse_args()
(options.folder / "copy.txt").write_text(options.label + ": " + options.source.read_text())
'''
RECIPE = """
    model: {name: "@prepare/model"}
    stages:
      - prepare: {script: one/make.py, args: {text: first}}
      - prepare: {name: copy, script: two/copy.py, args: {source: "@prepare/made.txt", label: "a@b"}}
"""


def written(folder: Path, recipe: str = RECIPE) -> Path:
    for place, script in (("one/make.py", MAKE), ("two/copy.py", COPY)):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(script, encoding="utf-8")
    (folder / "recipe.yaml").write_text(dedent(recipe), encoding="utf-8")
    return folder / "recipe.yaml"


def run(folder: Path, *overrides: str) -> str:
    """What the console said."""
    console = Console(file=io.StringIO(), width=300)
    run_recipe(load_recipe(folder / "recipe.yaml", [f"output={folder / 'run'}", *overrides]), console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_link_becomes_the_path_of_what_the_stage_made(tmp_path: Path) -> None:
    written(tmp_path)
    run(tmp_path)
    assert (tmp_path / "run/copy/copy.txt").read_text() == "a@b: first"


def test_the_stage_runs_again_exactly_when_what_it_names_has_changed(tmp_path: Path) -> None:
    written(tmp_path)
    run(tmp_path)
    assert run(tmp_path).count("inputs are unchanged: skipped") == 2
    assert "skipped" not in run(tmp_path, "prepare.args.text=second")
    assert (tmp_path / "run/copy/copy.txt").read_text() == "a@b: second"
    (tmp_path / "two/copy.py").write_text(COPY + "\n", encoding="utf-8")
    assert run(tmp_path, "prepare.args.text=second").count("skipped") == 1


@pytest.mark.parametrize(("link", "message"), [
    ("@prepar/made.txt", "copy.args.source: .*does not exist; did you mean prepare"),
    ("@copy/made.txt", "copy.args.source: .*comes later, or is this stage itself")])
def test_a_link_to_no_earlier_stage_is_refused(tmp_path: Path, link: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(written(tmp_path, RECIPE.replace("@prepare/made.txt", link)))
