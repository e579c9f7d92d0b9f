"""Upstream's jobs: they run, again where they failed, and can be asked about; webhooks are delivered while others are served."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import server_api
from server_api import ask, search

from annotation.server import inside

PLACES = {"fields": {"text": server_api.TEXT}, "questions": {"ranking": server_api.RANKING}}
PATIENCE = 30.0
SCRIPT = """
import asyncio, json, os, sys, tempfile
os.environ["ARGILLA_HOME_PATH"] = tempfile.mkdtemp()
os.environ["ARGILLA_SEARCH_ENGINE"] = "sql"
from rq import Retry
from rq.job import Job as RqJob
from inside import jobs

async def observe():
    kept, tries = jobs.Jobs(), []
    def failing(times):
        async def job():
            tries.append(times)
            if tries.count(times) <= times:
                raise OSError("not yet")
        return job
    async def status_of(times, retry):
        job = kept.enqueue_call(failing(times), retry=retry)
        before = str(job.get_status())
        await asyncio.gather(*kept.tasks)
        return [before, str(kept.fetch(job.id).get_status(refresh=True)), tries.count(times)]
    results = {"fails twice": await status_of(2, Retry(max=3)), "fails thrice, tried thrice": await status_of(3, Retry(max=2)),
               "fails once, tried once": await status_of(1, None)}
    first = kept.enqueue_call(failing(0))
    for _ in range(jobs.REMEMBERED):
        kept.enqueue_call(failing(0))
    await asyncio.gather(*kept.tasks)
    try:
        kept.fetch(first.id)
    except jobs.NotFoundError as error:
        results["forgotten"] = str(error.message)
    return results

def as_rq(retry):
    job, seconds = RqJob(connection=object()), []
    job.retry_intervals = retry.intervals
    for job.retries_left in range(retry.max, 0, -1):
        seconds.append(job.get_retry_interval())
    return seconds

retries = [Retry(max=3), Retry(max=3, interval=[10, 60, 180]), Retry(max=5, interval=[1, 2]), Retry(max=1, interval=[1, 2])]
print(json.dumps({"observed": asyncio.run(observe()), "ours": [jobs.pauses(retry) for retry in retries],
                  "rq": [as_rq(retry) for retry in retries]}))
"""


@pytest.fixture(scope="module")
def told(server_python: Path) -> dict[str, Any]:
    ran = subprocess.run([server_python, "-c", SCRIPT], cwd=Path(inside.__file__).parents[1], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def test_a_job_is_tried_again_as_often_as_it_asks_for(told: dict[str, Any]) -> None:
    assert told["observed"]["fails twice"] == ["JobStatus.QUEUED", "JobStatus.FINISHED", 3]
    assert told["observed"]["fails thrice, tried thrice"] == ["JobStatus.QUEUED", "JobStatus.FAILED", 3]
    assert told["observed"]["fails once, tried once"] == ["JobStatus.QUEUED", "JobStatus.FAILED", 1]


def test_the_pauses_between_tries_are_those_of_rq(told: dict[str, Any]) -> None:
    assert told["ours"] == told["rq"]
    assert told["ours"][:2] == [[0, 0, 0], [10, 60, 180]]


def test_old_jobs_are_forgotten(told: dict[str, Any]) -> None:
    assert "not found" in told["observed"]["forgotten"]


@contextmanager
def receiver(handle: Callable[[dict[str, Any]], int]) -> Iterator[str]:
    """The URL of a webhook's receiver; `handle` gets what was sent, in a thread, and says with which status to answer."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(handle(json.loads(self.rfile.read(int(self.headers["content-length"])))))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not to the console."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def webhook(owner: httpx.Client, url: str, *events: str) -> Iterator[None]:
    made = ask(owner, "POST", "/webhooks", json={"url": url, "events": list(events), "description": "test"})
    try:
        yield
    finally:
        ask(owner, "DELETE", f"/webhooks/{made['id']}")


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(params=["argilla_server", "argilla_on_postgresql"])
def owner(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Of a server that runs its jobs itself, and of one whose worker does."""
    server = request.getfixturevalue(request.param)
    with server_api.client(server.connection.url, server.connection.api_key) as client:
        yield client


def make_dataset(owner: httpx.Client, name: str, texts: list[str], min_submitted: int = 1) -> tuple[str, list[str]]:
    workspace = ask(owner, "GET", "/me/workspaces")["items"][0]["name"]
    dataset = server_api.make_dataset(owner, workspace, name, min_submitted=min_submitted, **PLACES)
    return dataset, server_api.push(owner, dataset, [{"fields": {"text": text}} for text in texts])


def submit(client: httpx.Client, record: str) -> None:
    ask(client, "POST", f"/records/{record}/responses", json={"status": "submitted", "values": server_api.ranking(1, 2)})


def test_a_webhook_hears_of_responses_and_of_completed_records(owner: httpx.Client) -> None:
    heard: list[dict[str, Any]] = []

    def note(event: dict[str, Any]) -> int:
        heard.append(event)
        return 200

    with receiver(note) as url, webhook(owner, url, "response.created", "record.completed", "record.deleted"):
        _, (record, other) = make_dataset(owner, "jobs-heard", ["first", "second"])
        submit(owner, record)
        ask(owner, "DELETE", f"/records/{other}")
        until(lambda: len(heard) == 3)
    by_type = {event["type"]: event["data"] for event in heard}
    assert set(by_type) == {"response.created", "record.completed", "record.deleted"}
    assert by_type["response.created"]["values"] == server_api.ranking(1, 2)
    assert by_type["response.created"]["record"]["id"] == by_type["record.completed"]["id"] == record
    assert by_type["record.completed"]["status"] == "completed"
    assert by_type["record.deleted"]["id"] == other


def test_a_slow_receiver_holds_nobody_up(owner: httpx.Client) -> None:
    called, answer = threading.Event(), threading.Event()

    def stall(event: dict[str, Any]) -> int:
        called.set()
        answer.wait(PATIENCE)
        return 200

    with receiver(stall) as url, webhook(owner, url, "response.created"):
        dataset, (record,) = make_dataset(owner, "jobs-slow", ["first"])
        submit(owner, record)
        assert called.wait(PATIENCE)
        assert search(owner, dataset)[1] == 1    # while the receiver is waited for
        answer.set()


def test_more_or_fewer_responses_wanted_reopens_and_completes_records(owner: httpx.Client) -> None:
    """The one job that changes data."""
    dataset, records = make_dataset(owner, "jobs-statuses", ["first", "second"])
    submit(owner, records[0])
    assert ask(owner, "GET", f"/datasets/{dataset}/progress")["completed"] == 1
    for min_submitted, completed in ((2, 0), (1, 1)):
        ask(owner, "PATCH", f"/datasets/{dataset}", json={"distribution": {"strategy": "overlap", "min_submitted": min_submitted}})
        until(lambda completed=completed: ask(owner, "GET", f"/datasets/{dataset}/progress")["completed"] == completed)


def test_an_unknown_job_is_not_found(owner: httpx.Client) -> None:
    assert owner.get("/jobs/00000000-0000-0000-0000-000000000000").status_code == 404
