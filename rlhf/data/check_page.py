"""The page that `rlhf check` prints: counts, lengths, the shortest row with its mask in colour, and the problems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.data.check import CheckReport, Finding, Piece, Severity
from rlhf.data.tokens import Lengths, TokenReport

STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
BAR_WIDTH = 32
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that a terminal acts on, or that turn a line around."""


def render(report: CheckReport, console: Console) -> None:
    console.print(counts_table(report))
    for name, tokens in report.tokens.items():
        if tokens.rows:
            console.print(lengths_table(name, tokens))
            console.print(histogram(tokens.sequence_lengths))
    if report.preview is not None:
        console.print(Text.assemble(("\nshortest row: ", "bold"), ("prompt", "dim"), ", ", ("response", "green"), ", ",
                                    ("special token", "reverse")))
        for number, response in enumerate(report.preview.responses, 1):
            console.print(Text.assemble((f"[{number}] ", "bold"), marked(report.preview.prompt, "dim"), marked(response, "green")))
    if report.findings:
        console.print(Text("\nproblems", "bold"))
        console.print(findings_list(report.findings))
    console.print(Text("ready", "bold green") if report.ok else Text("not ready: see the errors above", "bold red"))


def counts_table(report: CheckReport) -> Table:
    table = Table(title="data", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for source, layout in report.layouts.items():
        table.add_row(Text(visible(source)), Text(f"layout {layout}, sha256 {report.files[source][:12]}"))
    table.add_row("rows", f"{report.rows:,}")
    table.add_row("records", f"{report.train:,} to train on, {report.holdout:,} held out")
    table.add_row("rejected", f"{report.rejected:,}")
    for repair, count in report.repaired.items():
        table.add_row(repair, f"{count:,} rows changed")
    return table


def lengths_table(name: str, tokens: TokenReport) -> Table:
    table = Table(title=f"{name}: {tokens.kept:,} rows, {tokens.packed_tokens:,} tokens ({tokens.padded_tokens:,} if padded)")
    for column in ("tokens", "p50", "p90", "p99", "longest"):
        table.add_column(column, justify="left" if column == "tokens" else "right")
    for what, lengths in (("prompt", tokens.prompt_lengths), ("response", tokens.response_lengths),
                          ("prompt + longest response", tokens.sequence_lengths)):
        table.add_row(what, f"{lengths.p50:,}", f"{lengths.p90:,}", f"{lengths.p99:,}", f"{lengths.longest:,}")
    return table


def histogram(lengths: Lengths) -> Text:
    """Rows by prompt + longest response, in powers of two."""
    first = next((index for index, count in enumerate(lengths.histogram) if count), 0)
    text = Text()
    for index, count in enumerate(lengths.histogram[first:], first):
        bar = "█" * round(BAR_WIDTH * count / max(lengths.histogram)) or ("▏" if count else "")
        text.append(f"{2**index:>8,}-{2**(index + 1) - 1:<8,} {bar} {count:,}\n")
    return text


def marked(row: Sequence[Piece], style: str) -> Text:
    text = Text()
    for piece in row:
        text.append(visible(piece.text).replace("\n", "↵\n"), f"{style} reverse" if piece.special else style)
    return text


def visible(text: str) -> str:
    """With escapes for the characters of ACTING: data must not move the cursor."""
    return ACTING.sub(lambda found: repr(found.group())[1:-1], text)


def findings_list(findings: Sequence[Finding]) -> Table:
    """One finding a paragraph, which fits on narrow terminals: kind, count and rows; what was found; what to do."""
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(overflow="fold")
    for finding in findings:
        where = f"{finding.count:,} ({row_numbers(finding.rows)})" if finding.rows else f"{finding.count:,}" if finding.count else ""
        grid.add_row(Text(finding.severity, STYLES[finding.severity]),
                     Text.assemble((finding.kind, "bold"), f"  {where}\n" if where else "\n", visible(finding.found), "\n",
                                   ("-> " + finding.advice, "dim"), "\n"))
    return grid


def row_numbers(rows: Sequence[str]) -> str:
    """`folder/pairs.jsonl:3`, `folder/pairs.jsonl:8` -> `pairs.jsonl: 3, 8`."""
    numbers: dict[str, list[str]] = {}
    for row in rows:
        source, _, number = row.rpartition(":")
        numbers.setdefault(visible(PurePath(source).name), []).append(number)
    return "; ".join(f"{name}: {', '.join(found)}" if name else ", ".join(found) for name, found in numbers.items())
