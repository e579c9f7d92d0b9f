"""Figures as a report writes them, and the tables and tiles that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Tile(NamedTuple):
    label: str
    value: str
    detail: str


class Table(NamedTuple):
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: object) -> str:
    """Four digits that count for a fraction, all of a whole number; texts as they are."""
    match value:
        case bool() | None | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
        case _:
            return str(value)


def interval_text(interval: Mapping[str, float] | None, *, percent: bool) -> str:
    """`84.3 % [80.1, 88.0]`."""
    if interval is None:
        return "–"
    scale, digits, unit = (100, 1, " %") if percent else (1, 2, "")
    mean, low, high = (f"{interval[key] * scale:.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean}{unit} [{low}, {high}]"


def clock(seconds: float) -> str:
    """42 s, 3 min 5 s, 2 h 14 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
