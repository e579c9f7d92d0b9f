"""Rules about files: size, names, errors that vanish, settings nobody reads, and nothing of the machine it was written on."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = [path for folder in ("rlhf", "annotation", "benchmarks", "recipes", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
SHIPPED = [path for path in OURS if "tests" not in path.relative_to(ROOT).parts]
JUNK_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
LONGEST_FILE, LONGEST_FUNCTION = 400, 80
Function = ast.FunctionDef | ast.AsyncFunctionDef


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[Function]:
    yield from (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, Function))


def library_files_with(pattern: str) -> list[str]:
    return [label(path) for path in SHIPPED if path.is_relative_to(ROOT / "rlhf") and re.search(pattern, path.read_text(encoding="utf-8"))]


def vanishing_errors(source: str) -> list[int]:
    """Lines of handlers that catch everything unnamed, or catch something and do nothing."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    idle = (ast.Pass, ast.Continue)
    return [node.lineno for node in handlers if node.type is None or all(isinstance(part, idle) for part in node.body)]


@pytest.mark.parametrize("path", OURS, ids=label)
def test_a_file_fits_in_the_head(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions(path)
            if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION}
    assert long == {}


def test_no_file_is_named_like_a_junk_drawer() -> None:
    assert [label(path) for path in OURS if path.stem in JUNK_NAMES or path.parent.name in JUNK_NAMES] == []


@pytest.mark.parametrize("path", SHIPPED, ids=label)
def test_no_error_vanishes_and_nothing_is_left_for_later(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert vanishing_errors(source) == []
    assert re.findall(r"\b(?:TODO|FIXME|XXX|HACK|NotImplementedError)\b", source) == []


def test_the_rule_about_vanishing_errors_finds_them() -> None:
    assert vanishing_errors("try:\n    f()\nexcept OSError:\n    pass\n") == [3]
    assert vanishing_errors("try:\n    f()\nexcept:\n    stop()\n") == [3]
    assert vanishing_errors("try:\n    f()\nexcept OSError as error:\n    raise ValueError('no') from error\n") == []


def test_no_function_stands_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in SHIPPED:
        for node in functions(path):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if sum(1 for part in body for _ in ast.walk(part)) > 60:
                places[";".join(map(ast.dump, body))].append(f"{label(path)}:{node.lineno} {node.name}")
    assert [copies for copies in places.values() if len(copies) > 1] == []


def test_randomness_is_seeded_in_the_command_line_only() -> None:
    seeds = r"\b(?:torch\.manual_seed|torch\.cuda\.manual_seed(?:_all)?|(?:np\.|numpy\.)?random\.seed|set_seed)\("
    assert set(library_files_with(seeds)) <= {"rlhf/cli.py"}


def test_the_environment_is_read_by_the_commands_and_in_distributed_only() -> None:
    reading = library_files_with(r"\bos\.(?:environ|getenv)\b")
    assert [name for name in reading if name not in ("rlhf/cli.py", "rlhf/commands.py") and not name.startswith("rlhf/distributed/")] == []


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
                            text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the list of files is git's")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return {label(file): file.read_text(encoding="utf-8", errors="ignore") for file in files
            if file.is_file() and file.suffix not in {".png", ".parquet", ".gz"}}


def test_no_file_names_a_machine_or_a_package_source() -> None:
    folders = r"(?<![\w.])/(?:wo[r]k|ro[o]t|ho[m]e/\w+|op[t]/\w+|Us[e]rs/\w+)/|fi[l]e:///"
    sources = r"inde[x]-url|find-link[s]|PIP_[A-Z]+|https?://(?:[\w.-]*\.)?(?:pyp[i]|pythonhoste[d]|npmj[s]|download\.pytorc[h])\.\w+"
    traces = re.compile(f"{folders}|{sources}|https?://(?:10|192\\.168)\\.")
    found = {name: traces.findall(text) for name, text in tracked_texts().items() if traces.search(text)}
    assert found == {}
