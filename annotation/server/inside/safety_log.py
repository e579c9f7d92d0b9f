"""Runs inside the server's environment: what upstream logs of a request that it refuses. It would log what was sent, a password too."""

from __future__ import annotations

import logging

from fastapi.exceptions import RequestValidationError


class WithoutWhatWasSent(logging.Filter):
    """In place of the values and a page of traceback: where in the request something was wrong, and what."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RequestValidationError):
            wrong = (f"{'.'.join(map(str, one['loc'][:4]))} ({one['type']})" for one in error.errors()[:3])
            record.msg, record.args, record.exc_info = f"refused a request: {', '.join(wrong)}"[:500], (), None
        return True


def install() -> None:
    logging.getLogger("argilla").addFilter(WithoutWhatWasSent())
