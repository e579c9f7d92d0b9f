"""Load a recipe: YAML and overrides in, a validated `Recipe` or every problem at once out. Nothing heavy is imported.

    recipe file, `key.path=value`  --recipe_text-->  mappings  --schema_check-->  configs  --recipe_links-->  Recipe
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf.config import STAGES, DataConfig, Recipe, StageConfig, StageKind
from rlhf.errors import ConfigError, Problem
from rlhf.recipe_links import StageDraft, addresses, reference, unused_settings, wrong_links, wrong_names
from rlhf.recipe_text import apply_overrides, read_mapping
from rlhf.schema_check import check_schema, did_you_mean

SCALARS = ("name", "seed", "output", "folder")
"""Keys of the recipe itself that hold one value."""


def load_recipe(source: Path | None, overrides: Sequence[str] = (), *, stage: StageKind | None = None) -> Recipe:
    """The recipe of a file with overrides applied, or of overrides alone; ConfigError names everything that is wrong.

    `stage`: the kind of stage that will be run. It must be there; without a file the recipe consists of it.
    """
    recipe, problems = _examine(source, overrides, stage)
    if recipe is None or problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{'the command line' if source is None else source} has {count}:", problems)
    return recipe


def problems_of(source: Path | None, overrides: Sequence[str] = (), *, stage: StageKind | None = None) -> tuple[Problem, ...]:
    """Everything that is wrong with a recipe; empty for a good one."""
    return tuple(_examine(source, overrides, stage)[1])


def resolve(recipe: Recipe, text: str) -> Path:
    """Where a text of the recipe points: `@STAGE/FILE` into the run folder; a relative path or glob beside the recipe where that
    exists; anything else (a path below the working directory, a hub name) is unchanged."""
    linked = reference(text)
    if linked is not None:
        names = [config.name for _, config in recipe.stages]
        if linked.stage not in names:
            raise ConfigError(f"{text!r} names no stage of this recipe{did_you_mean(linked.stage, names)}; it has {', '.join(names)}")
        return Path(recipe.output, linked.stage, linked.inside)
    folder, path = Path(recipe.folder), Path(text)
    beside = (folder / path).exists() or (not path.is_absolute() and any(folder.glob(text)))
    return folder / path if beside else path


def resolve_data(recipe: Recipe, data: DataConfig) -> DataConfig:
    """The same section with every source resolved."""
    def places(sources: str | tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(resolve(recipe, text)) for text in ((sources,) if isinstance(sources, str) else sources))
    return replace(data, train=places(data.train), holdout=None if data.holdout is None else places(data.holdout))


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults included; loading it gives an equal one."""
    head = {name: vars(recipe)[name] for name in SCALARS}
    stages = [{kind: asdict(config)} for kind, config in recipe.stages]
    return yaml.safe_dump(_plain({**head, "model": asdict(recipe.model), "stages": stages}), sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    """Tuples as lists, which is what YAML has."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _examine(source: Path | None, overrides: Sequence[str], stage: StageKind | None) -> tuple[Recipe | None, list[Problem]]:
    raw, problems = ({}, []) if source is None else read_mapping(source)
    if problems and not raw:
        return None, problems
    drafts, unreadable = _drafts({stage: {}} if source is None and stage is not None else raw, stage)
    top = {key: value for key, value in raw.items() if key not in ("stages", *STAGES)}
    top["model"] = {} if "model" not in top or top["model"] is None else top["model"]
    addressed = [("model", top["model"]), *((draft.name, draft.raw) for draft in drafts)]
    places = {name: place for name, place in addressed if isinstance(place, dict)}
    problems += [*unreadable, *apply_overrides(overrides, places, top, SCALARS)]

    top = _with_defaults_from_place(top, source, stage)
    head, wrong = check_schema(Recipe, {**top, "stages": []})
    problems += wrong
    stages: list[tuple[StageKind, StageConfig]] = []
    for draft, where in zip(drafts, addresses(drafts), strict=True):
        config, wrong = check_schema(STAGES[draft.kind], draft.raw, where)
        problems += wrong
        stages += [] if config is None else [(draft.kind, config)]
    problems += wrong_names(drafts)
    if not unreadable:      # a stage that could not be read would make every reference to it look wrong
        folder = Path(top["folder"]) if isinstance(top["folder"], str) else Path()
        problems += wrong_links(top["model"], drafts, folder)
    if not any(problem.where.startswith("model") for problem in problems):
        problems += unused_settings(top["model"], drafts)
    return (None if head is None else replace(head, stages=tuple(stages))), problems


def _drafts(raw: dict[Any, Any], stage: StageKind | None) -> tuple[list[StageDraft], list[Problem]]:
    """The stages as written: a list under `stages`, or one stage by its kind at the top level."""
    loose = [kind for kind in STAGES if kind in raw]
    problems: list[Problem] = []
    if "stages" in raw and loose:
        problems.append(Problem(loose[0], "stands beside the list of stages; move it into the list"))
    if "stages" not in raw and len(loose) > 1:
        problems.append(Problem("stages", f"is missing; write {', '.join(loose)} as a list, in order"))
    entries = raw["stages"] if "stages" in raw else [{kind: raw[kind]} for kind in loose]
    if not isinstance(entries, list) or not entries:
        return [], [*problems, Problem("stages", f"must be a list with a stage or more, `- sft: {{...}}`; kinds: {', '.join(STAGES)}")]
    drafts = []
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict) or len(entry) != 1:
            got = ", ".join(map(str, entry)) if isinstance(entry, dict) else repr(entry)
            what = f"must have one key, its kind, with the rest indented below it: `- sft: {{...}}`; got {got}"
            problems.append(Problem(f"stages[{position}]", what))
            continue
        (kind, written), = entry.items()
        if kind in STAGES:
            drafts.append(StageDraft(position, kind, {} if written is None else written))
        else:
            hint = did_you_mean(str(kind), list(STAGES)) or f"; kinds: {', '.join(STAGES)}"
            problems.append(Problem(f"stages[{position}]", f"{kind!r} is no kind of stage{hint}"))
    if stage is not None and not problems and stage not in [draft.kind for draft in drafts]:
        problems.append(Problem("stages", f"has no {stage} stage, only {', '.join(draft.kind for draft in drafts)}"))
    return drafts, problems


def _with_defaults_from_place(top: dict[Any, Any], source: Path | None, stage: StageKind | None) -> dict[Any, Any]:
    """`name`, `output` and `folder` follow from where the file lies."""
    if source is None:
        places = {"name": stage, "folder": "."}
    else:
        places = {"name": source.resolve().parent.name if source.stem == "recipe" else source.stem, "folder": str(source.parent)}
    named = {**places, **top}
    return {"output": f"runs/{named['name']}", **named}
