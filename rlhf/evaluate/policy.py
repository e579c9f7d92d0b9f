"""What policies learned, measured on held-out prompts, with intervals and against the first of them.

    answered well   greedy responses scored by a rule of the recipe: a share (Wilson), and the gain over the first model (paired bootstrap)
    preferences     does the policy rank chosen over rejected?  By log-prob alone, and by implicit reward against the first model,
                    log pi(y) - log pi_first(y) (Rafailov et al. 2023, arXiv:2305.18290, Eq. 5 with beta = 1); pairs of one prompt are
                    drawn together in the bootstrap

Models are loaded one at a time. What stays of each is one bit a prompt and two numbers a pair.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.config import EvaluateConfig
from rlhf.data.formats import load_demonstrations, load_preferences
from rlhf.data.rejects import Reject, count_reasons, require_share, write_rejects
from rlhf.data.templates import template_for
from rlhf.data.tokens import tokenise
from rlhf.errors import ConfigError, DataError
from rlhf.maths.bootstrap import Interval, bootstrap_difference, bootstrap_mean, wilson_interval
from rlhf.maths.losses import wins
from rlhf.models.attention import choose_layout, evaluating
from rlhf.models.loading import Policy
from rlhf.models.packing import Layout, pack, response_logps
from rlhf.progress import Bar, SilentBar, progress
from rlhf.records import Demonstration, PreferenceRecord, Prompt, TokenRun
from rlhf.rollout import Response, generate_responses
from rlhf.whole_files import replace_file

EVALUATION_FILE = "evaluation.json"
Scorer = Callable[[str, str], bool]
"""(text of the prompt's last message, response) -> answered well."""


@dataclass(frozen=True, kw_only=True)
class AnsweredWell:
    good: int
    prompts: int
    share: Interval
    gain: Interval | None
    """Share minus that of the first model, on the same prompts; None for the first."""


@dataclass(frozen=True, kw_only=True)
class PreferenceFigures:
    pairs: int
    prompts: int
    logps_accuracy: Interval
    """Share of pairs whose chosen response has the higher log-prob; a tie counts half."""
    accuracy: Interval | None
    """Share of pairs whose chosen response gained more log-prob over the first model; a tie counts half. None for the first."""
    margin: Interval | None
    """Mean of that difference, in nats; times beta it is rewards/margins."""


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    name: str
    answered_well: AnsweredWell | None
    """None without a scorer."""
    preferences: PreferenceFigures | None
    """None where the recipe does not ask for them."""
    generated: int
    """Responses."""
    unfinished: int
    """Responses that reached max_new_tokens without an end."""


class SampleResponse(NamedTuple):
    model: str
    text: str
    good: bool | None


class Sample(NamedTuple):
    prompt: str
    responses: tuple[SampleResponse, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    models: tuple[ModelFigures, ...]
    samples: tuple[Sample, ...]
    left_out: dict[str, int]
    """Rows of the files that were not used, by reason."""

    def as_json(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(self).items()}


def plain(value: Any) -> Any:
    """Records as mappings by field, plain tuples as lists."""
    match value:
        case Interval() | Sample() | SampleResponse():
            return {name: plain(item) for name, item in value._asdict().items()}
        case AnsweredWell() | PreferenceFigures() | ModelFigures():
            return {name: plain(item) for name, item in vars(value).items()}
        case tuple():
            return [plain(item) for item in value]
        case _:
            return value


class HeldOut(NamedTuple):
    prompts: dict[str, Prompt]
    """By content id, in the order of the files."""
    records: tuple[PreferenceRecord | Demonstration, ...]
    """Of these prompts; pairs where the recipe asks for preferences."""
    rejects: tuple[Reject, ...]
    rows: int


@dataclass(frozen=True)
class Measured:
    """What one model did, by content id of the prompt or pair; kept until all models have been seen."""

    good: dict[str, bool]
    logps: dict[str, tuple[float, float]]
    """(chosen, rejected), summed over the response."""
    shown: dict[str, Response]
    """Responses to the prompts that the report shows."""
    generated: int
    unfinished: int
    rejects: tuple[Reject, ...]


def evaluate_policies(config: EvaluateConfig, models: Mapping[str, Callable[[], Policy]], *, folder: Path,
                      console: Console | None = None) -> EvaluationResult:
    """Measure each model on the held-out side of `config.data`; writes evaluation.json and rejects.jsonl into the folder.

    `models` loads by name, the first one is the baseline; each is freed before the next is loaded.
    """
    held_out = load_held_out(config)
    scorer = None if config.scorer is None else load_scorer(config.scorer)
    measured = {name: measure(load(), name, held_out, config, scorer, console) for name, load in models.items()}
    rejects = list(dict.fromkeys([*held_out.rejects, *(reject for one in measured.values() for reject in one.rejects)]))
    write_rejects(rejects, folder / "rejects.jsonl")
    require_share(rejects, rows=held_out.rows, at_most=config.data.max_rejected, rejects_file=folder / "rejects.jsonl")
    result = EvaluationResult(models=compare(measured, held_out, resamples=config.resamples),
                              samples=samples_of(measured, held_out.prompts), left_out=count_reasons(rejects))
    replace_file(folder / EVALUATION_FILE, json.dumps(result.as_json(), indent=2))
    return result


def load_held_out(config: EvaluateConfig) -> HeldOut:
    """The held-out prompts, the first `config.limit` of them, with their pairs. Raises DataError where none is held out."""
    data = load_preferences(config.data) if config.preferences else load_demonstrations(config.data)
    prompts: dict[str, Prompt] = {}
    for record in data.holdout:
        if config.limit is None or len(prompts) < config.limit:
            prompts.setdefault(record.prompt.content_id, record.prompt)
    if not prompts:
        raise DataError(f"evaluate: none of the {data.rows} rows of {config.data.train} is held out. "
                        "Raise data.holdout_percent or name files in data.holdout.")
    records = tuple(record for record in data.holdout if record.prompt.content_id in prompts)
    return HeldOut(prompts, records, data.rejects, data.rows)


def load_scorer(place: str) -> Scorer:
    """FILE.py:FUNCTION -> the function. The file is run as a module of its own."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"scorer_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"evaluate.scorer: there is no Python file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module    # dataclasses look their module up by name
    spec.loader.exec_module(module)
    if name not in vars(module) or not callable(vars(module)[name]):
        raise ConfigError(f"evaluate.scorer: {file} has no function {name!r}")
    scorer: Scorer = vars(module)[name]
    return scorer


def measure(policy: Policy, name: str, held_out: HeldOut, config: EvaluateConfig, scorer: Scorer | None,
            console: Console | None) -> Measured:
    """Generate and score with one model. Without a scorer only the samples are generated."""
    model = on_gpu_if_there_is_one(policy.model)
    template = template_for(policy.tokenizer, config.data.template)
    tokens = tokenise(held_out.records, template, max_length=config.data.max_length, on_long=config.data.on_long)
    kept = {run.id for run in tokens.runs}
    usable = list(dict.fromkeys(record.prompt.content_id for record in held_out.records if record.content_id in kept))
    wanted = usable[:config.samples] if scorer is None else usable
    prompts = [held_out.prompts[id] for id in wanted]
    with progress(console, f"{name}: responses", len(wanted)) as bar:
        responses = generate_responses(model, template, prompts, max_new_tokens=config.max_new_tokens, batch=config.batch, bar=bar)
    pairs = [run for run in tokens.runs if len(run.responses) == 2]
    with progress(console, f"{name}: preferences", len(pairs)) as bar:
        logps = pair_logps(model, pairs, batch=config.batch, layout=choose_layout(model, "auto")[0], bar=bar).tolist() if pairs else []
    return Measured(
        good={} if scorer is None else {id: bool(scorer(last_text(prompt), response.text))
                                        for id, prompt, response in zip(wanted, prompts, responses, strict=True)},
        logps={run.id: (chosen, rejected) for run, (chosen, rejected) in zip(pairs, logps, strict=True)},
        shown=dict(zip(wanted[:config.samples], responses, strict=False)), generated=len(responses),
        unfinished=sum(not response.finished for response in responses), rejects=tokens.rejects)


def on_gpu_if_there_is_one(model: PreTrainedModel | PeftModel) -> PreTrainedModel | PeftModel:
    return model.to("cuda") if torch.cuda.is_available() and model.device.type == "cpu" else model


def last_text(prompt: Prompt) -> str:
    return prompt.messages[-1].content


def pair_logps(model: PreTrainedModel | PeftModel, runs: Sequence[TokenRun], *, batch: int, layout: Layout,
               bar: Bar | None = None) -> Tensor:
    """Summed log-probs of (chosen, rejected), [runs, 2] float64 on the CPU, in the order of the runs."""
    logps = torch.zeros(len(runs), 2, dtype=torch.float64)
    shown = SilentBar() if bar is None else bar
    by_length = sorted(range(len(runs)), key=lambda row: (-runs[row].packed_tokens, row))
    with evaluating(model), torch.inference_mode():
        for start in range(0, len(runs), batch):
            rows = by_length[start:start + batch]
            packed = pack([runs[row] for row in rows], layout=layout).to(model.device)
            logps[rows] = response_logps(model, packed).logps.view(-1, 2).double().cpu()
            shown.advance(len(rows))
    return logps


def compare(measured: Mapping[str, Measured], held_out: HeldOut, *, resamples: int) -> tuple[ModelFigures, ...]:
    """Figures of each model over the prompts and pairs that every model could take."""
    prompts = common(one.good for one in measured.values())
    pairs = common(one.logps for one in measured.values())
    prompt_of = {record.content_id: record.prompt.content_id for record in held_out.records}
    units = {id: number for number, id in enumerate(dict.fromkeys(prompt_of[pair] for pair in pairs))}
    clusters = torch.tensor([units[prompt_of[pair]] for pair in pairs])
    good = {name: [one.good[id] for id in prompts] for name, one in measured.items()}
    logps = {name: torch.tensor([one.logps[id] for id in pairs], dtype=torch.float64) for name, one in measured.items()}
    first = next(iter(measured))

    def figures(name: str) -> ModelFigures:
        compared = name != first
        return ModelFigures(
            name=name, generated=measured[name].generated, unfinished=measured[name].unfinished,
            answered_well=answered_well(good[name], good[first] if compared else None, resamples=resamples) if prompts else None,
            preferences=None if not pairs else preference_figures(logps[name], logps[first] if compared else None, clusters,
                                                               resamples=resamples))

    return tuple(map(figures, measured))


def common(keyed: Iterable[Mapping[str, object]]) -> list[str]:
    """Keys that all mappings have, in the order of the first."""
    first, *others = keyed
    return [key for key in first if all(key in other for other in others)]


def answered_well(good: Sequence[bool], baseline: Sequence[bool] | None, *, resamples: int) -> AnsweredWell:
    """Share of prompts answered well, and the gain over a baseline on the same prompts in the same order."""
    gain = None if baseline is None else bootstrap_difference(
        torch.tensor(good).double(), torch.tensor(baseline).double(), resamples=resamples, generator=fixed_generator())
    return AnsweredWell(good=sum(good), prompts=len(good), share=wilson_interval(sum(good), len(good)), gain=gain)


def preference_figures(logps: Tensor, baseline: Tensor | None, clusters: Tensor, *, resamples: int) -> PreferenceFigures:
    """logps, baseline [pairs, (chosen, rejected)] summed over the response; clusters [pairs] numbers the prompts."""
    own = logps[:, 0] - logps[:, 1]
    gained = None if baseline is None else own - (baseline[:, 0] - baseline[:, 1])

    def interval(values: Tensor) -> Interval:
        return bootstrap_mean(values, clusters=clusters, resamples=resamples, generator=fixed_generator())

    return PreferenceFigures(
        pairs=len(logps), prompts=len(set(clusters.tolist())), logps_accuracy=interval(wins(own)),
        accuracy=None if gained is None else interval(wins(gained)), margin=None if gained is None else interval(gained))


def fixed_generator() -> torch.Generator:
    """The same resamples for every figure, so that a report that is rebuilt says the same."""
    return torch.Generator().manual_seed(0)


def samples_of(measured: Mapping[str, Measured], prompts: Mapping[str, Prompt]) -> tuple[Sample, ...]:
    """Responses of all models side by side."""
    shown = common(one.shown for one in measured.values())
    return tuple(Sample(last_text(prompts[id]), tuple(
        SampleResponse(name, one.shown[id].text, one.good[id] if one.good else None) for name, one in measured.items())) for id in shown)
