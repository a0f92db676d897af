"""What is left of vLLM's own HTTP server when it could not be mounted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "pydoc-lm"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    "flags",
    ["--tokenizer-mode mistral", "--enable-lora --lora-modules a=/no/adapter"],
    ids=["before its client", "after its client"],
)
def test_the_engine_goes_on_and_keeps_nothing_for_a_server_that_is_not_there(flags: str) -> None:
    """Each step's statistics were queued for it for ever, and a thread looked for its socket every 10 ms."""
    command = [sys.executable, HERE / "run_failed_mount.py", EXAMPLE, flags]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert "vLLM's HTTP server could not be started" in answer["error"]
    assert (answer["queued"], answer["threads"]) == (0, [])
