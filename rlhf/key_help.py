"""What the annotations of a schema say: every key with its type, unit, default and source, as rows and as the table of `--help`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlhf.config import STAGES, Key, Recipe, StageKind

NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def key_of(hint: Any) -> Key:
    """The `Key` in Annotated[TYPE, Key(...)]."""
    return next(part for part in get_args(hint)[1:] if isinstance(part, Key))


def bare(hint: Any) -> Any:
    """TYPE of Annotated[TYPE, ...]."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def alternatives(hint: Any) -> tuple[Any, ...]:
    """A | B -> (A, B); anything else stands alone."""
    hint = bare(hint)
    if isinstance(hint, types.UnionType) or get_origin(hint) is typing.Union:
        return tuple(inner for part in get_args(hint) for inner in alternatives(part))
    return (hint,)


def choices(hint: Any) -> list[str]:
    """Every text that a Literal inside the type allows."""
    if get_origin(bare(hint)) is Literal:
        return [value for value in get_args(bare(hint)) if isinstance(value, str)]
    return [text for part in get_args(bare(hint)) for text in choices(part)]


def describe(hint: Any) -> str:
    """A type in words: 'a whole number or null', 'a list of text'."""
    parts = alternatives(hint)
    if len(parts) > 1:
        return " or ".join(describe(part) for part in parts)
    kind = parts[0]
    if get_origin(kind) is Literal:
        values = ", ".join(map(str, get_args(kind)))
        return f"one of {values}" if len(get_args(kind)) > 1 else values
    if get_origin(kind) is tuple:
        return f"a list of {describe(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a mapping to {describe(get_args(kind)[1])}"
    return "a mapping of keys" if is_dataclass(kind) else NAMES[kind]


def nested(hint: Any) -> type | None:
    """The schema behind a field that is a mapping of keys."""
    inner = bare(hint)
    return inner if isinstance(inner, type) and is_dataclass(inner) else None


@cache
def hints_of(schema: type) -> dict[str, Any]:
    """Annotated types by field, in order."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in fields(schema)}


class KeyRow(NamedTuple):
    path: str
    type: str
    default: str
    key: Key
    section: bool
    """A mapping whose keys are rows of their own."""


def key_rows(schema: type, where: str = "") -> Iterator[KeyRow]:
    """One row a field, in order; nested schemas are flattened to paths (`dpo.optim.learning_rate`)."""
    hints = hints_of(schema)
    for field in fields(schema):
        hint, path = hints[field.name], f"{where}.{field.name}" if where else field.name
        section = nested(hint)
        yield KeyRow(path, describe(hint), "" if section else _default(field), key_of(hint), section is not None)
        if section is not None:
            yield from key_rows(section, path)


def _default(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return _yaml_word(field.default_factory())
    return "required" if field.default is MISSING else _yaml_word(field.default)


def _yaml_word(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case tuple():
            return "[" + ", ".join(map(str, value)) + "]"
        case _:
            return str(value)


def recipe_rows(kind: StageKind | None = None) -> Iterator[KeyRow]:
    """Keys of a recipe: those of the whole, then those of one kind of stage, or of all kinds."""
    derived = {"name", "output", "folder"}    # required by the schema, but filled in from the place of the recipe file
    for row in key_rows(Recipe):
        yield row._replace(default="derived") if row.path in derived else row
    for stage in STAGES if kind is None else (kind,):
        yield from key_rows(STAGES[stage], stage)


def key_table(kind: StageKind | None = None) -> RenderableType:
    """The keys for `--help`: what one stage takes, or the whole recipe."""
    table = Table(box=None, padding=(0, 1), header_style="bold", pad_edge=False)
    table.add_column("Key", no_wrap=True, style="cyan")
    table.add_column("Default", overflow="fold", max_width=18)
    table.add_column(Text("Meaning: type [unit] (source of the default)"))
    for row in recipe_rows(kind):
        meaning = Text(row.key.text, style="bold" if row.section else "")
        if not row.section:
            meaning.append(f": {row.type}", style="green")
        if row.key.unit != "-":
            meaning.append(f" [{row.key.unit}]", style="yellow")
        if row.key.source != "this project":
            meaning.append(f" ({row.key.source})", style="dim")
        table.add_row(Text(row.path), Text(row.default, style="red" if row.default == "required" else ""), meaning)
    intro = Text("Keys, in the recipe or as KEY=VALUE; a stage with a name of its own is addressed by that name. "
                 "Defaults without a source were chosen by this project.")
    return Group(Text(), intro, Text(), table)


def field_paths(schema: type) -> list[str]:
    """Every path in a schema, sections too."""
    return [row.path for row in key_rows(schema)]
