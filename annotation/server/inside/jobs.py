"""Runs inside the server's environment: upstream's background jobs, where no Redis is given, without a worker.

rq's own synchronous mode does not do: the jobs are coroutines, and are enqueued from the event loop that is to run them. What is in
progress when the server stops is lost. For the statuses of records that is made good at the next start (`search.heal`), a webhook's
events are not sent again: with `--redis-url` they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from argilla_server import _app
from argilla_server.api.handlers.v1 import jobs as handlers
from argilla_server.database import AsyncSessionLocal
from argilla_server.errors.future import NotFoundError
from argilla_server.jobs import queues, webhook_jobs
from argilla_server.models import Webhook
from argilla_server.webhooks.v1.commons import notify_event
from rq import Retry
from rq.job import JobStatus

LOG = logging.getLogger("uvicorn.error")
REMEMBERED = 500
"""Jobs whose status can be asked for."""
Function = Callable[..., Awaitable[None]]


@dataclass
class Job:
    """What upstream uses of an rq job."""

    id: str = field(default_factory=lambda: str(uuid4()))
    status: JobStatus = JobStatus.QUEUED

    def get_status(self, refresh: bool = True) -> JobStatus:    # noqa: ARG002  rq's signature
        return self.status


class Call(NamedTuple):
    function: Function
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Jobs:
    """Takes the place of the two queues, of the connection to Redis, and of the look-up of a job."""

    def __init__(self) -> None:
        self.recent: OrderedDict[str, Job] = OrderedDict()
        self.tasks: set[asyncio.Task[None]] = set()
        """The event loop itself keeps no reference to what it runs."""

    def enqueue_call(self, func: Function, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
                     retry: Retry | None = None, **_of_rq: object) -> Job:
        """As rq's method of that name; of its other arguments (time limits, callbacks) upstream uses none."""
        job = Job()
        self.recent[job.id] = job
        while len(self.recent) > REMEMBERED:
            self.recent.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self.run(job, Call(func, args, kwargs or {}), pauses(retry)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return job

    async def run(self, job: Job, call: Call, pauses: Sequence[float]) -> None:
        """Until it succeeds, or has failed once more than there are pauses."""
        for attempt in range(len(pauses) + 1):
            if attempt:
                job.status = JobStatus.SCHEDULED
                await asyncio.sleep(pauses[attempt - 1])
            job.status = JobStatus.STARTED
            try:
                await self.perform(call)
            except Exception:
                job.status = JobStatus.FAILED
                LOG.exception("job %s (%s) failed, attempt %d of %d", job.id, call.function.__name__, attempt + 1, len(pauses) + 1)
            else:
                job.status = JobStatus.FINISHED
                return

    async def perform(self, call: Call) -> None:
        """Upstream wrote the jobs for a process of their own: the one that waits for others does so here outside the event loop."""
        if call.function is webhook_jobs.notify_event_job:
            await deliver(*call.args, **call.kwargs)
        else:
            await call.function(*call.args, **call.kwargs)

    def fetch(self, job_id: str) -> Job:
        if job_id not in self.recent:
            raise NotFoundError(f"Job with id `{job_id}` not found")
        return self.recent[job_id]

    def ping(self) -> bool:
        """Upstream asks Redis at its start."""
        return True


def pauses(retry: Retry | None) -> list[float]:
    """Seconds before each repetition: the last intervals of those given, as in rq."""
    if retry is None:
        return []
    return [retry.intervals[max(len(retry.intervals) - left, 0)] for left in range(retry.max, 0, -1)]


async def deliver(webhook_id: UUID, event: str, timestamp: datetime, data: dict[str, Any]) -> None:
    """Upstream's job, whose HTTP call blocks, with that call in a thread. Raises httpx.HTTPError where the receiver does not take it."""
    async with AsyncSessionLocal() as db:
        webhook = await Webhook.get_or_raise(db, webhook_id)
    answer = await asyncio.to_thread(notify_event, webhook, event, timestamp, data)
    answer.raise_for_status()


def install() -> None:
    """Before the application starts."""
    jobs = Jobs()
    for queue in (queues.DEFAULT_QUEUE, queues.HIGH_QUEUE):
        queue.enqueue_call = jobs.enqueue_call
    _app.REDIS_CONNECTION = jobs
    handlers._get_job = jobs.fetch
