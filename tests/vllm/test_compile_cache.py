"""The file that carries a compiled model from one machine to another, without compiling."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from medusa_runtime.errors import StateError
from medusa_vllm.compiled.cache import pack, read_file, restore

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    (made / "kernels").mkdir(parents=True)
    (made / "index.json").write_text("{}")
    (made / "0.aot").write_bytes(CONTENT)
    (made / "kernels" / "ab.so").write_bytes(b"\x7fELF")
    return pack(made, tmp_path / "cache.zip")


def test_what_was_packed_comes_back_in_another_folder(blob: Path, tmp_path: Path) -> None:
    folder = restore(blob.read_bytes(), tmp_path / "here")
    assert (folder / "0.aot").read_bytes() == CONTENT
    assert (folder / "kernels" / "ab.so").read_bytes() == b"\x7fELF"
    assert folder.is_relative_to(tmp_path / "here")
    assert read_file(blob.read_bytes(), "index.json") == b"{}"


def test_the_file_names_nothing_of_where_it_was_made(blob: Path, tmp_path: Path) -> None:
    assert str(tmp_path).encode() not in blob.read_bytes()
    with zipfile.ZipFile(blob) as archive:
        assert all(not name.startswith("/") for name in archive.namelist())


def test_every_damage_is_noticed(blob: Path, tmp_path: Path) -> None:
    """Cuts and flipped bits anywhere give an error of ours or, in bytes that nobody reads, the right content."""
    data = blob.read_bytes()
    for size in range(0, len(data) - 1, max(1, len(data) // 40)):
        with pytest.raises(StateError, match="materialize it again"):
            restore(data[:size], tmp_path / "cut")
    noticed = 0
    for place in range(0, len(data), max(1, len(data) // 200)):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        try:
            folder = restore(bytes(flipped), tmp_path / f"flip{place}")
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
        restore((tmp_path / "x.zip").read_bytes(), tmp_path / "here")
    assert not (tmp_path / "outside").exists()


def test_a_missing_part_is_told(blob: Path) -> None:
    with pytest.raises(StateError, match=r"nothing\.json"):
        read_file(blob.read_bytes(), "nothing.json")
