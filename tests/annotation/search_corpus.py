"""Records, queries and filters drawn at random, and what they mean when every record is read: the reference for search."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import server_api
from hypothesis import strategies as st

VOCABULARY = ("river", "rivers", "riverbank", "moon", "mountain", "recipe", "and", "not", "near", "rank")
"""With words that mean something to FTS5."""
FIELDS = ("chat", "rank", "rowid")
"""With names that do."""
PEOPLE = ("anna", "ben")


@dataclass(frozen=True, kw_only=True)
class Document:
    words: dict[str, list[str]]
    """By field."""
    metadata: dict[str, Any]
    suggestion: dict[str, Any] | None
    responses: dict[str, dict[str, Any]]
    """By person: status, and rating or None."""

    @property
    def status(self) -> str:
        return "completed" if any(response["status"] == "submitted" for response in self.responses.values()) else "pending"


def draw_document(draw: random.Random) -> Document:
    metadata: dict[str, Any] = {}
    if draw.random() < 0.8:
        metadata["group"] = draw.choice(["x", "y", "z", ["x", "y"], ["z"]])
    if draw.random() < 0.8:
        metadata["turns"] = draw.randint(-2, 12)
    if draw.random() < 0.8:
        metadata["margin"] = draw.choice([0.0, 0.25, 0.5, 1.0, -1.5, 10.0])
    suggestion = {"value": draw.randint(1, 5), "agent": draw.choice(["rm-1", "rm-2"]), "score": draw.choice([0.0, 0.5, 1.0])}
    responses = {person: {"status": draw.choice(["submitted", "discarded", "draft"]), "rating": draw.choice([None, 1, 3, 5])}
                 for person in PEOPLE if draw.random() < 0.4}
    return Document(words={name: draw.choices(VOCABULARY, k=draw.randint(1, 4)) for name in FIELDS}, metadata=metadata,
                    suggestion=suggestion if draw.random() < 0.5 else None, responses=responses)


def as_pushed(number: int, document: Document, rating: str) -> dict[str, Any]:
    """`rating` is the id of that question. The role in the chat is a word of the vocabulary, and must not be found."""
    return {"external_id": f"e{number:03}", "metadata": document.metadata,
            "fields": {"chat": [{"role": "mountain", "content": " ".join(document.words["chat"])}],
                       "rank": " ".join(document.words["rank"]), "rowid": " ".join(document.words["rowid"])},
            "suggestions": [{"question_id": rating, **document.suggestion}] if document.suggestion else []}


def as_answered(response: dict[str, Any]) -> dict[str, Any]:
    rating = {"rating": {"value": response["rating"]}} if response["rating"] else {}
    return {"status": response["status"], "values": server_api.ranking(1, 2) | rating}


Tree: TypeAlias = "tuple[str, Any]"
"""("word" | "phrase" | "prefix", words) or ("not" | "all" | "any", trees)"""
LEAVES: st.SearchStrategy[Tree] = st.one_of(
    st.tuples(st.just("word"), st.tuples(st.sampled_from(VOCABULARY))),
    st.tuples(st.just("phrase"), st.tuples(st.sampled_from(VOCABULARY), st.sampled_from(VOCABULARY))),
    st.tuples(st.just("prefix"), st.sampled_from([("riv",), ("mo",), ("r",), ("river",)])))
TREES: st.SearchStrategy[Tree] = st.recursive(
    LEAVES, lambda parts: st.tuples(st.just("not"), st.lists(parts, min_size=1, max_size=1)) |
    st.tuples(st.sampled_from(["all", "any"]), st.lists(parts, min_size=2, max_size=3)), max_leaves=6)


def typed(tree: Tree) -> str:
    """The query, with parentheses around everything."""
    kind, parts = tree
    match kind:
        case "word":
            return str(parts[0])
        case "phrase":
            return f'"{" ".join(parts)}"'
        case "prefix":
            return f"{parts[0]}*"
        case "not":
            return f"-({typed(parts[0])})"
        case _:
            return "(" + (" | " if kind == "any" else " ").join(map(typed, parts)) + ")"


def contains(fields: list[list[str]], tree: Tree) -> bool:
    kind, parts = tree
    match kind:
        case "word":
            return any(parts[0] in words for words in fields)
        case "phrase":
            return any(pair == tuple(parts) for words in fields for pair in pairwise(words))
        case "prefix":
            return any(word.startswith(parts[0]) for words in fields for word in words)
        case "not":
            return not contains(fields, parts[0])
        case _:
            return (any if kind == "any" else all)(contains(fields, part) for part in parts)


@dataclass(frozen=True)
class Source:
    """Something that records can be filtered and sorted by: how the API names it, and the values that a document has of it. `mine` is the
    person who asks; None is the owner, whom everybody's responses concern.
    """

    scope: dict[str, Any]
    values: Callable[[Document, str | None], list[Any]]

    @property
    def hidden(self) -> bool:
        """Annotators are refused: who suggested something, and how sure of it, could bias them."""
        return self.scope.get("property") in ("agent", "score")


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def of_responses(document: Document, mine: str | None, name: str) -> list[Any]:
    return [response[name] for person, response in document.responses.items() if mine in (None, person) and response[name] is not None]


def metadata(name: str) -> Source:
    return Source({"entity": "metadata", "metadata_property": name}, lambda document, _: as_list(document.metadata.get(name)))


def suggested(name: str) -> Source:
    return Source({"entity": "suggestion", "question": "rating", "property": name},
                  lambda document, _: [document.suggestion[name]] if document.suggestion else [])


GROUP, TURNS, MARGIN = metadata("group"), metadata("turns"), metadata("margin")
VALUE, AGENT, SCORE = suggested("value"), suggested("agent"), suggested("score")
STATUS = Source({"entity": "record", "property": "status"}, lambda document, _: [document.status])
RATING = Source({"entity": "response", "question": "rating"}, lambda document, mine: of_responses(document, mine, "rating"))
RESPONSE = Source({"entity": "response", "property": "status"},
                  lambda document, mine: of_responses(document, mine, "status") or ["pending"])


@dataclass(frozen=True)
class Filter:
    source: Source
    sent: dict[str, Any]
    holds: Callable[[Document, str | None], bool]


def terms(source: Source, *possible: Any) -> st.SearchStrategy[Filter]:
    return st.lists(st.sampled_from(possible), min_size=1, max_size=3, unique=True).map(lambda chosen: Filter(
        source, {"type": "terms", "scope": source.scope, "values": [str(value) for value in chosen]},
        lambda document, mine: any(value in chosen for value in source.values(document, mine))))


def spans(source: Source) -> st.SearchStrategy[Filter]:
    bound = st.sampled_from([None, -1.5, 0, 0.5, 1, 3, 5, 12])

    def between(bounds: tuple[float | None, float | None]) -> Filter:
        low, high = bounds
        sent = {name: value for name, value in (("ge", low), ("le", high)) if value is not None}
        return Filter(source, {"type": "range", "scope": source.scope, **sent}, lambda document, mine: any(
            (low is None or value >= low) and (high is None or value <= high) for value in source.values(document, mine)))

    return st.tuples(bound, bound).filter(lambda pair: pair != (None, None) and (None in pair or pair[0] <= pair[1])).map(between)


FILTERS: st.SearchStrategy[Filter] = st.one_of(
    terms(GROUP, "x", "y", "z", "nowhere"), terms(TURNS, -2, 0, 3, 12), terms(MARGIN, 0.25, 1.0, -1.5), spans(TURNS), spans(MARGIN),
    terms(STATUS, "pending", "completed", "unheard of"), terms(AGENT, "rm-1", "rm-2", "rm-3"), terms(VALUE, 1, 3, 5), spans(VALUE),
    spans(SCORE), terms(RESPONSE, "pending", "submitted", "discarded", "draft"), terms(RATING, 1, 3, 5), spans(RATING))
SORTED_BY = (GROUP, TURNS, MARGIN, VALUE, AGENT, STATUS, RATING)


def sort_value(source: Source, document: Document, mine: str | None, *, descending: bool) -> Any:
    """What a document is sorted by: the mean of its ratings, of a list its smallest value or, descending, its largest; None without one."""
    values = source.values(document, mine)
    if not values:
        return None
    if source is RATING:
        return sum(values) / len(values)
    return max(values) if descending else min(values)
