"""What every benchmark ends with: its bars, as a table for people and as one JSON object for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    bar: float
    sense: Literal["at least", "at most"] = "at least"

    @property
    def holds(self) -> bool:
        return self.value >= self.bar if self.sense == "at least" else self.value <= self.bar


def finish(bars: Sequence[Bar], *, as_json: bool, extra: dict[str, object]) -> int:
    """Show the bars; returns the exit code: 1 where one does not hold."""
    table = Table("bar", "measured", "wanted", "")
    for bar in bars:
        table.add_row(bar.name, f"{bar.value:.4g}", f"{bar.sense} {bar.bar:.4g}", "[green]holds" if bar.holds else "[red]does not hold")
    Console(stderr=True).print(table)
    if as_json:
        print(json.dumps({**extra, "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars]}))
    return 0 if all(bar.holds for bar in bars) else 1
