"""Which layout a file has: from the columns of its first rows, by one table, and never by a guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rlhf.data import comparisons, layouts
from rlhf.data.files import Row
from rlhf.errors import ConfigError, DataError, Problem

SAMPLE_ROWS = 64
"""Rows looked at; columns are collected over all of them, so that one odd row does not decide."""


def _any_shape(_rows: Sequence[Row]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    read: Callable[[Row], layouts.Drafts]
    signatures: tuple[frozenset[str], ...]
    """Sets of columns; a file that has all of one may be of this layout."""
    judged: bool = True
    """Whether responses are compared. Such a layout is preferred: a demonstration can be taken from it, but not the other way."""
    fits: Callable[[Sequence[Row]], bool] = _any_shape
    """What else the rows must look like."""


def _columns(*signatures: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(signature.split()) for signature in signatures)


def _is_not_transcript(rows: Sequence[Row]) -> bool:
    return not layouts.is_transcript(rows)


LAYOUTS: tuple[Layout, ...] = (
    Layout("records", comparisons.read_records, fits=comparisons.is_records, signatures=_columns(
        "schema prompt response", "schema prompt chosen rejected", "schema prompt responses ranks")),
    Layout("preference", layouts.read_preference, _columns("prompt chosen rejected"), fits=_is_not_transcript),
    Layout("implicit", layouts.read_implicit, _columns("chosen rejected"), fits=_is_not_transcript),
    Layout("transcript", layouts.read_transcript, _columns("chosen rejected", "prompt chosen rejected"), fits=layouts.is_transcript),
    Layout("ranked", comparisons.read_ranked, _columns("prompt responses ranks")),
    Layout("scored", comparisons.read_scored, _columns("prompt responses scores")),
    Layout("ultrafeedback_overall", comparisons.read_ultrafeedback_overall, _columns("instruction completions"),
           fits=partial(comparisons.has_score, key="overall_score")),
    Layout("ultrafeedback_fine", comparisons.read_ultrafeedback_fine, _columns("instruction completions"),
           fits=partial(comparisons.has_score, key="fine-grained_score")),
    Layout("llmbar", comparisons.read_llmbar, _columns("input output_1 output_2 label")),
    Layout("pandalm", comparisons.read_pandalm, _columns("instruction input response1 response2 annotator1 annotator2 annotator3")),
    Layout("squality", comparisons.read_squality, _columns("question_text responses reviews")),
    Layout("oasst", comparisons.read_oasst, _columns("message_tree_id prompt")),
    Layout("alpaca", layouts.read_alpaca, _columns("instruction chosen rejected")),
    Layout("sharegpt", layouts.read_sharegpt, _columns("conversations chosen rejected")),
    Layout("alpaca", layouts.read_alpaca, _columns("instruction output"), judged=False),
    Layout("sharegpt", layouts.read_sharegpt, _columns("conversations"), judged=False),
    Layout("messages", layouts.read_messages, _columns("messages"), judged=False),
    Layout("completion", layouts.read_completion, _columns("prompt response", "prompt completion"), judged=False,
           fits=layouts.is_completion),
)
NAMES = tuple(dict.fromkeys(layout.name for layout in LAYOUTS))


def require_layout_name(name: str) -> None:
    if name not in ("auto", *NAMES):
        raise ConfigError("unknown layout", [Problem("data.format", f"{name!r} is none of auto, {', '.join(NAMES)}")])


def layout_named(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


def detect(source: str, rows: Sequence[Row]) -> Layout:
    """The layout of the file whose first readable rows these are; DataError when none fits, or more than one."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    try:
        fitting = [(layout, signature) for layout in LAYOUTS for signature in layout.signatures
                   if signature <= set(columns) and layout.fits(rows)]
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    if not fitting:
        raise DataError(f"{source}: no layout has these columns: {layouts.listed(columns)}. {_nearest(columns)}"
                        "Rename the columns, or see the table in docs/data.md")
    if any(layout.judged for layout, _ in fitting):
        fitting = [(layout, signature) for layout, signature in fitting if layout.judged]
    widest = [(layout, signature) for layout, signature in fitting if not any(signature < other for _, other in fitting)]
    if len(widest) > 1:
        choices = "; ".join(f"{layout.name} ({', '.join(sorted(signature))})" for layout, signature in widest)
        raise DataError(f"{source}: the columns {layouts.listed(columns)} can be read in more than one way: {choices}. "
                        "Say which with data.format")
    return widest[0][0]


def _nearest(columns: Sequence[str]) -> str:
    """The layout that lacks least, and of equals the one that uses most columns; other well-known names of a column count as it."""
    def lacks(signature: frozenset[str]) -> tuple[int, int]:
        return sum(layouts.other_name(name, columns) is None for name in signature - set(columns)), -len(signature)

    layout, signature = min(((layout, signature) for layout in LAYOUTS for signature in layout.signatures), key=lambda pair: lacks(pair[1]))
    lacking = sorted(signature - set(columns))
    if not lacking:
        return f"The columns are those of {layout.name}, but the values are not. "
    if lacks(signature)[0] == len(signature):
        return ""
    others = [(name, layouts.other_name(name, columns)) for name in lacking]
    needed = ", ".join(f"{name!r} (did you mean {other!r}?)" if other else repr(name) for name, other in others)
    return f"The nearest is {layout.name}, which needs {needed}. "
