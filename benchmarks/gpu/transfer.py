"""Measures how fast bytes reach the device: the limit, the loader's link over the same bytes, and the whole loader."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from typing import Any

import torch
from medusa_runtime.config import Settings
from medusa_runtime.load.upload.link import Link
from medusa_runtime.load.upload.uploads import Uploads
from medusa_runtime.load.views import bytes_tensor
from medusa_runtime.region.file_range import FileRange, OpenFile

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.started import started

_PIECE = 64 << 20


def transfer(machine: Machine, *, total_bytes: int, repeats: int = 5) -> dict[str, Any]:
    """The GB/s into the device: pinned (the limit), pageable, and over a link from a read-only memfd."""
    found: dict[str, Any] = {"bytes": total_bytes}
    target = torch.empty(total_bytes, dtype=torch.uint8, device=machine.device)
    pinned = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=machine.device.type == "cuda").fill_(1)
    found["pinned_gb_s"] = _rate(machine, total_bytes, repeats, lambda: target.copy_(pinned, non_blocking=True))
    pageable = torch.ones(min(total_bytes, 1 << 30), dtype=torch.uint8)
    found["pageable_gb_s"] = _rate(machine, pageable.nbytes, repeats, lambda: target[: pageable.nbytes].copy_(pageable))
    link = machine.gpu().link  # allocates pinned memory meanwhile: a start opens it before the first bytes come, too
    found["link"] = _through(machine, link, target, *_memfd(total_bytes))
    return found


def _rate(machine: Machine, size: int, repeats: int, work: Any) -> float:
    return size / statistics.median(machine.time_ms(work, repeats)) / 1e6


def _memfd(total_bytes: int) -> tuple[torch.Tensor, OpenFile]:
    """A complete region's memory, as a reader maps it, and its file."""
    file = OpenFile(os.memfd_create("transfer"))
    os.ftruncate(file.fileno(), total_bytes)
    with mmap.mmap(file.fileno(), total_bytes) as writable:
        for start in range(0, total_bytes, _PIECE):
            writable[start : start + _PIECE] = bytes([start // _PIECE % 251]) * min(_PIECE, total_bytes - start)
    memory = mmap.mmap(file.fileno(), total_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    return bytes_tensor(memoryview(memory)), file


def _through(
    machine: Machine, link: Link, target: torch.Tensor, source: torch.Tensor, file: OpenFile
) -> dict[str, Any]:
    """Copy twice: the first time, the threads and the device have copied nothing yet."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        uploads, starts = Uploads(link), list(range(0, source.nbytes, _PIECE))
        while starts or uploads:
            while starts and uploads.has_room:
                part = slice(start := starts.pop(0), start + _PIECE)
                stored = FileRange(file, start)
                uploads.begin(str(start), target[part], source[part], urgent=False, stored=stored)
            uploads.wait(lambda: None)
        machine.synchronize()
        seconds.append(time.perf_counter() - begin)
    right = all(bool((target[s : s + 1].cpu() == source[s : s + 1]).all()) for s in range(0, source.nbytes, _PIECE))
    link.close()
    first, again = (source.nbytes / second / 1e9 for second in seconds)
    return {"first_gb_s": first, "again_gb_s": again, "right": right}


def loading(machine: Machine, settings: Settings) -> dict[str, Any]:
    """Run the whole loader on a checkpoint whose files are in the page cache."""
    with started(machine, settings):  # reads the files
        pass
    with started(machine, settings) as one:
        applied = [stage for stage in one.timeline.stages() if stage.name == "apply"]
        seconds = (max(s.end_ns for s in applied) - min(s.start_ns for s in applied)) / 1e9
        slab = one.engine._loader.wait_slab().memory
        return {"gb_s": slab.nbytes / seconds / 1e9, "seconds": seconds, "bytes": slab.nbytes}
