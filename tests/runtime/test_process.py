"""Reports of child processes to their supervisor."""

from __future__ import annotations

from contextlib import closing

import pytest
from medusa_runtime.errors import MedusaError
from medusa_runtime.process import ReportPipe


@pytest.mark.parametrize("message", ["é" * 2000, "aé" + "é" * 2000, "x" * 3400 + "]" * 1000, "\\" * 4000, "\n" * 4000])
def test_a_long_report_arrives_shortened(message: str) -> None:
    """The process that reads it would end where it is no JSON: the supervisor, or the node agent."""
    with closing(ReportPipe()) as pipe:
        pipe.send("engine", MedusaError(message))
        pipe.send("engine", MedusaError("short"))
        long, short = pipe.read()
    assert message.startswith(long.message.rstrip("…"))
    assert len(long.message) >= 400
    assert short.message == "short"
