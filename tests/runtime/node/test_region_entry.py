"""A region of the agent's, and whether its files are still those that were read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fetching import fetch_into
from medusa_runtime.checkpoint.index import version_of
from medusa_runtime.node.callers.impersonation import Folder, Identity
from medusa_runtime.node.regions.region_entry import RegionEntry
from medusa_runtime.region.reader import Region
from strangers import ALICE, as_user

OWN = Identity(os.getuid(), os.getgid(), (), confined=True)


@pytest.fixture
def entry(tmp_path: Path, safetensors_file: Callable[..., bytes]) -> Iterator[RegionEntry]:
    """The region of a folder that a caller has sent, filled."""
    (tmp_path / "model.safetensors").write_bytes(safetensors_file({"w": ("U8", [64], b"\1" * 64)}))
    found = RegionEntry(str(tmp_path), folder=Folder(os.open(tmp_path, os.O_RDONLY), OWN))
    fetch_into(found.region, str(tmp_path))
    found.sealed = True
    yield found
    found.close()


def test_files_that_change_are_noticed(entry: RegionEntry) -> None:
    assert entry.is_current()
    assert entry.is_current(Folder(entry.folder.fd, OWN))  # type: ignore[union-attr]
    (shard,) = entry.region.wait_index().shards
    os.utime(Path(entry.key, shard.name), ns=(1, 1))
    assert not entry.is_current()


def test_the_agent_reads_no_tensors_of_an_index(entry: RegionEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million of them take seconds, in which it would answer nobody."""
    assert entry.is_current()
    shards = entry.region.shards()
    index = Region(os.dup(entry.region.fd))
    assert entry.region._index is None
    assert shards == index.wait_index().shards
    assert version_of(shards) == index.wait_index().version
    index.close()
    monkeypatch.setattr("medusa_runtime.region.reader.MOST_SHARDS_BYTES", 60)
    assert not entry.is_current(), "with more shards than it reads"


@pytest.mark.root
def test_a_region_whose_mode_was_changed_is_still_handed_out() -> None:
    def hand_out() -> str:
        entry = RegionEntry("https://host/m")
        for descriptor in entry.descriptors():
            os.fchmod(descriptor, 0)
            os.close(descriptor)
        for descriptor in entry.descriptors():
            os.close(descriptor)
        entry.close()
        return "handed out"

    assert as_user(ALICE, hand_out) == "handed out"


def test_a_callers_file_system_that_hangs_does_not_stop_the_agent(
    entry: RegionEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, stat = threading.Event(), os.stat

    def hang(*arguments: Any, **options: Any) -> os.stat_result:
        going_on.wait(20)
        return stat(*arguments, **options)

    monkeypatch.setattr(os, "stat", hang)
    began = time.monotonic()
    try:
        assert not entry.is_current()
        assert time.monotonic() - began < 10
    finally:
        monkeypatch.undo()
        going_on.set()
