"""Readers that free a region's memory while it is filled: what they free, and that no fetch waits for ever."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fetching import fetch_into
from medusa_runtime.config import Settings
from medusa_runtime.errors import TooLargeError
from medusa_runtime.fetch.schedule import Schedule
from medusa_runtime.instance.engine_fetch import uploads
from medusa_runtime.region.layout import Word
from medusa_runtime.region.reader import Region
from waiting import until

MIB = 1 << 20


def fill(region: Region, url: str, host_weights: str = "release", **options: Any) -> None:
    settings = Settings(host_weights=host_weights)
    fetch_into(region, url, settings, **options)


def content(region: Region, name: str) -> bytes:
    entry = region.wait_index().tensors[name]
    return bytes(region.shard(entry.shard)[entry.start : entry.stop])


def test_bytes_of_several_tensors_are_freed_with_the_last_of_them(origin: Any, region: Region, tmp_path: Path) -> None:
    """A pickled checkpoint has the bytes of tied weights once."""
    weight, other = torch.ones(256, 1024), torch.ones(256, 1024)
    torch.save({"head": weight, "middle": other, "embed": weight[:128]}, tmp_path / "weights")
    origin.put("/m/pytorch_model.bin", (tmp_path / "weights").read_bytes())
    fill(region, origin.url + "/m")
    region.release("head")
    assert content(region, "embed") == bytes(weight[:128].numpy())
    region.release("embed")
    region.release("embed")
    assert not any(content(region, "head")[4096:-4096])
    assert content(region, "middle") == bytes(other.numpy())
    assert region._words()[Word.RELEASED_BYTES] == weight.nbytes


def test_a_fetch_goes_on_to_what_its_reader_waits_for_however_much_is_not_freed(
    origin: Any, region: Region, safetensors_file: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each layer comes a part of a later tensor, as chunks are larger, and only the last layer frees these."""
    monkeypatch.setattr("medusa_runtime.fetch.schedule.UNRELEASED_BYTES", 2 * MIB)
    data = os.urandom(MIB // 2)
    names = [f"layers.{number}.w" for number in range(24)]
    between = zip(names[:12], reversed(names[12:]), strict=True)
    tensors = {name: ("U8", [len(data)], data) for pair in between for name in pair}
    origin.put("/m/model.safetensors", safetensors_file(tensors))
    thread = threading.Thread(target=fill, args=(region, origin.url + "/m"))
    thread.start()
    for name in region.wait_index(60).order:
        region.wait_tensor(name, 60)
        region.release(name)
    thread.join(60)
    assert not thread.is_alive()


def test_weights_larger_than_memory_go_through_it_to_a_gpu(
    origin: Any, safetensors_file: Any, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {f"{n}": ("U8", [2 * MIB], os.urandom(2 * MIB)) for n in range(24)}
    origin.put("/m/model.safetensors", safetensors_file(data))
    origin.put("/m/config.json", b'{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setattr("medusa_runtime.instance.engine_fetch.choose", lambda asked, environ: "cuda")
    monkeypatch.setattr("medusa_runtime.container_limits.memory_available_bytes", lambda: (64 + 16) * MIB)
    monkeypatch.setattr("medusa_runtime.fetch.schedule.UNRELEASED_BYTES", 4 * MIB)
    monkeypatch.setattr("medusa_runtime.fetch.prefetcher.UNRELEASED_BYTES", 4 * MIB)
    with pytest.raises(TooLargeError, match="or --host-weights release"):
        fill(region, origin.url + "/m", host_weights="keep", uploads=partial(uploads, Settings()))
    region, held = Region.create(), 0
    thread = threading.Thread(
        target=fill, args=(region, origin.url + "/m"), kwargs={"uploads": partial(uploads, Settings())}
    )
    thread.start()
    for name in region.wait_index(60).order:
        region.wait_tensor(name, 60)
        time.sleep(0.02)  # as if the GPU took its time
        held = max(held, os.fstat(region.fd).st_blocks * 512)
        entry = region.wait_index().tensors[name]
        assert region.shard(entry.shard)[entry.start : entry.stop] == data[name][2]
        region.release(name)
    thread.join(60)
    region.close()
    # 8 MiB before any is freed, 4 under way, and the range that is handed out when these have not been reached
    assert held <= (8 + 4 + 8 + 1) * MIB, "of 48"


def test_ranges_that_are_under_way_need_memory_too(
    filling: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many connections has up to 8 MiB under way, all of which may come before the reader frees any."""
    monkeypatch.setattr("medusa_runtime.fetch.schedule.UNRELEASED_BYTES", 50)
    filled = filling({f"{n}": torch.zeros(10) for n in range(12)}).lay_out()
    filled.arrive("0")
    filled.region.release("0")
    schedule = Schedule(filled.writer)
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.extend(iter(lambda: schedule.take(1), None)), daemon=True)
    thread.start()
    until(lambda: len(taken) >= 4)
    time.sleep(0.1)
    schedule.stop()
    thread.join(120)
    assert len(taken) == 4, "the first at which 40 bytes each exceed 50, a tensor's 40 and 50 under way"


@pytest.mark.parametrize(("has_engine", "architectures"), [(True, ["BertModel"]), (False, ["LlamaForCausalLM"])])
def test_weights_that_no_engine_frees_must_fit_into_memory(
    origin: Any,
    region: Region,
    safetensors_file: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_engine: bool,
    architectures: list[str],
) -> None:
    """An encoder's engine leaves them on the host, and `medusa fetch` has no engine: the fetch would wait for ever."""
    origin.put("/m/model.safetensors", safetensors_file({f"{n}": ("U8", [MIB], bytes(MIB)) for n in range(8)}))
    origin.put("/m/config.json", json.dumps({"architectures": architectures, "model_type": "bert"}).encode())
    monkeypatch.setattr("medusa_runtime.instance.engine_fetch.choose", lambda asked, environ: "cuda")
    monkeypatch.setattr("medusa_runtime.fetch.prefetcher.UNRELEASED_BYTES", MIB)
    monkeypatch.setattr("medusa_runtime.container_limits.memory_available_bytes", lambda: (64 + 4) * MIB)
    with pytest.raises(TooLargeError, match=r"larger container$"):
        fill(region, origin.url + "/m", uploads=partial(uploads, Settings()) if has_engine else None)


def test_what_nobody_reads_is_freed_when_it_has_come(
    origin: Any, region: Region, safetensors_file: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture tower, say: it was freed before it came, stayed, and let the fetch run ahead by as much."""
    monkeypatch.setattr("medusa_runtime.fetch.schedule.UNRELEASED_BYTES", 4 * MIB)
    data = {f"{n}": ("U8", [2 * MIB], os.urandom(2 * MIB)) for n in range(24)}
    origin.put("/m/model.safetensors", safetensors_file(data))
    thread = threading.Thread(target=fill, args=(region, origin.url + "/m"))
    thread.start()
    first, *unread = region.wait_index(60).order
    region.release_unread(unread)
    region.wait_tensor(first, 60)
    region.release(first)
    thread.join(60)
    until(lambda: region._words()[Word.RELEASED_BYTES] == 48 * MIB)
    assert os.fstat(region.fd).st_blocks * 512 < MIB
