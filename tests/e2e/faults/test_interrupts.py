"""Ctrl-C ends every command at every moment: status 130 within a second, and nothing is left."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from hanging_files import LOOKUP, HangingFiles
from medusa_process import MEDUSA
from plain_environ import plain_environ

CURL = str(Path(__file__).parents[2] / "support/processes/curl.py")  # a bare machine has no other
WITHIN_S = 1.0
# From the first lines of ours to the end of the longest command; before that the interpreter itself is starting.
DELAYS = (0.06, 0.08, 0.1, 0.12, 0.18, 0.25, 0.4, 0.6, 0.9, 1.3, 1.9, 2.6)
COMMANDS = {
    "materialize": ("materialize", "--model", "model", "--starts", "1"),
    "materialize-out": ("materialize", "--model", "model", "--out", "out", "--starts", "0"),
    "doctor": ("doctor", "--model", "model", "--port", "0"),
    "inspect": ("inspect", "model", "--tensors"),
    "fetch": ("fetch", "model", "--to", "copy"),
    "fetch-memory": ("fetch", "model"),
    "bench": ("bench", "coldstart", "--model", "model", "--runs", "9"),
    "bench-fetch": ("bench", "fetch", "model", "--runs", "9"),
}


class Interrupted:
    """One run of a command in a folder of its own, which is interrupted after a while."""

    def __init__(self, folder: Path, example: Path, arguments: Sequence[str]) -> None:
        shutil.copytree(example, folder / "model", ignore=shutil.ignore_patterns(".medusa"))
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._before = self._files()
        self._mark = f"MEDUSA_TEST_MARK={uuid.uuid4().hex}"
        environ = plain_environ()
        name, _, value = self._mark.partition("=")
        environ |= {name: value, "TMPDIR": str(self.temporary)}
        self.process = subprocess.Popen(
            [MEDUSA, *arguments], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def interrupt(self, delay_s: float) -> tuple[int, float, str] | None:
        """Status, seconds and stderr; None when the command had ended before."""
        try:
            self.process.communicate(timeout=delay_s)
            return None
        except subprocess.TimeoutExpired:
            pass
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=240)
        return self.process.returncode, time.monotonic() - began, errors

    def left(self, within_s: float) -> set[str]:
        """Files that were not there before, and processes that still run. Killed ones have a while: they need a CPU."""
        deadline = time.monotonic() + within_s
        while (processes := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return processes | (self._files() - self._before)

    def _processes(self) -> set[str]:
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(f"{entry.name}: {(entry / 'comm').read_text().strip()}")
            except OSError:
                continue
        return found

    def _files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


def check(folder: Path, example: Path, arguments: Sequence[str], delay_s: float) -> bool:
    """False when the command was faster."""
    # Where more processes want a CPU than there are, a second of ours takes several.
    within_s = WITHIN_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    run = Interrupted(folder, example, arguments)
    try:
        found = run.interrupt(delay_s)
        if found is None:
            return False
        status, took_s, errors = found
        if status == 0:
            return False  # it was about to end
        if (status == -signal.SIGINT and "in main" not in errors) or "Fatal Python error: init_" in errors:
            return False  # the interpreter was starting, and none of our code had run; a shell shows 130
        assert status == 130, (delay_s, status, errors)
        assert took_s < within_s, (delay_s, took_s)
        assert "Traceback" not in errors, (delay_s, errors)
        assert "error_already_set" not in errors, (delay_s, errors)
        left = run.left(within_s - took_s)
        # Once a bundle is committed, or a copy is complete, it is what the command was asked for.
        if "model/.medusa/manifest.json" not in left and "out/manifest.json" not in left and not _copied(folder, left):
            assert left == set(), delay_s
        return True
    finally:
        run.process.kill()
        run.process.wait()
        shutil.rmtree(folder)


def _copied(folder: Path, left: set[str]) -> bool:
    """Return whether all that is left is the copy of the model, each file of it whole."""
    files = [file for file in (folder / "model").iterdir() if file.name != "README.md"]
    if left != {"copy", *(f"copy/{file.name}" for file in files)}:
        return False
    return all((folder / "copy" / file.name).read_bytes() == file.read_bytes() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_ends_a_command(name: str, tmp_path: Path, example: Path) -> None:
    hit = [check(_new(tmp_path / f"{delay_s}"), example, COMMANDS[name], delay_s) for delay_s in DELAYS]
    assert any(hit)


@pytest.mark.slow
def test_an_interrupt_is_not_lost_in_the_import_of_torch(tmp_path: Path, example: Path) -> None:
    """Where it was: swallowed by, or fatal to, the extension modules that are being imported."""
    for number in range(30):
        delay_s = 0.3 + number * 0.04
        check(_new(tmp_path / str(number)), example, COMMANDS["materialize-out"], delay_s)


def test_one_interrupt_ends_materialize(tmp_path: Path, example: Path) -> None:
    assert check(_new(tmp_path / "run"), example, COMMANDS["materialize"], 0.7)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.root
@pytest.mark.timeout(60)
@pytest.mark.skipif(os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_command_ends_whose_process_cannot_be_killed(tmp_path: Path, number: int, status: int) -> None:
    (place := tmp_path / "model").mkdir()
    with HangingFiles(place) as files, open(tmp_path / "errors", "w") as errors:
        files.hang(LOOKUP)
        process = subprocess.Popen([MEDUSA, "inspect", str(place)], stderr=errors)
        while not files.asked:
            time.sleep(0.01)
        process.send_signal(number)
        try:
            assert process.wait(20) == status
        finally:
            process.kill()
            process.wait()
    assert "was killed and has not ended" in (tmp_path / "errors").read_text()


def test_serve_says_for_how_many_requests_it_waits(tmp_path: Path) -> None:
    """In a terminal, as a user sees it: Ctrl-C, the line, and Ctrl-C again."""
    (tmp_path / "handler.py").write_text("import time\ndef handle(request):\n    time.sleep(600)\n")
    terminal, inside = pty.openpty()
    environ = plain_environ()
    command = [MEDUSA, "serve", "--handler", f"{tmp_path}/handler.py:handle", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        command, env=environ, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inside)
    try:
        shown = _read_until(terminal, "ready on http://127.0.0.1:")
        port = re.findall(r"listening on http://127.0.0.1:(\d+)", shown)[0]
        with subprocess.Popen([sys.executable, CURL, "-d", "x", f"http://127.0.0.1:{port}/"]) as client:
            while "medusa_requests_in_flight 1" not in _metrics(port):
                assert client.poll() is None
                time.sleep(0.02)
            os.write(terminal, b"\x03")
            _read_until(terminal, "waiting for 1 request; Ctrl-C again ends")
            time.sleep(0.6)  # sooner, it would count as the first
            os.write(terminal, b"\x03")
            assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def _metrics(port: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return str(page.read().decode())


def _read_until(terminal: int, words: str) -> str:
    shown, deadline = "", time.monotonic() + 90
    while words not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return shown
