"""Standing verdicts of a project -> records to train on, ties, and disputes, with everything that did not become a record counted.

What is exported depends on the tasks, the verdicts and the settings alone. `export_folder.py` writes it down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from rich.console import Console

from annotation.adjudicate import Pair, Tally, likelier_than, majority, tally, unanimous
from annotation.smoothing import StrictAgreement, chance_wrong, strict_agreement
from annotation.task_records import ChanceWrong, Origin, Rule, adjudicated, as_given, versions
from annotation.tasks import Task
from annotation.verdicts import Verdict
from annotation.votes import CHOICES, Choice, PairKey, PairVote, pair_votes
from rlhf.errors import ConfigError, DataError, Problem
from rlhf.progress import progress
from rlhf.records import PreferenceRecord, RankedRecord, Split

SIDES: tuple[Split, Split] = ("train", "holdout")
Policy = Literal["majority", "unanimous", "dawid-skene", "all"]
TASK_KINDS = ("ranking", "tie", "undecided", "contradiction", "unplaced", "too_few_votes", "no_votes", "gold")
"""What becomes of a task: annotation.adjudicate.Kind; no_votes: nobody ranked it yet; gold: never a record."""
PAIR_FATES = ("strict", "tie", "open", "contradiction", "too_few_votes", "repeated", "tasks_disagree")
"""What becomes of a pair of responses. repeated: several tasks showed it and agree, so that one record speaks for all.
tasks_disagree: they do not, so that there is none."""
VERDICT_FATES = ("used", "gold", "discarded", "withdrawn", "other_annotator", "other_guideline", "unknown_task")
"""What becomes of a standing verdict. unknown_task: the project has no such task, or took it back."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    policy: Policy
    min_votes: int
    """Annotators that must have ranked a task."""
    min_posterior: float = 0.8
    """Of dawid-skene: a choice decides when it is likelier than this."""
    holdout_percent: float = 5.0
    annotators: tuple[str, ...] = ()
    """Only these; empty: all."""
    without: tuple[str, ...] = ()
    guideline: str | None = None
    """Only votes given under this version: v2, or as a whole v2-1a2b3c4d."""

    def __post_init__(self) -> None:
        problems = []
        if self.min_votes < 1:
            problems.append(Problem("--min-votes", f"must be at least 1, got {self.min_votes}"))
        if self.policy == "unanimous" and self.min_votes == 1:
            problems.append(Problem("--min-votes", "a single vote always agrees with itself; unanimous needs at least 2"))
        if not 0.5 <= self.min_posterior < 1:
            problems.append(Problem("--min-posterior", f"must be in [0.5, 1), got {self.min_posterior}"))
        if not 0 <= self.holdout_percent < 100:
            problems.append(Problem("--holdout-percent", f"must be in [0, 100), got {self.holdout_percent}"))
        if self.annotators and self.without:
            problems.append(Problem("--annotators, --without", "name those to keep or those to leave out, not both"))
        if problems:
            raise ConfigError("this export cannot be made", problems)


@dataclass(frozen=True, kw_only=True)
class Side:
    """Records of one side of the split, each tuple in the order of its prompts' ids, which is no order of the work."""

    rankings: tuple[RankedRecord, ...]
    pairs: tuple[PreferenceRecord, ...]
    ties: tuple[RankedRecord, ...]


@dataclass(frozen=True, kw_only=True)
class Export:
    sides: Mapping[Split, Side]
    disputes: tuple[dict[str, Any], ...]
    """A row for each task that has votes but no ranking and no tie: its kind, the texts, the votes."""
    tasks: Mapping[str, int]
    """By TASK_KINDS; adds up to all tasks."""
    pairs: Mapping[str, int]
    """By PAIR_FATES; adds up to all pairs of responses of the tasks that are no gold items."""
    verdicts: Mapping[str, int]
    """By VERDICT_FATES; adds up to all standing verdicts."""
    votes: tuple[PairVote, ...]
    """The votes that were counted."""
    rankings_by_annotator: Mapping[str, int]
    guidelines: Mapping[str, int]
    """Verdicts that were counted, by the version that they were given under."""
    strict_agreement: StrictAgreement

    @property
    def records(self) -> int:
        """Rankings and pairs of both sides; 0: there is nothing to train on."""
        return sum(len(side.rankings) + len(side.pairs) for side in self.sides.values())


# Which verdicts count

class Selected(NamedTuple):
    used: tuple[Verdict, ...]
    counts: dict[str, int]


def select(tasks: Mapping[str, Task], verdicts: Iterable[Verdict], settings: ExportSettings) -> Selected:
    """The verdicts that count, by task and annotator. Raises ConfigError for a name that no verdict has."""
    standing = sorted(verdicts, key=lambda verdict: (verdict.task_id, verdict.annotator))
    annotators = {verdict.annotator for verdict in standing}
    guidelines = {verdict.guideline for verdict in standing if verdict.guideline}
    for name in (*settings.annotators, *settings.without):
        if name not in annotators:
            raise ConfigError(f"no verdict is of annotator {name}; there are verdicts of {', '.join(sorted(annotators)) or 'nobody'}")
    if settings.guideline is not None and not any(is_version(guideline, settings.guideline) for guideline in guidelines):
        raise ConfigError(f"no verdict was given under guideline {settings.guideline}; there are verdicts under "
                          f"{', '.join(sorted(guidelines)) or 'none'}")
    fates = [_fate(verdict, tasks, settings) for verdict in standing]
    used = tuple(verdict for verdict, fate in zip(standing, fates, strict=True) if fate == "used")
    return Selected(used, {fate: fates.count(fate) for fate in VERDICT_FATES})


def is_version(guideline: str, asked: str) -> bool:
    """v2-1a2b3c4d is v2."""
    return guideline == asked or guideline.startswith(f"{asked}-")


def _fate(verdict: Verdict, tasks: Mapping[str, Task], settings: ExportSettings) -> str:
    if verdict.task_id not in tasks:
        return "unknown_task"
    task = tasks[verdict.task_id]
    if verdict.kind != "submitted":
        return verdict.kind
    if len(verdict.ranks) != len(task.responses):
        raise DataError(f"task {task.id} has {len(task.responses)} responses, but {verdict.annotator} gave {len(verdict.ranks)} ranks. "
                        "The tasks and the verdicts belong to two projects; put the right tasks.jsonl back.")
    if verdict.annotator in settings.without or (settings.annotators and verdict.annotator not in settings.annotators):
        return "other_annotator"
    if settings.guideline is not None and not is_version(verdict.guideline, settings.guideline):
        return "other_guideline"
    return "gold" if task.gold else "used"


# How pairs are decided

def rule_of(settings: ExportSettings, votes: Sequence[PairVote], tallies: Mapping[PairKey, Tally]) -> Rule:
    error_rate = strict_agreement(tallies.values()).error_rate

    def by_votes(_pair: PairKey, votes: Tally, choice: Choice) -> float | None:
        if error_rate is None:
            return None
        return chance_wrong(votes.of(choice), votes.of(opposite(choice)), error_rate=error_rate)

    match settings.policy:
        case "majority":
            return Rule(majority, by_votes)
        case "unanimous" | "all":
            return Rule(unanimous, by_votes)
        case "dawid-skene":
            from annotation.agreement import pair_posteriors  # imports torch, which the other policies do without
            posteriors = pair_posteriors(votes)
            return Rule(likelier_than(settings.min_posterior, posteriors), _by_posterior(posteriors))


def _by_posterior(posteriors: Mapping[PairKey, Sequence[float]]) -> ChanceWrong:
    """P(the other response is better) + P(tie) / 2: where both are equally good, either order is wrong half of the time."""
    def chance(pair: PairKey, _votes: Tally, choice: Choice) -> float:
        likely = dict(zip(CHOICES, posteriors[pair], strict=True))
        return min(0.5, likely[opposite(choice)] + likely["tie"] / 2)
    return chance


def opposite(choice: Choice) -> Choice:
    """Of a strict choice."""
    return "second" if choice == "first" else "first"


# All tasks together

def make_export(tasks: Mapping[str, Task], verdicts: Iterable[Verdict], settings: ExportSettings, *, project: str,
                console: Console | None = None) -> Export:
    """Records of all tasks, each on its side. Raises ConfigError for a name that no verdict has, DataError for ranks that fit no task."""
    used, verdict_counts = select(tasks, verdicts, settings)
    votes = tuple(pair_votes(used))
    tallies = tally(votes)
    rule = rule_of(settings, votes, tallies)
    given: defaultdict[str, list[Verdict]] = defaultdict(list)
    for verdict in used:
        given[verdict.task_id].append(verdict)
    counted: defaultdict[str, dict[Pair, Tally]] = defaultdict(dict)
    for (task_id, first, second), pair_tally in tallies.items():
        counted[task_id][first, second] = pair_tally

    kinds, fates = Counter(dict.fromkeys(TASK_KINDS, 0)), Counter(dict.fromkeys(PAIR_FATES, 0))
    rankings: list[RankedRecord] = []
    ties: list[RankedRecord] = []
    pairs: list[tuple[PreferenceRecord, ...]] = []
    disputes: list[dict[str, Any]] = []
    with progress(console, "adjudicate", len(tasks)) as bar:
        for task in sorted(tasks.values(), key=lambda task: task.id):
            bar.advance()
            if task.gold:
                kinds["gold"] += 1
                continue
            said, origin = given[task.id], Origin(versions(given[task.id]), f"{project}/{task.id}")
            found = (as_given(task, said, counted[task.id], rule, min_votes=settings.min_votes, origin=origin) if settings.policy == "all"
                     else adjudicated(task, counted[task.id], rule, min_votes=settings.min_votes, origin=origin))
            kinds[found.kind if said else "no_votes"] += 1
            fates.update(found.fates)
            rankings += found.rankings
            ties += found.ties
            pairs += found.pairs
            if said and not (found.rankings or found.ties):
                disputes.append(_dispute(task, found.kind, said, counted[task.id]))
    distinct = each_pair_once(pairs, orders_may_differ=settings.policy == "all")
    for fate, count in (("repeated", distinct.repeated), ("tasks_disagree", distinct.tasks_disagree)):
        fates[fate] += count
        fates["strict"] -= count
    percent = settings.holdout_percent
    split_rankings, split_pairs, split_ties = by_side(rankings, percent), by_side(distinct.pairs, percent), by_side(ties, percent)
    sides = {side: Side(rankings=split_rankings[side], pairs=split_pairs[side], ties=split_ties[side]) for side in SIDES}
    return Export(sides=sides, disputes=tuple(disputes), tasks=dict(kinds), pairs=dict(fates), verdicts=verdict_counts, votes=votes,
                  rankings_by_annotator=dict(sorted(Counter(verdict.annotator for verdict in used).items())),
                  guidelines=dict(sorted(Counter(verdict.guideline for verdict in used).items())),
                  strict_agreement=strict_agreement(tallies.values()))


class Distinct(NamedTuple):
    pairs: list[PreferenceRecord]
    repeated: int
    tasks_disagree: int


def each_pair_once(pairs: Iterable[tuple[PreferenceRecord, ...]], *, orders_may_differ: bool) -> Distinct:
    """Of tasks that show the same two responses to the same prompt, the one with the most votes speaks; if they disagree, none does.

    With `orders_may_differ` nothing is adjudicated, and tasks cannot disagree.
    """
    by_texts: defaultdict[object, list[tuple[PreferenceRecord, ...]]] = defaultdict(list)
    for records in pairs:
        by_texts[records[0].prompt, frozenset((records[0].chosen, records[0].rejected))].append(records)
    kept: list[PreferenceRecord] = []
    repeated = tasks_disagree = 0
    for tasks in by_texts.values():
        if not orders_may_differ and len({record.chosen for records in tasks for record in records}) > 1:
            tasks_disagree += len(tasks)
            continue
        repeated += len(tasks) - 1
        speaking = max(tasks, key=lambda records: (sum(record.votes for record in records), records[0].agreement, records[0].source))
        kept += speaking
    return Distinct(kept, repeated, tasks_disagree)


R = TypeVar("R", PreferenceRecord, RankedRecord)


def by_side(records: Iterable[R], holdout_percent: float) -> dict[Split, tuple[R, ...]]:
    """Sorted by ids: neither the order of the work nor who did it shows in the files."""
    sides: dict[Split, list[R]] = {side: [] for side in SIDES}
    for record in sorted(records, key=lambda record: (record.prompt.content_id, record.content_id)):
        sides[record.prompt.split(holdout_percent=holdout_percent)].append(record)
    return {side: tuple(chosen) for side, chosen in sides.items()}


def _dispute(task: Task, kind: str, said: Sequence[Verdict], counted: Mapping[Pair, Tally]) -> dict[str, Any]:
    """What people need who look into it: the texts in the order of the ledger, every vote with its reason, the votes on each pair."""
    return {"task": task.id, "kind": kind, "prompt": [asdict(message) for message in task.prompt.messages], "responses": task.responses,
            "verdicts": [{"annotator": verdict.annotator, "ranks": verdict.ranks, "confidence": verdict.confidence,
                          "reason": verdict.reason, "comment": verdict.comment, "guideline": verdict.guideline} for verdict in said],
            "pairs": [{"responses": pair, **votes._asdict()} for pair, votes in counted.items()]}
