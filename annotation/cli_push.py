"""Commands of `annotation`: push."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from annotation.cli_options import DEFAULT_HOME, HomeFolder, Json, ProjectName
from annotation.home import Home
from annotation.tasks import FEWEST, MOST
from rlhf.commands import EXIT_CODES, Outcome
from rlhf.errors import ConfigError

if TYPE_CHECKING:
    from annotation.candidates import Asked, Reading, Reject
    from annotation.push import Pushed
    from annotation.tasks import Candidates
    from rlhf.data.rejects import Reject as DataReject
    from rlhf.data.templates import Template
    from rlhf.records import Prompt
    from rlhf.rollout import Response

DEFAULT_GUIDELINES = Path(__file__).with_name("guidelines.md")
TemplateName = Literal["chat", "plain", "transcript"]
CANDIDATE_FILES = (".jsonl", ".ndjson")
DROP_DUPLICATES = "drop_duplicates"
"""Repair of rlhf.data: a record given twice is no fault here, only a repetition."""
PROMPTS_AT_ONCE = 16


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(epilog=EXIT_CODES)(push)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a policy answers the prompts."""

    model: str
    responses: int = 2
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    template: TemplateName = "chat"
    seed: int = 0


def sampling_of(model: str | None, settings: Mapping[str, Any]) -> Sampling | None:
    """None without a policy. Raises ConfigError where settings of the sampling were given all the same."""
    given = {name: value for name, value in settings.items() if value is not None}
    if model is not None:
        return Sampling(model=model, **given)
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{options}: of no effect without --from-policy MODEL, which samples responses")
    return None


def push(
    name: ProjectName,
    sources: Annotated[list[str] | None, typer.Argument(metavar="SOURCE...", show_default=False, help=(
        "JSONL with prompt and responses a line; or a data set in any layout that `rlhf check` knows: files, globs, hub names"))] = None,
    gold: Annotated[list[str] | None, typer.Option(metavar="FILE", show_default=False, help=(
        "gold items, mixed in: like SOURCE, with known ranks in `gold` or `ranks`; repeat it"))] = None,
    from_policy: Annotated[str | None, typer.Option(metavar="MODEL", help=(
        "folder or hub name: sample the responses to the prompts of SOURCE from this model"))] = None,
    responses: Annotated[int | None, typer.Option(min=FEWEST, max=MOST, help=(
        "of --from-policy: different responses for each prompt, else 2"))] = None,
    temperature: Annotated[float | None, typer.Option(help="of --from-policy: else 1")] = None,
    top_p: Annotated[float | None, typer.Option(help="of --from-policy: share of the probability that is sampled from, else 1")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="of --from-policy: else 512")] = None,
    template: Annotated[TemplateName | None, typer.Option(help="of --from-policy: how conversations become text, else chat")] = None,
    seed: Annotated[int | None, typer.Option(help="of --from-policy: else 0")] = None,
    guidelines: Annotated[Path | None, typer.Option(metavar="FILE.md", help=(
        "what annotators are told; a changed text is a new version"))] = None,
    overlap: Annotated[int | None, typer.Option(min=1, help="annotators for each task; 3 for a new project")] = None,
    confidence: Annotated[bool | None, typer.Option("--confidence", help="ask how sure they are, 1 to 5", show_default=False)] = None,
    reasons: Annotated[str | None, typer.Option(metavar="A,B,...", help="ask what decided it, one of these")] = None,
    comment: Annotated[bool | None, typer.Option("--comment", help="offer a box for comments", show_default=False)] = None,
    workspace: Annotated[str | None, typer.Option(help="of Argilla, for a new project; without it the one that is served")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first rows of SOURCE; gold items do not count")] = None,
    atomic: Annotated[bool, typer.Option("--atomic", help="all or nothing: one bad row, and nothing is pushed")] = False,
    home: HomeFolder = DEFAULT_HOME,
    as_json: Json = False,
) -> Outcome:
    """Candidates become ranking tasks, blinded and shuffled. Pushing again adds what is missing and nothing twice.

    Rows that cannot be used are named, with their lines, in the answer and in HOME/projects/NAME/rejects.jsonl; the others go in (exit
    code 0). The questions (confidence, reasons, comment) are fixed by the first push of a project; guidelines and overlap may change.
    """
    from annotation.argilla import ArgillaBackend
    from annotation.push import REJECTS_FILE, Wishes, settle
    from annotation.push import push as send

    console = Console(stderr=as_json)
    place = Home(home)
    connection = place.connection()
    wishes = Wishes(workspace=workspace, overlap=overlap, confidence=confidence, comment=comment,
                    reasons=tuple(reason.strip() for reason in reasons.split(",")) if reasons else None,
                    guidelines=None if guidelines is None else text_of(guidelines))
    sampling = sampling_of(from_policy, {"responses": responses, "temperature": temperature, "top_p": top_p,
                                         "max_new_tokens": max_new_tokens, "template": template, "seed": seed})
    settled = settle(place, name, wishes, workspace=connection.workspace, guidelines=DEFAULT_GUIDELINES.read_text(encoding="utf-8"))
    backend = ArgillaBackend(connection)
    try:
        reading = gathered(sources or [], gold or [], sampling, limit, console)
        pushed = send(settled.project, backend, reading, atomic=atomic, console=console)
    finally:
        backend.close()
    for change in settled.changes:
        console.print(change, markup=False, highlight=False, soft_wrap=True)
    show(console, pushed, url=connection.url, rejects_file=settled.project.folder / REJECTS_FILE)
    return Outcome({"ok": True, "project": name, "url": connection.url, "guideline": settled.project.guideline.version,
                    "changes": settled.changes, **asdict(pushed)})


def text_of(path: Path) -> str:
    """Of --guidelines. Raises ConfigError for a file that cannot be read as text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        raise ConfigError(f"--guidelines {path} cannot be read ({why}); name a Markdown file in UTF-8") from error


def gathered(sources: Sequence[str], gold: Sequence[str], sampling: Sampling | None, limit: int | None,
             console: Console) -> Reading[Candidates]:
    """Candidates of all sources, gold items last; and what gave none."""
    from annotation.candidates import Reading

    if not sources and not gold:
        raise ConfigError("nothing to push: name a SOURCE (candidates), or --gold FILE")
    readings: list[Reading[Candidates]] = []
    left = limit
    for source in sources:
        reading = read_source(source, limit=left) if sampling is None else sampled(source, sampling, left, console)
        readings.append(reading)
        if left is not None and (left := max(0, left - len(reading.found) - len(reading.rejects) - reading.repeated)) == 0:
            break
    readings += [read_source(source, gold=True) for source in gold]
    return Reading(tuple(found for reading in readings for found in reading.found),
                   tuple(reject for reading in readings for reject in reading.rejects), sum(reading.repeated for reading in readings))


def read_source(source: str, *, gold: bool = False, limit: int | None = None) -> Reading[Candidates]:
    """JSONL whose first row has `responses` is read as candidates, anything else as a data set."""
    from annotation.candidates import Reading, of_records, read_candidates

    if is_jsonl_with(source, "responses"):
        return read_candidates(Path(source), gold=gold, limit=limit)
    from rlhf.data.formats import read

    found = read([source], repair=[DROP_DUPLICATES], limit=limit)
    reading = of_records(found.records, gold=gold)
    return Reading(reading.found, (*as_rejects(found.rejects), *reading.rejects), found.repaired.get(DROP_DUPLICATES, 0))


def read_asked(source: str, *, limit: int | None) -> Reading[Asked]:
    """JSONL whose first row has `prompt` gives prompts, anything else the prompts of a data set."""
    from annotation.candidates import Asked, Reading, read_prompts

    if is_jsonl_with(source, "prompt"):
        return read_prompts(Path(source), limit=limit)
    from rlhf.data.formats import read

    found = read([source], repair=[DROP_DUPLICATES], limit=limit)
    return Reading(tuple(Asked(record.prompt, record.source) for record in found.records), as_rejects(found.rejects))


def is_jsonl_with(source: str, column: str) -> bool:
    from annotation.candidates import first_row

    path = Path(source).expanduser()
    return path.suffix in CANDIDATE_FILES and path.is_file() and column in first_row(path)


def as_rejects(rejects: Sequence[DataReject]) -> tuple[Reject, ...]:
    from annotation.candidates import Reject

    return tuple(Reject(reject.where, reject.reason, reject.detail) for reject in rejects)


def sampled(source: str, sampling: Sampling, limit: int | None, console: Console) -> Reading[Candidates]:
    """Each prompt once, with different responses of the policy. Prompts that got fewer than two are rejected: `one_response`."""
    from annotation.candidates import Reading
    from rlhf.config import ModelConfig
    from rlhf.data.templates import template_for
    from rlhf.ops.evaluate_stage import load_trained
    from rlhf.progress import progress
    from rlhf.rollout import sample_responses

    reading = read_asked(source, limit=limit)
    policy = load_trained(sampling.model, model=ModelConfig(name=sampling.model))
    template = template_for(policy.tokenizer, sampling.template)
    asked, rejects = usable(reading.found, template)
    with progress(console, "sample", sampling.responses * len(asked)) as bar:
        given = sample_responses(policy.model, template, [item.prompt for item in asked], count=sampling.responses,
                                 temperature=sampling.temperature, top_p=sampling.top_p, max_new_tokens=sampling.max_new_tokens,
                                 batch=PROMPTS_AT_ONCE, seed=sampling.seed, bar=bar)
    found, without = as_candidates(asked, given, sampling.model)
    fewer = sum(len(candidates.responses) < sampling.responses for candidates in found)
    unfinished = sum(not response.finished for responses in given for response in responses)
    console.print(f"{len(found)} of {len(asked)} prompts have responses of {sampling.model} to rank, {fewer} of them fewer than "
                  f"{sampling.responses}; {unfinished} responses reached {sampling.max_new_tokens} tokens without an end",
                  markup=False, highlight=False, soft_wrap=True)
    return Reading(tuple(found), (*reading.rejects, *rejects, *without))


def usable(found: Sequence[Asked], template: Template) -> tuple[list[Asked], list[Reject]]:
    """Each prompt once, if the template takes it."""
    from annotation.candidates import Reject
    from rlhf.data.rejects import RowError

    asked: dict[Prompt, Asked] = {}
    rejects: list[Reject] = []
    for item in found:
        try:
            template.prompt_ids(item.prompt)
        except RowError as error:
            rejects.append(Reject(item.source, error.reason, error.detail))
        else:
            asked.setdefault(item.prompt, item)
    return list(asked.values()), rejects


def as_candidates(asked: Sequence[Asked], given: Sequence[Sequence[Response]], model: str) -> tuple[list[Candidates], list[Reject]]:
    from annotation.candidates import Reject, Rejected, checked

    found: list[Candidates] = []
    rejects: list[Reject] = []
    for item, responses in zip(asked, given, strict=True):
        texts = [response.text for response in responses if response.text.strip()]
        if len(texts) < FEWEST:
            rejects.append(Reject(item.source, "one_response", f"{len(texts)} different responses that are not empty came from {model}"))
            continue
        try:
            found.append(checked(item.prompt, texts, models=[model] * len(texts), source=item.source))
        except Rejected as error:
            rejects.append(error.at(item.source))
    return found, rejects


def show(console: Console, pushed: Pushed, *, url: str, rejects_file: Path) -> None:
    """What went where, and every row that did not."""
    from annotation.candidates import count_reasons

    table = Table("tasks", "", title=f"pushed to {url}")
    for text, count in (("new", pushed.new), ("there already", pushed.present), ("repeated in the sources", pushed.repeated),
                        ("gold items among them", pushed.gold), *pushed.by_sheet.items()):
        table.add_row(text, str(count))
    for reason, count in count_reasons(pushed.rejects).items():
        table.add_row(f"[yellow]not used: {reason}[/yellow]", str(count))
    console.print(table)
    for reject in pushed.rejects[:10]:
        console.print(f"  {reject.where}: {reject.reason}: {reject.detail}", markup=False, highlight=False, soft_wrap=True)
    if pushed.rejects:
        console.print(f"all {len(pushed.rejects)} are in {rejects_file}", markup=False, highlight=False, soft_wrap=True)
