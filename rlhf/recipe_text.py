"""From the text of a recipe and of overrides to plain mappings; every reading error has its line."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import Problem
from rlhf.schema_check import did_you_mean

DEEPEST = 20
"""No recipe nests this far; an alias that contains itself would never end."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that notes keys written twice instead of keeping the last one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[tuple[int, int, str]] = []
        """Line of the second, line of the first, key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                line = key_node.start_mark.line + 1
                if key_node.value in lines:
                    self.twice.append((line, lines[key_node.value], key_node.value))
                lines[key_node.value] = line
        return super().construct_mapping(node, deep)


def read_mapping(file: Path) -> tuple[dict[Any, Any], list[Problem]]:
    """The mapping that a YAML file holds; {} and the reasons where it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}, [Problem(str(file), "there is no such file")]
    except IsADirectoryError:
        return {}, [Problem(str(file), "is a folder; name the recipe file in it")]
    except UnicodeDecodeError as error:
        return {}, [Problem(str(file), f"is not UTF-8 text (byte {error.start}); save it as UTF-8")]
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        return {}, [_reading_problem(file, error)]
    problems = [Problem(f"{file}:{line}", f"key {key!r} is written twice; the first is in line {first}. Keep one")
                for line, first, key in sorted(loader.twice)]
    if not isinstance(value, dict):
        got = "nothing" if value is None else type(value).__name__
        return {}, [*problems, Problem(str(file), f"must hold a mapping of keys, got {got}")]
    if _deeper_than(value, DEEPEST):
        return {}, [*problems, Problem(str(file), f"is nested more than {DEEPEST} levels deep; does an alias contain itself?")]
    return _unshared(value), problems


def _reading_problem(file: Path, error: yaml.YAMLError) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(str(file), f"is not YAML: {error}")
    mark = error.problem_mark
    hint = ". Text that starts with @, `, % or * must stand in quotes: \"@sft\"" if "cannot start any token" in str(error.problem) else ""
    return Problem(f"{file}:{mark.line + 1}", f"is not YAML: {error.problem}, column {mark.column + 1}{hint}")


def _deeper_than(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_deeper_than(item, levels - 1) for item in inner)


def _unshared(value: Any) -> Any:
    """A copy without shared parts: changing one place of an alias must not change the others."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return [_unshared(item) for item in value] if isinstance(value, list) else value


def apply_overrides(
    overrides: Sequence[str], places: Mapping[str, dict[Any, Any]], top: dict[Any, Any], top_keys: Sequence[str],
) -> list[Problem]:
    """Set `key.path=value` in place: below one of `places` (model, a stage by its name), or a key of the recipe itself in `top`."""
    return [problem for text in overrides if (problem := _apply(text, places, top, top_keys)) is not None]


def _apply(text: str, places: Mapping[str, dict[Any, Any]], top: dict[Any, Any], top_keys: Sequence[str]) -> Problem | None:
    path, equals, written = text.partition("=")
    first, *rest = path.split(".")
    if not equals or not all((first, *rest)):
        return Problem(text, "an override is written key.path=value")
    try:
        value = written if written[:1] in ("@", "*", "`", "%") else yaml.safe_load(written)
    except yaml.YAMLError:
        return Problem(path, f"the value {written!r} is not YAML; put it in quotes, for YAML and for the shell")
    if not rest and first in top_keys:
        top[first] = value
        return None
    if not rest or first not in places:
        known = [*top_keys, *places]
        whole = f"; did you mean {first}.KEY=...?" if first in places else did_you_mean(first, known)
        return Problem(path, f"matches nothing in this recipe{whole or '; it starts with one of ' + ', '.join(known)}")
    owner = places[first]
    for part in rest[:-1]:
        owner[part] = {} if part not in owner or owner[part] is None else owner[part]
        if not isinstance(owner[part], dict):
            return Problem(path, f"cannot be set: {part} is {owner[part]!r} in the recipe, not a mapping")
        owner = owner[part]
    owner[rest[-1]] = value
    return None
