"""A run folder as it is found: finished, in progress, interrupted or damaged. Nothing in it is changed.

What is missing or unreadable becomes a note, so that a report can be made at any moment of a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import DataError
from rlhf.step_log import first_evaluation, read_log, step_lines

REJECTS_SHOWN = 8

Line = dict[str, float | int | str]


@dataclass(frozen=True, kw_only=True)
class StageView:
    name: str
    kind: str
    """"?" where neither recipe nor stage.json tells."""
    status: str
    """finished, running, not started, or unreadable."""
    seconds: float | None
    results: dict[str, Any]
    inputs: dict[str, Any]
    log: tuple[Line, ...]
    data: dict[str, Any]
    evaluation: dict[str, Any]
    """Empty, or evaluation.json with its `models` and `samples`."""
    annotation: dict[str, Any]
    """Empty, or annotation.json, as `annotation_content` describes it."""
    rejects: tuple[dict[str, str], ...]
    """The first few rows that were not used."""
    notes: tuple[str, ...]

    @property
    def steps(self) -> list[Line]:
        return step_lines(list(self.log))

    @property
    def evaluations(self) -> list[Line]:
        """Lines of evaluations on held-out rows, in the order of steps."""
        return [line for line in self.log if any(name.startswith("eval_") for name in line)]

    @property
    def alarms(self) -> list[Line]:
        return [line for line in self.log if "alarm" in line]

    @property
    def before(self) -> Line:
        """Held-out figures before the first step."""
        return held_out_figures(first_evaluation(list(self.log)))

    @property
    def after(self) -> Line:
        """Held-out figures of the model that was kept; of the latest evaluation while the stage has not ended."""
        lines = [line for line in self.evaluations if line["step"] != 0]
        kept = [line for line in lines if "kept_step" in self.results and line["step"] == self.results["kept_step"]]
        return held_out_figures((kept or lines)[-1]) if lines else {}


@dataclass(frozen=True, kw_only=True)
class RunView:
    folder: Path
    name: str
    """What tells this run from the others of a report."""
    recipe_text: str
    recipe: dict[str, Any]
    environment: dict[str, Any]
    stages: tuple[StageView, ...]
    notes: tuple[str, ...]

    def renamed(self, name: str) -> RunView:
        return replace(self, name=name)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds or 0.0 for stage in self.stages)

    @property
    def evaluations(self) -> list[StageView]:
        """Stages that hold an evaluation of policies."""
        return [stage for stage in self.stages if stage.evaluation]


def held_out_figures(line: Line) -> Line:
    """`eval_loss` -> `loss`; times and counts of the evaluation itself are left out."""
    figures = {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}
    return {name: value for name, value in figures.items() if name not in ("runtime", "samples_per_second", "steps_per_second")}


def read_run(folder: Path) -> RunView:
    """Raises DataError only where there is no run folder at all."""
    if not folder.is_dir() or not ((folder / "recipe.yaml").is_file() or any(folder.glob("*/stage.json"))):
        raise DataError(f"{folder} is no run folder: it has neither recipe.yaml nor a stage. Name the folder that `rlhf run` printed.")
    notes: list[str] = []
    recipe_text, recipe = _read_recipe(folder / "recipe.yaml", notes)
    environment = _read_mapping(folder / "environment.json", notes, required=True)
    kinds = _planned_stages(recipe)
    for path in sorted(folder.glob("*/stage.json")):
        kinds.setdefault(path.parent.name, "?")
    return RunView(folder=folder, name=folder.resolve().name, recipe_text=recipe_text, recipe=recipe, environment=environment,
                   stages=tuple(_read_stage(folder / name, kind) for name, kind in kinds.items()), notes=tuple(notes))


def _read_recipe(path: Path, notes: list[str]) -> tuple[str, dict[str, Any]]:
    if not path.is_file():
        notes.append("recipe.yaml is missing")
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError as error:
        notes.append(f"recipe.yaml cannot be read: {error}")
        return text, {}
    if not isinstance(recipe, dict):
        notes.append("recipe.yaml does not hold a recipe")
        return text, {}
    return text, recipe


def _planned_stages(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Name -> kind, in the order of the recipe."""
    stages = recipe["stages"] if "stages" in recipe and isinstance(recipe["stages"], list) else []
    planned = {}
    for stage in stages:
        for kind, settings in stage.items() if isinstance(stage, dict) else ():
            named = isinstance(settings, dict) and "name" in settings
            planned[str(settings["name"]) if named else str(kind)] = str(kind)
    return planned


def _read_stage(folder: Path, kind: str) -> StageView:
    notes: list[str] = []
    record = _read_mapping(folder / "stage.json", notes)
    status = str(record["status"]) if "status" in record else ("unreadable" if notes else "not started")
    log = read_log(folder / "train_log.jsonl")
    if log.torn:
        lines = "1 line" if log.torn == 1 else f"{log.torn} lines"
        notes.append(f"{lines} of train_log.jsonl could not be read (torn by a kill?); the rest is shown")
    if status == "running":
        notes.append(f"in progress or interrupted; {len(step_lines(log.lines))} steps so far")
    elif status == "not started":
        notes.append("not started yet")
    results, inputs = ({**record[key]} if isinstance(record.get(key), dict) else {} for key in ("results", "inputs"))
    seconds = record.get("seconds")
    return StageView(
        name=folder.name, kind=str(record.get("kind", kind)), status=status, results=results, inputs=inputs, log=tuple(log.lines),
        seconds=float(seconds) if isinstance(seconds, int | float) else None, data=_read_mapping(folder / "data.json", notes),
        evaluation=_read_evaluation(folder / "evaluation.json", notes), annotation=_read_annotation(folder / "annotation.json", notes),
        rejects=_first_rejects(folder / "rejects.jsonl", notes),
        notes=tuple(notes))


def _read_evaluation(path: Path, notes: list[str]) -> dict[str, Any]:
    content = _read_mapping(path, notes)
    if content and not all(isinstance(content.get(key), list) for key in ("models", "samples")):
        notes.append("evaluation.json lacks its list of models or samples")
        return {}
    return content


def _read_annotation(path: Path, notes: list[str]) -> dict[str, Any]:
    content = _read_mapping(path, notes)
    missing = {"overall", "annotators", "known", "outside", "page"} - content.keys() if content else set()
    if missing:
        notes.append(f"annotation.json lacks {', '.join(sorted(missing))}")
        return {}
    return content


def _first_rejects(path: Path, notes: list[str]) -> tuple[dict[str, str], ...]:
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8") as file:
        lines = list(islice(file, REJECTS_SHOWN))
    try:
        return tuple({key: str(row[key]) for key in ("where", "reason", "detail")} for row in map(json.loads, lines))
    except (ValueError, KeyError, TypeError) as error:
        notes.append(f"rejects.jsonl cannot be read: {error!r}")
        return ()


def _read_mapping(path: Path, notes: list[str], *, required: bool = False) -> dict[str, Any]:
    """A JSON object; empty, with a note, where it is unreadable (or absent though `required`)."""
    if not path.is_file():
        if required:
            notes.append(f"{path.name} is missing")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} does not hold a JSON object")
        return {}
    return content
