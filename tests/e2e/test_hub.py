"""hf:// as a new user meets it: a name without the scheme, and a machine that cannot reach the hub."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from fork_server import MEDUSA_MAIN, ForkServer
from medusa_command import medusa
from plain_environ import plain_environ


def test_a_hub_name_without_its_scheme(tmp_path: Path) -> None:
    for command in ("inspect", "fetch"):
        done = medusa(command, "org/name", folder=tmp_path)
        assert (done.returncode, "did you mean hf://org/name?" in done.stderr) == (1, True)
    assert "did you mean" not in medusa("inspect", "./org/name", folder=tmp_path).stderr


def test_a_hub_that_cannot_be_reached(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed}")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):  # the latter is set by tests that import transformers
        monkeypatch.delenv(name, raising=False)
    began = time.monotonic()
    done = fork_server.run(MEDUSA_MAIN, ["inspect", "hf://org/name"], environ=plain_environ())
    assert time.monotonic() - began < 60  # three tries
    for words in (
        f"127.0.0.1 port {closed}",
        "HTTPS_PROXY is not set",
        "HF_ENDPOINT may name a mirror",
        "[Storage.Unreachable]",
    ):
        assert words in done.stderr
