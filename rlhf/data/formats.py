"""Files in any public layout -> records, with every row that is not used named and counted.

`read` gives the records as they are; `load_demonstrations` and `load_preferences` make of them what a stage trains on, split by the
hash of the prompt or by separate holdout files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from rlhf.config import DataConfig
from rlhf.data.detect import SAMPLE_ROWS, Layout, detect, layout_named, require_layout_name
from rlhf.data.drafts import Repairer, check_repairs, finish
from rlhf.data.files import Line, Source, expand
from rlhf.data.rejects import Reject, RowError, count_reasons
from rlhf.errors import DataError
from rlhf.records import Demonstration, PreferenceRecord, RankedRecord, Record

MERGED_DEMONSTRATIONS, MERGED_PAIRS = "merged_demonstrations", "merged_pairs"
"""Keys in `DataSet.repaired`: what several records gave (one chosen response in several pairs, one pair in several rankings)."""


@dataclass(frozen=True)
class Reading:
    """What files hold. Every row is a record, a reject, or a duplicate that `drop_duplicates` dropped."""

    records: tuple[Record, ...]
    rejects: tuple[Reject, ...]
    rows: int
    """Judgements found: rows of the files; of a tree, its groups of replies and each reply left out."""
    repaired: dict[str, int]
    """Rows changed, by repair."""
    files: dict[str, str]
    """Source -> SHA-256 of its bytes; of a hub data set, of the rows read."""
    layouts: dict[str, str]
    """Source -> name of its layout."""


R = TypeVar("R", bound=Demonstration | PreferenceRecord)


@dataclass(frozen=True)
class DataSet(Generic[R]):
    """What a stage trains on (`train`) and is measured on (`holdout`); no prompt is in both."""

    train: tuple[R, ...]
    holdout: tuple[R, ...]
    rejects: tuple[Reject, ...]
    rows: int
    repaired: dict[str, int]
    files: dict[str, str]
    layouts: dict[str, str]


def read(sources: Sequence[str], *, layout: str = "auto", repair: Sequence[str] = (), limit: int | None = None) -> Reading:
    """Records of files, globs and hub names. `limit`: only the first rows of all sources together."""
    require_layout_name(layout)
    gathered = _Gathered(frozenset(check_repairs(repair)))
    remaining = limit
    for source in expand(sources):
        if remaining == 0:
            break
        remaining = _read_source(source, layout, remaining, gathered)
    return gathered.reading()


class _Gathered:
    """What has been read so far, over all sources."""

    def __init__(self, repairs: frozenset[str]) -> None:
        self.repairs = repairs
        self.records: list[Record] = []
        self.rejects: list[Reject] = []
        self.rows = 0
        self.repaired: Counter[str] = Counter()
        self.files: dict[str, str] = {}
        self.layouts: dict[str, str] = {}
        self.seen: dict[str, str] = {}
        """content_id -> where it was first."""

    def add(self, line: Line, source: str, layout: Layout) -> None:
        where = f"{source}:{line.number}"
        if isinstance(line.content, RowError):
            self._reject(line.content.at(where))
            return
        try:
            for draft in layout.read(line.content):
                if isinstance(draft, RowError):
                    self._reject(draft.at(where))
                    continue
                repairer = Repairer(self.repairs)
                try:
                    record = finish(draft, repairer, where)
                except RowError as error:
                    self._reject(error.at(where))
                    continue
                self.repaired.update(repairer.used)
                self._keep(record, where)
        except RowError as error:
            self._reject(error.at(where))

    def reading(self) -> Reading:
        return Reading(tuple(self.records), tuple(self.rejects), self.rows, dict(self.repaired), self.files, self.layouts)

    def _reject(self, reject: Reject) -> None:
        self.rows += 1
        self.rejects.append(reject)

    def _keep(self, record: Record, where: str) -> None:
        content_id = record.content_id
        if content_id not in self.seen:
            self.rows += 1
            self.records.append(record)
            self.seen[content_id] = where
        elif "drop_duplicates" in self.repairs:
            self.rows += 1
            self.repaired["drop_duplicates"] += 1
        else:
            self._reject(Reject(where, "duplicate", f"the same content as {self.seen[content_id]}; repair: drop_duplicates"))


def _read_source(source: Source, name: str, limit: int | None, gathered: _Gathered) -> int | None:
    """Read one source into `gathered`; what is left of the limit."""
    opened = source.open()
    lines = opened.lines if limit is None else islice(opened.lines, limit)
    sample = list(_until_readable(lines, SAMPLE_ROWS))
    readable = [line.content for line in sample if not isinstance(line.content, RowError)]
    if not sample:
        raise DataError(f"{source.name} holds no rows")
    if not readable:
        bad = [line.content.at(f"{source.name}:{line.number}") for line in sample if isinstance(line.content, RowError)]
        raise DataError(f"{source.name}: none of its {len(bad)} rows can be read ({count_reasons(bad)}); {bad[0].where}: {bad[0].detail}")
    layout = detect(source.name, readable) if name == "auto" else layout_named(name)
    before, count, broken = len(gathered.rejects), 0, 0
    for line in chain(sample, lines):
        gathered.add(line, source.name, layout)
        count += 1
        broken += isinstance(line.content, RowError)
    _require_columns(source.name, layout, gathered.rejects[before:], readable=count - broken)
    gathered.files[source.name], gathered.layouts[source.name] = opened.digest(), layout.name
    return None if limit is None else limit - count


def _until_readable(lines: Iterator[Line], wanted: int) -> Iterator[Line]:
    """The first lines, up to and with the readable one number `wanted`."""
    readable = 0
    for line in lines:
        yield line
        readable += not isinstance(line.content, RowError)
        if readable == wanted:
            return


def _require_columns(source: str, layout: Layout, rejects: Sequence[Reject], *, readable: int) -> None:
    """A column that no row has is one error about the file, not a reject for each row."""
    lacking = [reject for reject in rejects if reject.reason == "missing_column"]
    if len(lacking) == readable:
        raise DataError(f"{source}: no row has what layout {layout.name} needs: {lacking[0].detail}")


class Converted(NamedTuple, Generic[R]):
    kept: list[R]
    rejects: list[Reject]
    merged: dict[str, int]
    """What was given more than once, by its key in `DataSet.repaired`."""


def as_demonstrations(reading: Reading) -> Converted[Demonstration]:
    """The response to imitate: of a pair the chosen one, of a ranking the best. Each (prompt, response) once; none is ever rejected."""
    found: dict[str, Demonstration] = {}
    for record in reading.records:
        match record:
            case Demonstration():
                demonstration = record
            case PreferenceRecord():
                demonstration = Demonstration(prompt=record.prompt, response=record.chosen, source=record.source)
            case RankedRecord():
                demonstration = record.best()
        found.setdefault(demonstration.content_id, demonstration)
    return Converted(list(found.values()), [], {MERGED_DEMONSTRATIONS: len(reading.records) - len(found)})


def as_preferences(reading: Reading) -> Converted[PreferenceRecord]:
    """Every strictly ordered pair of every record, each once. Records that hold none are rejected: `tie`, `no_preference`, `disputed`."""
    found: dict[str, PreferenceRecord] = {}
    rejects: list[Reject] = []
    given = 0
    for record in reading.records:
        match record:
            case PreferenceRecord():
                pairs = [record]
            case Demonstration():
                rejects.append(Reject(record.source, "no_preference", "one response, nothing to compare it with"))
                continue
            case RankedRecord() if len(set(record.ranks)) == 1:
                rejects.append(Reject(record.source, "tie", f"all {len(record.responses)} responses have the same rank"))
                continue
            case RankedRecord() if record.agreement <= 0.5 and record.smoothing is None:
                rejects.append(Reject(record.source, "disputed", f"only {record.agreement:.0%} of the votes agree with the ranking"))
                continue
            case RankedRecord():
                pairs = list(record.pairs())
        given += len(pairs)
        for pair in pairs:
            found.setdefault(pair.content_id, pair)
    return Converted(list(found.values()), rejects, {MERGED_PAIRS: given - len(found)})


def load_demonstrations(config: DataConfig) -> DataSet[Demonstration]:
    return _load(config, as_demonstrations)


def load_preferences(config: DataConfig) -> DataSet[PreferenceRecord]:
    return _load(config, as_preferences)


Convert = Callable[[Reading], Converted[R]]


def _load(config: DataConfig, convert: Convert[R]) -> DataSet[R]:
    train = _side(config, config.train, convert)
    if config.holdout is None:
        sides: dict[str, list[R]] = {"train": [], "holdout": []}
        for record in train.train:
            sides[record.prompt.split(holdout_percent=config.holdout_percent)].append(record)
        return replace(train, train=tuple(sides["train"]), holdout=tuple(sides["holdout"]))
    holdout = _side(config, config.holdout, convert)
    both = sorted(name for name, digest in train.files.items() if digest in holdout.files.values())
    if both:
        raise DataError(f"{', '.join(both)} is the same file as one of holdout; the holdout must be rows that are never trained on")
    measured = {record.prompt for record in holdout.train}
    overlap = [Reject(record.source, "in_holdout", "its prompt is in the holdout file too")
               for record in train.train if record.prompt in measured]
    return DataSet(train=tuple(record for record in train.train if record.prompt not in measured), holdout=holdout.train,
                   rejects=(*train.rejects, *overlap, *holdout.rejects), rows=train.rows + holdout.rows,
                   repaired=dict(Counter(train.repaired) + Counter(holdout.repaired)),
                   files=train.files | holdout.files, layouts=train.layouts | holdout.layouts)


def _side(config: DataConfig, sources: str | tuple[str, ...], convert: Convert[R]) -> DataSet[R]:
    """All rows of these sources, none held out."""
    reading = read((sources,) if isinstance(sources, str) else sources, layout=config.format, repair=config.repair, limit=config.limit)
    kept, rejects, merged = convert(reading)
    repaired = reading.repaired | {name: count for name, count in merged.items() if count}
    return DataSet(tuple(kept), (), (*reading.rejects, *rejects), reading.rows, repaired, reading.files, reading.layouts)
