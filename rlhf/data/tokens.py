"""Records to token runs, with every cut, merge and refusal counted.

The prompt's ids are those that generation is given. A response's ids are what follows them when prompt and response are tokenised as one
text. Where the two merge at the boundary ("Answer: " + "$46" may share a token), the response is tokenised alone instead, so that the
prompt stays what generation sees; such rows are counted as `boundary_merges`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rlhf.data.rejects import Reject, RowError, count_reasons
from rlhf.data.templates import Template
from rlhf.errors import DataError
from rlhf.records import Demonstration, PreferenceRecord, RankedRecord, Record, TokenRun

ROWS_PER_CALL = 2048
"""Enough for the tokenizer to use all cores, few enough to keep its memory small."""
LEAST_PROMPT = 8
"""Tokens of the prompt that stay however long a response is: about a generation prompt (`<|im_start|>assistant\\n`) and a word."""
ROWS_NAMED = 5

OnLong = Literal["cut_prompt", "reject"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts before any cut; percentiles by nearest rank."""

    p50: int
    p90: int
    p99: int
    longest: int
    histogram: tuple[int, ...]
    """`histogram[k]` rows have 2**k to 2**(k+1) - 1 tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        if not lengths:
            return cls(0, 0, 0, 0, ())
        ordered = sorted(lengths)
        p50, p90, p99 = (ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in (50, 90, 99))
        bins = Counter(length.bit_length() - 1 for length in ordered)
        return cls(p50, p90, p99, ordered[-1], tuple(bins[index] for index in range(max(bins) + 1)))


@dataclass(frozen=True, slots=True)
class TokenReport:
    rows: int
    kept: int
    prompts_cut: int
    """Kept rows whose prompt lost tokens on the left."""
    responses_cut: int
    """Responses that lost their end, because they do not fit even alone."""
    boundary_merges: int
    """Responses tokenised alone, because their first characters merge with the prompt's last."""
    prompt_tokens: int
    """Of kept rows, after the cuts, each prompt once."""
    response_tokens: int
    packed_tokens: int
    """Tokens of the kept rows when a prompt is laid out once."""
    padded_tokens: int
    """Tokens when each response repeats the prompt and is padded to the longest of its row."""
    prompt_lengths: Lengths
    response_lengths: Lengths
    sequence_lengths: Lengths
    """Prompt + longest response, what `max_length` limits; rejected rows that were tokenised count too."""
    rejected: dict[str, int]
    first_rows: dict[str, tuple[str, ...]]
    """Where the first few rows of `prompts_cut`, `responses_cut` and `boundary_merges` came from."""


class Tokens(NamedTuple):
    runs: tuple[TokenRun, ...]
    rejects: tuple[Reject, ...]
    report: TokenReport


class Rendered(NamedTuple):
    where: str
    record: Record
    prompt: str
    tail: str
    """The end of the prompt that decides how a response behind it is tokenised."""
    responses: tuple[str, ...]


class Row(NamedTuple):
    """A tokenised record before any cut, and what became of it."""

    where: str
    whole: TokenRun
    merges: int
    result: TokenRun | Reject


def tokenise(records: Sequence[Record], template: Template, *, max_length: int, on_long: OnLong) -> Tokens:
    """Runs in the order of the records; `max_length` limits prompt + longest response of each run, in tokens."""
    least = max(1, len(template.head)) + 2
    if max_length < least:
        raise DataError(f"max_length is {max_length}; a row needs at least {least} tokens: BOS, one of the prompt and one of the response. "
                        "Raise data.max_length.")
    rows: list[Row] = []
    rejects: list[Reject] = []
    runs: list[TokenRun] = []
    for start in range(0, len(records), ROWS_PER_CALL):
        for row in rows_of(records[start:start + ROWS_PER_CALL], start, template, max_length=max_length, on_long=on_long):
            if isinstance(row, Row):
                rows.append(row)
            result = row.result if isinstance(row, Row) else row
            if isinstance(result, Reject):
                rejects.append(result)
            else:
                runs.append(result)
    return Tokens(tuple(runs), tuple(rejects), summarise(rows, rejects, total=len(records)))


def rows_of(records: Sequence[Record], start: int, template: Template, *, max_length: int, on_long: OnLong) -> Iterator[Row | Reject]:
    """One item a record, in order. Each distinct text is tokenised once: the pairs of one ranking share prompts and responses."""
    rendered = [render(record, start + index, template) for index, record in enumerate(records)]
    usable = [item for item in rendered if isinstance(item, Rendered)]
    ids = encode_once([text for item in usable
                       for text in (item.prompt, item.tail, *(item.tail + response for response in item.responses))], template)
    alone = encode_once([response for item in usable for response in item.responses
                         if not extends(ids[item.tail + response], ids[item.tail])], template)
    for item in rendered:
        yield item if isinstance(item, Reject) else settle(item, ids, alone, template, max_length=max_length, on_long=on_long)


def render(record: Record, index: int, template: Template) -> Rendered | Reject:
    where = record.source or f"record {index + 1}"
    try:
        prompt = template.prompt_text(record.prompt)
        rendered = Rendered(where, record, prompt, template.tail_of(prompt), tuple(map(template.response_text, responses_of(record))))
    except RowError as error:
        return error.at(where)
    for text in (rendered.prompt, *rendered.responses):
        if (surrogate := lone_surrogate(text)) is not None:
            return Reject(where, "lone_surrogate", f"{surrogate!r} is half a character; no tokenizer can read it")
    return rendered


def responses_of(record: Record) -> tuple[str, ...]:
    """(chosen, rejected) of a pair, in that order."""
    match record:
        case Demonstration():
            return (record.response,)
        case PreferenceRecord():
            return (record.chosen, record.rejected)
        case RankedRecord():
            return record.responses


def smoothing_of(record: Record) -> float:
    """Chance that the judgement is wrong: as the record says, or else the share of the votes that are against it."""
    if isinstance(record, Demonstration):
        return 0.0
    return 1 - record.agreement if record.smoothing is None else record.smoothing


def lone_surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def encode_once(texts: Iterable[str], template: Template) -> dict[str, list[int]]:
    distinct = list(dict.fromkeys(texts))
    return dict(zip(distinct, template.encode(distinct), strict=True))


def extends(whole: Sequence[int], start: Sequence[int]) -> bool:
    return whole[:len(start)] == start


def settle(item: Rendered, ids: dict[str, list[int]], alone: dict[str, list[int]], template: Template, *, max_length: int,
           on_long: OnLong) -> Row | Reject:
    """Ids of one row, cut or rejected where it must be."""
    start = ids[item.tail]
    prompt = template.with_head(ids[item.prompt])
    joint = [ids[item.tail + response] for response in item.responses]
    merges = sum(not extends(whole, start) for whole in joint)
    responses = tuple(tuple(whole[len(start):] if extends(whole, start) else alone[response])
                      for whole, response in zip(joint, item.responses, strict=True))
    if not prompt:
        return Reject(item.where, "empty_prompt_tokens", f"the {len(item.prompt)} characters of the prompt give no tokens")
    for response, text in zip(responses, item.responses, strict=True):
        if not response or response == (template.end_id,):
            return Reject(item.where, "empty_response_tokens", f"the {len(text)} characters of a response give no tokens before its end")
    whole = TokenRun(id=item.record.content_id, prompt=prompt, responses=responses, smoothing=smoothing_of(item.record))
    return Row(item.where, whole, merges, fit(whole, item.where, head=template.head_length(prompt), max_length=max_length, on_long=on_long))


def fit(run: TokenRun, where: str, *, head: int, max_length: int, on_long: OnLong) -> TokenRun | Reject:
    """The run within `max_length`: the prompt loses its left, behind its first `head` ids; a response its end only where it must.

    All responses keep one prompt, so the longest of them decides how much of it stays.
    """
    if len(set(run.responses)) < len(run.responses):
        return Reject(where, "identical_tokens", "two responses that differ as texts have the same tokens")
    longest = max(map(len, run.responses))
    if len(run.prompt) + longest <= max_length:
        return run
    if on_long == "reject":
        return Reject(where, "too_long", f"{len(run.prompt)} + {longest} tokens, max_length is {max_length}")
    least = min(len(run.prompt), max(head + 1, min(LEAST_PROMPT, max_length // 8)))
    kept = min(len(run.prompt), max(least, max_length - longest))
    tail = kept - head
    cut = replace(run, prompt=run.prompt[:head] + run.prompt[len(run.prompt) - tail:],
                  responses=tuple(response[:max_length - kept] for response in run.responses))
    if len(set(cut.responses)) < len(cut.responses):
        return Reject(where, "identical_after_cut", f"the first {max_length - kept} tokens of two responses are the same")
    return cut


def summarise(rows: Sequence[Row], rejects: Sequence[Reject], *, total: int) -> TokenReport:
    kept = [(row, row.result) for row in rows if isinstance(row.result, TokenRun)]
    prompts_cut = [row.where for row, run in kept if len(run.prompt) < len(row.whole.prompt)]
    responses_cut = [row.where for row, run in kept
                     for after, before in zip(run.responses, row.whole.responses, strict=True) if len(after) < len(before)]
    merges = [row.where for row, _ in kept for _ in range(row.merges)]
    named = {"prompts_cut": prompts_cut, "responses_cut": responses_cut, "boundary_merges": merges}
    return TokenReport(
        rows=total, kept=len(kept), prompts_cut=len(prompts_cut), responses_cut=len(responses_cut), boundary_merges=len(merges),
        prompt_tokens=sum(len(run.prompt) for _, run in kept),
        response_tokens=sum(len(response) for _, run in kept for response in run.responses),
        packed_tokens=sum(run.packed_tokens for _, run in kept), padded_tokens=sum(run.padded_tokens for _, run in kept),
        prompt_lengths=Lengths.of([len(row.whole.prompt) for row in rows]),
        response_lengths=Lengths.of([len(response) for row in rows for response in row.whole.responses]),
        sequence_lengths=Lengths.of([len(row.whole.prompt) + max(map(len, row.whole.responses)) for row in rows]),
        rejected=count_reasons(rejects),
        first_rows={name: tuple(dict.fromkeys(where))[:ROWS_NAMED] for name, where in named.items()})
