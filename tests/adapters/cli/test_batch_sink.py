"""Where a batch writes its results: one batch at a time, and nothing behind a line that is broken."""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.cli.batch import lines
from medusa_adapters.cli.batch.sink import Sink, open_sink
from medusa_runtime.errors import ConfigError, StorageError

LINE = lines.failure("a", "connection_lost", "x" * 100)


def begin(place: Path | str, *, resume: bool = False) -> tuple[Sink, list[str]]:
    found: list[str] = []

    def note(key: str) -> bool:
        is_new = key not in found
        found.append(key)
        return is_new

    return open_sink(str(place), resume=resume, note=note), found


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let files be only so large, as on a full disk: of a line that does not fit, a part is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_one_batch_at_a_time_writes_to_a_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for resume in (False, True):
        first, found = begin(output, resume=resume)
        first.write(LINE)
        with pytest.raises(ConfigError, match="another medusa batch writes to it"):
            begin(output, resume=True)
        first.close()
        assert found == ["a"] * resume
    with pytest.raises(ConfigError, match="there are results already"):
        begin(output)
    again, found = begin(output, resume=True)
    again.close()
    assert (found, output.read_bytes()) == (["a", "a"], LINE * 2)
    shared = [begin("/dev/null")[0] for _ in range(2)]  # what is no file may be
    for sink in shared:
        sink.write(LINE)
        sink.close()


def test_a_file_without_results_is_left_only_where_there_was_one(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    begin(output)[0].close()
    assert not output.exists()  # as in a store
    output.touch()
    begin(output)[0].close()
    assert output.exists()


def test_nothing_is_written_behind_a_line_that_does_not_fit(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    sink, _ = begin(output)
    with largest_file(len(LINE) + 50):
        sink.write(LINE)
        with pytest.raises(StorageError, match=r"out\.jsonl cannot be written: File too large"):
            sink.write(LINE)
    with pytest.raises(StorageError, match=r"out\.jsonl cannot be written"):
        sink.write(LINE)
    sink.close()
    assert output.read_bytes() == LINE + LINE[:50]
    again, found = begin(output, resume=True)
    again.write(LINE)
    again.close()
    assert (found, output.read_bytes()) == (["a"], LINE * 2)


@pytest.mark.parametrize("text", ["notes in one line", '{"custom_id": "a", "method": "POST"', '["', "\0"])
def test_a_file_that_is_no_output_stays_as_it_is(tmp_path: Path, text: str) -> None:
    """A file of one line without an end, such as the input itself, was once taken for a line that was cut off."""
    output = tmp_path / "notes"
    output.write_text(text)
    with pytest.raises(ConfigError, match="expected results of a batch, found something else in line 1"):
        begin(output, resume=True)
    assert output.read_text() == text
    for cut in (LINE[:3], LINE[:7], LINE[:60], b' {"id" : "a', b""):
        output.write_bytes(LINE + cut)
        sink, found = begin(output, resume=True)
        sink.close()
        assert (found, output.read_bytes()) == (["a"], LINE)


def test_an_object_is_begun_with_its_first_result(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    output = tmp_path / "out.jsonl"
    begin(f"local://{output}")[0].close()
    assert list(tmp_path.iterdir()) == []
    sink, _ = begin(f"local://{output}")
    sink.write(LINE)
    sink.close()
    with open(output, "ab") as file:
        file.write(LINE[:9])
    sink, found = begin(f"local://{output}", resume=True)
    sink.close()
    assert (found, output.read_bytes(), list(tmp_path.iterdir())) == (["a"], LINE + LINE[:9], [output])
    sink, _ = begin(f"local://{output}", resume=True)
    sink.write(LINE)
    sink.close()
    assert (output.read_bytes(), list(tmp_path.iterdir())) == (LINE * 2, [output])


@pytest.fixture
def store() -> Iterator[dict[str, bytes]]:
    """A store in memory, and what is in it."""
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Store(dict[str, bytes]):
        def __getitem__(self, name: str) -> bytes:
            return bytes(MemoryFileSystem.store[f"/{name}"].getvalue())

        def __iter__(self) -> Iterator[str]:
            return iter(sorted(name.removeprefix("/") for name in MemoryFileSystem.store))

    MemoryFileSystem.store.clear()
    yield Store()
    MemoryFileSystem.store.clear()


def other(line: bytes) -> bytes:
    return line.replace(b"x", b"y")


@pytest.mark.parametrize("resume", [False, True])
def test_a_batch_whose_object_another_one_wrote_keeps_its_results_beside_it(
    store: dict[str, bytes], resume: bool
) -> None:
    if resume:
        sink, _ = begin("memory://out.jsonl")
        sink.write(LINE)
        sink.close()
    first, second = (begin("memory://out.jsonl", resume=resume)[0] for _ in range(2))
    first.write(LINE)
    second.write(other(LINE))
    first.close()
    with pytest.raises(StorageError, match=r"by another batch meanwhile.*memory://out\.jsonl\.\w+\.new"):
        second.close()
    output, kept = store
    assert (output, store[output]) == ("out.jsonl", LINE * (1 + resume))
    assert store[kept] == LINE * resume + other(LINE)
    assert kept.endswith(".new")
    second.close()  # again, which does nothing


def test_a_batch_is_refused_at_its_first_result_if_there_are_others_by_then(store: dict[str, bytes]) -> None:
    import fsspec

    first, second = (begin("memory://out.jsonl")[0] for _ in range(2))
    first.write(LINE)
    first.close()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"since this one began.*--resume"):
            second.write(other(LINE))
    second.close()
    assert list(store) == ["out.jsonl"]
    assert store["out.jsonl"] == LINE
    third, _ = begin("memory://out.jsonl", resume=True)
    fsspec.filesystem("memory").pipe_file("/out.jsonl", b"")  # shorter than it was
    with pytest.raises(StorageError, match="since this one began"):
        third.write(LINE)
    third.close()
    assert list(store) == ["out.jsonl"]


def result(custom_id: str) -> bytes:
    return lines.failure(custom_id, "connection_lost", "x" * 100)


def test_resume_uses_what_killed_batches_have_left_beside_the_output(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    one, other = "/out.jsonl.0123456789ab.new", "/out.jsonl.ba9876543210.new"
    system.pipe_file("/out.jsonl", result("a") + result("b"))
    system.pipe_file(one, result("a") + result("b") + result("c") + b"\n" + result("d")[:20])
    system.pipe_file(other, result("c") + result("a") + result("e"))
    for foreign in ("/out.jsonl.0123456789.new", "/more.jsonl.0123456789ab.new", "/out.jsonl.0123456789ab.new.txt"):
        system.pipe_file(foreign, result("z"))
    sink, found = begin("memory://out.jsonl", resume=True)
    assert sorted(set(found)) == ["a", "b", "c", "e"]
    names = "memory://out.jsonl.0123456789ab.new, memory://out.jsonl.ba9876543210.new"
    assert f"2 results are taken from {names}, which other batches have left" in caplog.text
    sink.write(result("d"))
    sink.close()
    ids = [lines.key_of(line) for line in store["out.jsonl"].splitlines()]
    assert ids == ["a", "b", "c", "e", "d"]
    assert {one.strip("/"), other.strip("/")} < set(store), "another batch may still write to them"
    again, found = begin("memory://out.jsonl", resume=True)
    again.close()
    assert ids == [lines.key_of(line) for line in store["out.jsonl"].splitlines()]


@pytest.fixture
def short_parts(store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The store shows objects once they are complete, like S3, and each result is in an object of its own."""
    from fsspec.implementations.memory import MemoryFileSystem
    from medusa_adapters.cli.batch import stored_object

    class Pending(io.BytesIO):
        path = ""

        def close(self) -> None:
            if not self.closed:
                MemoryFileSystem().pipe_file(self.path, self.getvalue())
            super().close()

        def discard(self) -> None:
            super().close()

    def open_file(system: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "wb":
            return original(system, path, mode, **options)
        pending = Pending()
        pending.path = path
        return pending

    original = MemoryFileSystem.open
    monkeypatch.setattr(MemoryFileSystem, "open", open_file)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda system, path, value, **_: put(system, path, value))
    monkeypatch.setattr(stored_object, "_PART_S", 0.0)

    def put(system: MemoryFileSystem, path: str, value: bytes) -> None:
        with original(system, path, "wb") as file:
            file.write(value)


@pytest.mark.usefixtures("short_parts")
def test_a_long_batch_that_is_killed_leaves_what_it_has_had_for_a_while(store: dict[str, bytes]) -> None:
    sink, _ = begin("memory://out.jsonl")
    for custom_id in "abc":
        sink.write(result(custom_id))
    assert sorted(lines.key_of(store[name]) for name in store) == ["a", "b"]
    again, found = begin("memory://out.jsonl", resume=True)
    assert sorted(found) == ["a", "b"]
    again.write(result("d"))
    again.write(result("c"))
    again.close()
    assert [lines.key_of(line) for line in store["out.jsonl"].splitlines()] == [*found, "d", "c"]
    assert len(list(store)) == 3, "its own objects are gone"


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("fails", [None, "taken", "join", "shorter"])
def test_a_long_batch_joins_its_objects(
    store: dict[str, bytes], fails: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

    def read(file: MemoryFile, size: int = -1) -> bytes:
        raise OSError("Slow Down")

    sink, _ = begin("memory://out.jsonl")
    written = [result(custom_id) for custom_id in "abc"]
    for line in written:
        sink.write(line)
    if fails is None:
        sink.close()
        assert (list(store), store["out.jsonl"]) == (["out.jsonl"], b"".join(written))
        return
    if fails == "taken":
        MemoryFileSystem().pipe_file("/out.jsonl", result("z"))
    if fails == "shorter":
        name = next(iter(store))
        MemoryFileSystem().pipe_file(f"/{name}", store[name][:-1])
    with monkeypatch.context() as patched:
        if fails == "join":
            patched.setattr(MemoryFile, "read", read)
        with pytest.raises(StorageError, match="the results of this batch are in") as told:
            sink.close()
    kept = sorted(name for name in store if name.endswith(".new"))
    assert len(kept) == (1 if fails == "taken" else 3)
    assert all(f"memory://{name}" in str(told.value) for name in kept)
    if fails == "shorter":
        assert f"{name} is shorter than it was" in str(told.value)
        return
    assert b"".join(sorted(b"".join(store[name] for name in kept).splitlines(True))) == b"".join(sorted(written))


def test_what_a_killed_batch_has_left_is_the_output_though_nothing_is_left_to_do(store: dict[str, bytes]) -> None:
    import fsspec

    left = result("a") + result("b")
    fsspec.filesystem("memory").pipe_file("/out.jsonl.0123456789ab.new", left)
    with pytest.raises(ConfigError, match=r"results beside it, in memory://out\.jsonl\.0123456789ab\.new.*--resume"):
        begin("memory://out.jsonl")
    sink, found = begin("memory://out.jsonl", resume=True)
    assert found == ["a", "b"]
    sink.close()
    sink.close()
    assert store["out.jsonl"] == left


def test_a_store_that_lists_nothing_takes_batches(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(system: MemoryFileSystem, path: str, **options: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    for resume in (False, True):
        sink, _ = begin("memory://out.jsonl", resume=resume)
        sink.write(LINE)
        sink.close()
    assert store["out.jsonl"] == LINE * 2
    assert caplog.text.count("could not be looked for (Access Denied)") == 1


def test_one_batch_at_a_time_writes_its_object(store: dict[str, bytes]) -> None:
    import fsspec

    sink, _ = begin("memory://out.jsonl")
    sink.write(LINE)
    fsspec.filesystem("memory").pipe_file("/out.jsonl.lock", b"another's")
    for resume in (False, True):
        with pytest.raises(
            ConfigError, match=r"another medusa batch.*remove memory://out\.jsonl\.lock if none runs.*\.new"
        ):
            begin("memory://out.jsonl", resume=resume)
    with pytest.raises(StorageError, match=r"being written by another batch.*are in memory://out\.jsonl\.\w+\.new"):
        sink.close()
    kept, lock = store
    assert (store[kept], lock, store[lock]) == (LINE, "out.jsonl.lock", b"another's")


@pytest.mark.parametrize("conditions", [True, False])
def test_batches_that_end_at_the_same_time_replace_no_results(
    store: dict[str, bytes], conditions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the output free; the second one's right is refused by the store, or taken for the first one's."""
    from fsspec.implementations.memory import MemoryFileSystem

    def pipe_file(system: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite") -> None:
        original(system, path, b"another's")
        if conditions:
            raise FileExistsError(path)

    original = MemoryFileSystem.pipe_file
    sink, _ = begin("memory://out.jsonl")
    sink.write(LINE)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    with pytest.raises(StorageError, match="being written by another batch"):
        sink.close()
    kept, lock = store
    assert (store[kept], store[lock]) == (LINE, b"another's")


def test_a_store_that_lets_nobody_delete_keeps_copies_and_takes_the_next_batch(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(system: MemoryFileSystem, path: str, **options: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "rm", refuse)
    for resume in (False, True):
        sink, _ = begin("memory://out.jsonl", resume=resume)
        sink.write(LINE)
        sink.close()
        assert store["out.jsonl"] == LINE * (1 + resume)
        assert store["out.jsonl.lock"] == b""
    assert caplog.text.count("could not be removed (Access Denied)") == 2


def test_a_store_that_takes_no_conditions_takes_results(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def pipe_file(system: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "create":
            raise NotImplementedError("a header you provided implies functionality that is not implemented")
        original(system, path, value)

    original = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    sink, _ = begin("memory://out.jsonl")
    sink.write(LINE)
    sink.close()
    assert (list(store), store["out.jsonl"]) == (["out.jsonl"], LINE)


def test_an_object_that_cannot_be_moved_leaves_its_results_where_the_error_says(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def mv(system: MemoryFileSystem, old: str, new: str) -> None:
        raise OSError("Slow Down")

    sink, _ = begin("memory://out.jsonl")
    sink.write(LINE)
    monkeypatch.setattr(MemoryFileSystem, "mv", mv)
    with pytest.raises(StorageError, match=r"Slow Down.*are in memory://out\.jsonl\.\w+\.new"):
        sink.close()
    (kept,) = store
    assert store[kept] == LINE


def test_an_object_may_have_a_name_that_looks_like_a_pattern(store: dict[str, bytes]) -> None:
    sink, _ = begin("memory://out[1].jsonl")
    sink.write(LINE)
    sink.close()
    assert (list(store), store["out[1].jsonl"]) == (["out[1].jsonl"], LINE)


def test_batches_of_one_s3_object_leave_one_result_and_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "secret")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        import s3fs

        system = s3fs.S3FileSystem()
        system.mkdir("bucket")
        sinks = [begin("s3://bucket/out.jsonl")[0] for _ in range(6)]
        for number, sink in enumerate(sinks):
            sink.write(b"%d\n" % number)

        def close(sink: Sink) -> str:
            try:
                sink.close()
            except StorageError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(sinks)) as pool:
            errors = list(pool.map(close, sinks))
        system.invalidate_cache()
        found = {name: system.cat_file(name) for name in system.ls("bucket", detail=False)}
        assert sorted(found.values()) == [b"%d\n" % number for number in range(len(sinks))]
        winner = found.pop("bucket/out.jsonl", None)
        assert (winner is not None, errors.count("")) == (True, 1)
        assert errors.index("") == int(winner or b"-1")
        assert all(name.endswith(".new") for name in found)
    finally:
        server.stop()


def test_an_object_that_cannot_be_copied_stays_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    output = tmp_path / "out.jsonl"
    output.write_bytes(LINE * 200)
    sink, found = begin(f"local://{output}", resume=True)
    with largest_file(len(LINE) * 100):
        for _ in range(2):
            with pytest.raises(StorageError, match=r"out\.jsonl cannot be written"):
                sink.write(LINE)
        sink.close()
    assert (len(found), output.read_bytes()) == (200, LINE * 200)


def test_a_pipe_whose_reader_has_gone_is_an_error(tmp_path: Path) -> None:
    """The reader ends early in `medusa batch -o /dev/stdout … | head`. The batch must not hold the pipe open itself."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    sink, _ = begin(pipe)
    sink.write(LINE)
    os.close(reader)
    with pytest.raises(StorageError, match="Broken pipe"):
        sink.write(LINE)
    sink.close()


def test_a_dash_is_no_file() -> None:
    with pytest.raises(ConfigError, match="standard output is /dev/stdout"):
        begin("-")
