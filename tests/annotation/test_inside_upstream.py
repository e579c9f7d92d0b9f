"""What is replaced in upstream is there, with the parameters that are expected, or the server says what is not and does not start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from annotation.server import inside
from annotation.server.inside.upstream import NAMES, VERSION, Name

INSIDE = Path(inside.__file__).parent
SCRIPT = """
import importlib, json, os, sys, tempfile
os.environ["ARGILLA_HOME_PATH"] = tempfile.mkdtemp()
from inside import upstream

def answer():
    try:
        upstream.check()
    except upstream.UpstreamChanged as error:
        return str(error)
    return ""

answers = {"": answer()}
for name in upstream.NAMES:
    owner = importlib.import_module(f"argilla_server.{name.module}")
    *path, last = name.path.split(".")
    for part in path:
        owner = getattr(owner, part)
    if last in vars(owner):
        kept, take = vars(owner)[last], type if isinstance(owner, type) else object
        take.__delattr__(owner, last)
        answers[f"{name.module}.{name.path}"] = answer()
        take.__setattr__(owner, last, kept)
from argilla_server.contexts import distribution
kept, distribution.update_record_status = distribution.update_record_status, lambda engine, record_id, wait: None
answers["parameters"] = answer()
distribution.update_record_status = kept
from argilla_server import _version
_version.__version__ = "2.9.0"
del importlib.import_module("argilla_server.contexts.accounts").create_user
answers["version"] = answer()
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def answers(server_python: Path) -> dict[str, str]:
    """What the check says with each name taken away in turn."""
    ran = subprocess.run([server_python, "-c", SCRIPT], cwd=INSIDE.parent, capture_output=True, text=True, check=True)
    told: dict[str, str] = json.loads(ran.stdout)
    return told


def test_the_installed_version_is_the_one_that_is_expected(answers: dict[str, str]) -> None:
    assert answers[""] == ""


INHERITED = {"jobs.queues.DEFAULT_QUEUE.enqueue_call", "jobs.queues.HIGH_QUEUE.enqueue_call"}
"""rq's own; ours are set on the two queues."""


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name.module}.{name.path}")
def test_a_name_that_is_gone_is_named(answers: dict[str, str], name: Name) -> None:
    told = f"{name.module}.{name.path}"
    if told in INHERITED:
        assert told not in answers
    else:
        [difference] = answers[told].splitlines()[1:-1]
        assert name.module in difference and name.path in difference


def test_other_parameters_are_named(answers: dict[str, str]) -> None:
    assert "contexts.distribution.update_record_status takes (engine, record_id, wait) instead of (search_engine, record_id)\n" in answers[
        "parameters"]


def test_all_differences_are_told_at_once_with_what_to_do(answers: dict[str, str]) -> None:
    lines = answers["version"].splitlines()
    assert lines[0] == f"this Prefloop serves argilla-server {VERSION}, but what is installed differs:"
    assert lines[1] == "  its version is 2.9.0"
    assert "  argilla_server.contexts.accounts has no create_user" in lines
    assert lines[-1].startswith("Run `annotation install`")


def test_every_name_of_upstream_that_is_replaced_is_checked() -> None:
    """Read off the code: `module.name = ...` for a module or a class imported from argilla_server."""
    import ast

    replaced = set()
    for path in INSIDE.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                    and (node.module or "").startswith("argilla_server") for alias in node.names}
        replaced |= {target.attr for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
                     if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in imported}
    assert len(replaced) >= 10
    assert replaced <= {part for name in NAMES for part in name.path.split(".")}
