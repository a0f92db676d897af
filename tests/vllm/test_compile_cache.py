"""The file that carries a compiled model from one machine to another, without compiling."""

from __future__ import annotations

import contextlib
import getpass
import os
import tempfile
import zipfile
from pathlib import Path

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError, StateError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from medusa_vllm.compiled.cache import ARCHIVE
from medusa_vllm.compiled.settings import CompiledStart

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    (made / "kernels").mkdir(parents=True)
    (made / "index.json").write_text("{}")
    (made / "0.aot").write_bytes(CONTENT)
    (made / "kernels" / "ab.so").write_bytes(b"\x7fELF")
    return ARCHIVE.pack(made, tmp_path / "cache.zip")


def test_what_was_packed_comes_back_in_another_folder(blob: Path, tmp_path: Path) -> None:
    folder = ARCHIVE.unpack(blob.read_bytes(), tmp_path / "here")
    assert (folder / "0.aot").read_bytes() == CONTENT
    assert (folder / "kernels" / "ab.so").read_bytes() == b"\x7fELF"
    assert folder.is_relative_to(tmp_path / "here")
    assert ARCHIVE.read(blob.read_bytes(), "index.json") == b"{}"


def test_the_file_names_nothing_of_where_it_was_made(blob: Path, tmp_path: Path) -> None:
    assert str(tmp_path).encode() not in blob.read_bytes()
    with zipfile.ZipFile(blob) as archive:
        assert all(not name.startswith("/") for name in archive.namelist())


def test_every_damage_is_noticed(blob: Path, tmp_path: Path) -> None:
    """Cuts and flipped bits anywhere give an error of ours or, in bytes that nobody reads, the right content."""
    data = blob.read_bytes()
    for size in range(0, len(data) - 1, max(1, len(data) // 40)):
        with pytest.raises(StateError, match="materialize it again"):
            ARCHIVE.unpack(data[:size], tmp_path / "cut")
    noticed = 0
    for place in range(0, len(data), max(1, len(data) // 200)):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        try:
            folder = ARCHIVE.unpack(bytes(flipped), tmp_path / f"flip{place}")
        except StateError:
            noticed += 1
            continue
        found = folder / "0.aot"
        assert not found.exists() or found.read_bytes() == CONTENT
    assert noticed > 50


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "model-1/../../outside", "model-2/x", "model-1"])
def test_no_file_is_written_outside_and_no_other_format_read(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(name, b"x")
    with pytest.raises(StateError, match="materialize it again"):
        ARCHIVE.unpack((tmp_path / "x.zip").read_bytes(), tmp_path / "here")
    assert not (tmp_path / "outside").exists()


def test_a_missing_part_is_told(blob: Path) -> None:
    with pytest.raises(StateError, match=r"nothing\.json"):
        ARCHIVE.read(blob.read_bytes(), "nothing.json")


def compiling(region: Region) -> CompiledStart:
    return CompiledStart(region, Settings(engine="vllm", compile="always"), Timeline.create("test"), Path("made"))


@pytest.mark.parametrize("kind", ["writable", "link", "file", pytest.param("owner", marks=pytest.mark.root)])
def test_the_compiler_takes_nothing_from_a_folder_that_others_made(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"torchinductor_{getpass.getuser()}"
    if kind == "file":
        folder.touch()
    elif kind == "link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to("theirs")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "writable" else 0o755)
        if kind == "owner":
            os.chown(folder, 1000, 1000)
    with contextlib.closing(Region.create()) as region:
        with pytest.raises(ConfigError, match=r"torch's compiler would run code from there.*TMPDIR"):
            compiling(region)
        folder.rename(tmp_path / "away")
        for _ in range(2):
            compiling(region).close()
            assert oct(folder.stat().st_mode)[-3:] == "700"
