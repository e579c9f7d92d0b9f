"""Candidates from JSONL: a prompt with the responses to rank on each line. What cannot be used is named, with its line and a reason.

    {"prompt": "What is a monad?", "responses": ["...", "..."]}
    {"prompt": [{"role": "user", "content": "..."}], "responses": [{"text": "...", "model": "sft-3"}, {"text": "...", "model": "base"}]}
    {"prompt": "...", "responses": ["...", "..."], "models": ["sft-3", "base"], "gold": [1, 2]}

`gold` holds the known ranks of a gold item, 1 is best, equal ranks are ties. `ranks` are somebody's judgement, and gold only in a file of
gold items. Other columns are left alone. Lines end at b"\\n" and nowhere else. Standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from annotation.tasks import Candidates
from rlhf.errors import DataError
from rlhf.records import Demonstration, Message, PreferenceRecord, Prompt, RankedRecord, Record
from rlhf.whole_files import replace_file

BOM = b"\xef\xbb\xbf"
TEXT_KEYS = ("text", "response", "content")
"""Where a response that is an object keeps its text."""
Row = Mapping[str, Any]
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Reject:
    """A line, or a task, that is not used."""

    where: str
    """File and line, `candidates.jsonl:17`."""
    reason: str
    """bad_json, bad_encoding, missing_column, bad_prompt, bad_responses, bad_models, bad_gold, bad_text, not_rankable; conflict and refused
    come from the push itself."""
    detail: str


class Rejected(DataError):
    """Why a row cannot be used; whoever knows file and line makes a Reject of it."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")

    def at(self, where: str) -> Reject:
        return Reject(where, self.reason, self.detail)


@dataclass(frozen=True)
class Reading(Generic[Read]):
    found: tuple[Read, ...]
    rejects: tuple[Reject, ...]
    repeated: int = 0
    """Rows that say what an earlier one says, where the reader has dropped them already."""


class Asked(NamedTuple):
    """A prompt that responses are to be sampled for."""

    prompt: Prompt
    source: str


class Line(NamedTuple):
    where: str
    content: Row | Rejected


def read_candidates(path: Path, *, gold: bool = False, limit: int | None = None) -> Reading[Candidates]:
    """`gold`: every row is a gold item, with its ranks in `gold` or `ranks`. `limit`: only the first rows."""
    return _read(path, lambda row, where: candidates_of(row, source=where, gold=gold), limit)


def read_prompts(path: Path, *, limit: int | None = None) -> Reading[Asked]:
    """Only the prompts; other columns are left alone."""
    return _read(path, lambda row, where: Asked(prompt_of(row), where), limit)


def of_records(records: Iterable[Record], *, gold: bool = False) -> Reading[Candidates]:
    """The responses of pairs and rankings; of demonstrations, those to one prompt together. `gold`: their ranks are known to be right."""
    found: list[Candidates] = []
    rejects: list[Reject] = []
    demonstrations: dict[Prompt, list[Demonstration]] = {}
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    for record in records:
        match record:
            case Demonstration():
                demonstrations.setdefault(record.prompt, []).append(record)
                continue
            case PreferenceRecord():
                responses, ranks = (record.chosen, record.rejected), (1, 2)
            case RankedRecord():
                responses, ranks = record.responses, record.ranks
        _gather(found, rejects, record.prompt, responses, gold=ranks if gold else (), source=record.source)
    for prompt, same in demonstrations.items():
        _gather(found, rejects, prompt, [record.response for record in same], gold=(), source=same[0].source)
    return Reading(tuple(found), tuple(rejects))


def _gather(found: list[Candidates], rejects: list[Reject], prompt: Prompt, responses: Sequence[str], *, gold: Sequence[int],
            source: str) -> None:
    try:
        found.append(checked(prompt, responses, gold=gold, source=source))
    except Rejected as error:
        rejects.append(error.at(source))


def first_row(path: Path) -> Row:
    """The first row that can be read; empty where there is none. Tells which layout a file has."""
    return next((line.content for line in lines_of(path) if not isinstance(line.content, Rejected)), {})


def count_reasons(rejects: Iterable[Reject]) -> dict[str, int]:
    """Rejects by reason, most frequent first."""
    return dict(Counter(reject.reason for reject in rejects).most_common())


def write_rejects(rejects: Iterable[Reject], path: Path) -> None:
    """One JSON line each, replacing the file as a whole."""
    replace_file(path, "".join(json.dumps(asdict(reject), ensure_ascii=True) + "\n" for reject in rejects))


def lines_of(path: Path) -> Iterator[Line]:
    """Rows with their lines; empty lines are no rows. Raises DataError where the file cannot be read at all."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                content = line.removeprefix(BOM) if number == 1 else line
                if content.strip():
                    yield Line(f"{path}:{number}", _row(content))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Name a JSONL file, a data set, or a hub name") from error


def _row(line: bytes) -> Row | Rejected:
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Rejected("bad_encoding", f"not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Rejected("bad_json", f"not JSON: {error}")
    if not isinstance(values, dict):
        return Rejected("bad_json", f"not an object but {_kind(values)}")
    return values


def _read(path: Path, read: Callable[[Row, str], Read], limit: int | None) -> Reading[Read]:
    found: list[Read] = []
    rejects: list[Reject] = []
    for line in islice(lines_of(path), limit):
        if isinstance(line.content, Rejected):
            rejects.append(line.content.at(line.where))
            continue
        try:
            found.append(read(line.content, line.where))
        except Rejected as error:
            rejects.append(error.at(line.where))
    return Reading(tuple(found), tuple(rejects))


def candidates_of(row: Row, *, source: str, gold: bool = False) -> Candidates:
    """Raises Rejected."""
    prompt = prompt_of(row)
    if "responses" not in row:
        raise _missing("responses", row)
    texts, named = _responses(row["responses"])
    models = _models(row, named)
    return checked(prompt, texts, models=models, gold=_gold(row, required=gold), source=source)


def checked(prompt: Prompt, responses: Sequence[str], *, models: Sequence[str] = (), gold: Sequence[int] = (), source: str) -> Candidates:
    """Candidates of parts that come from anywhere. Raises Rejected, also for what no server takes."""
    empty = next((place for place, message in enumerate(prompt.messages, 1) if not message.content), None)
    if empty is not None:
        raise Rejected("bad_prompt", f"message {empty} of the prompt is empty")
    for name, text in [*((f"message {place} of the prompt", message.content) for place, message in enumerate(prompt.messages, 1)),
                       *((f"response {place}", text) for place, text in enumerate(responses, 1))]:
        _require_storable(name, text)
    try:
        return Candidates(prompt=prompt, responses=tuple(responses), models=tuple(models), gold=tuple(gold), source=source)
    except DataError as error:
        raise Rejected("not_rankable", str(error)) from error


def prompt_of(row: Row) -> Prompt:
    """A text is one user message; a list holds messages of {role, content}. Raises Rejected."""
    if "prompt" not in row:
        raise _missing("prompt", row)
    value = row["prompt"]
    if isinstance(value, str) and value.strip():
        return Prompt.of_text(value)
    if isinstance(value, list) and value:
        return Prompt(messages=tuple(_message(message, place) for place, message in enumerate(value, 1)))
    raise Rejected("bad_prompt", "prompt is empty" if value in ("", []) or isinstance(value, str) else
                   f"prompt is {_kind(value)}, not a text or a list of messages")


def _message(value: object, place: int) -> Message:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise Rejected("bad_prompt", f"message {place} of the prompt is {_kind(value)}, not an object with role and content")
    try:
        return Message(role=value["role"], content=value["content"])
    except (DataError, TypeError) as error:    # TypeError: a role that is a list
        raise Rejected("bad_prompt", f"message {place} of the prompt: {error}") from error


def _responses(value: object) -> tuple[list[str], list[str]]:
    """Texts, and who wrote them where the responses say so: for none of them, or for all."""
    if not isinstance(value, list):
        raise Rejected("bad_responses", f"responses is {_kind(value)}, not a list")
    texts: list[str] = []
    models: list[str] = []
    for place, item in enumerate(value, 1):
        text = next((item[key] for key in TEXT_KEYS if key in item), None) if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise Rejected("bad_responses", f"response {place} is {_kind(item)}, not a text and no object with {' or '.join(TEXT_KEYS)}")
        texts.append(text)
        if isinstance(item, dict) and "model" in item:
            models.append(_name(item["model"], f"the model of response {place}"))
    if models and len(models) != len(texts):
        raise Rejected("bad_models", f"{len(models)} of {len(texts)} responses name their model; name all or none")
    return texts, models


def _models(row: Row, named: Sequence[str]) -> Sequence[str]:
    if "models" not in row or row["models"] in (None, []):
        return named
    if named:
        raise Rejected("bad_models", "models are named twice: in responses and in models")
    if not isinstance(row["models"], list):
        raise Rejected("bad_models", f"models is {_kind(row['models'])}, not a list")
    return [_name(model, f"model {place}") for place, model in enumerate(row["models"], 1)]


def _gold(row: Row, *, required: bool) -> list[int]:
    column = "gold" if "gold" in row or not required else "ranks"
    value = row.get(column)
    if value is None and not required:
        return []
    if not isinstance(value, list) or not value or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 for rank in value):
        raise Rejected("bad_gold", f"{column} must be a list of ranks, whole numbers from 1 (best), got {value!r:.80}")
    return value


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Rejected("bad_models", f"{what} is {_kind(value)}, not a name")
    return value


def _require_storable(name: str, text: str) -> None:
    """Half of a surrogate pair, which JSON can spell as \\ud83d, is no character and has no UTF-8."""
    bad = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    if bad is not None:
        raise Rejected("bad_text", f"{name} holds U+{ord(bad):04X}, half of a character; repair its encoding")


def _missing(column: str, row: Row) -> Rejected:
    return Rejected("missing_column", f"no column {column!r}; found: {', '.join(map(repr, list(row)[:12])) or 'none'}")


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, list(value)[:6])) or 'no keys'}"
    if value is None:
        return "null"
    name = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return name[type(value)]
