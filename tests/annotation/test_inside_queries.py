"""The language of queries and what a word is: golden values, and truth tables against the queries' structure."""

from __future__ import annotations

import itertools
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annotation.server.inside.search_query import DEEPEST, MOST_WORDS, AllOf, AnyOf, Not, Query, QueryError, Words, parse
from annotation.server.inside.search_words import LONGEST, words_of


@pytest.mark.parametrize(("text", "words"), [
    ("The quick, brown fox", ["the", "quick", "brown", "fox"]),
    ("Café CAFÉ cafe\u0301 ｃａｆｅ", ["cafe", "cafe", "cafe", "cafe"]),
    ("Straße STRASSE", ["strasse", "strasse"]),
    ("Σίσυφος ΣΊΣΥΦΟΣ", ["σισυφοσ", "σισυφοσ"]),
    ("don't e-mail user@example.com 3.14", ["don", "t", "e", "mail", "user", "example", "com", "3", "14"]),
    ("snake_case CamelCase", ["snake_case", "camelcase"]),
    ("हिन्दी 한국어", ["हिन्दी", "한국어"]),
    ("北京大学 2024年", ["北", "京", "大", "学", "2024", "年"]),
    ("ありがとう", ["あ", "り", "か\u3099", "と", "う"]),
    ("party🎉time ❤\ufe0f ❤", ["party", "🎉", "time", "❤", "❤"]),
    ("<b>bold</b> &amp; x<y", ["b", "bold", "b", "amp", "x", "y"]),
    ("nul\x00in side\u00a0by\u2028line", ["nul", "in", "side", "by", "line"]),
    ("", []), ("?!… — *", []),
])
def test_words_of_many_scripts(text: str, words: list[str]) -> None:
    assert [unicode_form(word) for word in words_of(text)] == [unicode_form(word) for word in words]


def unicode_form(word: str) -> str:
    """Whether が is one code point or two is not what this test is about."""
    import unicodedata

    return unicodedata.normalize("NFC", word)


@given(st.text())
def test_no_word_can_leave_the_quotation_marks_it_is_put_in(text: str) -> None:
    for word in words_of(text):
        assert word and len(word) <= LONGEST
        assert not set(word) & set("\"'\\ \t\n\r\x00():*&|!<>{}^+-")
        assert len(word.split()) == 1


@given(st.text())
def test_words_are_found_again_in_themselves(text: str) -> None:
    assert words_of(" ".join(words_of(text))) == words_of(text)


def words(*found: str, prefix: bool = False) -> Words:
    return Words(found, prefix)


A, B, C = words("a"), words("b"), words("c")


@pytest.mark.parametrize(("text", "query"), [
    ("a b", AllOf((A, B))),
    ("a + b", AllOf((A, B))),
    ("a | b", AnyOf((A, B))),
    ("a | b c", AllOf((AnyOf((A, B)), C))),    # from left to right, as Lucene's SimpleQueryParser joins them
    ("a b | c", AnyOf((AllOf((A, B)), C))),
    ("a (b | c)", AllOf((A, AnyOf((B, C))))),
    ("a -b", AllOf((A, Not(B)))),
    ("-a", Not(A)),
    ("- a", A),                                # a dash, not an operator
    ("--a", A),
    ("-(a b)", Not(AllOf((A, B)))),
    ('"a b" c', AllOf((words("a", "b"), C))),
    ('-"a b"', Not(words("a", "b"))),
    ("moun*", words("moun", prefix=True)),
    ("e-mai*", words("e", "mai", prefix=True)),
    ("well-known", words("well", "known")),
    ("a~2 \"b c\"~3", AllOf((A, words("b", "c")))),
    (r"\-a b\*", AllOf((A, B))),
    ("a & b", AllOf((A, B))),
    ("a | | b", AnyOf((A, B))),
    ("| a |", A),
    ("((a", A), ("a) b", AllOf((A, B))), (")(", None), ("()", None), ("() a", A), ("a | (b c", AllOf((AnyOf((A, B)), C))),
    ('a "b', AllOf((A, B))), ('"', None), ("", None), ("*", None), ("!?", None), ("-", None), ("- -", None),
])
def test_queries_are_read_as_elasticsearch_reads_them(text: str, query: Query | None) -> None:
    assert parse(text) == query


@given(st.text(alphabet=st.sampled_from("ab \"()|+-*~\\2'é北🎉\x00\n"), max_size=60))
def test_whatever_is_typed_can_be_read(text: str) -> None:
    parse(text)


def test_a_query_beyond_the_limits_is_refused_with_the_limit() -> None:
    assert parse(" ".join(["w"] * MOST_WORDS)) is not None
    with pytest.raises(QueryError, match=rf"at most {MOST_WORDS} words, got {MOST_WORDS + 1}"):
        parse(" ".join(["w"] * (MOST_WORDS + 1)))
    assert parse("(" * DEEPEST + "a" + ")" * DEEPEST) == A
    with pytest.raises(QueryError, match=f"{DEEPEST} deep, got 5000"):
        parse("(" * 5000 + "a" + ")" * 5000)
    assert parse("(" * 5000 + "a") == A    # no parenthesis that counts


Tree: TypeAlias = "str | tuple[str, list[Tree]]"
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.sampled_from("abc"),
    lambda parts: st.tuples(st.just("not"), st.lists(parts, min_size=1, max_size=1)) |
    st.tuples(st.sampled_from(["all", "any"]), st.lists(parts, min_size=2, max_size=3)), max_leaves=8)


def typed(tree: Tree) -> str:
    """As a person would write it, with parentheses around everything."""
    if isinstance(tree, str):
        return tree
    kind, parts = tree
    if kind == "not":
        return f"-({typed(parts[0])})"
    return "(" + (" | " if kind == "any" else " ").join(map(typed, parts)) + ")"


def is_true(tree: Tree, present: frozenset[str]) -> bool:
    if isinstance(tree, str):
        return tree in present
    kind, parts = tree
    values = [is_true(part, present) for part in parts]
    return not values[0] if kind == "not" else all(values) if kind == "all" else any(values)


def matches(query: Query, present: frozenset[str]) -> bool:
    match query:
        case Words(found):
            return found[0] in present
        case Not(part):
            return not matches(part, present)
        case AllOf(parts):
            return all(matches(part, present) for part in parts)
        case AnyOf(parts):
            return any(matches(part, present) for part in parts)


@given(TREES)
def test_a_query_means_what_its_parentheses_say(tree: Tree) -> None:
    query = parse(typed(tree))
    assert query is not None
    for size in range(4):
        for present in map(frozenset, itertools.combinations("abc", size)):
            assert matches(query, present) == is_true(tree, present)
