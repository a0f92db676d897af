"""A device for copies: a driver in host memory (``fake_copies.c``), and a link over it."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from built_once import built_once
from medusa_runtime.device.driver import Driver
from medusa_runtime.load.upload import cuda_link
from medusa_runtime.load.upload.cuda_link import CudaLink
from medusa_runtime.load.upload.staging import StagingThreads


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("fake_copies.c")

    def compile_it(folder: Path) -> None:
        command = ["cc", "-shared", "-fPIC", "-pthread", "-Wall", "-Werror", "-o", str(folder / "libcuda.so.1"), source]
        subprocess.run(command, check=True, timeout=240)

    return built_once(tmp_path_factory, "fake_copies", compile_it) / "libcuda.so.1"


class Fake:
    """The fake driver. Each test loads a copy of it, because the library has one device."""

    def __init__(self, library: Path) -> None:
        self.driver = Driver(str(library))
        self.calls = ctypes.CDLL(str(library))
        self.calls.fake_target.restype = ctypes.c_uint64
        self.locked = ctypes.PyDLL(str(library))  # its calls hold the interpreter's lock

    @contextmanager
    def threads(self, count: int = 3) -> Iterator[StagingThreads]:
        threads = StagingThreads(self.driver, count)
        try:
            yield threads
        finally:
            self.calls.fake_hold(0)
            threads.close()

    @contextmanager
    def link(self) -> Iterator[CudaLink]:
        """A link whose device is this driver's. Its streams and events do nothing, for torch has no such device."""
        torch_cuda = {"Stream": _Stream, "stream": lambda stream: nullcontext(), "Event": _Event}
        with patch.object(cuda_link, "Driver", lambda: self.driver), patch.multiple(torch.cuda, **torch_cuda):
            made = CudaLink(torch.device("cpu"))
            try:
                yield made
            finally:
                self.calls.fake_hold(0)
                made.close()


@pytest.fixture
def fake(fake_library: Path, tmp_path: Path) -> Fake:
    copy = tmp_path / fake_library.name
    copy.write_bytes(fake_library.read_bytes())
    return Fake(copy)


@pytest.fixture
def link(fake: Fake) -> Iterator[Any]:
    with fake.link() as made:
        yield made


class _Stream:
    def __init__(self, device: torch.device) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def record(self, stream: _Stream) -> None: ...

    def query(self) -> bool:
        return True
