"""One self-contained HTML page about a run, or several runs side by side. It can be made at any moment of a run, and again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table as TerminalTable

from rlhf.errors import DataError
from rlhf.evaluate.annotation_content import annotation_sections, annotator_table
from rlhf.evaluate.report_content import (
    Plot,
    before_after,
    comparison,
    data_table,
    evaluation_plots,
    evaluation_table,
    model_rows,
    plots_of_stage,
    tiles,
    token_table,
)
from rlhf.evaluate.run_folder import RunView, StageView, read_run
from rlhf.evaluate.tables import Table, clock
from rlhf.whole_files import replace_file


class StagePart(NamedTuple):
    run: str
    stage: StageView
    layout: str
    before_after: Table | None
    data: list[Table]


class StageSection(NamedTuple):
    """The curves of a stage over all runs, and what each run says about it."""

    name: str
    plots: list[Plot]
    parts: list[StagePart]

    @property
    def worth_showing(self) -> bool:
        """An evaluation has its own section; a stage that only made files has none."""
        return bool(self.plots) or any(part.stage.notes or part.data for part in self.parts)


def build_report(runs: Sequence[Path], output: Path) -> Path:
    """Write the page about these run folders to `output`; every text of a run is escaped, every picture is inside. Returns `output`."""
    if not runs:
        raise DataError("a report needs at least one run folder")
    views = told_apart([read_run(folder) for folder in runs])
    replace_file(output, page(views, output))
    return output


def page(runs: Sequence[RunView], output: Path) -> str:
    """`output` is where the page will lie: what it links to is named from there."""
    # What a model wrote must never become markup: everything is escaped, and the page's policy allows no script at all.
    environment = Environment(loader=PackageLoader("rlhf.evaluate"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)
    rows = model_rows(runs)
    return environment.get_template("report.html").render(
        title=" · ".join(run.name for run in runs), runs=runs, clock=clock, tiles={run.name: tiles(run) for run in runs},
        comparison=comparison(runs) if len(runs) > 1 else None,
        evaluation=evaluation_table(rows) if rows else None, evaluation_plots=evaluation_plots(rows),
        samples=[(run.name if len(runs) > 1 else "", stage.evaluation["samples"]) for run in runs for stage in run.evaluations],
        annotations=annotation_sections(runs, output), sections=stage_sections(runs),
        alarms=[(run.name, stage.name, line) for run in runs for stage in run.stages for line in stage.alarms],
        environments=[(run.name, environment_rows(run.environment)) for run in runs])


def told_apart(runs: Sequence[RunView]) -> list[RunView]:
    """Runs whose folders have the same name get their parents' names in front."""
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else run.renamed(f"{run.folder.resolve().parent.name}/{run.name}") for run in runs]


def stage_sections(runs: Sequence[RunView]) -> list[StageSection]:
    names = dict.fromkeys(stage.name for run in runs for stage in run.stages)
    return [StageSection(name, plots_of_stage(name, runs), [stage_part(run, stage) for run in runs for stage in run.stages
                                                           if stage.name == name]) for name in names]


def stage_part(run: RunView, stage: StageView) -> StagePart:
    return StagePart(run=run.name, stage=stage,
                     layout=": ".join(str(stage.results[key]) for key in ("layout", "layout_reason") if key in stage.results),
                     before_after=before_after(stage),
                     data=[table for table in (data_table(stage), token_table(stage)) if table is not None])


def environment_rows(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """One row a fact; packages one by one."""
    rows = []
    for key, value in environment.items():
        match value:
            case dict():
                rows += [(str(name), str(item)) for name, item in value.items()]
            case list():
                rows.append((key, ", ".join(map(str, value))))
            case _:
                rows.append((key, str(value)))
    return rows


def summary_tables(run: RunView) -> list[TerminalTable]:
    """For the terminal: how good annotators are, where a stage asked any; what the models reached, a column a model, or else how far the
    stages are."""
    tables = [terminal_table(f"{stage.name}: annotators, with 95 % intervals", annotator_table(stage.annotation, counts=False))
              for stage in run.stages if stage.annotation]
    rows = model_rows([run])
    if rows:
        return [*tables, terminal_table(f"{run.name}, with 95 % intervals", turned(evaluation_table(rows)))]
    stages = Table(("stage", "status", "steps", "time"), tuple(
        (stage.name, stage.status, str(len(stage.steps)), clock(stage.seconds or 0.0)) for stage in run.stages))
    return [*tables, terminal_table(run.name, stages)]


def terminal_table(title: str, content: Table) -> TerminalTable:
    table = TerminalTable(title=title, title_justify="left")
    for place, head in enumerate(content.head):
        table.add_column(head, justify="left" if place == 0 else "right")
    for row in content.rows:
        table.add_row(*row)
    return table


def turned(table: Table) -> Table:
    """Rows as columns."""
    head, *rows = zip(table.head, *table.rows, strict=True)
    return Table(tuple(head), tuple(rows))
