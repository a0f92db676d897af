"""The log as text and as a file: names in it may be a stranger's."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_runtime.logs import TextFormatter

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


LOGGING = """
import logging, sys
from pathlib import Path
from medusa_runtime.logs import configure_logging, log_to_file
configure_logging("info", sys.argv[1])
log_to_file(Path(sys.argv[2]))
logging.getLogger("a").info("one")
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_file_has_the_lines_of_stderr_with_their_time(tmp_path: Path, log_format: str) -> None:
    file = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", LOGGING, log_format, file], capture_output=True, text=True, check=True)
    if log_format == "json":
        assert file.read_text() == done.stderr
        assert json.loads(done.stderr)["message"] == "one"
    else:
        assert done.stderr == "INFO: one\n"
        at, _, rest = file.read_text().partition(" INFO: ")
        assert at.startswith("20")
        assert rest == "one\n"
