"""The command `rlhf`. Recipes are checked before anything heavy is imported; what a command works with is imported inside it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperCommand

from rlhf.commands import EXIT_CODES, Outcome, Program, as_rows
from rlhf.config import DataConfig, Dtype, FormatName, StageKind, TemplateName
from rlhf.errors import ConfigError
from rlhf.recipe import load_recipe, problems_of

LAUNCHERS = {"WORLD_SIZE": "torchrun or accelerate", "SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun",
             "PMI_SIZE": "mpiexec"}
"""Who has started several processes, by the variable that counts them."""
app = typer.Typer(name="rlhf", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
                  help="Preference tuning from human rankings: check, train, evaluate, report.", epilog=EXIT_CODES)

RunArguments = Annotated[list[str], typer.Argument(metavar="RECIPE|KEY=VALUE", show_default=False,
                                                   help="recipe file, then overrides such as dpo.beta=0.2 or model.method=qlora")]
StageArguments = Annotated[list[str], typer.Argument(metavar="RECIPE|KEY=VALUE", show_default=False,
                                                     help="recipe file and overrides, or overrides alone")]
Fresh = Annotated[bool, typer.Option("--fresh", help="start over: what the run folder holds of these stages is moved to RUN/replaced")]
Json = Annotated[bool, typer.Option("--json", help="exactly one JSON object on stdout; everything else on stderr")]
Records = Literal["preferences", "demonstrations"]


def with_keys(kind: StageKind | None) -> type[TyperCommand]:
    """A command whose --help ends with the table of every key."""
    class KeyedCommand(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            from rlhf.key_help import key_table
            super().format_help(ctx, formatter)
            terminal = Console()
            Console(width=max(100, terminal.width)).print(key_table(kind))
    return KeyedCommand


def files_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    overrides = [text for text in arguments if re.match(r"[A-Za-z_][\w.-]*=", text)]
    return [text for text in arguments if text not in overrides], overrides


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe file, if there is one, and the overrides."""
    files, overrides = files_and_overrides(arguments)
    if len(files) > 1:
        raise ConfigError(f"one recipe at a time, got {', '.join(files)}; an override is written key.path=value")
    return (Path(files[0]) if files else None), overrides


@app.command(cls=with_keys(None), epilog=EXIT_CODES)
def run(arguments: RunArguments, only: Annotated[str | None, typer.Option(metavar="STAGE", help="run this stage alone")] = None,
        fresh: Fresh = False, as_json: Json = False) -> Outcome:
    """Run a recipe. Finished stages whose inputs are unchanged are skipped, an interrupted one resumes."""
    source, overrides = split_arguments(arguments)
    if source is None:
        raise ConfigError("no recipe is named; `rlhf sft`, `rlhf dpo` and `rlhf evaluate` run one stage from overrides alone")
    recipe = load_recipe(source, overrides)
    _require_one_process()
    from rlhf.ops.pipeline import run_recipe
    return Outcome(run_recipe(recipe, only=only, fresh=fresh, console=Console(stderr=as_json)))


def _require_one_process() -> None:
    for name, launcher in LAUNCHERS.items():
        if name in os.environ and os.environ[name] not in ("", "1"):
            raise ConfigError(f"{launcher} started {os.environ[name]} processes ({name}), but this version trains in one. Start rlhf "
                              "without it; CUDA_VISIBLE_DEVICES chooses the GPU.")


def _run_stage(kind: StageKind, arguments: Sequence[str], *, fresh: bool, as_json: bool) -> Outcome:
    source, overrides = split_arguments(arguments)
    recipe = load_recipe(source, overrides, stage=kind)
    names = [config.name for stage, config in recipe.stages if stage == kind]
    if len(names) > 1:
        raise ConfigError(f"{source} has several {kind} stages: {', '.join(names)}; choose one with `rlhf run {source} --only NAME`")
    _require_one_process()
    from rlhf.ops.pipeline import run_recipe
    return Outcome(run_recipe(recipe, only=names[0], fresh=fresh, console=Console(stderr=as_json)))


@app.command(cls=with_keys("sft"), epilog=EXIT_CODES)
def sft(arguments: StageArguments, fresh: Fresh = False, as_json: Json = False) -> Outcome:
    """Supervised fine-tuning: the sft stage of a recipe, or one made of overrides."""
    return _run_stage("sft", arguments, fresh=fresh, as_json=as_json)


@app.command(cls=with_keys("dpo"), epilog=EXIT_CODES)
def dpo(arguments: StageArguments, fresh: Fresh = False, as_json: Json = False) -> Outcome:
    """Direct preference optimisation: the dpo stage of a recipe, or one made of overrides."""
    return _run_stage("dpo", arguments, fresh=fresh, as_json=as_json)


@app.command(cls=with_keys("evaluate"), epilog=EXIT_CODES)
def evaluate(arguments: StageArguments, fresh: Fresh = False, as_json: Json = False) -> Outcome:
    """Compare models on held-out prompts: the evaluate stage of a recipe, or one made of overrides."""
    return _run_stage("evaluate", arguments, fresh=fresh, as_json=as_json)


@app.command(epilog=EXIT_CODES)
def check(
    arguments: Annotated[list[str], typer.Argument(metavar="RECIPE|DATA|KEY=VALUE", show_default=False,
                                                   help="a recipe (.yaml) with overrides; or data: files, globs, hub names")],
    layout: Annotated[FormatName, typer.Option("--format", metavar="LAYOUT", help="of data: name of a reader, see docs/data.md")] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="of data: model folder or hub name; shows lengths, cuts and masks")] = None,
    template: Annotated[TemplateName, typer.Option(help="of data: how conversations become text")] = "chat",
    max_length: Annotated[int, typer.Option(min=8, help="of data: longest prompt + response, in tokens")] = 1024,
    records: Annotated[Records, typer.Option("--as", help="of data: what it would be used for")] = "preferences",
    as_json: Json = False,
) -> Outcome:
    """Everything wrong with a recipe and its data, or with data files, before any training."""
    files, overrides = files_and_overrides(arguments)
    if not files:
        raise ConfigError("no recipe and no data is named")
    if any(Path(name).suffix in (".yaml", ".yml") for name in files):
        recipe, overrides = split_arguments(arguments)
        assert recipe is not None
        return _check_recipe(recipe, overrides, Console(stderr=as_json))
    if overrides:
        raise ConfigError(f"{overrides[0]}: overrides belong to a recipe; for data use --format, --template, --max-length")
    from rlhf.data.check import as_dict, check_data
    from rlhf.data.check_page import render
    from rlhf.models.loading import find_source, load_tokenizer
    from rlhf.ops.check_inputs import model_limits
    model = None if tokenizer is None else find_source(tokenizer)
    report = check_data(DataConfig(train=tuple(files), format=layout, template=template, max_length=max_length),
                        None if model is None else load_tokenizer(model), records=records,
                        limits=None if model is None else model_limits(model))
    render(report, Console(stderr=as_json))
    return Outcome(as_dict(report), 0 if report.ok else 1)


def _check_recipe(source: Path, overrides: Sequence[str], console: Console) -> Outcome:
    problems = problems_of(source, overrides)
    if problems:
        console.print(f"[bold red]{source} has {len(problems)} problem(s):[/bold red]")
        for problem in problems:
            console.print(f"  {problem.where}: {problem.what}", markup=False, highlight=False, soft_wrap=True)
        return Outcome({"ok": False, "problems": as_rows(problems), "data": {}}, 1)
    console.print(f"[bold green]{source}: every key is right[/bold green]")
    recipe = load_recipe(source, overrides)
    from rlhf.data.check import as_dict
    from rlhf.data.check_page import render
    from rlhf.ops.check_inputs import check_stages
    from rlhf.ops.requirements import missing_requirements
    missing = missing_requirements(recipe)
    for problem in missing:
        console.print(f"  {problem.where}: {problem.what}", style="red", markup=False, highlight=False, soft_wrap=True)
    found: dict[str, Any] = {}
    ok = not missing
    for stage in check_stages(recipe):
        console.rule(f"[bold]{stage.stage}[/bold]", align="left")
        if stage.report is not None:
            render(stage.report, console)
            found[stage.stage] = as_dict(stage.report)
        else:
            console.print(stage.error or stage.later, style="red" if stage.error else "", markup=False, soft_wrap=True)
            found[stage.stage] = {"ok": stage.ok, "error": stage.error, "later": stage.later}
        ok = ok and stage.ok
    return Outcome({"ok": ok, "problems": as_rows(missing), "data": found}, 0 if ok else 1)


@app.command(epilog=EXIT_CODES)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="run folders; several are compared in one report")],
    output: Annotated[Path | None, typer.Option(help="HTML file; of one run: RUN/report.html")] = None,
    as_json: Json = False,
) -> Outcome:
    """Rebuild the HTML report of a run, or compare several runs."""
    if output is None and len(runs) > 1:
        raise ConfigError("a report of several runs belongs to none of them: name its file with --output FILE")
    from rlhf.evaluate.report import build_report
    written = build_report(runs, output or runs[0] / "report.html")
    Console(stderr=as_json).print(f"report: {written}", highlight=False, soft_wrap=True)
    return Outcome({"report": written})


@app.command(epilog=EXIT_CODES)
def export(
    folder: Annotated[Path, typer.Argument(metavar="MODEL_FOLDER", help="a trained adapter, for example RUN/dpo/model")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="new folder for the merged model")],
    dtype: Annotated[Dtype | None, typer.Option(help="precision of the files; without it, that of the base")] = None,
    max_change: Annotated[float | None, typer.Option(help="largest change of a logit that is accepted, in nats")] = None,
    as_json: Json = False,
) -> Outcome:
    """Merge an adapter into its 16- or 32-bit base: a plain transformers model that is checked to say the same."""
    from rlhf.models.export import export_merged
    done = export_merged(folder, out, dtype=dtype, max_change=max_change)
    Console(stderr=as_json).print(f"merged model: {done.folder} ({done.dtype}); largest change of a logit "
                                  f"{done.largest_logit_change:.3g} nats, accepted {done.bound:.3g}", highlight=False, soft_wrap=True)
    return Outcome(done._asdict())


PROGRAM = Program("rlhf", app, interrupted="the same command continues where the last checkpoint was written")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
