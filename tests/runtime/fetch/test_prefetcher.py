"""Regions filled by real processes from a server that misbehaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fetching import fetch_into
from medusa_runtime.checkpoint.checksums import Checksums
from medusa_runtime.config import Settings
from medusa_runtime.errors import (
    CorruptError,
    ForbiddenError,
    MedusaError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    TooLargeError,
    UnreachableError,
)
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.lock import is_locked
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

MIB = 1 << 20
SIZES = {"embed.weight": 3 * MIB + 5, "layers.1.w": 5 * MIB, "layers.0.w": 2 * MIB + 77, "lm_head.weight": MIB}
TENSORS = {name: ("U8", [size], os.urandom(size)) for name, size in SIZES.items()}


@pytest.fixture
def served(origin: Any, safetensors_file: Callable[..., bytes]) -> Any:
    """One checkpoint in two shards at ``/m``."""
    names = list(TENSORS)
    for shard, part in (("one", names[:2]), ("two", names[2:])):
        origin.put(f"/m/{shard}.safetensors", safetensors_file({name: TENSORS[name] for name in part}))
    weight_map = {name: f"{'one' if name in names[:2] else 'two'}.safetensors" for name in names}
    origin.put("/m/model.safetensors.index.json", json.dumps({"weight_map": weight_map}).encode())
    origin.put("/m/config.json", b'{"model_type": "llama"}')
    return origin


def fill(region: Region, url: str, timeline: Timeline | None = None, **options: Any) -> None:
    checksums = options.pop("checksums", None)
    if timeline is None:
        fetch_into(region, url, Settings(**options), checksums=checksums)
    else:
        prefetch(region, url, settings=Settings(**options), timeline=timeline, checksums=checksums)


def check(region: Region) -> None:
    """Every tensor's bytes are those of the checkpoint."""
    index = region.wait_index()
    for name, (_, _, data) in TENSORS.items():
        region.wait_tensor(name, timeout_s=120)
        entry = index.tensors[name]
        assert region.shard(entry.shard)[entry.start : entry.stop] == data, name
        stored = region.file_range(name)
        assert os.pread(stored.file.fileno(), len(data), stored.offset) == data, name
        assert region.has(name)


def start(region: Region, url: str) -> int:
    """A prefetcher in a process of its own, as the supervisor starts it."""
    pid = os.fork()
    if not pid:
        try:
            fill(region, url)
            os._exit(0)
        except MedusaError:
            os._exit(1)
        finally:
            os._exit(9)
    return pid


def test_a_region_is_filled_sealed_and_told(served: Any, region: Region) -> None:
    timeline = Timeline.create("prefetcher")
    fill(region, served.url + "/m", timeline)
    check(region)
    assert region.file("config.json") == b'{"model_type": "llama"}'
    assert region.file("tokenizer.json") is None
    progress = region.progress()
    assert progress.state == "done"
    assert progress.fetched_bytes == progress.total_bytes == sum(SIZES.values())
    stages = {stage.name: stage for stage in timeline.stages()}
    assert set(stages) == {"index", "fetch"}
    assert stages["fetch"].detail["bytes"] == sum(SIZES.values())
    with pytest.raises(PermissionError):
        os.pwrite(region.fd, b"x", 0)
    with pytest.raises(TypeError):
        region.shard(0)[0] = 1


def test_a_region_whose_memory_a_reader_may_free_is_not_sealed(served: Any, region: Region) -> None:
    fill(region, served.url + "/m", host_weights="release")
    held = os.fstat(region.fd).st_blocks
    for name in TENSORS:
        region.release(name)
    assert os.fstat(region.fd).st_blocks < held


def test_a_file_range_outlives_its_region(served: Any, region: Region) -> None:
    fill(region, served.url + "/m")
    name, (_, _, data) = next(iter(TENSORS.items()))
    stored = region.file_range(name)
    region.close()
    assert os.pread(stored.file.fileno(), len(data), stored.offset) == data


def test_the_header_starts_with_the_watermark(served: Any, region: Region) -> None:
    fill(region, served.url + "/m")
    assert int.from_bytes(os.pread(region.fd, 8, 0), sys.byteorder) == sum(SIZES.values())


def test_ranges_are_asked_for_in_execution_order(served: Any, region: Region) -> None:
    fill(region, served.url + "/m", connections=1)
    asked = [(path[3:6], start) for path, start, _, _ in served.requests if "safetensors" in path and start > 100]
    order = region.wait_index().order
    assert order == ("embed.weight", "layers.0.w", "layers.1.w", "lm_head.weight")
    first_two = next(i for i, (shard, _) in enumerate(asked) if shard == "two")
    last_one = max(i for i, (shard, _) in enumerate(asked) if shard == "one")
    assert 0 < first_two < last_one  # layer 0, in the second shard, comes before layer 1 in the first


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_fetch_goes_on_with_as_many_threads_as_it_may_have(
    served: Any, region: Region, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    started: list[str] = []
    start_thread = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(("fetch-", "hedge")):
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(thread.name)
        start_thread(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    if most:
        fill(region, served.url + "/m")
        check(region)
    else:
        with pytest.raises(RuntimeError, match="new thread"):
            fill(region, served.url + "/m")
        assert "Limit" in (region.progress().error or "")
    assert len(started) == most


@pytest.mark.parametrize("fault", ["cut:500000", "503", "short:1000", "stall"])
def test_faults_in_the_middle(served: Any, region: Region, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_runtime.storage.http.store.RetryPolicy", lambda: _quick())
    served.faults["/m/one.safetensors"] = ["", fault, fault]
    served.faults["/m/two.safetensors"] = ["", fault]
    fill(region, served.url + "/m")
    assert not any(served.faults.values())
    check(region)
    assert region.progress().retries > 0 or fault in ("short:1000", "stall")  # continued, or asked for again early


def _quick() -> Any:
    from medusa_runtime.storage.retry import RetryPolicy

    return RetryPolicy(stall_s=1.0, first_pause_s=0.01)


def test_a_killed_prefetcher_is_continued(served: Any, region: Region) -> None:
    served.bytes_per_s = 4e6
    first = start(region, served.url + "/m")
    while region.progress().fetched_bytes < 2 * MIB:
        time.sleep(0.005)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    kept = region.progress().fetched_bytes
    assert kept < sum(SIZES.values())
    served.bytes_per_s = None
    served.requests.clear()
    second = start(region, served.url + "/m")
    check(region)
    assert os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) == 0
    asked = sorted(one[:3] for one in served.requests if one[0].endswith("safetensors") and one[1] > 100)
    fetched, reached = 0, ("", 0)  # on a slow machine a late range is asked for twice
    for path, first_byte, stop in asked:
        begin = max(first_byte, reached[1]) if path == reached[0] else first_byte
        fetched += max(stop - begin, 0)
        reached = path, max(stop, begin)
    assert fetched == sum(SIZES.values()) - kept


def test_another_version_does_not_continue_a_region(served: Any, region: Region) -> None:
    served.bytes_per_s = 4e6
    first = start(region, served.url + "/m")
    while region.progress().fetched_bytes < MIB:
        time.sleep(0.005)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    served.bytes_per_s = None
    body = served.objects["/m/two.safetensors"]
    served.put("/m/two.safetensors", body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(ObjectChangedError, match=r"two\.safetensors"):
        fill(region, served.url + "/m")
    with pytest.raises(ObjectChangedError):
        region.wait_tensor("lm_head.weight")


def test_only_one_writer(region: Region) -> None:
    writer = region.writer()
    with pytest.raises(StorageError, match="another prefetcher"):
        region.writer()
    writer.close()
    region.writer().close()


def test_a_region_that_cannot_be_mapped_is_left_to_others() -> None:
    with closing(Region(os.memfd_create("empty"))) as region:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ValueError, match="greater than file size"):
            region.writer()
        assert os.listdir("/proc/self/fd") == before
        assert not is_locked(region.fd)


def test_a_dead_prefetcher_is_noticed(served: Any, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    served.bytes_per_s = 1e6
    pid = start(region, served.url + "/m")
    region.wait_index()
    monkeypatch.setattr("medusa_runtime.region.reader._GRACE_S", 0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(StorageError, match="the prefetcher ended before the checkpoint was complete"):
        region.wait_tensor("lm_head.weight")


def test_waiting_ends_with_its_time(region: Region) -> None:
    writer = region.writer()
    with pytest.raises(TimeoutError):
        region.wait_index(timeout_s=0.05)
    writer.close()


def test_an_object_replaced_while_it_is_read(served: Any, region: Region) -> None:
    served.faults["/m/one.safetensors"] = ["", "replace"]
    with pytest.raises(ObjectChangedError):
        fill(region, served.url + "/m")
    assert region.progress().state == "failed"
    assert (region.progress().error or "").startswith("Storage.Changed: ")


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("{origin}/nowhere", ObjectNotFoundError),
        ("http://127.0.0.1:1/m", UnreachableError),
        ("/nowhere/at/all", ObjectNotFoundError),
        ("gopher://host/m", MedusaError),
    ],
)
def test_errors_reach_the_readers(origin: Any, region: Region, url: str, kind: type[MedusaError]) -> None:
    with pytest.raises(kind) as raised:
        fill(region, url.format(origin=origin.url))
    with pytest.raises(kind) as seen:
        region.wait_index()
    assert str(seen.value) == str(raised.value)


def test_a_forbidden_store(served: Any, region: Region) -> None:
    served.accept = lambda headers, path: False
    with pytest.raises(ForbiddenError, match="403"):
        fill(region, served.url + "/m")


def test_too_large(served: Any, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLargeError, match="the weights take 12 MB, but the memory limit is 3 MB"):
        fill(region, served.url + "/m", memory_limit_mb=3)
    monkeypatch.setattr("medusa_runtime.container_limits.memory_available_bytes", lambda: 5_000_000)
    other = Region.create()
    with pytest.raises(TooLargeError, match="need 79 MB of memory, but only 5 MB"):
        fill(other, served.url + "/m")
    other.close()


@pytest.mark.parametrize("flips", [0, 1, 2])
def test_checksums(origin: Any, region: Region, safetensors_file: Callable[..., bytes], flips: int) -> None:
    data = os.urandom(3 * MIB)
    origin.put("/m/model.safetensors", safetensors_file({"w": ("U8", [len(data)], data)}))
    values = [zlib.crc32(data[at : at + MIB]) for at in range(0, len(data), MIB)]
    origin.faults["/m/model.safetensors"] = ["", *["flip"] * flips]
    if flips < 2:
        fill(region, origin.url + "/m", connections=1, checksums=Checksums("crc32", MIB, values))
        assert region.shard(0) == data
    else:
        with pytest.raises(CorruptError, match="also when fetched again"):
            fill(region, origin.url + "/m", connections=1, checksums=Checksums("crc32", MIB, values))


def test_local_files_are_mapped_and_not_copied(region: Region, tmp_path: Path, safetensors_file: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(TENSORS))
    (tmp_path / "config.json").write_bytes(b"{}")
    fill(region, str(tmp_path))
    check(region)
    assert os.fstat(region.fd).st_size < 100_000
    assert region.progress().fetched_bytes == sum(SIZES.values())


def test_a_local_file_replaced_before_it_is_mapped(region: Region, tmp_path: Path, safetensors_file: Any) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_file(TENSORS))
    fill(region, str(path))
    (tmp_path / "new").write_bytes(path.read_bytes())
    (tmp_path / "new").rename(path)
    with pytest.raises(ObjectChangedError, match="was replaced"):
        region.shard(0)


def test_memory_urls_through_fsspec(region: Region, safetensors_file: Any) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/prefetcher-test/model.safetensors", safetensors_file(TENSORS))
    try:
        fill(region, "memory://prefetcher-test")
        check(region)
    finally:
        memory.rm("/prefetcher-test", recursive=True)


def test_nothing_heavy_is_imported(served: Any) -> None:
    code = (
        "import sys\n"
        "from medusa_runtime.config import Settings\n"
        "from medusa_runtime.timeline import Timeline\n"
        "from medusa_runtime.fetch.prefetcher import prefetch\n"
        "from medusa_runtime.region.reader import Region\n"
        f"prefetch(Region.create(), {served.url + '/m'!r}, settings=Settings(), timeline=Timeline.create('t'))\n"
        "print([name for name in ('torch', 'numpy', 'boto3', 'botocore', 'http.client', 'ssl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("reserved", [64 * MIB, MIB])
def test_a_region_that_was_reserved_ahead_of_time(served: Any, region: Region, reserved: int) -> None:
    writer = region.writer()
    writer.reserve(reserved)
    fetch_into(region, served.url + "/m", writer=writer)
    check(region)
    assert os.fstat(region.fd).st_size < sum(SIZES.values()) + 4 * MIB


def test_a_slow_store_is_asked_over_more_connections(served: Any, region: Region) -> None:
    served.bytes_per_s = 4e6  # each connection
    timeline = Timeline.create("test")
    fill(region, served.url + "/m", timeline)
    check(region)
    (stage,) = [stage for stage in timeline.stages() if stage.name == "fetch"]
    assert stage.detail["connections"] > 4
