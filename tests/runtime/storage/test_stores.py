"""The registry, local files, and what fsspec reaches."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import (
    ConfigError,
    ForbiddenError,
    MissingPackageError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
)
from medusa_runtime.storage.base import Store, open_store
from medusa_runtime.storage.fsspec_store import FsspecStore
from medusa_runtime.storage.local import LocalStore
from medusa_runtime.storage.retry import RetryPolicy

BODY = os.urandom(5_000_000)


@pytest.fixture(params=["path", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        memory = pytest.importorskip("fsspec").filesystem("memory")
        memory.pipe("/stores-test/w", BODY)
        yield open_store("memory://stores-test")
        memory.rm("/stores-test", recursive=True)
        return
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "w").write_bytes(BODY)
    url = str(tmp_path / "my model") if request.param == "path" else f"file://{tmp_path}/my%20model"
    yield open_store(url)


def test_ranges(store: Store) -> None:
    info = store.stat("w")
    assert info.size == len(BODY)
    assert store.read("w", 10, 20, info.version) == (BODY[10:20], info)
    assert store.read("w", len(BODY) - 5, len(BODY) + 5)[0] == BODY[-5:]
    assert store.read("w", len(BODY), len(BODY) + 5)[0] == b""
    buffer, seen = bytearray(len(BODY) - 7), []
    with memoryview(buffer) as view:
        store.read_into("w", 7, view, info.version, seen.append)
    assert buffer == BODY[7:]
    assert seen[-1] == len(buffer)


def test_missing_and_changed(store: Store) -> None:
    with pytest.raises(ObjectNotFoundError, match="nothing"):
        store.stat("nothing")
    with pytest.raises(ObjectChangedError), memoryview(bytearray(10)) as view:
        store.read_into("w", 0, view, "another version")


@pytest.mark.parametrize("how", ["read", "read_into"])
def test_a_file_that_is_written_to_while_it_is_read_is_no_mixture(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first half of it was once of the old version, and the second of the new one."""
    (tmp_path / "w").write_bytes(BODY)
    os.utime(tmp_path / "w", (1, 1))
    store, read = LocalStore(str(tmp_path)), os.preadv

    def write_between(fd: int, buffers: Any, offset: int) -> int:
        count = read(fd, [buffers[0][: len(BODY) // 2]], offset)
        with open(tmp_path / "w", "r+b") as file:  # in place, as rsync --inplace does
            file.write(BODY[::-1])
        return count

    monkeypatch.setattr(os, "preadv", write_between)
    stop: Any = len(BODY) if how == "read" else memoryview(bytearray(len(BODY)))
    with pytest.raises(ObjectChangedError, match="replaced or written to while it was read"):
        getattr(store, how)("w", 0, stop)


@pytest.mark.parametrize("size", [None, -1, "9"])
def test_an_object_of_unknown_size_is_one_error(size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setattr(type(memory), "info", lambda *_: {"type": "file", "size": size, "ETag": "x"})
    with pytest.raises(StorageError, match="does not say how many bytes it has"):
        open_store("memory://stores-test").stat("w")


def test_versions_that_are_only_a_size_are_not_mixed(store: Store) -> None:
    """A replacement of the same size could not be seen."""
    if isinstance(store, LocalStore):
        pytest.skip("local files always have a version")
    with pytest.raises(StorageError, match="nothing shows whether two ranges are of the same version"):
        store.read("w", 0, 10, f"size={len(BODY)}")
    with (
        pytest.raises(StorageError, match="nothing shows whether two ranges"),
        memoryview(bytearray(10)) as view,
    ):
        store.read_into("w", 0, view, f"size={len(BODY)}")


@pytest.fixture
def memory(store: Store) -> Any:
    if not isinstance(store, FsspecStore):
        pytest.skip("this is about fsspec")
    return store._system


@pytest.mark.parametrize("version", [None, "the current one"])
def test_a_change_during_a_read_is_seen(
    store: Store, memory: Any, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    """fsspec has no conditional reads: the version is compared before and after each one."""
    version = version and store.stat("w").version
    read = type(memory).cat_file

    def replaced(system: Any, path: str, **options: Any) -> Any:
        data = read(system, path, **options)
        system.pipe(path, BODY[::-1])
        return data

    monkeypatch.setattr(type(memory), "cat_file", replaced)
    with pytest.raises(ObjectChangedError):
        store.read("w", 0, 10, version)


@pytest.mark.parametrize("method", ["info", "cat_file"])
def test_a_file_system_that_hangs_is_given_up(
    store: Store, memory: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr("medusa_runtime.storage.fsspec_store._PIECE_S", 0.1)
    hanging = threading.Event()
    monkeypatch.setattr(type(memory), method, lambda *_, **__: hanging.wait())
    monkeypatch.setattr(store, "retries", RetryPolicy(unreachable_attempts=2, first_pause_s=0.01, stall_s=0.1))
    with pytest.raises(UnreachableError, match=r"no answer within 0\.1 s.*tried 2 times"):
        store.read("w", 0, 10)
    hanging.set()


def test_a_server_that_never_answers_is_given_up_as_soon_as_by_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("fsspec", "requests"):
        pytest.importorskip(package)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = open_store(f"webhdfs://127.0.0.1:{silent.getsockname()[1]}/m")
        assert isinstance(store, FsspecStore)
        assert store.retries == RetryPolicy()
        store.retries = RetryPolicy(stall_s=0.5, patience_s=1.0)  # in proportion
        with pytest.raises(UnreachableError, match=r"/m/w: no answer within 0.5 s; .* \(tried 2 times\)"):
            store.stat("w")


def test_only_local_files_can_be_mapped(store: Store) -> None:
    path = store.local_path("w")
    assert (path is not None) == isinstance(store, LocalStore)
    assert path is None or path.read_bytes() == BODY


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    store = LocalStore(str(tmp_path))
    monkeypatch.setattr("medusa_runtime.storage.local.os.open", refuse)  # root, as tests may be, is never refused
    with pytest.raises(ForbiddenError, match="may not be read"):
        store.stat("w")


@pytest.mark.timeout(20)
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ForbiddenError, match="expected a regular file"):
        LocalStore(str(tmp_path)).read("config.json", 0, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(ObjectNotFoundError, match="expected a folder with a checkpoint, found a file"):
        open_store(str(tmp_path / "f"))


@pytest.mark.parametrize(("url", "meant"), [("s3:/b/m", "s3://b/m"), ("https:host/m", "https://host/m")])
def test_a_url_that_lacks_slashes(url: str, meant: str) -> None:
    with pytest.raises(ObjectNotFoundError, match=rf"found nothing; did you mean {meant}\?$"):
        open_store(url)


@pytest.mark.parametrize("url", ["https:/user:secret@host/m", "s3:b/m?X-Amz-Signature=secret"])
def test_a_secret_in_a_url_that_lacks_slashes_is_not_shown(url: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="did you mean") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_fsspec_may_read_what_a_store_of_ours_reads(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "w").write_bytes(BODY)
    store = open_store(f"fsspec+file://{tmp_path}")
    assert isinstance(store, FsspecStore)
    assert store.read("w", 5, 10)[0] == BODY[5:10]


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"gopher://host/p: unknown scheme .*file://.*https://.*s3://.*hf://.*gs://"
    ) as it:
        open_store("gopher://user:password@host/p?token=t")
    assert "password" not in str(it.value)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("memory://p", "fsspec", "fsspec"),
        ("gs://b/p", "google.auth", "gcs"),
        ("s3://b/p", "botocore.session", "s3"),
    ],
)
def test_a_missing_package_names_the_command(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, package, None)
    if package == "fsspec":
        monkeypatch.setitem(sys.modules, "fsspec.registry", None)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises((ConfigError, MissingPackageError), match=rf'pip install "medusa-runtime\[{extra}\]"'):
        open_store(url).stat("w")
