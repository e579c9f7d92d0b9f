"""What a report shows, computed from run folders: headline figures, tables, plots. `report.py` lays it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf.evaluate.annotation_content import agreement_tile
from rlhf.evaluate.plots import Bar, Series, bars, curves
from rlhf.evaluate.run_folder import Line, RunView, StageView
from rlhf.evaluate.tables import Table, Tile, clock, interval_text, number
from rlhf.step_log import TIMING

PANELS: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    "reward margin": ("rewards/margins",),
    "rewards": ("rewards/chosen", "rewards/rejected"),
    "share of pairs ranked right": ("rewards/accuracies",),
    "log-probs of responses": ("logps/chosen", "logps/rejected"),
    "learning rate": ("learning_rate",),
    "gradient norm": ("grad_norm",),
    "tokens a second": ("tokens_per_second",),
}
"""Plots of a training stage by title; every other figure of the log gets one of its own, under its name."""
NOT_PLOTTED = TIMING | {"step", "epoch", "tokens", "alarm", "text"} - {"tokens_per_second"}
ROLE_COLOURS = {"chosen": 2, "rejected": 1}


HEADLINES = (("answered well", "answered_well", "share"), ("pairs ranked right", "preferences", "accuracy"))
"""Label, and where in evaluation.json's entry of a model the interval stands."""


class Plot(NamedTuple):
    title: str
    image: str


# ---- training ----

def plots_of_stage(name: str, runs: Sequence[RunView]) -> list[Plot]:
    """The curves of a training stage, those of all runs that have it in one plot."""
    having = [(index, run.name, stage) for index, run in enumerate(runs) for stage in run.stages if stage.name == name and stage.steps]
    known = {metric for metrics in PANELS.values() for metric in metrics}
    others = sorted({metric for _, _, stage in having for line in stage.steps for metric, value in line.items()
                     if metric not in known | NOT_PLOTTED and isinstance(value, int | float)})
    plots = []
    for title, metrics in {**PANELS, **{metric: (metric,) for metric in others}}.items():
        series = [one for index, run, stage in having for metric in metrics
                  for one in series_of(stage, metric, run if len(runs) > 1 else "", index if len(runs) > 1 else None)]
        if series:
            plots.append(Plot(title, curves(title, series)))
    return plots


def series_of(stage: StageView, metric: str, run: str, colour: int | None) -> list[Series]:
    """Training line and held-out points of a metric. Several runs are told apart by colour, the roles of one run by theirs."""
    role = metric.rpartition("/")[2] if metric.rpartition("/")[2] in ROLE_COLOURS else ""
    shade = ROLE_COLOURS.get(role, 0) if colour is None else colour
    label = ": ".join(filter(None, (run, role))) or "training"
    found = []
    for prefix, lines in (("", stage.steps), ("eval_", stage.evaluations)):
        having = [line for line in lines if is_number(line, prefix + metric)]
        x, y = ([float(line[name]) for line in having] for name in ("step", prefix + metric))
        if having and not prefix:
            found.append(Series(label, x, y, colour=shade, dashed=bool(run) and role == "rejected"))
        elif having:
            held_out = f"{label}, held out" if label != "training" else "held out"
            found.append(Series(held_out, x, y, colour=shade if role or run else 1, points=True))
    return found


def is_number(line: Line, metric: str) -> bool:
    return metric in line and isinstance(line[metric], int | float)


def before_after(stage: StageView) -> Table | None:
    """Held-out figures before the first step and after the last."""
    before, after = stage.before, stage.after
    metrics = list(dict.fromkeys([*before, *after]))
    if not metrics:
        return None
    return Table(("held-out figure", "before", "after"), tuple(
        (metric, number(before[metric]) if metric in before else "–", number(after[metric]) if metric in after else "–")
        for metric in metrics))


def data_table(stage: StageView) -> Table | None:
    """Counts, rejects by reason, and where the rows came from."""
    rows: list[tuple[str, ...]] = []
    for key, value in stage.data.items():
        if not isinstance(value, dict):
            rows.append((key, number(value)))
        elif not key.endswith("_tokens"):
            rows += [(f"{key}: {name}", number(item)) for name, item in value.items()] or [(key, "none")]
    return Table(("data", ""), tuple(rows)) if rows else None


def token_table(stage: StageView) -> Table | None:
    """Lengths, cuts and tokens of both sides."""
    sides = {side: token_cells(stage.data[f"{side}_tokens"]) for side in ("train", "holdout")
             if isinstance(stage.data.get(f"{side}_tokens"), dict)}
    return Table(("tokens", *sides), tuple(rows_of(list(sides.values())))) if sides else None


def token_cells(report: Mapping[str, Any]) -> dict[str, str]:
    """One cell a count, one for each distribution of lengths: its median, 90th and 99th percentile and maximum."""
    cells: dict[str, str] = {}
    for key, value in report.items():
        label = key.replace("_", " ")
        if key.endswith("_lengths") and isinstance(value, dict):
            cells[f"{label}, 50/90/99/100 %"] = "/".join(number(value.get(name, "–")) for name in ("p50", "p90", "p99", "longest"))
        elif isinstance(value, int | float):
            cells[label] = number(value)
    return cells


# ---- evaluation ----

class ModelRow(NamedTuple):
    """Figures of one model of one run, as evaluation.json has them."""

    label: str
    colour: int
    figures: Mapping[str, Any]


def model_rows(runs: Sequence[RunView]) -> list[ModelRow]:
    """Of one run, a colour a model; of several, a colour a run."""
    return [ModelRow(f"{run.name} / {model['name']}" if len(runs) > 1 else str(model["name"]), index if len(runs) > 1 else place, model)
            for index, run in enumerate(runs) for stage in run.evaluations for place, model in enumerate(stage.evaluation["models"])]


def evaluation_plots(rows: Sequence[ModelRow]) -> list[Plot]:
    return [plot for plot in (
        bar_plot("answered well, held-out prompts", rows, lambda row: part(row, "answered_well", "share"), percent=True),
        bar_plot("pairs ranked right by implicit reward against the first model", rows, lambda row: part(row, "preferences", "accuracy"),
                 percent=True, line_at=0.5),
        bar_plot("pairs whose chosen response has the higher log-prob", rows, lambda row: part(row, "preferences", "logps_accuracy"),
                 percent=True, line_at=0.5)) if plot is not None]


def part(row: ModelRow, group: str, figure: str) -> Mapping[str, float] | None:
    """An interval of evaluation.json, or None where it was not measured."""
    found = row.figures[group]
    interval: Mapping[str, float] | None = None if found is None else found[figure]
    return interval


def bar_plot(title: str, rows: Sequence[ModelRow], figure: Callable[[ModelRow], Mapping[str, float] | None], *, percent: bool,
             line_at: float | None = None) -> Plot | None:
    shown = [Bar(row.label, interval["mean"], interval["low"], interval["high"], row.colour)
             for row in rows if (interval := figure(row)) is not None]
    return Plot(title, bars(title, shown, percent=percent, line_at=line_at)) if shown else None


def evaluation_table(rows: Sequence[ModelRow]) -> Table:
    """Every measured figure with its 95 % interval."""
    columns: dict[str, Callable[[ModelRow], str]] = {
        "answered well": lambda row: interval_text(part(row, "answered_well", "share"), percent=True),
        "gain": lambda row: interval_text(part(row, "answered_well", "gain"), percent=True),
        "implicit-reward accuracy": lambda row: interval_text(part(row, "preferences", "accuracy"), percent=True),
        "margin, nats": lambda row: interval_text(part(row, "preferences", "margin"), percent=False),
        "log-prob accuracy": lambda row: interval_text(part(row, "preferences", "logps_accuracy"), percent=True),
        "prompts, pairs": lambda row: ", ".join(number(row.figures[group][unit]) if row.figures[group] else "–" for group, unit in
                                                (("answered_well", "prompts"), ("preferences", "pairs"))),
        "no end": lambda row: f"{number(row.figures['unfinished'])} of {number(row.figures['generated'])}",
    }
    cells = {head: [cell(row) for row in rows] for head, cell in columns.items()}
    measured = {head: column for head, column in cells.items() if any(text != "–" for text in column)}
    return Table(("model", *measured), tuple(zip((row.label for row in rows), *measured.values(), strict=True)))


def tiles(run: RunView) -> list[Tile]:
    """The few figures that a reader wants first."""
    found = [agreement_tile(stage) for stage in run.stages if stage.annotation]
    for stage in run.evaluations:
        for model in stage.evaluation["models"]:
            row = ModelRow(str(model["name"]), 0, model)
            for label, group, figure in HEADLINES:
                if (interval := part(row, group, figure)) is not None:
                    mean, low, high = (f"{interval[key] * 100:.1f}" for key in ("mean", "low", "high"))
                    found.append(Tile(f"{row.label}: {label}", f"{mean} %", f"95 %: [{low}, {high}]"))
    finished = sum(stage.status == "finished" for stage in run.stages)
    steps = sum(len(stage.steps) for stage in run.stages)
    alarms = sum(len(stage.alarms) for stage in run.stages)
    return [*found, Tile("time", clock(run.seconds), f"{finished} of {len(run.stages)} stages finished"),
            Tile("optimizer steps", number(steps), "no alarm" if not alarms else f"{alarms} alarm{'s' if alarms > 1 else ''}")]


# ---- several runs ----

def comparison(runs: Sequence[RunView]) -> Table:
    """Settings that differ and figures that came out, a column a run."""
    settings, figures = [settings_of(run.recipe) for run in runs], [outcomes(run) for run in runs]
    rows = [row for row in rows_of(settings) if len(set(row[1:])) > 1] + rows_of(figures)
    return Table(("setting or figure", *(run.name for run in runs)), tuple(rows))


def rows_of(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return [(key, *(column.get(key, "–") for column in columns)) for key in keys]


def settings_of(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Every setting by the path that an override names it by: `dpo.optim.learning_rate`."""
    found = {path: text for key, value in recipe.items() if key not in ("stages", "name", "output") for path, text in flat(value, key)}
    for stage in recipe.get("stages", ()):
        for kind, settings in stage.items():
            found |= dict(flat(settings, settings.get("name", kind)))
    return found


def flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield path, number(value)
        return
    for key, item in value.items():
        yield from flat(item, f"{path}.{key}")


def outcomes(run: RunView) -> dict[str, str]:
    """The figures of a run by name."""
    found: dict[str, str] = {}
    for stage in run.stages:
        found |= {f"{stage.name}: held-out {metric}": number(value) for metric, value in stage.after.items()}
        if stage.seconds is not None and stage.status == "finished":
            found[f"{stage.name}: time"] = clock(stage.seconds)
        for model in stage.evaluation["models"] if stage.evaluation else ():
            row = ModelRow(str(model["name"]), 0, model)
            for label, group, figure in HEADLINES:
                if (interval := part(row, group, figure)) is not None:
                    found[f"{stage.name}: {row.label} {label}"] = interval_text(interval, percent=True)
    return found
