"""Annotators as their browsers are: requests over HTTP, each timed, none left out of the count."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT = 60.0
PENDING = {"filters": {"and": [{"type": "terms", "scope": {"entity": entity, "property": "status"}, "values": ["pending"]}
                               for entity in ("response", "record")]}}
"""The page's queue: tasks that I have not answered, and that have not got all their answers."""
RANKS = ((1, 2), (2, 1), (1, 1))


@dataclass
class Traffic:
    """What was seen of the requests of one kind after the other: seconds each, and what went wrong."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"queue": [], "submit": [], "progress": []})
    failures: Counter[str] = field(default_factory=Counter)
    stored: list[tuple[str, str]] = field(default_factory=list)
    """(record, response) that the server acknowledged."""

    def percentile(self, kind: str, share: float) -> float:
        ordered = sorted(self.seconds[kind])
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("inf")

    @property
    def longest(self) -> float:
        return max((max(times) for times in self.seconds.values() if times), default=float("inf"))

    def described(self) -> dict[str, object]:
        return {"acknowledged": len(self.stored), "failures": dict(self.failures),
                **{kind: {"requests": len(times)} | {f"p{percent}_s": round(self.percentile(kind, percent / 100), 4)
                                                     for percent in (50, 95, 99)} for kind, times in self.seconds.items() if times}}


class Annotator:
    """One person with the page open."""

    def __init__(self, client: httpx.AsyncClient, dataset: str, draw: random.Random, traffic: Traffic) -> None:
        self.client, self.dataset, self.draw, self.traffic = client, dataset, draw, traffic

    async def request(self, kind: str, method: str, path: str, **kwargs: Any) -> Any:
        """The decoded answer; None where it failed, which is counted."""
        start = time.perf_counter()
        try:
            answer = await self.client.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            self.traffic.failures[f"{kind}: {type(error).__name__}"] += 1
            return None
        finally:
            self.traffic.seconds[kind].append(time.perf_counter() - start)
        if not answer.is_success:
            self.traffic.failures[f"{kind}: {answer.status_code} {answer.text[:100]}"] += 1
            return None
        return answer.json()

    async def queue(self, limit: int) -> list[str]:
        page = await self.request("queue", "POST", f"/me/datasets/{self.dataset}/records/search", json=PENDING,
                                  params={"limit": limit, "include": ["responses", "suggestions"]})
        return [item["record"]["id"] for item in page["items"]] if page else []

    async def submit(self, record: str) -> None:
        first, second = self.draw.choice(RANKS)
        values = {"ranking": {"value": [{"value": "response_1", "rank": first}, {"value": "response_2", "rank": second}]}}
        answer = await self.request("submit", "POST", f"/records/{record}/responses", json={"status": "submitted", "values": values})
        if answer:
            self.traffic.stored.append((record, answer["id"]))

    async def look_at_progress(self) -> None:
        """As the page does after each task."""
        await self.request("progress", "GET", f"/me/datasets/{self.dataset}/metrics")
        await self.request("progress", "GET", f"/datasets/{self.dataset}/progress")

    async def work_at_a_pace(self, start: float, every: float, stop: float) -> None:
        """A task each `every` seconds, the first at `start`: a page of the queue is looked at, its first task answered."""
        due = start
        while due < stop:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            records = await self.queue(10)
            if records:
                await self.submit(records[0])
            await self.look_at_progress()
            due += every

    async def work_without_pause(self, stop: float) -> None:
        while time.perf_counter() < stop:
            records = await self.queue(10)
            if not records:    # done, or refused: not a busy loop
                await asyncio.sleep(1.0)
            for record in records:
                if time.perf_counter() < stop:
                    await self.submit(record)


def paced(url: str, keys: Sequence[str], dataset: str, *, every: float, seconds: float) -> Traffic:
    """So many annotators as there are keys, who began at different moments."""
    def work(annotator: Annotator, number: int) -> Coroutine[Any, Any, None]:
        now = time.perf_counter()
        return annotator.work_at_a_pace(now + every * number / len(keys), every, now + seconds)

    return asyncio.run(all_at_once(url, keys, dataset, work))


def unpaced(url: str, keys: Sequence[str], dataset: str, *, seconds: float) -> Traffic:
    """As fast as the server answers."""
    return asyncio.run(all_at_once(url, keys, dataset, lambda annotator, _: annotator.work_without_pause(time.perf_counter() + seconds)))


async def all_at_once(url: str, keys: Sequence[str], dataset: str, work: Any) -> Traffic:
    traffic = Traffic()
    clients = [httpx.AsyncClient(base_url=f"{url}/api/v1", headers={"X-Argilla-Api-Key": key}, timeout=TIMEOUT, trust_env=False)
               for key in keys]
    try:
        await asyncio.gather(*(work(Annotator(client, dataset, random.Random(number), traffic), number)
                               for number, client in enumerate(clients)))
    finally:
        for client in clients:
            await client.aclose()
    return traffic
