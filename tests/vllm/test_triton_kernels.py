"""Triton's kernels as an artifact of the state bundle: packed offline, found by Triton in another folder."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_runtime.errors import StateError
from medusa_runtime.state.kinds import file_name
from medusa_vllm import TRITON_KERNELS
from medusa_vllm.gpu import triton_kernels
from medusa_vllm.gpu.triton_kernels import key_read_beside, pack, restored, unpack

KERNEL = """
import sys, time
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

source = ASTSource(add, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 128})
hits = []
triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(hits, len(made.asm["cubin"]), sorted(made.asm))
"""


def cached(folder: Path, name: str = "add") -> None:
    """What Triton keeps of one kernel, and of a launcher that it compiles with a C compiler."""
    kernel, launcher = folder / "KEY", folder / "LAUNCHER"
    kernel.mkdir(parents=True)
    launcher.mkdir()
    members = {f"{name}.{kind}": str(kernel / f"{name}.{kind}") for kind in ("ttir", "ptx", "cubin", "json")}
    for path in members.values():
        Path(path).write_text(path)
    (kernel / f"__grp__{name}.json").write_text(json.dumps({"child_paths": members}))
    (launcher / "stub.so").write_bytes(b"\x7fELF")
    (kernel / "tmp.pid_1").mkdir()


class Bundle:
    """A region with the artifact, if ``data`` is one."""

    def __init__(self, data: bytes | None) -> None:
        self._files = {} if data is None else {file_name(TRITON_KERNELS.name): data}

    def has_code(self, name: str) -> bool:
        return name in self._files

    def code(self, name: str) -> bytes | None:
        return self._files.get(name)


@pytest.fixture(autouse=True)
def nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(triton_kernels, "_NAMED", None)


@pytest.fixture
def blob(tmp_path: Path) -> bytes:
    cached(tmp_path / "cache")
    assert pack(tmp_path / "cache", tmp_path / TRITON_KERNELS.name, "eager") == 1
    return (tmp_path / TRITON_KERNELS.name).read_bytes()


def test_a_group_names_its_members_where_they_are_now(blob: bytes, tmp_path: Path) -> None:
    folder = unpack(blob, tmp_path / "here")
    group = json.loads((folder / "KEY/__grp__add.json").read_text())["child_paths"]
    assert sorted(group) == ["add.cubin", "add.json"], "intermediate code is left out"
    assert all(Path(path).parent == folder / "KEY" and Path(path).exists() for path in group.values())
    assert (folder / "LAUNCHER/stub.so").read_bytes() == b"\x7fELF"
    assert str(tmp_path / "cache").encode() not in b"".join(path.read_bytes() for path in folder.glob("*/__grp__*")), (
        "it says where it was made"
    )


def test_without_kernels_there_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    assert pack(tmp_path / "cache", tmp_path / "blob") == 0
    assert not (tmp_path / "blob").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"child_paths": 3}'])
def test_a_damaged_group_is_told(tmp_path: Path, text: str) -> None:
    with zipfile.ZipFile(tmp_path / "blob", "w") as archive:
        archive.writestr("triton-1/KEY/__grp__add.json", text)
    with pytest.raises(StateError, match=r"damaged group.*materialize it again"):
        unpack((tmp_path / "blob").read_bytes(), tmp_path / "here")


def test_a_group_names_nothing_outside_its_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "blob", "w") as archive:
        archive.writestr("triton-1/KEY/__grp__add.json", json.dumps({"child_paths": {"../../x.cubin": "/etc/passwd"}}))
    folder = unpack((tmp_path / "blob").read_bytes(), tmp_path / "here")
    group = json.loads((folder / "KEY/__grp__add.json").read_text())["child_paths"]
    assert group == {"../../x.cubin": str(folder / "KEY/x.cubin")}


def test_a_start_has_the_kernels_until_it_ends(blob: bytes) -> None:
    with restored(Bundle(blob)) as made_for:  # type: ignore[arg-type]
        folder = Path(os.environ["TRITON_CACHE_DIR"])
        assert made_for == "eager"
        assert (folder / "KEY/add.cubin").exists()
        assert folder.parent.stat().st_mode & 0o777 == 0o700, "others could put code there"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not folder.exists()


@pytest.mark.parametrize("data", [None, b"no archive"])
def test_without_usable_kernels_triton_compiles(data: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    with restored(Bundle(data)) as found:  # type: ignore[arg-type]
        assert not found
        assert "TRITON_CACHE_DIR" not in os.environ
    assert ("compiled and not restored" in caplog.text) == (data is not None)


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_a_group_with_a_member_without_a_name_is_told(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "blob", "w") as archive:
        archive.writestr("triton-1/KEY/__grp__add.json", json.dumps({"child_paths": {name: ""}}))
    with pytest.raises(StateError, match=r"damaged group.*materialize it again"):
        unpack((tmp_path / "blob").read_bytes(), tmp_path / "here")


def test_without_a_place_for_temporary_files_triton_compiles(
    blob: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole disk may be read-only."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with restored(Bundle(blob)) as found:  # type: ignore[arg-type]
        assert not found
        assert "TRITON_CACHE_DIR" not in os.environ
    assert "compiled and not restored: [Errno 2]" in caplog.text


def test_an_error_of_the_start_is_not_taken_for_one_of_the_folder(blob: bytes) -> None:

    def start() -> None:
        with restored(Bundle(blob)) as found:  # type: ignore[arg-type]
            assert found
            raise OSError("of the start")

    with pytest.raises(OSError, match="of the start"):
        start()
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_full_disk_is_not_told_as_damage(
    blob: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def full(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with restored(Bundle(blob)) as found:  # type: ignore[arg-type]
        assert not found
    assert "cannot be unpacked ([Errno 28] No space left on device)" in caplog.text
    assert "materialize it again" not in caplog.text


def test_where_no_code_may_run_from_temporary_files_triton_compiles(
    blob: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton maps its launchers, and puts one that it cannot map in the same folder again: the start would fail."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with restored(Bundle(blob)) as found:  # type: ignore[arg-type]
        assert not found
        assert "TRITON_CACHE_DIR" not in os.environ
    assert "is mounted without the right to run code" in caplog.text


def test_a_folder_that_inductor_has_named_is_used_again_afterwards(
    blob: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with restored(Bundle(blob)) as made_for:  # type: ignore[arg-type]
        assert made_for
        assert os.environ["TRITON_CACHE_DIR"] != str(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)


def test_an_archive_that_does_not_say_what_it_is_for_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zipfile.ZipFile(tmp_path / "blob", "w") as archive:
        archive.writestr("triton-1/KEY/add.cubin", b"code")
    with restored(Bundle((tmp_path / "blob").read_bytes())) as made_for:  # type: ignore[arg-type]
        assert made_for is None
        assert "TRITON_CACHE_DIR" not in os.environ
    assert "does not say what it is for" in caplog.text


def test_a_folder_that_the_user_has_named_stays(
    blob: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_kernels, "_NAMED", str(tmp_path))
    with restored(Bundle(blob)) as found:  # type: ignore[arg-type]
        assert not found
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
    assert f"TRITON_CACHE_DIR is {tmp_path}" in caplog.text


def compiled(script: Path, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_itself_finds_them_and_compiles_nothing(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    first = compiled(script, tmp_path / "cache")
    assert first.startswith("[False]"), first
    assert pack(tmp_path / "cache", tmp_path / "blob") == 1
    again = compiled(script, unpack((tmp_path / "blob").read_bytes(), tmp_path / "elsewhere"))
    size = first.split()[1]
    assert again == f"[True] {size} ['cubin']"


def test_what_triton_reads_of_itself_is_read_beside_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = threading.Event()
    monkeypatch.setattr(triton_kernels, "read_triton_key", lambda: imported.wait(10))
    with key_read_beside():
        assert "triton-key" in [thread.name for thread in threading.enumerate()]
        imported.set()
    assert "triton-key" not in [thread.name for thread in threading.enumerate()], "it would not survive a fork"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_what_triton_reads_of_itself_is_kept() -> None:
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    with key_read_beside():
        pass
    assert triton_key.cache_info().currsize == 1


def test_what_was_attached_to_an_agents_region_reaches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another object for the same region there; code from the region itself would be the agent's."""
    from medusa_runtime.config import Settings
    from medusa_vllm.weights import attached

    found: dict[str, bytes] = {}
    files = {".medusa/triton-kernels": b"code"}
    region = SimpleNamespace(fd=os.memfd_create("region"), from_agent=True, attached_files=files)
    extra = attached.loader_config(region, SimpleNamespace(fd=0), Settings())  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    monkeypatch.setattr(
        attached, "Region", lambda fd, **given: options.update(given) or SimpleNamespace(attach_file=found.__setitem__)
    )
    assert attached.AttachedRegion.of(SimpleNamespace(model_loader_extra_config=extra)).region
    assert found == files
    assert options == {"private": True, "from_agent": True}
