"""The log as text: names in it may be a stranger's."""

from __future__ import annotations

import logging
import sys

from medusa_adapters.cli.text_log import TextFormatter

NAME = "model\x1b[2J\nERROR: all is lost"


def fail() -> None:
    raise ValueError(NAME)


def test_a_name_makes_no_line_and_changes_no_terminal() -> None:
    form = TextFormatter("%(levelname)s: %(message)s")
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "fetching %s", (NAME,), None)
    assert form.format(record) == "INFO: fetching model?[2J\n  ERROR: all is lost"
    try:
        fail()
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, __file__, 1, "it failed", (), sys.exc_info())
    first, *more = form.format(record).split("\n")
    assert first == "ERROR: it failed"
    assert more[-2:] == ["  ValueError: model?[2J", "  ERROR: all is lost"]
    assert all(line.startswith("  ") for line in more)
