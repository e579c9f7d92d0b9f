"""What the parts of the project hand to each other: immutable, versioned records of human judgement.

Standard library only, so that `annotation` and every reader can use them without torch.

Identity is content: two records that say the same have the same `content_id`, whatever file layout they came from. Where a record
came from (`source`), how many people voted and how they agreed travel along, but are not part of its identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from rlhf.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: frozenset[str] = frozenset({"system", "user", "assistant", "tool"})
Split = Literal["train", "holdout"]
CANONICAL = json.JSONEncoder(ensure_ascii=True, sort_keys=True, separators=(",", ":"))
"""Made once: `json.dumps` makes an encoder a call, which is a third of the time of reading a log of verdicts."""


def content_hash(*parts: object) -> str:
    """First 16 hex digits of the SHA-256 of the parts as canonical JSON."""
    return hashlib.sha256(CANONICAL.encode(parts).encode("ascii")).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    role: Role
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise DataError(f"message role must be one of {sorted(ROLES)}, got {self.role!r}")
        if not isinstance(self.content, str):
            raise DataError(f"message content must be text, got {type(self.content).__name__} {self.content!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The conversation before the response. A plain string prompt is one user message: `Prompt.of_text("...")`."""

    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        if not self.messages:
            raise DataError("a prompt needs at least one message")

    @classmethod
    def of_text(cls, text: str) -> Prompt:
        return cls(messages=(Message(role="user", content=text),))

    @property
    def content_id(self) -> str:
        return content_hash("prompt/1", self._key())

    def _key(self) -> list[list[str]]:
        return [[message.role, message.content] for message in self.messages]

    def split(self, *, holdout_percent: float) -> Split:
        """Which side this prompt is on, in this export and in every later one: a hash of its messages, never a row number."""
        bucket = int(hashlib.sha256(self.content_id.encode("ascii")).hexdigest()[:8], 16) % 10_000
        return "holdout" if bucket < holdout_percent * 100 else "train"


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise DataError(f"{name} must be text, got {type(value).__name__} {value!r}")
    if not value.strip():
        raise DataError(f"{name} is empty")


def _require_smoothing(value: float | None) -> None:
    if value is not None and not 0 <= value <= 0.5:
        raise DataError(f"smoothing must be in [0, 0.5] or None, got {value}; above 0.5 the other order would be the likelier one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A prompt with one response to imitate (SFT)."""

    prompt: Prompt
    response: str
    source: str = ""
    schema: Literal["demonstration/1"] = "demonstration/1"

    def __post_init__(self) -> None:
        _require_text("response", self.response)

    @property
    def content_id(self) -> str:
        return content_hash(self.schema, self.prompt.content_id, self.response)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceRecord:
    """One strict preference between two responses to a prompt (DPO, pairwise reward models)."""

    prompt: Prompt
    chosen: str
    rejected: str
    votes: int = 1
    """How many annotators judged this pair."""
    agreement: float = 1.0
    """Share of the votes that are for `chosen`, in (0.5, 1]; in (0, 1] where `smoothing` says how far the pair is to be trusted."""
    smoothing: float | None = None
    """Chance that the preference is wrong, estimated from the annotators' disagreement, in [0, 0.5]. None: 1 - agreement."""
    guideline: str = ""
    """Version of the text the annotators read."""
    source: str = ""
    schema: Literal["preference/1"] = "preference/1"

    def __post_init__(self) -> None:
        _require_text("chosen", self.chosen)
        _require_text("rejected", self.rejected)
        _require_smoothing(self.smoothing)
        if self.chosen == self.rejected:
            raise DataError("chosen equals rejected; a tie is not a preference record")
        if self.votes < 1:
            raise DataError(f"votes must be at least 1, got {self.votes}")
        if not (0.5 if self.smoothing is None else 0) < self.agreement <= 1:
            raise DataError(f"agreement must be in (0.5, 1], or in (0, 1] with a smoothing, got {self.agreement}")

    @property
    def content_id(self) -> str:
        return content_hash(self.schema, self.prompt.content_id, self.chosen, self.rejected)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedRecord:
    """Two or more responses to a prompt with ranks: 1 is best, equal ranks are ties."""

    prompt: Prompt
    responses: tuple[str, ...]
    ranks: tuple[int, ...]
    votes: int = 1
    agreement: float = 1.0
    """Share of pairwise votes that agree with the order of `ranks`."""
    smoothing: float | None = None
    """Mean, over the strictly ordered pairs, of the chance that the order is wrong, in [0, 0.5]. None: 1 - agreement."""
    guideline: str = ""
    source: str = ""
    schema: Literal["ranked/1"] = "ranked/1"

    def __post_init__(self) -> None:
        if len(self.responses) < 2:
            raise DataError(f"a ranking needs at least 2 responses, got {len(self.responses)}")
        if len(self.ranks) != len(self.responses):
            raise DataError(f"{len(self.responses)} responses but {len(self.ranks)} ranks")
        for index, (response, rank) in enumerate(zip(self.responses, self.ranks, strict=True)):
            _require_text(f"responses[{index}]", response)
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise DataError(f"ranks[{index}] must be a whole number from 1 (best), got {rank!r}")
        if len(set(self.responses)) != len(self.responses):
            raise DataError("two responses of one ranking are the same text")
        _require_smoothing(self.smoothing)

    @property
    def content_id(self) -> str:
        """Does not depend on the order in which the responses are listed."""
        return content_hash(self.schema, self.prompt.content_id, sorted(zip(self.responses, self.ranks, strict=True)))

    def pairs(self) -> Iterator[PreferenceRecord]:
        """Each strictly ordered pair, best first; ties give none."""
        ordered = sorted(zip(self.ranks, self.responses, strict=True))
        for (better, chosen), (worse, rejected) in combinations(ordered, 2):
            if better < worse:
                yield PreferenceRecord(prompt=self.prompt, chosen=chosen, rejected=rejected, votes=self.votes,
                                       agreement=self.agreement, smoothing=self.smoothing, guideline=self.guideline, source=self.source)

    def best(self) -> Demonstration:
        """The response ranked first; among ties the one listed first."""
        index = min(range(len(self.ranks)), key=lambda i: self.ranks[i])
        return Demonstration(prompt=self.prompt, response=self.responses[index], source=self.source)


Record = Demonstration | PreferenceRecord | RankedRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRun:
    """A prompt and its responses as token ids: what batches are made of.

    One response for SFT, two (chosen, rejected) for DPO, k for ranked groups. Prompt ids are those that generation would be given;
    each response ends with its end-of-turn token unless it was cut. Masks follow from lengths, never from ids.
    """

    id: str
    """`content_id` of the record."""
    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]
    smoothing: float = 0.0
    """Chance that the preference is wrong, from the annotators' disagreement: the record's smoothing, or 1 - agreement."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise DataError(f"row {self.id}: the prompt has no tokens; the first response token could not be predicted")
        if not self.responses or not all(self.responses):
            raise DataError(f"row {self.id}: a response has no tokens")

    @property
    def packed_tokens(self) -> int:
        """Tokens when the prompt is laid out once."""
        return len(self.prompt) + sum(map(len, self.responses))

    @property
    def longest(self) -> int:
        """Tokens of the prompt and its longest response: what `max_length` limits, and what a model needs positions for."""
        return len(self.prompt) + max(map(len, self.responses))

    @property
    def padded_tokens(self) -> int:
        """Tokens of this row alone, one padded row a response."""
        return len(self.responses) * self.longest
