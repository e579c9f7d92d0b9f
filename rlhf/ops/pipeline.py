"""Run the stages of a recipe: skip what is finished and unchanged, resume what was interrupted, refuse what would mix two runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf import dpo, sft
from rlhf.config import DpoConfig, EvaluateConfig, PrepareConfig, Recipe, SftConfig, StageConfig, StageKind
from rlhf.data.files import expand
from rlhf.distributed.state import checkpoints_in, differing_inputs
from rlhf.errors import CheckpointError, ConfigError
from rlhf.evaluate.model_card import write_model_card
from rlhf.evaluate.report import build_report, summary_tables
from rlhf.evaluate.run_folder import read_run
from rlhf.fitting import FitResult, Site
from rlhf.ops.environment import environment
from rlhf.ops.evaluate_stage import run_evaluate
from rlhf.ops.prepare_stage import run_prepare
from rlhf.ops.requirements import missing_requirements
from rlhf.ops.run_lock import only_process_in
from rlhf.ops.stage_record import NAME, StageRecord, path_hash, read_record
from rlhf.recipe import resolve, resolve_data, to_yaml
from rlhf.recipe_links import links_among
from rlhf.whole_files import replace_file

TRAINING = (SftConfig, DpoConfig)


@dataclass(frozen=True)
class Pipeline:
    """A recipe with its run folder."""

    recipe: Recipe
    console: Console

    @property
    def run(self) -> Path:
        return Path(self.recipe.output)

    def folder(self, stage: StageConfig) -> Path:
        return self.run / stage.name

    def local(self, text: str) -> str:
        """@STAGE/FILE, a path relative to the recipe, or a hub name -> what loaders take."""
        return str(resolve(self.recipe, text))

    def start_of(self, stage: SftConfig | DpoConfig) -> str | None:
        """What a training stage starts from: `start`, else for DPO the training stage before it, else None (model.name)."""
        if stage.start is not None:
            return self.local(stage.start)
        if isinstance(stage, SftConfig):
            return None
        before = [config for _, config in self.recipe.stages[: self._position(stage)] if isinstance(config, TRAINING)]
        return str(self.folder(before[-1]) / "model") if before else None

    def _position(self, stage: StageConfig) -> int:
        return next(number for number, (_, config) in enumerate(self.recipe.stages) if config is stage)

    def model_folder(self, name: str) -> str:
        """`base`, the name of a stage, a folder or a hub name -> what can be loaded."""
        if name == "base":
            return self.local(self.recipe.model.name)
        stages = {config.name: config for _, config in self.recipe.stages if isinstance(config, TRAINING)}
        return str(self.folder(stages[name]) / "model") if name in stages else self.local(name)

    def inputs_of(self, kind: StageKind, stage: StageConfig) -> dict[str, str]:
        """Everything the result of the stage depends on, by name."""
        inputs = {"configuration": json.dumps(asdict(stage), sort_keys=True), "seed": str(self.recipe.seed),
                  "version": version("prefloop")}
        if kind != "prepare":
            inputs["model"] = json.dumps(asdict(self.recipe.model), sort_keys=True)
        for label, text in self._sources(stage):
            inputs[label] = self._source_hash(text)
        return inputs

    def _sources(self, stage: StageConfig) -> list[tuple[str, str]]:
        """Files (of a glob, each), folders and names that the stage reads. Raises DataError where a file is not there."""
        if isinstance(stage, PrepareConfig):
            scripts = [(f"script {file.name}", str(file)) for file in sorted(Path(self.local(stage.script)).parent.glob("*.py"))]
            return scripts + [(f"argument {key}", self.local(str(stage.args[key]))) for key in links_among(stage.args)]
        placed = resolve_data(self.recipe, stage.data)
        sources = [(f"data {self._in_any_place(source.name)}", str(source.path or source.name))
                   for group in (placed.train, placed.holdout) if group is not None for source in expand(group)]
        if isinstance(stage, EvaluateConfig):
            sources += [(f"model {name}", self.model_folder(name)) for name in stage.models]
            if stage.scorer is not None:
                sources.append(("scorer", self.placed_scorer(stage.scorer).rpartition(":")[0]))
        else:
            sources.append(("start", self.start_of(stage) or self.local(self.recipe.model.name)))
        return sources

    def placed_scorer(self, scorer: str) -> str:
        """FILE.py:FUNCTION with the file where it lies."""
        file, _, function = scorer.rpartition(":")
        return f"{self.local(file)}:{function}"

    def _in_any_place(self, text: str) -> str:
        """The same name for a file of the run folder wherever that folder lies: moving it changes no input."""
        return f"@{Path(text).relative_to(self.run)}" if Path(text).is_relative_to(self.run) else text

    def _source_hash(self, text: str) -> str:
        """Of what an earlier stage made: that stage's identity; of local files: their content; of hub names: the name."""
        path = Path(text)
        for _, config in self.recipe.stages:
            record = read_record(self.folder(config)) if path.is_relative_to(self.folder(config)) else None
            if record is not None:
                return record.identity
        return path_hash(path) if path.exists() else text

    def run_stage(self, kind: StageKind, stage: StageConfig, *, fresh: bool) -> dict[str, Any]:
        """Results of the stage: from its record when it is finished and its inputs are the same, else by running it."""
        folder, inputs = self.folder(stage), self.inputs_of(kind, stage)
        record = read_record(folder)
        changed = differing_inputs(record.inputs, inputs) if record is not None else []
        if record is not None and not fresh:
            if record.status == "finished" and not changed:
                self.console.print(f"[green]✓[/green] [bold]{stage.name}[/bold] is finished and its inputs are unchanged: skipped")
                return record.results
            if record.status == "running" and changed and checkpoints_in(folder / "checkpoints"):
                raise CheckpointError(f"{folder} holds an interrupted run that was given other inputs ({', '.join(changed)}). "
                                      "Run with the old inputs to resume it, with --fresh to start over, or choose another output.")
        if record is None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty and no stage of a run ({NAME} is missing); choose another output, or move it away")
        if record is not None and (fresh or changed or record.status == "finished"):
            self._set_aside(folder)
        self._describe_run()
        folder.mkdir(parents=True, exist_ok=True)
        started = StageRecord(kind=kind, status="running", inputs=inputs)
        started.write(folder)
        self.console.rule(f"[bold]{stage.name}[/bold]", align="left")
        clock = time.perf_counter()
        results = self._work(stage, folder, inputs)
        replace(started, status="finished", results=results, seconds=round(time.perf_counter() - clock, 2)).write(folder)
        if isinstance(stage, TRAINING):
            write_model_card(self.run, stage.name)
        return results

    def _describe_run(self) -> None:
        """Only once a stage is about to run: a recipe that was refused must not take the place of the one that made the run."""
        replace_file(self.run / "recipe.yaml", to_yaml(self.recipe))
        replace_file(self.run / "environment.json", json.dumps(environment(), indent=2))

    def _set_aside(self, folder: Path) -> None:
        """What was paid for with GPU hours is never deleted here, only moved out of the way."""
        kept = self.run / "replaced"
        kept.mkdir(exist_ok=True)
        number = next(number for number in count(1) if not (kept / f"{folder.name}-{number}").exists())
        target = folder.rename(kept / f"{folder.name}-{number}")
        self.console.print(f"what {folder} held was moved to {target}")

    def _work(self, stage: StageConfig, folder: Path, inputs: dict[str, str]) -> dict[str, Any]:
        match stage:
            case PrepareConfig():
                paths = {key: self.local(str(stage.args[key])) for key in links_among(stage.args)}
                return run_prepare(replace(stage, args={**stage.args, **paths}), script=Path(self.local(stage.script)), folder=folder,
                                   console=self.console)
            case EvaluateConfig():
                places = {name: self.model_folder(name) for name in stage.models}
                scorer = None if stage.scorer is None else self.placed_scorer(stage.scorer)
                resolved = replace(stage, data=resolve_data(self.recipe, stage.data), scorer=scorer)
                return run_evaluate(resolved, places=places, folder=folder, model=self.recipe.model, console=self.console)
            case SftConfig() | DpoConfig():
                model = replace(self.recipe.model, name=self.local(self.recipe.model.name))
                site = Site(folder=folder, name=stage.name, model=model, seed=self.recipe.seed, start=self.start_of(stage), inputs=inputs,
                            console=self.console)
                placed = replace(stage, data=resolve_data(self.recipe, stage.data))
                result = sft.train(placed, site) if isinstance(placed, SftConfig) else dpo.train(placed, site)
                return json_ready(result)


def json_ready(result: FitResult) -> dict[str, Any]:
    """As stage.json holds it."""
    ready: dict[str, Any] = json.loads(json.dumps(asdict(result)))
    return ready


def run_recipe(recipe: Recipe, *, only: str | None = None, fresh: bool = False, console: Console) -> dict[str, Any]:
    """Run the stages in order (or the one named `only`); returns their results by stage, and the path of the report."""
    pipeline = Pipeline(recipe, console)
    names = [config.name for _, config in recipe.stages]
    if only is not None and only not in names:
        raise ConfigError(f"the recipe has no stage named {only!r}; it has {', '.join(names)}")
    problems = missing_requirements(recipe)
    if problems:
        raise ConfigError("this machine cannot run the recipe:", problems)
    pipeline.run.mkdir(parents=True, exist_ok=True)
    with only_process_in(pipeline.run, console):
        results = {config.name: pipeline.run_stage(kind, config, fresh=fresh)
                   for kind, config in recipe.stages if only is None or config.name == only}
        report = build_report([pipeline.run], pipeline.run / "report.html")
    console.print(*summary_tables(read_run(pipeline.run)))
    console.print(f"report: {report}", soft_wrap=True)
    return {"run": str(pipeline.run), "report": str(report), "stages": results}
