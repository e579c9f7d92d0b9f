"""Data sets of an Argilla server, made and filled over its REST API as the tests need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

CHAT, TEXT = {"type": "chat", "use_markdown": True}, {"type": "text", "use_markdown": False}
RANKING = {"type": "ranking", "options": [{"value": "a", "text": "A"}, {"value": "b", "text": "B"}]}
RATING = {"type": "rating", "options": [{"value": value} for value in range(1, 6)]}
TERMS, INTEGER, FLOAT = {"type": "terms"}, {"type": "integer"}, {"type": "float"}


@contextmanager
def client(url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{url}/api/v1", headers={"X-Argilla-Api-Key": api_key}, timeout=60, trust_env=False) as opened:
        yield opened


def ask(api: httpx.Client, method: str, path: str, **kwargs: Any) -> Any:
    answer = api.request(method, path, **kwargs)
    assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:500]}"
    return answer.json() if answer.content else None


def make_dataset(api: httpx.Client, workspace: str, name: str, *, fields: Mapping[str, Any], questions: Mapping[str, Any],
                 metadata: Mapping[str, Any] | None = None, min_submitted: int = 1) -> str:
    """A published data set; its id. The first field and the first question are required."""
    workspaces = {item["name"]: item["id"] for item in ask(api, "GET", "/me/workspaces")["items"]}
    made = ask(api, "POST", "/datasets", json={"name": name, "workspace_id": workspaces[workspace], "allow_extra_metadata": True,
                                               "distribution": {"strategy": "overlap", "min_submitted": min_submitted}})
    for kind, described in (("fields", fields), ("questions", questions), ("metadata-properties", metadata or {})):
        for number, (item, settings) in enumerate(described.items()):
            required = {} if kind == "metadata-properties" else {"required": number == 0}
            ask(api, "POST", f"/datasets/{made['id']}/{kind}", json={"name": item, "title": item, "settings": settings, **required})
    ask(api, "PUT", f"/datasets/{made['id']}/publish")
    return str(made["id"])


def question_ids(api: httpx.Client, dataset: str) -> dict[str, str]:
    return {item["name"]: item["id"] for item in ask(api, "GET", f"/datasets/{dataset}/questions")["items"]}


def push(api: httpx.Client, dataset: str, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The server's ids, in the order of the records."""
    ids = []
    for start in range(0, len(records), 250):
        added = ask(api, "POST", f"/datasets/{dataset}/records/bulk", json={"items": records[start:start + 250]})
        ids += [item["id"] for item in added["items"]]
    return ids


def search(api: httpx.Client, dataset: str, *, text: str | None = None, field: str | None = None, filters: Sequence[Any] = (),
           sort: Sequence[Any] = (), mine: bool = False, limit: int = 1000, offset: int = 0) -> tuple[list[str], int]:
    """(ids of the page, how many match)"""
    body: dict[str, Any] = {}
    if text is not None:
        body["query"] = {"text": {"q": text, **({"field": field} if field else {})}}
    if filters:
        body["filters"] = {"and": filters}
    if sort:
        body["sort"] = sort
    path = f"{'/me' if mine else ''}/datasets/{dataset}/records/search"
    found = ask(api, "POST", path, json=body, params={"limit": limit, "offset": offset})
    return [item["record"]["id"] for item in found["items"]], found["total"]


def ranking(a: int, b: int) -> dict[str, Any]:
    return {"ranking": {"value": [{"value": "a", "rank": a}, {"value": "b", "rank": b}]}}
