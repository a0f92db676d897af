"""The log as text. Names in it may be a stranger's, and must neither look like a line of ours nor change a terminal."""

from __future__ import annotations

import logging

from .progress import printable


class TextFormatter(logging.Formatter):
    """Formats a record as one line. The further lines of a message or a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(printable(line.expandtabs()) for line in super().format(record).split("\n"))
