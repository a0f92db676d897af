"""The log of a process, as text or as lines of JSON (json_log.py).

Names in it may be a stranger's, and must neither look like a line of ours nor change a terminal.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_LONGEST_FILE_BYTES = 8 << 20


def configure_logging(level: str, log_format: str = "text") -> None:
    """Write this process's log to stderr, unless it has been set up before.

    ``level`` is one of LOG_LEVELS of config.py, and ``log_format`` one of LOG_FORMATS.
    """
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s" if level == "debug" else "%(levelname)s: %(message)s"
    formatter: logging.Formatter = TextFormatter(form)
    if log_format == "json":
        from .json_log import JsonFormatter

        formatter = JsonFormatter()
        logging.captureWarnings(True)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":  # at which it names its source of credentials at each look at a store
        logging.getLogger("botocore").setLevel(logging.WARNING)


def log_to_file(path: Path) -> None:
    """Write this process's log to a file as well, text with times. A full one becomes ``<path>.1``: 16 MiB in all."""
    from logging.handlers import RotatingFileHandler  # 4 ms

    root = logging.getLogger()
    handler = RotatingFileHandler(path, maxBytes=_LONGEST_FILE_BYTES, backupCount=1)
    form = root.handlers[0].formatter if root.handlers else None
    if isinstance(form, TextFormatter):
        form = TextFormatter("%(asctime)s %(levelname)s: %(message)s")
    handler.setFormatter(form)
    root.addHandler(handler)


class TextFormatter(logging.Formatter):
    """Formats a record as one line. The further lines of a message or a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(for_terminal(line.expandtabs()) for line in super().format(record).split("\n"))


def for_terminal(line: str) -> str:
    """Return a line with ? for control characters, by which a checkpoint's author might change a terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)
