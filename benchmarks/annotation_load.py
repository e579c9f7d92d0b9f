"""The annotation server under the load of a team, over the loopback interface: how fast it answers, and that it keeps what it confirmed.

    python -m benchmarks.annotation_load [--json] [--quick]

It installs and starts the server as `annotation serve` does, in a temporary home. Bars and figures: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from annotation.argilla import ArgillaBackend
from annotation.backend import Sheet
from annotation.home import Home
from annotation.server.embedded import RunningServer, ServerOptions, running
from annotation.server.install import environment_folder, install
from annotation.server.reachable import client_of
from annotation.server.users import administration
from annotation.tasks import ShownTask
from benchmarks.annotation_traffic import PENDING, Traffic, paced, unpaced
from benchmarks.bars import Bar, finish
from rlhf.records import Message, Prompt

OVERLAP = 3
VOCABULARY = [f"w{number:05}" for number in range(20_000)]
WORKING_DAY = 8 * 3600
RESPONSES_A_DAY = 10_000 * OVERLAP
CONSOLE = Console(stderr=True)


@dataclass(frozen=True, kw_only=True)
class Size:
    tasks: int = 10_000
    records: int = 100_000
    annotators: int = 100
    every: float = 30.0
    """Seconds in which an annotator does a task."""
    paced_seconds: float = 300.0
    clients: int = 20
    unpaced_seconds: float = 60.0


QUICK = Size(tasks=200, records=500, annotators=4, every=1.0, paced_seconds=3.0, clients=4, unpaced_seconds=2.0)


def text(draw: random.Random, words: int) -> str:
    """A few words are in every text and most are in hardly any, as in language. The commonest is w00000."""
    return " ".join(VOCABULARY[min(int(draw.paretovariate(0.6)) - 1, len(VOCABULARY) - 1)] for _ in range(words))


class Process:
    """The server's process, as Linux accounts for it."""

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")

    def cpu_seconds(self) -> float:
        user, system = (self.folder / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def megabytes(self) -> float:
        lines = (self.folder / "status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def push_tasks(server: RunningServer, count: int) -> tuple[str, float]:
    """Through the project's own path. The data set's id, and tasks per second."""
    draw = random.Random(1)
    sheet = Sheet(name="load-k2", places=2, workspace=server.connection.workspace, guidelines="Rank them.", min_submitted=OVERLAP)
    tasks = [ShownTask(id=f"task-{number:06}", prompt=Prompt(messages=(Message(role="user", content=text(draw, 40)),)),
                       responses=(text(draw, 110), text(draw, 110))) for number in range(count)]
    backend = ArgillaBackend(server.connection)
    try:
        backend.ensure_sheet(sheet)
        start = time.perf_counter()
        added = backend.add(sheet, tasks)
        rate = count / (time.perf_counter() - start)
    finally:
        backend.close()
    assert len(added.new) == count and not added.refused, added.refused[:3]
    with client_of(server.connection) as api:
        return next(item["id"] for item in api.get("/me/datasets").json()["items"] if item["name"] == sheet.name), rate


def push_records(api: httpx.Client, count: int) -> tuple[str, float]:
    """Records with metadata, which the project's own do not have. The data set's id, and records per second."""
    workspace = api.get("/me/workspaces").json()["items"][0]["id"]
    dataset = str(posted(api, "/datasets", {"name": "large", "workspace_id": workspace, "allow_extra_metadata": True,
                                            "distribution": {"strategy": "overlap", "min_submitted": OVERLAP}})["id"])
    for field in ("prompt", "answer"):
        posted(api, f"/datasets/{dataset}/fields", {"name": field, "title": field, "required": True, "settings": {"type": "text"}})
    posted(api, f"/datasets/{dataset}/questions", {"name": "ranking", "title": "ranking", "required": True, "settings": {
        "type": "ranking", "options": [{"value": value, "text": value} for value in ("response_1", "response_2")]}})
    for name, kind in (("source", "terms"), ("margin", "float")):
        posted(api, f"/datasets/{dataset}/metadata-properties", {"name": name, "title": name, "settings": {"type": kind}})
    api.put(f"/datasets/{dataset}/publish").raise_for_status()
    draw = random.Random(2)
    seconds = 0.0
    for start in range(0, count, 250):
        items = [{"fields": {"prompt": text(draw, 40), "answer": text(draw, 220)},
                  "metadata": {"source": draw.choice(["sft", "dpo", "base"]), "margin": draw.random()}}
                 for _ in range(min(250, count - start))]
        before = time.perf_counter()
        posted(api, f"/datasets/{dataset}/records/bulk", {"items": items})
        seconds += time.perf_counter() - before
    return dataset, count / seconds


def posted(api: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = api.post(path, json=body)
    answer.raise_for_status()
    return answer.json()


def searches(api: httpx.Client, annotator: httpx.Client, dataset: str) -> dict[str, float]:
    """Seconds of the slowest of five."""
    def metadata(**condition: Any) -> dict[str, Any]:
        name = "source" if "values" in condition else "margin"
        return {"filters": {"and": [{"scope": {"entity": "metadata", "metadata_property": name}, **condition}]}}

    asked: dict[str, tuple[httpx.Client, str, dict[str, Any]]] = {
        "queue page": (annotator, "/me", PENDING),
        "rare word": (api, "", {"query": {"text": {"q": VOCABULARY[15_000]}}}),
        "common word": (api, "", {"query": {"text": {"q": VOCABULARY[0]}}}),
        "phrase": (api, "", {"query": {"text": {"q": f'"{VOCABULARY[0]} {VOCABULARY[1]}"'}}}),
        "without a word": (api, "", {"query": {"text": {"q": f"{VOCABULARY[0]} -{VOCABULARY[5]}"}}}),
        "metadata term": (api, "", metadata(type="terms", values=["dpo"])),
        "metadata range": (api, "", metadata(type="range", ge=0.9)),
        "sorted by metadata": (api, "", {"sort": [{"scope": {"entity": "metadata", "metadata_property": "margin"}, "order": "desc"}]}),
    }
    slowest = dict.fromkeys(asked, 0.0)
    for name, (client, mine, body) in asked.items():
        for _ in range(5):
            start = time.perf_counter()
            posted(client, f"{mine}/datasets/{dataset}/records/search?limit=10&include=responses&include=suggestions", body)
            slowest[name] = max(slowest[name], time.perf_counter() - start)
    return slowest


def losses(api: httpx.Client, dataset: str, acknowledged: Sequence[tuple[str, str]]) -> tuple[int, int]:
    """(acknowledged responses that are not stored, records whose status is not what follows from their responses)"""
    missing, wrong, offset = set(acknowledged), 0, 0
    path = f"/datasets/{dataset}/records?include=responses&limit=500"
    while records := api.get(f"{path}&offset={offset}").json()["items"]:
        for record in records:
            missing -= {(record["id"], response["id"]) for response in record["responses"]}
            submitted = Counter(response["status"] for response in record["responses"])["submitted"]
            wrong += (record["status"] == "completed") != (submitted >= OVERLAP)
        offset += len(records)
    return len(missing), wrong


def measure(server: RunningServer, size: Size) -> tuple[list[Bar], dict[str, object]]:
    process = Process(server.pid)
    with administration(server.connection) as users:
        keys = [person.api_key for person in users.add([f"annotator-{number}" for number in range(max(size.annotators, size.clients))])]
    dataset, rate = push_tasks(server, size.tasks)
    say(f"pushed {size.tasks} tasks, {rate:.0f}/s")
    bars = [Bar(f"push of {size.tasks}: tasks/s", rate, 300)]
    details: dict[str, object] = {"cores": os.cpu_count()}

    def under(name: str, load: Callable[[], Traffic]) -> tuple[Traffic, float]:
        start, cpu = time.perf_counter(), process.cpu_seconds()
        traffic = load()
        seconds, cpu = time.perf_counter() - start, process.cpu_seconds() - cpu
        details[name] = {**traffic.described(), "seconds": round(seconds, 1), "responses_per_s": round(len(traffic.stored) / seconds, 2),
                         "server_cpu_s_per_response": round(cpu / max(1, len(traffic.stored)), 4)}
        say(f"{name}: {details[name]}")
        return traffic, len(traffic.stored) / seconds

    team = f"{size.annotators} annotators, a task each {size.every:.0f} s"
    calm, _ = under(team, lambda: paced(server.connection.url, keys[:size.annotators], dataset, every=size.every,
                                        seconds=size.paced_seconds))
    bars += [Bar(f"{team}: requests that failed", calm.failures.total(), 0, "at most"),
             Bar(f"{team}: responses stored", len(calm.stored), size.annotators * round(size.paced_seconds / size.every)),
             Bar(f"{team}: submit p95, s", calm.percentile("submit", 0.95), 1, "at most"),
             Bar(f"{team}: queue page p95, s", calm.percentile("queue", 0.95), 1, "at most")]
    crowd = f"{size.clients} clients without pause"
    busy, throughput = under(crowd, lambda: unpaced(server.connection.url, keys[:size.clients], dataset, seconds=size.unpaced_seconds))
    bars += [Bar(f"{crowd}: requests that failed", busy.failures.total(), 0, "at most"),
             Bar(f"{crowd}: longest request, s", busy.longest, 30, "at most"),
             Bar("responses in a day of 8 hours at that rate", throughput * WORKING_DAY, RESPONSES_A_DAY)]
    with client_of(server.connection) as api:
        missing, wrong = losses(api, dataset, calm.stored + busy.stored)
        bars += [Bar("acknowledged responses that are not stored", missing, 0, "at most"),
                 Bar("records with a wrong status", wrong, 0, "at most")]
        large, rate = push_records(api, size.records)
        say(f"pushed {size.records} records, {rate:.0f}/s")
        bars.append(Bar(f"push of {size.records}: records/s", rate, 300))
        with httpx.Client(base_url=api.base_url, headers={"X-Argilla-Api-Key": keys[0]}, timeout=60, trust_env=False) as annotator:
            bars += [Bar(f"search in {size.records}: {name}, s", seconds, 1, "at most")
                     for name, seconds in searches(api, annotator, large).items()]
    details["server_peak_mb"] = round(process.megabytes())
    return bars, details


def say(what: str) -> None:
    CONSOLE.print(what, markup=False, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--quick", action="store_true", help="a few seconds: a first look")
    options = parser.parse_args()
    python = install(environment_folder(os.environ), CONSOLE)
    with tempfile.TemporaryDirectory() as name, running(Home(Path(name)), python, ServerOptions(), CONSOLE) as server:
        bars, details = measure(server, QUICK if options.quick else Size())
    return finish(bars, as_json=options.json, extra=details)


if __name__ == "__main__":
    sys.exit(main())
