"""If vLLM refuses to start, the instance ends with one line, which says what to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plain_environ import plain_environ

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


def refused(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "medusa_adapters", "serve", "--engine", "vllm", "--host", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--port", "0", "--node-socket", "none", *arguments],
        capture_output=True, text=True, env=plain_environ(), timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()[-1]


def test_more_memory_for_the_cache_than_there_is(example: Path) -> None:
    status, line = refused("--model", example, "--max-concurrency", "1000000", "--kv-cache-mb", "100000000")
    assert status == 2
    assert re.fullmatch(
        r"medusa: expected [\d.]+ GiB of free memory for the KV cache, vLLM found [\d.]+ of [\d.]+ GiB; give the "
        r"container more memory, or lower --kv-cache-mb \[Config\.Invalid\]",
        line,
    ), line


def test_a_configuration_that_contradicts_itself(example: Path, tmp_path: Path) -> None:
    shutil.copytree(example, tmp_path / "model", ignore=shutil.ignore_patterns(".medusa"))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 100}))
    status, line = refused("--model", tmp_path / "model")
    expected = "The hidden size (100) is not a multiple of the number of attention heads (8)."
    assert (status, line) == (1, f"medusa: config.json cannot be used: {expected} [Weights.Invalid]")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--middleware nowhere.Middleware",
            "--middleware: .* found 'nowhere.Middleware': ModuleNotFoundError: No module",
        ),
        ("--middleware json.nothing", "--middleware: .* found 'json.nothing': AttributeError"),
        ("--enable-auto-tool-choice --tool-call-parser nowhere", "nowhere"),
        ("--enable-auto-tool-choice --tool-call-parser mine --tool-parser-plugin /no/file.py", "mine"),
        ("--chat-template /no/file.jinja", "/no/file.jinja"),
        ("--enable-lora --lora-modules a=/no/adapter", "/no/adapter"),
    ],
)
def test_flags_with_which_vllms_server_does_not_start(example: Path, flags: str, said: str) -> None:
    """The instance became ready, and every request got the error."""
    status, line = refused("--model", example, "--kv-cache-mb", "64", "--", *flags.split())
    assert re.fullmatch(rf"medusa: .*{said}.* \[Config\.Invalid\]", line), line
    assert status == 2
