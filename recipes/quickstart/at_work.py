"""Simulated annotators at work: each with a key of its own, taking tasks from its queue and answering over REST, as the web page does."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import httpx
from simulate import Reply, SimulatedAnnotator

from rlhf.progress import Bar

PAGE = 10
"""Tasks that an annotator takes at a time, like the page."""
TIMEOUT = 60.0
PENDING = {"filters": {"and": [{"type": "terms", "scope": {"entity": entity, "property": "status"}, "values": ["pending"]}
                               for entity in ("response", "record")]}}
"""The queue: tasks that this annotator has not answered, and that not enough others have."""
Judge = Callable[[str, Sequence[str]], Sequence[int]]
"""(prompt, responses by place) -> true ranks by place."""


def answer_everything(url: str, keys: Mapping[SimulatedAnnotator, str], project: str, judge: Judge, *, seed: int, bar: Bar) -> Counter[str]:
    """Everybody in turn, a page at a time, until all queues are empty. Returns how many responses have each status.

    `keys` holds everybody's API key. Raises httpx.HTTPStatusError where the server refuses an answer.
    """
    done: Counter[str] = Counter()
    with ExitStack() as stack:
        people = {annotator: stack.enter_context(httpx.Client(base_url=f"{url}/api/v1", timeout=TIMEOUT, trust_env=False,
                                                              headers={"X-Argilla-Api-Key": key})) for annotator, key in keys.items()}
        busy = True
        while busy:
            busy = False
            for annotator, client in people.items():
                for sheet in sheets(client, project):
                    replies = {record["id"]: (record, annotator.reply(record["external_id"], judge(*texts(record)), seed=seed))
                               for record in queue(client, sheet)}
                    if replies:
                        busy = True
                        send(client, [response(record, reply) for record, reply in replies.values()])
                        done.update(reply.status for _, reply in replies.values())
                        bar.advance(len(replies))
    return done


def sheets(client: httpx.Client, project: str) -> Iterator[str]:
    """Ids of the project's data sets: NAME-k2, NAME-k4."""
    for dataset in ask(client, "GET", "/me/datasets")["items"]:
        if dataset["name"].rpartition("-k")[0] == project:
            yield dataset["id"]


def queue(client: httpx.Client, sheet: str) -> list[dict[str, Any]]:
    found = ask(client, "POST", f"/me/datasets/{sheet}/records/search", json=PENDING, params={"limit": PAGE})
    return [item["record"] for item in found["items"]]


def texts(record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The prompt and the responses by place, as the page shows them: the server keeps < and & as entities."""
    fields = record["fields"]
    places = range(1, sum(name.startswith("response_") for name in fields) + 1)
    return html.unescape(fields["prompt"][-1]["content"]), [html.unescape(fields[f"response_{place}"]) for place in places]


def response(record: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
    ranking = [{"value": f"response_{place}", "rank": rank} for place, rank in enumerate(reply.ranks, 1)]
    return {"record_id": record["id"], "status": reply.status, "values": {"ranking": {"value": ranking}} if ranking else None}


def send(client: httpx.Client, responses: Sequence[Mapping[str, Any]]) -> None:
    refused = [item["error"] for item in ask(client, "POST", "/me/responses/bulk", json={"items": responses})["items"] if item["error"]]
    if refused:
        raise RuntimeError(f"the server refused {len(refused)} of {len(responses)} responses, the first one with {refused[0]}")


def ask(client: httpx.Client, method: str, path: str, *, json: Any = None, params: Mapping[str, int] | None = None) -> Any:
    answer = client.request(method, path, json=json, params=params)
    answer.raise_for_status()
    return answer.json()
