"""The threads that stage copies to a device, and their link, over a driver whose copies a test holds back."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_copies import Fake
from medusa_runtime.errors import DeviceError
from medusa_runtime.kernels import build as kernels
from medusa_runtime.load.upload import staging
from medusa_runtime.load.upload.cuda_link import CudaLink
from medusa_runtime.load.upload.staging import StagingThreads, StagingUnavailableError, Transfer
from medusa_runtime.region.file_range import FileRange, OpenFile
from waiting import until

PART = 4 << 20  # PART_BYTES in staging.c
SLOTS = 2


class Bytes:
    """Memory of the host, or, in place of a device's, of this process."""

    def __init__(self, data: bytes) -> None:
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.address = ctypes.addressof(self.memory)

    def __len__(self) -> int:
        return len(self.memory)

    def get(self) -> bytes:
        return self.memory.raw


def begin(
    threads: StagingThreads, target: Bytes, source: Bytes, *, urgent: bool = False, stored: FileRange | None = None
) -> Transfer:
    return threads.begin(
        target.address, source.address, len(source), urgent=urgent, stored=stored, keep=(target, source)
    )


def test_every_byte_arrives(fake: Fake) -> None:
    sizes = (1, 4097, PART - 1, PART, PART + 1, 3 * PART, 5 * PART + 77, 0)
    sources = [Bytes(random.Random(size).randbytes(size)) for size in sizes]
    targets = [Bytes(bytes(size)) for size in sizes]
    with fake.threads() as threads:
        pairs = zip(targets, sources, strict=True)
        transfers = [begin(threads, *pair, urgent=number % 3 == 0) for number, pair in enumerate(pairs)]
        until(lambda: all(transfer.done() for transfer in transfers))
        assert [target.get() for target in targets] == [source.get() for source in sources]


def file_of(data: bytes) -> OpenFile:
    file = OpenFile(os.memfd_create("bytes"))
    os.write(file.fileno(), data)
    return file


def test_bytes_are_read_from_the_file_that_has_them(fake: Fake) -> None:
    size, offset = 2 * PART + 77, 4097
    data = random.Random(size).randbytes(offset + size)
    target, untouched = Bytes(bytes(size)), Bytes(bytes(size))
    with fake.threads() as threads:
        transfer = begin(threads, target, untouched, stored=FileRange(file_of(data), offset))
        until(transfer.done)
    assert target.get() == data[offset:]


def test_what_a_file_does_not_have_is_copied(fake: Fake) -> None:
    size, there = 2 * PART, PART + 1000
    source, target = Bytes(random.Random(1).randbytes(size)), Bytes(bytes(size))
    with fake.threads() as threads:
        until(begin(threads, target, source, stored=FileRange(file_of(source.get()[:there]), 0)).done)
    assert target.get() == source.get()


def test_a_file_is_open_until_its_bytes_are_copied(fake: Fake) -> None:
    """A descriptor that was closed may be another file's by the time a thread reads from it."""
    source, target = Bytes(b"x" * 4 * PART), Bytes(bytes(4 * PART))
    file = file_of(source.get())
    descriptor = file.fileno()
    fake.calls.fake_hold(1)
    with fake.threads(count=1) as threads:
        begin(threads, target, Bytes(bytes(4 * PART)), stored=FileRange(file, 0))
        del file
        gc.collect()
        os.fstat(descriptor)
        fake.calls.fake_hold(0)
        until(lambda: target.get() == source.get())
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_transfer_is_done_when_the_device_has_read_all_of_it(fake: Fake) -> None:
    target, source = Bytes(bytes(100)), Bytes(b"x" * 100)
    fake.calls.fake_hold(1)
    with fake.threads() as threads:
        transfer = begin(threads, target, source)
        until(lambda: fake.calls.fake_begun() == 1)
        time.sleep(0.05)
        assert not transfer.done()
        fake.calls.fake_hold(0)
        until(transfer.done)
        assert target.get() == source.get()


def test_urgent_transfers_go_before_what_has_not_begun(fake: Fake) -> None:
    size = 6 * PART
    target, other, source = Bytes(bytes(size)), Bytes(bytes(10)), Bytes(b"x" * size)
    fake.calls.fake_hold(1)
    with fake.threads(count=1) as threads:
        first = begin(threads, target, source)
        until(lambda: fake.calls.fake_begun() == SLOTS)
        urgent = threads.begin(other.address, source.address, 10, urgent=True, keep=source)
        fake.calls.fake_hold(0)
        until(lambda: first.done() and urgent.done())
        order = [fake.calls.fake_target(number) for number in range(7)]
    expected = [target.address + start for start in range(0, size, PART)]
    assert order == [*expected[:SLOTS], other.address, *expected[SLOTS:]]


def test_the_interpreters_lock_is_not_needed(fake: Fake) -> None:
    """A start computes in Python while its weights come. Threads of Python would get a turn every few milliseconds."""
    parts = 12
    target, source = Bytes(bytes(parts * PART)), Bytes(b"x" * parts * PART)
    with fake.threads() as threads:
        transfer = begin(threads, target, source)
        fake.locked.fake_await(parts)
        until(transfer.done)


def test_the_hosts_memory_is_kept_until_it_is_copied(fake: Fake) -> None:
    class Owner(Bytes):
        pass

    source, target = Owner(b"x" * 3 * PART), Bytes(bytes(3 * PART))
    alive, expected = weakref.ref(source), source.get()
    fake.calls.fake_hold(1)
    with fake.threads(count=1) as threads:
        begin(threads, target, source)
        del source
        gc.collect()
        assert alive() is not None
        fake.calls.fake_hold(0)
        until(lambda: target.get() == expected)
        until(lambda: not threads._transfers[0].native.left)
        begin(threads, target, Bytes(b"y"))
        gc.collect()
        assert alive() is None


def test_closing_waits_for_what_has_begun_and_leaves_nothing(fake: Fake) -> None:
    size = 20 * PART
    target, source = Bytes(bytes(size)), Bytes(b"x" * size)
    threads = StagingThreads(fake.driver, 3)
    transfer = begin(threads, target, source)
    until(lambda: fake.calls.fake_begun() > 0)
    threads.close()
    threads.close()
    begun = fake.calls.fake_begun()
    assert target.get().count(b"x") == begun * PART, "each part that had begun is there"
    assert transfer.done() == (begun == 20)
    assert not any(thread.is_alive() for thread in threads._threads)
    assert fake.calls.fake_pinned() == fake.calls.fake_handles() == 0


def test_two_threads_may_close_at_once(fake: Fake) -> None:
    fake.calls.fake_hold(1)
    threads = StagingThreads(fake.driver, 1)
    begin(threads, Bytes(bytes(10)), Bytes(b"x" * 10))
    until(lambda: fake.calls.fake_begun() == 1)
    closing = [threading.Thread(target=threads.close) for _ in range(8)]
    for thread in closing:
        thread.start()
    time.sleep(0.05)  # all of them wait for the copy
    fake.calls.fake_hold(0)
    for thread in closing:
        thread.join()
    assert fake.calls.fake_pinned() == fake.calls.fake_handles() == 0


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync_v2", "cuEventSynchronize"])
def test_a_copy_that_fails_raises(fake: Fake, function: str) -> None:
    target, source = Bytes(bytes(10 * PART)), Bytes(b"x" * 10 * PART)
    fake.calls.fake_fail(function.encode())
    with fake.threads() as threads:
        transfer = begin(threads, target, source)
        with pytest.raises(DeviceError, match="weights to the device failed: out of memory"):
            until(transfer.done)


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync_v2", "cuEventSynchronize"])
def test_a_part_that_failed_stays_left(fake: Fake, function: str) -> None:
    """``failure`` and ``left`` are read one after the other: between the two, a failed transfer must not look done."""
    fake.calls.fake_fail(function.encode())
    threads = StagingThreads(fake.driver, 1)
    transfer = begin(threads, Bytes(bytes(10)), Bytes(b"x" * 10))
    until(lambda: transfer.native.failure != 0)
    threads.close()
    assert transfer.native.left == 10


@pytest.mark.parametrize("function", ["cuMemHostAlloc", "cuCtxSetCurrent"])
def test_threads_that_cannot_start_raise(fake: Fake, function: str) -> None:
    fake.calls.fake_fail(function.encode())
    with fake.threads() as threads, pytest.raises(DeviceError, match="out of memory"):
        until(begin(threads, Bytes(bytes(10)), Bytes(bytes(10))).done)
    assert fake.calls.fake_pinned() == fake.calls.fake_handles() == 0


def test_without_the_compiled_code_the_message_says_how_to_make_it(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(StagingUnavailableError, match=r"none\.so.*medusa_runtime\.kernels\.build"):
        StagingThreads(fake.driver, 1)


def test_a_library_of_other_sources_is_not_used(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_INTERFACE", 3)
    with pytest.raises(StagingUnavailableError, match=r"interface 3, found 2; .*medusa_runtime\.kernels\.build"):
        StagingThreads(fake.driver, 1)


def test_the_structure_is_that_of_the_compiled_code(tmp_path: Path) -> None:
    ours = staging._Transfer
    checks = {"sizeof(struct transfer)": ctypes.sizeof(ours), "PART_BYTES": PART, "SLOTS": SLOTS}
    checks |= {f"offsetof(struct transfer, {name})": getattr(ours, name).offset for name, _ in ours._fields_}
    lines = [f'_Static_assert({expression} == {value}, "{expression}");' for expression, value in checks.items()]
    source = kernels.SOURCE_DIR / "staging.c"
    (tmp_path / "program.c").write_text("\n".join(["#include <stddef.h>", f'#include "{source}"', *lines, ""]))
    subprocess.run(["cc", "-fsyntax-only", str(tmp_path / "program.c")], check=True, timeout=240)


@pytest.mark.parametrize("possible", [0, 1])
def test_as_many_threads_as_can_be_started(fake: Fake, monkeypatch: pytest.MonkeyPatch, possible: int) -> None:
    left, start = possible, threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith("medusa-staging"):
            if not left:
                raise RuntimeError("can't start new thread")
            left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    if not possible:
        with pytest.raises(StagingUnavailableError, match="can't start new thread"):
            StagingThreads(fake.driver, 3)
        return
    source, target = Bytes(bytes(range(256)) * 64), Bytes(bytes(256 * 64))
    with fake.threads() as threads:
        transfer = begin(threads, target, source)
        until(transfer.done)
    assert target.get() == source.get()


@pytest.mark.parametrize("refused", [(), (0,), (1,), (0, 1, 2)])
def test_a_dtype_is_converted_even_if_the_device_is_full(
    link: CudaLink, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: Any
) -> None:
    """There, if it has room for the bytes, and else by the processor. Each of three allocations is refused in turn."""
    numbers, empty, asked = torch.linspace(-3, 3, 4096), torch.empty, []

    def on_device(*arguments: Any, **options: Any) -> torch.Tensor:
        asked.append(arguments)
        if len(asked) - 1 in refused:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 KiB.")
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", on_device)
    targets = [torch.zeros(4096, dtype=torch.bfloat16) for _ in range(3)]
    copies = [link.copy(target, numbers + number, urgent=False) for number, target in enumerate(targets)]
    for copy in copies:
        until(copy.done)
    assert len(asked) == 3
    for number, target in enumerate(targets):
        assert torch.equal(target, (numbers + number).to(torch.bfloat16))
    assert caplog.text.count("the GPU has no 1 MiB free to convert a weight's dtype") == bool(refused)
    link.close()
    assert ctypes.CDLL(fake.driver.file).fake_pinned() == 0
