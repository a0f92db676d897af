"""A snapshot is used only where everything is as it was when it was saved, and if nobody else can write to it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from medusa_snapshot.resuming import CONDITIONS, MEMORY

from .saved import Saved

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no snapshots here")

_TRIVIAL = "import colorsys\ndef resumed(arguments): print('resumed')\n"


@pytest.mark.parametrize("language", [{}, {"LANG": "C"}, {"LC_ALL": "C"}])
def test_it_is_used_where_no_language_is_set(language: dict[str, str], tmp_path: Path) -> None:
    """Such as by cron, and by systemd. Python then has UTF-8, too, in another mode."""
    saved = Saved(tmp_path, "def resumed(arguments): print('é')\n", {"LANG": "C.UTF-8"})
    assert saved.resume(environ=dict.fromkeys(("LANG", "LC_ALL", "LC_CTYPE"), "") | language) == "é\n"


def test_another_environment_or_a_changed_file_is_noticed(tmp_path: Path) -> None:
    (modules := tmp_path / "modules").mkdir()  # not the snapshot's folder, which changes when that is saved
    module = modules / "a_module.py"
    module.write_text("x = 1")
    path = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    same = {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"}
    saved = Saved(tmp_path, "import a_module\n" + _TRIVIAL, same)
    assert saved.resume(environ=same | {"OTHER": "1"}) == "resumed\n"
    assert saved.resume(environ={**same, "OMP_NUM_THREADS": "3"}) == (
        "plain it was made with OMP_NUM_THREADS=2, found OMP_NUM_THREADS=3\n"
    )
    module.write_text("x = 11")
    assert saved.resume(environ=same) == f"plain {module} has changed since it was made\n"
    module.unlink()
    os.utime(modules, (1, 1))
    assert "no longer there" in saved.resume(environ=same) or "changed" in saved.resume(environ=same)


def test_other_trusted_certificates_are_noticed(tmp_path: Path) -> None:
    """aiohttp reads them when it is imported. One here stands for it: vLLM's environment has the real one."""
    trusted = tmp_path / "trusted.pem"
    trusted.touch()
    same = {"SSL_CERT_FILE": str(trusted)}
    saved = Saved(tmp_path, "import sys, ssl; sys.modules['aiohttp.connector'] = ssl\n" + _TRIVIAL, same)
    assert saved.resume(environ=same) == "resumed\n"
    trusted.write_text("another")
    assert saved.resume(environ=same) == f"plain {trusted} has changed since it was made\n"


def test_a_damaged_snapshot_is_not_used(tmp_path: Path) -> None:
    saved = Saved(tmp_path, _TRIVIAL)
    memory, conditions = saved.place / MEMORY, saved.place / CONDITIONS
    os.truncate(memory, memory.stat().st_size - 1)
    assert saved.resume() == "plain its memory was not written as a whole\n"
    conditions.write_bytes(conditions.read_bytes()[:100])
    assert saved.resume().startswith("plain it cannot be read")
    memory.unlink()
    assert saved.resume().startswith("plain it cannot be read")


def test_what_others_can_write_is_not_run(tmp_path: Path) -> None:
    saved = Saved(tmp_path, _TRIVIAL)
    for path in (saved.place, saved.place / MEMORY, saved.place / CONDITIONS):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert saved.resume() == "plain others than its owner may write to it, and it would be run as code\n"
        path.chmod(mode)
    assert saved.resume() == "resumed\n"


@pytest.mark.root
def test_what_belongs_to_another_user_is_not_run(tmp_path: Path) -> None:
    saved = Saved(tmp_path, _TRIVIAL)
    os.chown(saved.place / MEMORY, 4321, 4321)
    assert saved.resume().startswith("plain it belongs to user 4321")
