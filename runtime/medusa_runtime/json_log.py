"""The log as lines of JSON, each with the request that it belongs to."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line: time (UTC), level, process, logger, message and, where it has one, request_id.

    An exception's traceback is the field ``traceback``, and an error's code the field ``code``.
    """

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": _process(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            line["request_id"] = request_id
        if code := getattr(record, "code", ""):
            line["code"] = str(code)
        if record.exc_info and record.exc_info[0] is not None:
            import traceback

            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line)


def _process() -> str:
    try:
        with open("/proc/self/comm") as comm:  # a fork renames the process
            return comm.read().strip()
    except OSError:
        return ""
