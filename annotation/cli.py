"""The command `annotation`: a server with its annotators, tasks pushed, verdicts pulled, agreement, export."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from annotation import cli_agreement, cli_export, cli_push, cli_server, cli_verdicts
from rlhf.commands import EXIT_CODES, Program

app = typer.Typer(name="annotation", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
                  help="Human rankings: serve Argilla, push tasks, pull verdicts, measure agreement, export records.", epilog=EXIT_CODES)
for commands in (cli_server, cli_push, cli_verdicts, cli_agreement, cli_export):
    commands.add_to(app)

PROGRAM = Program("annotation", app, interrupted="what was acknowledged is stored; the same command continues")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
