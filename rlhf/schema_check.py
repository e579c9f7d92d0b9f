"""Hold what was read from YAML against a schema of `rlhf.config`: every wrong field at once, and the conflicts among the right ones."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args, get_origin, runtime_checkable

from pydantic import TypeAdapter, ValidationError

from rlhf.errors import Problem
from rlhf.key_help import alternatives, bare, choices, describe, field_paths, hints_of, key_of, nested

Schema = TypeVar("Schema")
FieldPath = tuple[str, ...]


@runtime_checkable
class Checked(Protocol):
    """A config class whose values may contradict each other."""

    def conflicts(self) -> Iterator[Problem]: ...


class Fault(NamedTuple):
    """One field that cannot be used. `hint` is its type, or None where the schema has no such field."""

    path: FieldPath
    what: str
    hint: Any


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    return TypeAdapter(schema)    # building one takes longer than checking a whole recipe


def _validated(schema: type, raw: Mapping[Any, Any]) -> Any:
    return _adapter(schema).validate_python(raw)


def check_schema(schema: type[Schema], raw: object, where: str = "") -> tuple[Schema | None, list[Problem]]:
    """The config, or None with every problem by path; `where` is put in front of the paths."""
    if not isinstance(raw, Mapping):
        return None, [Problem(where, f"must be a mapping of keys, got {_short(raw)}")]
    filled = _with_sections(schema, raw)
    faults = list(_faults(schema, filled))
    if not faults:
        config: Schema = _validated(schema, filled)
        return config, list(_conflicts(config, where))
    found = [Problem(join(where, *fault.path), fault.what) for fault in faults]
    return None, found + _conflicts_among_the_rest(schema, filled, faults, where)


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def did_you_mean(word: str, known: list[str]) -> str:
    """'; did you mean beta?', or nothing when no known word is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _with_sections(schema: type, raw: Mapping[Any, Any]) -> dict[Any, Any]:
    """A copy in which required sections that are absent or empty are {}: their own missing keys are then named one by one."""
    filled = dict(raw)
    for name, hint in hints_of(schema).items():
        section = nested(hint)
        if section is not None and (name not in filled or filled[name] is None):
            filled[name] = {}
        if section is not None and isinstance(filled[name], Mapping):
            filled[name] = _with_sections(section, filled[name])
    return filled


def _faults(schema: type, raw: Mapping[Any, Any]) -> Iterator[Fault]:
    """What pydantic refuses, one fault a field, and booleans that it would take for numbers or the reverse."""
    seen: set[FieldPath] = set()
    for fault in (*_misread(schema, raw, ()), *_refused(schema, raw)):
        if fault.path not in seen:
            seen.add(fault.path)
            yield fault


def _refused(schema: type, raw: Mapping[Any, Any]) -> Iterator[Fault]:
    try:
        _validated(schema, raw)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False):
            path, owner, hint = _locate(schema, item["loc"])
            if hint is None:
                yield Fault(path, _unknown_key(schema, owner, path), None)
            elif item["type"] == "missing":
                yield Fault(path, f"is missing: {key_of(hint).text} ({describe(hint)})", hint)
            else:
                yield Fault(path, wrong_value(hint, _value_at(raw, path)), hint)


def _locate(schema: type, loc: tuple[int | str, ...]) -> tuple[FieldPath, type, Any]:
    """Path, class and type of the field that pydantic complains about; members of unions and items of lists belong to their field."""
    owner: type = schema
    path: FieldPath = ()
    for depth, part in enumerate(loc, start=1):
        path, hints = (*path, str(part)), hints_of(owner)
        if part not in hints:
            return path, owner, None
        section = nested(hints[str(part)])
        if section is None or depth == len(loc):
            return path, owner, hints[str(part)]
        owner = section
    return path, owner, None


def _unknown_key(schema: type, owner: type, path: FieldPath) -> str:
    known = list(hints_of(owner))
    elsewhere = [full for full in field_paths(schema) if full.split(".")[-1] == path[-1]]
    hint = did_you_mean(path[-1], known) or (f"; did you mean {elsewhere[0]}?" if elsewhere else f"; known keys: {', '.join(known)}")
    return f"is no key of a recipe{hint}"


def wrong_value(hint: Any, value: object) -> str:
    allowed = choices(hint)
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, list | Mapping) else []
    strange = [word for word in words if isinstance(word, str) and word not in allowed]
    suggestion = did_you_mean(strange[0], allowed) if strange and allowed else ""
    return f"must be {describe(hint)}, got {_short(value)}{suggestion}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _value_at(raw: Mapping[Any, Any], path: FieldPath) -> object:
    value: Any = raw
    for part in path:
        value = value[part]
    return value


def _misread(schema: type, raw: Mapping[Any, Any], path: FieldPath) -> Iterator[Fault]:
    for name, hint in hints_of(schema).items():
        section = nested(hint)
        if name not in raw:
            continue
        if section is None:
            if _confuses_boolean(hint, raw[name]):
                yield Fault((*path, name), wrong_value(hint, raw[name]), hint)
        elif isinstance(raw[name], Mapping):
            yield from _misread(section, raw[name], (*path, name))


def _confuses_boolean(hint: Any, value: object) -> bool:
    """True for `per_step: true` and `dropout: 1`; pydantic would read 1 and true."""
    kinds = alternatives(hint)
    if isinstance(value, Mapping):
        inner = [get_args(kind)[1] for kind in kinds if get_origin(kind) is dict]
        return any(_confuses_boolean(item, entry) for item in inner for entry in value.values())
    if isinstance(value, bool):
        return bool not in kinds
    return bool in kinds and isinstance(value, int | float | str) and not any(kind in kinds for kind in (int, float, str))


def _conflicts(config: Any, where: str) -> Iterator[Problem]:
    """Of a config and of every config inside it."""
    if isinstance(config, Checked):
        for problem in config.conflicts():
            yield Problem(join(where, problem.where), problem.what)
    for name, value in vars(config).items():
        if is_dataclass(value):
            yield from _conflicts(value, join(where, name))


def _conflicts_among_the_rest(schema: type, raw: Mapping[Any, Any], faults: list[Fault], where: str) -> list[Problem]:
    """Conflicts that stand whatever value the faulty fields will be given: found with each of several stand-ins, word for word."""
    rounds = max(len(_stand_ins(fault.hint)) for fault in faults)
    found = [list(_conflicts(_validated(schema, _mended(schema, raw, number)), where)) for number in range(rounds)]
    return [problem for problem in found[0] if all(problem in others for others in found[1:])]


def _mended(schema: type, raw: Mapping[Any, Any], number: int) -> dict[Any, Any]:
    """A copy with a stand-in in the place of each faulty field, and without unknown keys."""
    mended = _with_sections(schema, copy.deepcopy(dict(raw)))
    for fault in list(_faults(schema, mended)):
        owner = _value_at(mended, fault.path[:-1])
        assert isinstance(owner, dict)
        if fault.hint is None:
            del owner[next(key for key in owner if str(key) == fault.path[-1])]
        else:
            values = _stand_ins(fault.hint)
            owner[fault.path[-1]] = values[number % len(values)]
    faults_left = any(_faults(schema, mended))
    return _mended(schema, mended, number) if faults_left else mended


def _stand_ins(hint: Any) -> tuple[Any, ...]:
    """Values of a type that lie far apart."""
    if hint is None:
        return ({},)
    section = nested(hint)
    return ({},) if section is not None else tuple(value for kind in alternatives(hint) for value in _values_of(bare(kind)))


def _values_of(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) is tuple:
        return ([], list(_stand_ins(get_args(kind)[0])[:1]))
    if get_origin(kind) is dict:
        key, value = get_args(kind)
        return ({}, {_stand_ins(key)[0]: _stand_ins(value)[0]})
    return {bool: (False, True), int: (1, 10**9), float: (1e-9, 0.4, 1e9), str: ("x", "x:y"), type(None): (None,)}[kind]
