"""What the pages tell people to type exists and parses: commands, options, recipes with their overrides, make targets, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

import annotation.cli
import rlhf.cli
from rlhf.cli import split_arguments
from rlhf.data.detect import NAMES
from rlhf.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
         *sorted(path for folder in ("docs", "recipes", "benchmarks", "configs") for path in (ROOT / folder).rglob("*.md"))]


def commands_of(app: typer.Typer) -> dict[str, typer.core.TyperCommand]:
    """By their words: `run`, `users add`."""
    found = {}
    groups = [("", typer.main.get_command(app))]
    while groups:
        words, command = groups.pop()
        if isinstance(command, typer.core.TyperGroup):
            groups += [(f"{words} {name}".strip(), inner) for name, inner in command.commands.items()]
        else:
            found[words] = command
    return found


PROGRAMS = {"rlhf": commands_of(rlhf.cli.app), "annotation": commands_of(annotation.cli.app)}


class Command(NamedTuple):
    page: str
    line: str


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if language in languages]


def commands() -> list[Command]:
    """Lines of shell blocks, continued ones joined."""
    return [Command(str(page.relative_to(ROOT)), line) for page in PAGES
            for block in blocks(page.read_text(encoding="utf-8"), "bash", "sh", "shell", "text")
            for line in block.replace("\\\n", " ").splitlines() if re.match(r"(?:make|rlhf|annotation|python|\. |\.venv)\b", line)]


def words_of(line: str) -> list[str]:
    """As a shell would split it; signs that a shell would act upon are words of their own."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parses a command line as far as it goes without running anything."""
    program, *rest = words
    taken = 2 if " ".join(rest[:2]) in PROGRAMS[program] else 1
    name = " ".join(rest[:taken])
    arguments = PROGRAMS[program][name].make_context(name, rest[taken:]).params
    if program == "rlhf" and name in ("run", "sft", "dpo", "evaluate"):
        monkeypatch.chdir(ROOT)
        source, overrides = split_arguments(arguments["arguments"])
        load_recipe(source, overrides, stage=None if name == "run" else name)


OURS = [command for command in commands() if command.line.startswith(("rlhf ", "annotation "))]


def test_there_are_commands_in_the_readme_and_in_each_recipe() -> None:
    assert len([command for command in OURS if command.page == "README.md"]) >= 3
    for recipe in (ROOT / "recipes").glob("*/recipe.yaml"):
        page = f"recipes/{recipe.parent.name}/README.md"
        assert any(command.page == page and f"{recipe.relative_to(ROOT)}" in command.line for command in commands()), page


@pytest.mark.parametrize("command", OURS, ids=lambda command: f"{command.page}: {command.line[:50]}")
def test_a_command_of_a_page_parses(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_of(command.line)
    assert set(words) & {"&", ";", "|", "&&", "(", ")", "<", ">"} == set(), "quote what the shell would act upon"
    parse(words, monkeypatch)


@pytest.mark.parametrize(("words", "error"), [
    (["rlhf", "run", "recipes/quickstart/recipe.yaml", "dpo.betta=1"], "did you mean beta"),
    (["rlhf", "run", "recipes/absent.yaml"], "no such file"),
    (["rlhf", "report", "runs/a", "--outptu", "x"], "--outptu"),
    (["annotation", "users", "add"], "names"),
    (["annotation", "export", "week-1", "out", "--polcy", "all"], "--polcy"),
    (["rlhf", "nosuch"], "nosuch")])
def test_the_check_itself_finds(words: list[str], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match=error):
        parse(words, monkeypatch)
    assert words_of("rlhf run a?b=c&d=e") == ["rlhf", "run", "a?b=c", "&", "d=e"]
    assert words_of("rlhf run 'a?b=c&d=e'   # both") == ["rlhf", "run", "a?b=c&d=e"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_commands_targets_scripts_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for program, known in PROGRAMS.items():
        assert set(re.findall(rf"`{program} ([a-z]\w*)", text)) <= {name.split()[0] for name in known}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", text, re.MULTILINE)) <= targets
    modules = [name.replace(".", "/") + ".py" for name in re.findall(r"python -m (benchmarks\.\w+)", text)]
    scripts = re.findall(r"python ((?:tests|benchmarks|recipes)/[\w/]+\.py)", text)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    assert [name for name in (*modules, *scripts) if not (ROOT / name).is_file()] == []
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_names_every_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for program, known in PROGRAMS.items():
        assert set(re.findall(rf"`{program} (\w+)", text)) == {name.split()[0] for name in known}


def test_the_recipe_of_the_readme_is_right(tmp_path: Path) -> None:
    recipes = [block for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"), "yaml") if "stages:" in block]
    assert recipes
    for text in recipes:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        load_recipe(tmp_path / "recipe.yaml")


def test_the_readme_counts_the_layouts_right() -> None:
    assert len(NAMES) == 16
    assert "[sixteen layouts](docs/data.md)" in re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("page", "folders"), [
    ("docs/architecture.md", {"rlhf": ()}),
    ("docs/annotation.md", {"annotation": ("server/inside",), "annotation/server/inside": ()})])
def test_the_map_of_modules_is_complete(page: str, folders: dict[str, tuple[str, ...]]) -> None:
    """`folders`: the packages on the page, with those of their folders that are listed by themselves."""
    text = (ROOT / page).read_text(encoding="utf-8").partition("## Modules")[2].partition("##")[0]
    first_cells = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    modules = [".".join(inside.with_suffix("").parts) for folder, elsewhere in folders.items()
               for inside in (path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.py"))
               if inside.name != "__init__.py" and not any(inside.is_relative_to(other) for other in elsewhere)]
    assert sorted(re.findall(r"`([\w.]+)`", first_cells)) == sorted(modules)
