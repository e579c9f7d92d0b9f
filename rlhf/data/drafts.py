"""What a layout says about one judgement -> a record, or the reason why not.

Every layout passes through here, so that the same content gives the same record whatever it was written in. A row
is never mended unless the recipe names the repair (`REPAIRS`); docs/data.md lists the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar, cast

from rlhf.data.rejects import RowError
from rlhf.errors import ConfigError, Problem
from rlhf.records import Demonstration, Message, PreferenceRecord, Prompt, RankedRecord, Record, Role

REPAIRS: dict[str, str] = {
    "replace_surrogates": "lone surrogate escapes become U+FFFD",
    "strip_whitespace": "white space around every message and response goes",
    "drop_empty_history": "empty messages before the last one of the prompt go",
    "drop_leading_assistant": "assistant messages before the first user message go",
    "merge_same_role": "neighbouring messages of one role become one, joined by an empty line",
    "strip_prompt_from_response": "a response that repeats the prompt loses the repetition",
    "drop_duplicates": "of rows with the same content the first stays",
}

ECHO_CHARACTERS = 10
"""A response that begins with a shorter prompt ("Hello") is an ordinary answer, not a repeated prompt."""

ROLE_MARKERS = re.compile(
    r"(?:\A\s*|\n\n)(?:Human|Assistant):|<\|(?:im_start|im_end|start_header_id|eot_id|user|assistant|system)\|>"
    r"|<(?:start|end)_of_turn>|\[/?INST\]|^### (?:Instruction|Response):", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    text: str


Turns = tuple[Turn, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Draft:
    """One judgement as a layout states it."""

    prompt: Turns | None
    """None: each of `responses` is a whole conversation, and the prompt is what they share."""
    responses: tuple[Turns, ...]
    ranks: tuple[float, ...] | None = None
    """Smaller is better, equal is a tie; None: nothing was compared."""
    votes: int = 1
    agreement: float = 1.0
    smoothing: float | None = None
    guideline: str = ""


def check_repairs(names: Collection[str]) -> frozenset[str]:
    unknown = sorted(set(names) - set(REPAIRS))
    if unknown:
        raise ConfigError("unknown repair", [Problem("data.repair", f"{name!r} is none of {', '.join(REPAIRS)}") for name in unknown])
    return frozenset(names)


class Repairer:
    """The repairs that a recipe allows, and those that this row needed."""

    def __init__(self, allowed: Collection[str]) -> None:
        self.allowed = allowed
        self.used: set[str] = set()

    def apply(self, name: str, value: T, change: Callable[[T], T]) -> T:
        if name not in self.allowed:
            return value
        changed = change(value)
        if changed != value:
            self.used.add(name)
        return changed


def finish(draft: Draft, repairer: Repairer, source: str) -> Record:
    """The record of a draft, or RowError."""
    if draft.ranks is not None and len(draft.responses) < 2:
        raise RowError("too_few_responses", f"a comparison needs at least 2 responses, got {len(draft.responses)}")
    draft = replace(draft, prompt=None if draft.prompt is None else _clean(draft.prompt, repairer),
                    responses=tuple(_clean(turns, repairer) for turns in draft.responses))
    prompt, responses = _split(draft, repairer)
    _require_prompt(prompt)
    texts = _response_texts(prompt, responses, draft, repairer)
    return _record(draft, prompt, texts, source)


def _clean(turns: Turns, repairer: Repairer) -> Turns:
    turns = repairer.apply("replace_surrogates", turns, lambda ts: tuple(
        Turn(turn.role, turn.text if _encodable(turn.text) else re.sub("[\ud800-\udfff]", "\ufffd", turn.text)) for turn in ts))
    for turn in turns:
        if not _encodable(turn.text):
            raise RowError("lone_surrogate", f"a {turn.role} message holds half of a UTF-16 pair, which no tokenizer can encode")
    return repairer.apply("strip_whitespace", turns, lambda ts: tuple(Turn(turn.role, turn.text.strip()) for turn in ts))


def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _split(draft: Draft, repairer: Repairer) -> tuple[Turns, tuple[Turns, ...]]:
    """Prompt and responses. Whole conversations split at the common prefix of their messages; each keeps at least one as its response."""
    if draft.prompt is not None:
        return _tidy(draft.prompt, repairer), draft.responses
    conversations = [_tidy(turns, repairer) for turns in draft.responses]
    if not all(conversations):
        raise RowError("empty_response", "a conversation has no messages")
    for number, turns in enumerate(conversations, 1):
        if turns[-1].role != "assistant":
            raise RowError("no_response", f"conversation {number} ends with a {turns[-1].role} message, not with an answer")
    shared = min(map(len, conversations)) - 1
    first = conversations[0]
    cut = next((i for i in range(shared) if any(turns[i] != first[i] for turns in conversations)), shared)
    if cut == 0:
        raise RowError("empty_prompt", "the conversation has no message before the response" if len(conversations) == 1
                       else "the conversations share no first message, so there is no prompt")
    return first[:cut], tuple(turns[cut:] for turns in conversations)


def _tidy(turns: Turns, repairer: Repairer) -> Turns:
    """Repairs of the history. The last message stays: of a prompt it is the question, of a conversation the response."""
    turns = repairer.apply("drop_empty_history", turns, lambda ts: (*(turn for turn in ts[:-1] if turn.text.strip()), *ts[-1:]))
    turns = repairer.apply("drop_leading_assistant", turns, _without_leading_assistant)
    return repairer.apply("merge_same_role", turns, _merged)


def _without_leading_assistant(turns: Turns) -> Turns:
    first_user = next((i for i, turn in enumerate(turns) if turn.role == "user"), 0)
    return (*(turn for turn in turns[:first_user] if turn.role != "assistant"), *turns[first_user:])


def _merged(turns: Turns) -> Turns:
    merged: list[Turn] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        run = list(group)
        merged += run if role == "tool" else [Turn(role, "\n\n".join(turn.text for turn in run))]
    return tuple(merged)


def _require_prompt(prompt: Turns) -> None:
    if not any(turn.role == "user" for turn in prompt):
        raise RowError("empty_prompt", "the prompt has no user message")
    if not prompt[-1].text.strip():
        raise RowError("empty_prompt", "the last message of the prompt is empty")
    for index, turn in enumerate(prompt):
        if turn.role == "system" and index > 0:
            raise RowError("system_not_first", f"message {index + 1} of the prompt is a system message; it must be the first")
        if not turn.text.strip():
            raise RowError("empty_turn", f"message {index + 1} of the prompt ({turn.role}) is empty; repair: drop_empty_history")
        if index and turn.role == prompt[index - 1].role != "tool":
            raise RowError("same_role_run", f"messages {index} and {index + 1} of the prompt are both {turn.role}; repair: merge_same_role")
    if next(turn.role for turn in prompt if turn.role != "system") == "assistant":
        raise RowError("assistant_first", "an assistant message comes before any user message; repair: drop_leading_assistant")
    if prompt[-1].role == "assistant":
        raise RowError("same_role_run", "the prompt ends with an assistant message, and the response is one too")


def _response_texts(prompt: Turns, responses: Sequence[Turns], draft: Draft, repairer: Repairer) -> tuple[str, ...]:
    best = 0 if draft.ranks is None else min(range(len(responses)), key=draft.ranks.__getitem__)
    question = prompt[-1].text.strip()
    texts = []
    for number, turns in enumerate(responses, 1):
        text = _only_turn(_without_prompt_messages(turns, prompt, number, repairer), number).text
        if _repeats(question, text):
            text = repairer.apply("strip_prompt_from_response", text, lambda text: text.lstrip().removeprefix(question).lstrip())
            if number - 1 == best and _repeats(question, text):
                raise RowError("prompt_in_response", f"response {number} begins with the prompt; repair: strip_prompt_from_response")
        if not text.strip():
            raise RowError("empty_response", f"response {number} of {len(responses)} is empty")
        marker = ROLE_MARKERS.search(text)
        if marker:
            raise RowError("role_in_response", f"response {number} holds the role marker {marker.group().strip()!r}")
        texts.append(text)
    if len(set(texts)) != len(texts):
        raise RowError("identical", f"two of the {len(texts)} responses are the same text")
    return tuple(texts)


def _repeats(question: str, text: str) -> bool:
    return len(question) >= ECHO_CHARACTERS and text.lstrip().startswith(question)


def _without_prompt_messages(turns: Turns, prompt: Turns, number: int, repairer: Repairer) -> Turns:
    if turns[:len(prompt)] != prompt:
        return turns
    rest = repairer.apply("strip_prompt_from_response", turns, lambda ts: ts[len(prompt):])
    if rest == turns:
        raise RowError("prompt_in_response", f"response {number} begins with the prompt; repair: strip_prompt_from_response")
    return rest


def _only_turn(turns: Turns, number: int) -> Turn:
    if not turns:
        raise RowError("empty_response", f"response {number} has no messages")
    if len(turns) > 1:
        raise RowError("role_in_response", f"response {number} has {len(turns)} messages, the first by {turns[0].role}; one is needed")
    if turns[0].role != "assistant":
        raise RowError("no_response", f"response {number} is a {turns[0].role} message, not an assistant's")
    return turns[0]


def _record(draft: Draft, prompt_turns: Turns, texts: tuple[str, ...], source: str) -> Record:
    """Canonical: ranks are dense from 1 and sorted, and a strict ranking of two is a preference."""
    prompt = Prompt(messages=tuple(Message(role=turn.role, content=turn.text) for turn in prompt_turns))
    if draft.ranks is None:
        return Demonstration(prompt=prompt, response=texts[0], source=source)
    places = {rank: place for place, rank in enumerate(sorted(set(draft.ranks)), 1)}
    ordered = sorted(zip((places[rank] for rank in draft.ranks), texts, strict=True), key=lambda pair: pair[0])
    ranks, responses = cast("tuple[tuple[int, ...], tuple[str, ...]]", tuple(zip(*ordered, strict=True)))
    if ranks == (1, 2) and (draft.agreement > 0.5 or draft.smoothing is not None):
        return PreferenceRecord(prompt=prompt, chosen=responses[0], rejected=responses[1], votes=draft.votes, agreement=draft.agreement,
                                smoothing=draft.smoothing, guideline=draft.guideline, source=source)
    return RankedRecord(prompt=prompt, responses=responses, ranks=ranks, votes=draft.votes, agreement=draft.agreement,
                        smoothing=draft.smoothing, guideline=draft.guideline, source=source)
