"""`medusa snapshot` ends when its imports do not, and leaves nothing behind when it is killed."""

from __future__ import annotations

import importlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from medusa_adapters.cli.serving_process import _shadowed
from medusa_snapshot.resuming import place
from plain_environ import plain_environ
from process_tree import alive, descendants

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no snapshots here")

_MEDUSA = Path(sys.executable).with_name("medusa")


class Saving:
    """`medusa snapshot` with a package gunicorn whose import does not end before ``gate`` is opened and closed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out, self.temporary, self.gate = (folder / name for name in ("out", "temporary", "gate"))
        self.module = folder / "modules" / "gunicorn" / "__init__.py"
        self.module.parent.mkdir(parents=True)
        self.module.write_text(f"open({str(self.gate)!r}).read()")
        self.temporary.mkdir()
        os.mkfifo(self.gate)
        self.process = subprocess.Popen(
            [_MEDUSA, "snapshot", "--out", self.out, *arguments], stderr=subprocess.PIPE, text=True,
            env=plain_environ() | {"PYTHONPATH": str(self.module.parents[1]), "TMPDIR": str(self.temporary)},
        )  # fmt: skip

    def saver(self) -> int:
        """Return the process that imports, once the import waits."""
        with open(self.gate, "w") as gate:  # opens when the other end is opened
            (pid,) = (
                pid for pid in descendants(self.process.pid)
                if str(self.gate) in map(os.readlink, _descriptors(pid))
            )  # fmt: skip
            os.kill(pid, signal.SIGSTOP)  # it stays there although the gate is closed
            gate.flush()
        return pid

    def left(self) -> list[str]:
        return [path.name for folder in (self.temporary, self.out) for path in folder.iterdir()]


def _descriptors(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/fd").iterdir())


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Saving]:
    yield (started := Saving(tmp_path))
    started.process.kill()
    started.process.communicate()


def test_an_import_that_does_not_end_is_named(tmp_path: Path) -> None:
    saving = Saving(tmp_path, "--timeout-s", "3")
    _, errors = saving.process.communicate(timeout=60)
    assert saving.process.returncode == 1
    assert "no snapshot was made: the imports took longer than --timeout-s=3" in errors
    assert f'File "{saving.module}", line 1' in errors
    assert saving.left() == []


def test_a_killed_process_is_reported_and_leaves_nothing(saving: Saving) -> None:
    pid = saving.saver()
    # As one that was killed while it wrote, after all imports.
    left = saving.out / f".new-{Path(place(str(saving.out), 'torch')).name}-{pid}"
    left.mkdir()
    os.kill(pid, signal.SIGKILL)
    _, errors = saving.process.communicate(timeout=60)
    assert saving.process.returncode == 1
    assert errors == "medusa: no snapshot was made: its process was killed by signal 9 [State.Invalid]\n"
    assert saving.left() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_the_command(saving: Saving, number: int) -> None:
    pid = saving.saver()
    saving.process.send_signal(number)
    assert saving.process.wait(60) == -number
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_where_no_temporary_files_can_be_written_it_says_so(tmp_path: Path) -> None:
    read_only = 'mount --bind "$each" "$each" && mount -o remount,ro,bind "$each"'
    mount = f'for each in /tmp /var/tmp "$0"; do {read_only} || exit 9; done; cd /proc; exec "$1" snapshot --out "$0"'
    environ = {name: value for name, value in plain_environ().items() if name not in ("TMPDIR", "TEMP", "TMP")}
    refused = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, tmp_path, _MEDUSA],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert refused.stderr.startswith("medusa: no snapshot was made: No usable temporary directory found in ['/tmp'")
    assert refused.stderr.endswith("; set TMPDIR to one that can be written to [State.Invalid]\n")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$1" snapshot --out "$0"'
    refused = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, tmp_path, _MEDUSA], env=plain_environ(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    why = "Read-only file system; choose another folder with --out, and name it in --snapshots [State.Invalid]\n"
    assert refused.stderr.startswith(f"medusa: no snapshot was made: {tmp_path}/.new-")
    assert refused.stderr.endswith(why)


def test_a_part_of_a_package_beside_the_handler_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages such as google have no file of their own, and parts in several folders."""
    for folder in ("installed", "beside"):
        (tmp_path / folder / "in_parts").mkdir(parents=True)
        (tmp_path / folder / "in_parts" / "part.py").touch()
    (tmp_path / "beside" / "in_parts" / "another.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "installed")
    importlib.import_module("in_parts.part")
    assert _shadowed(str(tmp_path / "installed" / "handler.py")) is None
    assert _shadowed(str(tmp_path / "beside" / "handler.py:Handler")) == "in_parts.part"
    for name in ("in_parts", "in_parts.part"):
        del sys.modules[name]
