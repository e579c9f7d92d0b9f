"""`rlhf check`: everything that can be known about a recipe or a data file before a run. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import AutoConfig

from rlhf.config import DataConfig, EvaluateConfig, PrepareConfig, Recipe, SftConfig, StageConfig
from rlhf.data.check import CheckReport, ModelLimits, check_data
from rlhf.errors import ModelError, RlhfError
from rlhf.models.loading import Source, find_source, load_tokenizer, positions_of
from rlhf.recipe import resolve, resolve_data
from rlhf.recipe_links import reference


@dataclass(frozen=True)
class StageCheck:
    """What was found about the input of one stage."""

    stage: str
    report: CheckReport | None = None
    """None: the data could not be looked at."""
    later: str = ""
    """What an earlier stage has to make first."""
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and (self.report is None or self.report.ok)


def check_stages(recipe: Recipe) -> Iterator[StageCheck]:
    """The data of every stage that reads some, with the tokenizer of the recipe's model."""
    for _, config in recipe.stages:
        if isinstance(config, PrepareConfig):
            continue
        missing = [text for text in (recipe.model.name, *_sources(config.data)) if reference(text) and not resolve(recipe, text).exists()]
        if missing:
            yield StageCheck(config.name, later=f"{', '.join(missing)} will be made by an earlier stage; check again after it")
            continue
        try:
            yield StageCheck(config.name, report=_check_stage(recipe, config))
        except RlhfError as error:
            yield StageCheck(config.name, error=str(error))


def _sources(data: DataConfig) -> Iterator[str]:
    for group in (data.train, data.holdout):
        yield from () if group is None else (group,) if isinstance(group, str) else group


def _check_stage(recipe: Recipe, config: StageConfig) -> CheckReport:
    assert not isinstance(config, PrepareConfig)
    demonstrations = isinstance(config, SftConfig) or (isinstance(config, EvaluateConfig) and not config.preferences)
    source = find_source(str(resolve(recipe, recipe.model.name)), recipe.model.revision)
    return check_data(resolve_data(recipe, config.data), load_tokenizer(source), limits=model_limits(source),
                      records="demonstrations" if demonstrations else "preferences", trains=not isinstance(config, EvaluateConfig))


def model_limits(source: Source) -> ModelLimits:
    """As the configuration states them; no weights are read."""
    try:
        config = AutoConfig.from_pretrained(source.base, revision=source.revision)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source.base} has no model configuration that can be read: {error}") from error
    return ModelLimits(embedding_rows=config.get_text_config().vocab_size, positions=positions_of(config))
