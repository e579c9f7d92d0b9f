"""Runs inside the server's environment: a worker for upstream's jobs, where a Redis is given. Started again, it continues where it was."""

from __future__ import annotations

import os
import signal
import sys
import threading

from .settings import ServerSettings
from .surroundings import prepare_process, prepare_sqlite


def work(settings: ServerSettings) -> None:
    """Returns when it is told to stop, or when the process that started it is gone."""
    prepare_process(settings, "worker")
    prepare_sqlite(settings.pool)
    from . import upstream
    upstream.check()
    from . import speed  # also registers the search engine

    speed.install()
    from argilla_server.jobs.queues import DEFAULT_QUEUE, HIGH_QUEUE, REDIS_CONNECTION
    from rq import Worker

    stop_with_the_starter()
    Worker([HIGH_QUEUE, DEFAULT_QUEUE], connection=REDIS_CONNECTION).work(with_scheduler=True, logging_level="WARNING")


def stop_with_the_starter() -> None:
    """As the server: standard input ends when the starter does. rq finishes the job it is at on the first signal."""
    def watch() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
