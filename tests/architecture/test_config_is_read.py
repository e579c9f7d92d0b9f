"""No setting is accepted and ignored, none goes unexplained, and new ones are added on purpose."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperCommand, TyperGroup

from annotation.cli import app as annotation_app
from rlhf import config
from rlhf.cli import app as rlhf_app
from rlhf.key_help import hints_of, key_of, nested, recipe_rows

ROOT = Path(__file__).resolve().parents[2]
LISTED = Path(__file__).with_name("command_line.txt")


def schemas() -> list[type]:
    """Recipe, every kind of stage, and the sections inside them."""
    found: list[type] = []
    waiting: list[type] = [config.Recipe, *config.STAGES.values()]
    while waiting:
        schema = waiting.pop()
        if schema not in found:
            found.append(schema)
            waiting += [section for hint in hints_of(schema).values() if (section := nested(hint)) is not None]
    return found


def attributes_read(sources: list[str]) -> set[str]:
    return {node.attr for source in sources for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_every_field_is_read_somewhere(schema: type) -> None:
    readers = [path.read_text(encoding="utf-8") for path in (ROOT / "rlhf").rglob("*.py") if path.name != "config.py"]
    assert {field.name for field in fields(schema)} - attributes_read(readers) == set()


def test_a_field_that_is_only_set_counts_as_unread() -> None:
    assert attributes_read(["config.beta = 1", "x = config.gamma"]) == {"gamma"}


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_every_field_says_what_it_does(schema: type) -> None:
    for name, hint in hints_of(schema).items():
        key = key_of(hint)
        assert len(key.text) > 3, name
        assert key.unit.strip(), name
        assert key.source.strip(), name


def test_every_config_class_is_part_of_the_recipe() -> None:
    classes = {node.name for node in ast.parse(Path(config.__file__).read_text(encoding="utf-8")).body
               if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)}
    assert classes == {schema.__name__ for schema in schemas()}


def options_of(command: object, name: str) -> set[str]:
    """NAME COMMAND --option of a program, and of the groups inside it."""
    if isinstance(command, TyperGroup):
        return {option for part, inner in command.commands.items() for option in options_of(inner, f"{name} {part}")}
    assert isinstance(command, TyperCommand), name
    return {f"{name} {option}" for parameter in command.params for option in parameter.opts if option.startswith("--")}


def test_options_and_keys_are_the_ones_listed() -> None:
    """A new name on the command line is a promise: it goes into command_line.txt together with the change."""
    options = {option for name, program in (("annotation", annotation_app), ("rlhf", rlhf_app))
               for option in options_of(typer.main.get_command(program), name)}
    names = sorted(options) + sorted({row.path for row in recipe_rows()})
    assert LISTED.read_text(encoding="utf-8").splitlines() == names
