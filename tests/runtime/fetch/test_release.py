"""Readers that free a region's memory while it is filled: what they free, and that no fetch waits for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_runtime.config import Settings
from medusa_runtime.errors import TooLargeError
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.layout import Word
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

MIB = 1 << 20


def fill(region: Region, url: str, **options: Any) -> None:
    settings = Settings(host_weights="release")
    prefetch(region, url, settings=settings, timeline=Timeline.create("test"), **options)


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
