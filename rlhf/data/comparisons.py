"""Layouts that compare several responses or carry votes: scored and ranked lists, LLMBar, PandaLM, SQuALITY, OASST trees, our records."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from rlhf.data.drafts import Draft, Turn, Turns
from rlhf.data.files import Row
from rlhf.data.layouts import (
    STRICT_PAIR,
    Drafts,
    assistant_turns,
    described,
    instruction_text,
    list_of,
    prompt_turns,
    response_turns,
    text_of,
    texts_of,
    turn_of,
    user_turn,
    value_of,
)
from rlhf.data.rejects import RowError
from rlhf.errors import DataError

# Scored and ranked lists

LARGEST_NUMBER = 1e15
"""Beyond it, sums of whole numbers are no longer exact. NaN is not below it either."""


def _number(value: object, where: str, reason: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        raise RowError(reason, f"{where} is {described(value)}, not a finite number")
    return value


def _numbers(row: Row, column: str, reason: str, *, count: int) -> list[float]:
    values = list_of(row, column)
    if len(values) != count:
        raise RowError(reason, f"{count} responses but {len(values)} {column}")
    return [_number(value, f"{column}[{index}]", reason) for index, value in enumerate(values)]


def read_scored(row: Row) -> Drafts:
    """Higher is better."""
    responses = texts_of(row, "responses")
    scores = _numbers(row, "scores", "bad_score", count=len(responses))
    yield _ranking(prompt_turns(row), responses, [-score for score in scores])


def read_ranked(row: Row) -> Drafts:
    """1 is best; equal ranks are ties, and gaps (1, 1, 3) mean nothing."""
    responses = texts_of(row, "responses")
    ranks = _numbers(row, "ranks", "bad_rank", count=len(responses))
    for index, rank in enumerate(ranks):
        if rank < 1 or rank != int(rank):
            raise RowError("bad_rank", f"ranks[{index}] is {rank}; whole numbers from 1 = best are needed (higher is better: scores)")
    yield _ranking(prompt_turns(row), responses, ranks)


def _ranking(prompt: Turns, responses: Sequence[str], ranks: Sequence[float]) -> Draft:
    return Draft(prompt, assistant_turns(responses), tuple(ranks))


def read_ultrafeedback_overall(row: Row) -> Drafts:
    yield from _ultrafeedback(row, "overall_score")


def read_ultrafeedback_fine(row: Row) -> Drafts:
    yield from _ultrafeedback(row, "fine-grained_score")


def _ultrafeedback(row: Row, key: str) -> Drafts:
    responses, scores = [], []
    for index, completion in enumerate(list_of(row, "completions")):
        where = f"completions[{index}]"
        if not isinstance(completion, Mapping):
            raise RowError("not_an_object", f"{where} is {described(completion)}, not an object")
        fields = {f"{where}.{name}": value for name, value in completion.items()}
        responses.append(text_of(fields, f"{where}.response"))
        scores.append(_number(value_of(fields, f"{where}.{key}"), f"{where}.{key}", "bad_score"))
    yield _ranking(user_turn(text_of(row, "instruction")), responses, [-score for score in scores])


def has_score(rows: Sequence[Row], key: str) -> bool:
    """Of UltraFeedback's two scores this one is there. Both: refused, for they order the completions differently."""
    keys = {name for row in rows for item in _items(row, "completions") if isinstance(item, Mapping)
            for name, value in item.items() if value is not None}
    if {"overall_score", "fine-grained_score"} <= keys:
        raise DataError("the completions have an overall_score and a fine-grained_score, which order them differently. "
                        "Say format: ultrafeedback_overall or ultrafeedback_fine")
    return key in keys


def _items(row: Row, column: str) -> list[object]:
    value = row.get(column)
    return value if isinstance(value, list) else []


# Votes

def read_llmbar(row: Row) -> Drafts:
    label = value_of(row, "label")
    if isinstance(label, bool) or label not in (1, 2):
        raise RowError("bad_vote", f"label is {described(label)}; 1 or 2 names the better output")
    ranks = STRICT_PAIR if label == 1 else STRICT_PAIR[::-1]
    yield Draft(user_turn(text_of(row, "input")), assistant_turns([text_of(row, "output_1"), text_of(row, "output_2")]), ranks)


PANDALM_VOTES = {0: (1.0, 1.0), 1: STRICT_PAIR, 2: STRICT_PAIR[::-1]}
"""0 is a tie, 1 and 2 name the better response."""


def read_pandalm(row: Row) -> Drafts:
    """Majority of three; agreement is its share of the votes."""
    votes = []
    for column in ("annotator1", "annotator2", "annotator3"):
        vote = value_of(row, column)
        if isinstance(vote, bool) or not isinstance(vote, int) or vote not in PANDALM_VOTES:
            raise RowError("bad_vote", f"{column} is {described(vote)}; 0 (tie), 1 or 2 is needed")
        votes.append(vote)
    (vote, count), = Counter(votes).most_common(1)
    if 2 * count <= len(votes):
        raise RowError("no_majority", "the three annotators gave three verdicts")
    responses = assistant_turns([text_of(row, "response1"), text_of(row, "response2")])
    yield Draft(user_turn(instruction_text(row)), responses, PANDALM_VOTES[vote], votes=len(votes), agreement=count / len(votes))


class Consensus(NamedTuple):
    means: tuple[float, ...]
    """Mean rank of each response; smaller is better."""
    votes: int
    agreement: float
    """Share of (voter, pair) that order a pair as the means do, over the pairs that these order strictly; with none, over all pairs.
    1 where there is no pair."""


def consensus(ballots: Sequence[Sequence[float]]) -> Consensus:
    """Of rankings: one row a voter, one rank a response, 1 = best. Mean rank is Borda's count."""
    sums = [sum(column) for column in zip(*ballots, strict=True)]
    pairs = list(combinations(range(len(sums)), 2))
    judged = [(i, j) for i, j in pairs if sums[i] != sums[j]] or pairs
    agreeing = sum(_order(ballot[i], ballot[j]) == _order(sums[i], sums[j]) for ballot in ballots for i, j in judged)
    agreement = agreeing / (len(ballots) * len(judged)) if judged else 1.0
    return Consensus(tuple(total / len(ballots) for total in sums), len(ballots), agreement)


def _order(a: float, b: float) -> int:
    return (a > b) - (a < b)


def read_squality(row: Row) -> Drafts:
    """SQuALITY rankings: each worker ranks the responses of all systems. `overall-rank` 1 is best; the ratings run the other way."""
    responses = value_of(row, "responses")
    if not isinstance(responses, Mapping):
        raise RowError("not_an_object", f"responses is {described(responses)}, not an object of system -> text")
    systems = list(responses)
    ballots: dict[str, dict[str, float]] = defaultdict(dict)
    for index, review in enumerate(list_of(row, "reviews")):
        if not isinstance(review, Mapping) or not {"system", "worker_id", "overall-rank"} <= review.keys():
            raise RowError("bad_vote", f"reviews[{index}] lacks one of system, worker_id, overall-rank")
        rank = _number(review["overall-rank"], f"reviews[{index}].overall-rank", "bad_rank")
        ballots[str(review["worker_id"])][str(review["system"])] = rank
    incomplete = [worker for worker, ballot in ballots.items() if ballot.keys() != set(systems)]
    if incomplete or not ballots:
        raise RowError("bad_vote", f"{len(incomplete)} of {len(ballots)} workers did not rank every response")
    means, votes, agreement = consensus([[ballot[system] for system in systems] for ballot in ballots.values()])
    texts = [text_of({f"responses.{system}": responses[system]}, f"responses.{system}") for system in systems]
    yield Draft(user_turn(text_of(row, "question_text")), assistant_turns(texts), means, votes=votes, agreement=agreement)


# Trees

def read_oasst(row: Row) -> Drafts:
    """OASST message trees: each prompter message with its replies is one comparison; rank 0 is best, and is a consensus, not votes.

    Replies without a rank, and deleted ones, are left out and counted. A single reply is a demonstration.
    """
    open_messages: list[tuple[Turns, Mapping[str, object]]] = [((), _message(value_of(row, "prompt")))]
    while open_messages:
        path, message = open_messages.pop()
        try:
            turns = (*path, turn_of(message, f"message {_id(message)}"))
            replies = [_message(reply) for reply in _replies(message)]
        except RowError as error:
            yield error
            continue
        open_messages += [(turns, reply) for reply in reversed(replies)]
        if turns[-1].role == "user":
            yield from _siblings(turns, replies)
            if not replies and len(turns) == 1:
                yield RowError("no_response", "the tree is a prompt without replies")


def _message(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise RowError("not_a_message", f"a node of the tree is {described(value)}, not a message")
    return value


def _replies(message: Mapping[str, object]) -> list[object]:
    return [] if message.get("replies") is None else list_of(dict(message), "replies")


def _id(message: Mapping[str, object]) -> str:
    """Its id, unless that is no id but a text."""
    name = str(message.get("message_id"))
    return name if re.fullmatch(r"[\w.:-]{1,40}", name) and name != "None" else "without id"


def _siblings(prompt: Turns, replies: Sequence[Mapping[str, object]]) -> Drafts:
    ranked: list[tuple[Turn, float]] = []
    for reply in replies:
        where = f"message {_id(reply)}"
        try:
            if reply.get("deleted") is True:
                raise RowError("deleted", f"{where} was deleted")
            if reply.get("rank") is None and len(replies) > 1:
                raise RowError("null_rank", f"{where} has no rank among {len(replies)} replies")
            rank = 0.0 if len(replies) == 1 else _number(reply["rank"], f"{where}.rank", "bad_rank")
            ranked.append((turn_of(reply, where), rank))
        except RowError as error:
            yield error
    if ranked:
        yield Draft(prompt, tuple((turn,) for turn, _ in ranked), tuple(rank for _, rank in ranked) if len(ranked) > 1 else None)


# Our own records

def read_records(row: Row) -> Drafts:
    """What `dataclasses.asdict` makes of the records of rlhf.records; votes, agreement, smoothing and guideline travel along."""
    schema = text_of(row, "schema")
    responses: tuple[Turns, ...]
    ranks: tuple[float, ...]
    match schema:
        case "demonstration/1":
            yield Draft(prompt_turns(row), (response_turns(row, "response"),))
            return
        case "preference/1":
            responses, ranks = (response_turns(row, "chosen"), response_turns(row, "rejected")), STRICT_PAIR
        case "ranked/1":
            listed = next(read_ranked(row))
            assert isinstance(listed, Draft) and listed.ranks is not None
            responses, ranks = listed.responses, listed.ranks
        case _:
            raise RowError("bad_schema", "schema is none of demonstration/1, preference/1, ranked/1")
    votes, agreement = _number(value_of(row, "votes"), "votes", "bad_vote"), _number(value_of(row, "agreement"), "agreement", "bad_vote")
    if votes < 1 or votes != int(votes) or not 0 <= agreement <= 1:
        raise RowError("bad_vote", f"votes is {votes}, agreement is {agreement}; a whole number from 1 and a share are needed")
    absent = row.get("smoothing") in (None, "")     # an empty cell of a CSV file is an empty text
    smoothing = None if absent else _number(row["smoothing"], "smoothing", "bad_vote")
    if smoothing is not None and not (0 <= smoothing <= 0.5 and agreement > 0):
        raise RowError("bad_vote", f"smoothing is {smoothing}, agreement is {agreement}; a share up to 0.5 and one above 0 are needed")
    yield Draft(prompt_turns(row), responses, ranks, votes=int(votes), agreement=agreement, smoothing=smoothing,
                guideline=text_of(row, "guideline"))


def is_records(rows: Sequence[Row]) -> bool:
    return all(row.get("schema") in ("demonstration/1", "preference/1", "ranked/1") for row in rows)
