"""`medusa serve --reload`: a changed handler is served, a broken one waits to be mended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import until


def write(folder: Path, text: str) -> None:
    (folder / "handler.py").write_text(f"def handle(request):\n    return {text}\n")


@contextmanager
def serving(folder: Path) -> Iterator[Callable[[], str]]:
    """`medusa serve --reload`; gives a function that returns its output."""
    log = folder / "log"
    command = [sys.executable, "-m", "medusa_adapters", "serve", "--handler", "handler.py", "--reload"]
    environment = {**os.environ, "PORT": "0", "MEDUSA_HOST": "127.0.0.1"}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environment)
    try:
        yield log.read_text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def answer(output: Callable[[], str]) -> str:
    """Return what the newest instance answers; nothing while there is none."""
    ports = [line.rpartition(":")[2] for line in output().splitlines() if line.startswith("listening on ")]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[-1]}/", timeout=5) as found:
            return str(found.read().decode())
    except (OSError, IndexError):
        return ""


def test_a_changed_handler_is_served(tmp_path: Path) -> None:
    write(tmp_path, '"one"')
    with serving(tmp_path) as output:
        until(lambda: answer(output) == "one", output)
        write(tmp_path, '"two" +')
        until(lambda: "waiting for a change" in output(), output)
        assert "handler.py has changed" in output()
        write(tmp_path, '"three"')
        until(lambda: answer(output) == "three", output)


@pytest.mark.parametrize(
    ("arguments", "text"), [((), "nothing to serve"), (("--handler", "no.py"), "no.py, found none")]
)
def test_what_cannot_be_watched_is_refused(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    command = [sys.executable, "-m", "medusa_adapters", "serve", "--reload", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert text in done.stderr
