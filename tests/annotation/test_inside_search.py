"""Search over the server's own tables against a plain reading of the same records, on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import correlation
from typing import Any

import httpx
import pytest
import server_api
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from search_corpus import (
    FIELDS,
    FILTERS,
    GROUP,
    PEOPLE,
    SORTED_BY,
    TREES,
    Document,
    Filter,
    Source,
    Tree,
    as_answered,
    as_pushed,
    contains,
    draw_document,
    sort_value,
    typed,
)
from server_api import ask, search

from annotation.server import inside

COUNT = 150
WHO = st.sampled_from([None, *PEOPLE])
PLACES = {"fields": {"text": server_api.TEXT}, "questions": {"ranking": server_api.RANKING}}


@dataclass(frozen=True)
class Place:
    """A server, with clients for the owner (None) and for the annotators."""

    workspace: str
    clients: dict[str | None, httpx.Client]

    @property
    def owner(self) -> httpx.Client:
        return self.clients[None]

    def dataset(self, name: str, texts: list[str]) -> tuple[str, list[str]]:
        """A data set of one field; its id and those of its records."""
        dataset = server_api.make_dataset(self.owner, self.workspace, name, **PLACES)
        return dataset, server_api.push(self.owner, dataset, [{"fields": {"text": text}} for text in texts])


class Corpus:
    """No dataclass: hypothesis would print all of it."""

    def __init__(self, dataset: str, documents: dict[str, Document]) -> None:
        self.dataset = dataset
        self.documents = documents
        """By the server's id."""

    def found(self, holds: Callable[[Document], bool]) -> set[str]:
        return {id for id, document in self.documents.items() if holds(document)}


@pytest.fixture(scope="module", params=["argilla_server", "argilla_on_postgresql"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    server = request.getfixturevalue(request.param)
    with ExitStack() as stack:
        keys = {None: server.connection.api_key} | {person: server.add_annotator(f"search-{person}").api_key for person in PEOPLE}
        clients = {who: stack.enter_context(server_api.client(server.connection.url, key)) for who, key in keys.items()}
        yield Place(server.connection.workspace, clients)


@pytest.fixture(scope="module")
def corpus(place: Place) -> Corpus:
    dataset = server_api.make_dataset(
        place.owner, place.workspace, "search-corpus",
        fields=dict(zip(FIELDS, (server_api.CHAT, server_api.TEXT, server_api.TEXT), strict=True)),
        questions={"ranking": server_api.RANKING, "rating": server_api.RATING},
        metadata={"group": server_api.TERMS, "turns": server_api.INTEGER, "margin": server_api.FLOAT})
    draw = random.Random(7)
    documents = [draw_document(draw) for _ in range(COUNT)]
    rating = server_api.question_ids(place.owner, dataset)["rating"]
    ids = server_api.push(place.owner, dataset, [as_pushed(number, document, rating) for number, document in enumerate(documents)])
    for id, document in zip(ids, documents, strict=True):
        for person, response in document.responses.items():
            ask(place.clients[person], "POST", f"/records/{id}/responses", json=as_answered(response))
    return Corpus(dataset, dict(zip(ids, documents, strict=True)))


@settings(max_examples=80, deadline=None)
@given(tree=TREES, only=st.sampled_from([None, *FIELDS]))
def test_a_text_query_finds_what_reading_every_record_finds(place: Place, corpus: Corpus, tree: Tree, only: str | None) -> None:
    found, total = search(place.owner, corpus.dataset, text=typed(tree), field=only)
    wanted = corpus.found(lambda document: contains([words for name, words in document.words.items() if only in (None, name)], tree))
    assert (set(found), len(found), total) == (wanted, len(wanted), len(wanted))


@settings(max_examples=80, deadline=None)
@given(filters=st.lists(FILTERS, min_size=1, max_size=3), who=WHO, tree=st.none() | TREES)
def test_filters_find_what_reading_every_record_finds(place: Place, corpus: Corpus, filters: list[Filter], who: str | None,
                                                      tree: Tree | None) -> None:
    assume(who is None or not any(filter.source.hidden for filter in filters))
    found, total = search(place.clients[who], corpus.dataset, text=typed(tree) if tree else None,
                          filters=[filter.sent for filter in filters], mine=who is not None)
    wanted = corpus.found(lambda document: all(filter.holds(document, who) for filter in filters)
                          and (tree is None or contains(list(document.words.values()), tree)))
    assert (set(found), len(found), total) == (wanted, len(wanted), len(wanted))


@settings(max_examples=40, deadline=None)
@given(keys=st.lists(st.tuples(st.sampled_from(SORTED_BY), st.booleans()), min_size=1, max_size=2), who=WHO)
def test_sorted_records_are_in_order_and_those_without_a_value_last(place: Place, corpus: Corpus, keys: list[tuple[Source, bool]],
                                                                    who: str | None) -> None:
    assume(who is None or not any(source.hidden for source, _ in keys))
    sort = [{"scope": source.scope, "order": "desc" if descending else "asc"} for source, descending in keys]
    found, total = search(place.clients[who], corpus.dataset, sort=sort, mine=who is not None)

    def key(id: str) -> tuple[Any, ...]:
        return tuple(sort_value(source, corpus.documents[id], who, descending=descending) for source, descending in keys)

    wanted = list(corpus.documents)
    for position, (_, descending) in reversed(list(enumerate(keys))):    # the last key first: Python's sort keeps what is equal in order
        present = [id for id in wanted if key(id)[position] is not None]
        wanted = (sorted(present, key=lambda id, position=position: key(id)[position], reverse=descending)
                  + [id for id in wanted if key(id)[position] is None])
    assert list(map(key, found)) == list(map(key, wanted))
    assert (set(found), total) == (set(corpus.documents), COUNT)


def test_pages_are_the_whole_in_pieces(place: Place, corpus: Corpus) -> None:
    for who in (None, "anna"):
        whole, _ = search(place.clients[who], corpus.dataset, mine=who is not None)
        pages = [search(place.clients[who], corpus.dataset, mine=who is not None, limit=40, offset=offset)
                 for offset in range(0, COUNT, 40)]
        assert [id for page, _ in pages for id in page] == whole
        assert {total for _, total in pages} == {COUNT}


def test_each_annotator_has_an_order_of_their_own_that_stays(place: Place, corpus: Corpus) -> None:
    orders = {person: search(place.clients[person], corpus.dataset, mine=True)[0] for person in PEOPLE}
    for person, order in orders.items():
        assert order == search(place.clients[person], corpus.dataset, mine=True)[0]
        assert set(order) == set(corpus.documents) and order != list(corpus.documents)
    first, second = (order[:COUNT // 5] for order in orders.values())
    assert len(set(first) & set(second)) < COUNT // 10    # 6 of 30 are expected by chance


def test_metrics_are_those_of_the_values(place: Place, corpus: Corpus) -> None:
    properties = ask(place.owner, "GET", f"/me/datasets/{corpus.dataset}/metadata-properties")["items"]
    metrics = {item["name"]: ask(place.owner, "GET", f"/metadata-properties/{item['id']}/metrics") for item in properties}
    groups = [value for document in corpus.documents.values() for value in GROUP.values(document, None)]
    assert metrics["group"]["total"] == len(groups)
    assert {item["term"]: item["count"] for item in metrics["group"]["values"]} == {value: groups.count(value) for value in set(groups)}
    assert [metrics["turns"]["min"], metrics["turns"]["max"]] == [-2, 12]
    assert [metrics["margin"]["min"], metrics["margin"]["max"]] == [-1.5, 10.0]


def test_progress_counts_every_record_and_ones_own_responses(place: Place, corpus: Corpus) -> None:
    progress = ask(place.owner, "GET", f"/datasets/{corpus.dataset}/progress")
    completed = len(corpus.found(lambda document: document.status == "completed"))
    assert (progress["total"], progress["completed"], progress["pending"]) == (COUNT, completed, COUNT - completed)
    for person in PEOPLE:
        mine = ask(place.clients[person], "GET", f"/me/datasets/{corpus.dataset}/metrics")["responses"]
        counts = {status: len(corpus.found(lambda document, status=status, person=person:
                                           document.responses.get(person, {}).get("status") == status))
                  for status in ("submitted", "discarded", "draft")}
        assert mine == {"total": COUNT, **counts, "pending": COUNT - sum(counts.values())}


ORDERS = """
import json, os, random, sqlite3, tempfile, uuid
os.environ["ARGILLA_HOME_PATH"] = tempfile.mkdtemp()
from inside.search_sqlite import Sqlite
from sqlalchemy.dialects import sqlite
database = sqlite3.connect(":memory:")
database.execute("CREATE TABLE records (name)")
database.executemany("INSERT INTO records VALUES (?)", [(number,) for number in range(200)])
draw = random.Random(5)
orders = []
for _ in range(400):
    user = uuid.UUID(int=draw.getrandbits(128), version=4)
    key = Sqlite().shuffled(user).compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    assert database.execute(f"SELECT count(DISTINCT {key}), max(typeof({key})) FROM records").fetchone() == (200, "integer")
    orders.append([name for (name,) in database.execute(f"SELECT name FROM records ORDER BY {key}")])
print(json.dumps(orders))
"""


def test_no_annotator_gets_the_order_of_insertion_or_of_somebody_else(server_python: Path) -> None:
    """On SQLite, where the order is arithmetic. The correlation of two independent orders of 200 has a standard deviation of 0.07."""
    ran = subprocess.run([server_python, "-c", ORDERS], cwd=Path(inside.__file__).parents[1], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    orders: list[list[int]] = json.loads(ran.stdout.splitlines()[-1])
    assert max(abs(correlation(order, range(200))) for order in orders) < 0.35
    assert max(abs(correlation(first, second)) for first, second in pairwise(orders)) < 0.35


HOSTILE = ("'; DROP TABLE records; --", '" OR 1=1 --', 'f0 : x', '{f0} : x', "a NEAR b", "NEAR(a b, 5)", "a AND OR NOT", "^a", "a:b:*",
           "rowid:1", "'a' <-> 'b'", "a & !b | (c", "\\", "\\'", "%_", "a\x00b", "a\ud7ffb", "🎉", "ａ", "''''", '""""',
           "((((", "))))", "-" * 500, "*" * 500, "(" * 20_000, '"' + "a " * 150 + '"', "q" * 100_000, "a" * 99 + "é" * 99)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_what_looks_like_a_query_language_is_only_text(place: Place, corpus: Corpus, text: str) -> None:
    for only in (None, "rank"):
        found, total = search(place.owner, corpus.dataset, text=text, field=only)
        assert total == len(found)
    assert search(place.owner, corpus.dataset)[1] == COUNT


@pytest.mark.parametrize(("body", "message"), [
    ({"query": {"text": {"q": "a " * 201}}}, "at most 200 words"),
    ({"query": {"text": {"q": "(" * 30 + "a" + ")" * 30}}}, "nested 20 deep"),
    ({"filters": {"and": [{"type": "range", "scope": {"entity": "metadata", "metadata_property": "turns"}, "ge": "many"}]}}, "'many'"),
    ({"filters": {"and": [{"type": "range", "scope": {"entity": "record", "property": "inserted_at"}, "ge": "yesterday"}]}}, "'yesterday'"),
    ({"filters": {"and": [{"type": "range", "scope": {"entity": "response", "property": "status"}, "ge": "a"}]}}, "by terms"),
    ({"query": {"text": {"q": "a", "field": "nowhere"}}}, "nowhere"),
])
def test_what_cannot_be_searched_for_is_refused_with_the_reason(place: Place, corpus: Corpus, body: dict[str, Any], message: str) -> None:
    answer = place.owner.post(f"/datasets/{corpus.dataset}/records/search", json=body)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_scripts_without_spaces_are_found_by_any_part(place: Place) -> None:
    texts = ["我爱北京天安门", "东京在日本", "Ich liebe 北京!", "ภาษาไทยสวยงาม", "Café au lait 🎉"]
    dataset, ids = place.dataset("search-scripts", texts)

    def found(text: str) -> set[int]:
        return {ids.index(id) for id in search(place.owner, dataset, text=text)[0]}

    assert found("北京") == {0, 2}
    assert found("京北") == set()
    assert found("天安") == {0}
    assert found("京") == {0, 1, 2}
    assert found("ไทย") == {3}
    assert found("cafe") == found("CAFÉ") == found("🎉") == {4}


def test_times_of_insertion_can_be_filtered_in_any_time_zone(place: Place) -> None:
    dataset, ids = place.dataset("search-times", ["first"])
    told = ask(place.owner, "GET", f"/records/{ids[0]}")["inserted_at"]

    def found(**bounds: Any) -> int:
        scope = {"entity": "record", "property": "inserted_at"}
        return search(place.owner, dataset, filters=[{"type": "range", "scope": scope, **bounds}])[1]

    assert (found(ge=told), found(le=told), found(ge=f"{told}+00:00")) == (1, 1, 1)
    assert (found(ge=f"{told}-01:00"), found(le=f"{told}+01:00")) == (0, 0)
    assert (found(ge=1_000), found(le=1_000)) == (1, 0)    # milliseconds since 1970


def test_a_changed_record_is_found_by_its_new_words_and_a_deleted_one_by_none(place: Place) -> None:
    dataset, ids = place.dataset("search-changes", ["old words", "other words"])
    ask(place.owner, "PATCH", f"/records/{ids[0]}", json={"fields": {"text": "new text"}})
    assert search(place.owner, dataset, text="old")[0] == []
    assert search(place.owner, dataset, text="new")[0] == [ids[0]]
    assert search(place.owner, dataset, text="-old")[1] == 2
    ask(place.owner, "DELETE", f"/records/{ids[1]}")
    assert search(place.owner, dataset, text="other | words")[0] == []
    ask(place.owner, "DELETE", f"/datasets/{dataset}")
    assert place.owner.post(f"/datasets/{dataset}/records/search", json={}).status_code == 404


def test_a_very_long_record_is_found_by_its_first_words(place: Place) -> None:
    text = " ".join(["needle", *(f"w{number}" for number in range(200_000))])
    dataset, _ = place.dataset("search-long", [text])
    assert search(place.owner, dataset, text='"needle w0 w1"', limit=1)[1] == 1
    assert search(place.owner, dataset, text="w5000", limit=1)[1] == 1
