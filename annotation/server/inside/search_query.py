"""Runs inside the server's environment: the query language, which is that of Elasticsearch's simple_query_string without fuzziness.

    river mountain      both words, in any field          river | mountain     either
    "over the river"    in this order, side by side       river -mountain      the first without the second
    mount*              words that begin so               (a | b) c            grouping; without it, from left to right

Anything can be typed: what is no operator where it stands is taken as text, or left out where it contains no word. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .search_words import words_of

MOST_WORDS = 200
"""In one query. Databases limit the size of an expression; a person never comes near it."""
DEEPEST = 20
"""Parentheses within parentheses."""
TOKEN = re.compile(r'"(?P<phrase>[^"]*)"(?:~\d*)?|(?P<operator>[()|+])|(?P<minus>-)|(?P<word>(?:\\.|[^\s"()|+])+)|(?P<space>\s+)')
FUZZY = re.compile(r"~\d*$")


class QueryError(ValueError):
    """The server answers 422 with its message."""


@dataclass(frozen=True)
class Words:
    """These words, next to each other in one field."""

    words: tuple[str, ...]
    prefix: bool = False
    """The last one may go on."""


@dataclass(frozen=True)
class Not:
    part: Query


@dataclass(frozen=True)
class AllOf:
    parts: tuple[Query, ...]


@dataclass(frozen=True)
class AnyOf:
    parts: tuple[Query, ...]


Query = Words | Not | AllOf | AnyOf


@dataclass
class Group:
    """What is between two parentheses, as far as it has been read."""

    query: Query | None = None
    joined_by: Literal["all", "any"] | None = None
    negated: bool = False

    def add(self, part: Query | None) -> None:
        """Join what comes next to what is there, from left to right: `a | b c` is `(a | b) c`."""
        if part is not None:
            part = Not(part) if self.negated else part
            if self.query is None:
                self.query = part
            elif self.joined_by == "any":
                self.query = AnyOf((*self.query.parts, part) if isinstance(self.query, AnyOf) else (self.query, part))
            else:
                self.query = AllOf((*self.query.parts, part) if isinstance(self.query, AllOf) else (self.query, part))
        self.joined_by, self.negated = None, False


def parse(text: str) -> Query | None:
    """None where the text contains no word, which finds nothing. Raises QueryError for a query beyond the limits."""
    tokens = without_loose_parentheses(list(TOKEN.finditer(text)))
    groups = [Group()]
    words = 0
    for token in tokens:
        group = groups[-1]
        match token.lastgroup:
            case "minus":
                group.negated = not group.negated
            case "word" | "phrase":
                leaf = words_in(token)
                words += len(leaf.words) if leaf else 0
                group.add(leaf)
            case "operator" if token["operator"] == "(":
                groups.append(Group())
            case "operator" if token["operator"] == ")":
                groups.pop()
                groups[-1].add(group.query)
            case "operator":
                if group.query is not None and group.joined_by is None:
                    group.joined_by = "any" if token["operator"] == "|" else "all"
                group.negated = False
            case _:    # white space between a minus and a word makes the minus a dash
                group.negated = False
    if words > MOST_WORDS:
        raise QueryError(f"a query has at most {MOST_WORDS} words, got {words}; shorten it")
    return groups[-1].query


def words_in(token: re.Match[str]) -> Words | None:
    if (phrase := token["phrase"]) is not None:
        found, prefix = words_of(phrase), False
    else:
        written = FUZZY.sub("", token["word"])
        found, prefix = words_of(written), written.endswith("*") and not written.endswith(r"\*")
    return Words(tuple(found), prefix) if found else None


def without_loose_parentheses(tokens: Sequence[re.Match[str]]) -> list[re.Match[str]]:
    """Those that have no partner are no operators. Raises QueryError where they are nested too deeply."""
    opened: list[int] = []
    paired: set[int] = set()
    for position, token in enumerate(tokens):
        if token["operator"] == "(":
            opened.append(position)
        elif token["operator"] == ")" and opened:
            paired |= {opened.pop(), position}
    depth = deepest = 0
    for position in sorted(paired):
        depth += 1 if tokens[position]["operator"] == "(" else -1
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise QueryError(f"parentheses can be nested {DEEPEST} deep, got {deepest}; simplify the query")
    return [token for position, token in enumerate(tokens) if token["operator"] not in ("(", ")") or position in paired]
