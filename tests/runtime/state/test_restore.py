"""Starts with a bundle from a real server: what it saves, and that nothing wrong with it stops a start."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.config import Settings
from medusa_runtime.errors import CorruptError
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.chunks import Chunks, chunk_bytes_for
from medusa_runtime.region.reader import Region
from medusa_runtime.state.bundle.manifest import Artifact, Manifest
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.key import Facts, Subject
from medusa_runtime.state.kinds import KV_PLAN, WEIGHT_INDEX, Kind, file_name
from medusa_runtime.state.materialize import Materialization
from medusa_runtime.state.restore import BundleRestorer
from medusa_runtime.state.weight_index import RecordedIndex
from medusa_runtime.timeline import Stage, Timeline
from medusa_vllm import COMPILE_CACHE

MIB = 1 << 20
SIZES = {"embed.weight": 3 * MIB + 5, "layers.0.w": 2 * MIB, "layers.1.w": 2 * MIB, "lm_head.weight": MIB}
TENSORS = {name: ("U8", [size], os.urandom(size)) for name, size in SIZES.items()}
ORDER = ["embed.weight", "layers.1.w", "layers.0.w", "lm_head.weight"]  # not what the names say
LARGE = os.urandom(9 * MIB)


class Published:
    """A checkpoint at ``/m`` of an origin, and its bundle below it."""

    def __init__(self, origin: Any, folder: Path, body: bytes) -> None:
        self.origin = origin
        self.url = f"{origin.url}/m"
        self.folder = folder
        origin.put("/m/model.safetensors", body)
        origin.put("/m/config.json", b'{"model_type": "llama"}')
        origin.put("/m/vocab.json", b"{}")
        checkpoint = open_checkpoint(self.url)
        checkpoint.store.close()
        self.index = checkpoint.index

    def recorded(self, *, pinned: bool = True) -> bytes:
        index = self.index.reordered(ORDER)
        chunks = Chunks(index, chunk_bytes_for(index))
        data = self.origin.objects["/m/model.safetensors"][index.shards[0].data_start :]
        places = [chunks.shard_range(chunk) for chunk in range(chunks.count)]
        values = array("Q", [zlib.crc32(data[place.start : place.stop]) for place in places])
        if not pinned:
            index = type(index)(
                [index.shards[0]._replace(version="another")], index.tensors, index.order, recorded=True
            )
        return RecordedIndex(index, chunks.chunk_bytes, {"crc32": values}).to_bytes()

    def publish(self, *artifacts: tuple[Kind, bytes], **facts: str) -> Manifest:
        """Upload a bundle; ``facts`` are said to be others than here."""
        here = Facts(Subject(self.index, {"config.json": b'{"model_type": "llama"}'}, Settings(engine="vllm")))
        with BundleWriter(self.folder) as writer:
            made = [
                writer.add(kind.name, here.key(kind.facts) | {n: t for n, t in facts.items() if n in kind.facts}, data)
                for kind, data in artifacts
            ]
            writer.commit(Manifest(tuple(made), ("config.json", "vocab.json")))
        self.upload()
        return Manifest(tuple(made), ("config.json", "vocab.json"))

    def upload(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                self.origin.put(f"/m/.medusa/{path.relative_to(self.folder)}", path.read_bytes())

    def manifest(self, change: Callable[[dict[str, Any]], None]) -> None:
        document = json.loads(self.origin.objects["/m/.medusa/manifest.json"])
        change(document)
        self.origin.put("/m/.medusa/manifest.json", json.dumps(document).encode())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to go on without a bundle."""
    monkeypatch.setattr("medusa_runtime.state.restore._PATIENCE_S", 60.0)


@pytest.fixture
def published(origin: Any, tmp_path: Path, safetensors_file: Callable[..., bytes]) -> Published:
    return Published(origin, tmp_path / "bundle", safetensors_file(TENSORS))


def fill(region: Region, url: str, *, state: str | None = None, **settings_: str | None) -> list[Stage]:
    settings_ = {"trust_state": url, **settings_}
    settings = Settings(engine="vllm", state=state, connections=2, **settings_)  # type: ignore[arg-type]
    timeline = Timeline.create("prefetcher")
    prefetch(region, url, settings=settings, timeline=timeline, bundle=BundleRestorer(settings, timeline))
    return [stage for stage in timeline.stages() if stage.name == "restore"]


def check(region: Region, tensors: dict[str, tuple[str, list[int], bytes]] = TENSORS) -> None:
    index = region.wait_index()
    for name, (_, _, data) in tensors.items():
        region.wait_tensor(name, timeout_s=60)
        entry = index.tensors[name]
        assert region.shard(entry.shard)[entry.start : entry.stop] == data, name


def left_out(stages: list[Stage]) -> dict[str, str]:
    return {stage.detail["artifact"]: stage.detail["left_out"] for stage in stages if "left_out" in stage.detail}


def used(stages: list[Stage]) -> set[str]:
    return {stage.detail["artifact"] for stage in stages if "left_out" not in stage.detail}


def test_a_bundle_gives_the_order_and_saves_requests(published: Published, region: Region) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    published.origin.requests.clear()
    stages = fill(region, published.url)
    check(region)
    assert list(region.wait_index().order) == ORDER
    assert region.wait_index().recorded
    assert (used(stages), left_out(stages)) == ({"weight-index"}, {})
    asked = {path.removeprefix("/m/") for path, *_ in published.origin.requests}
    assert region.file("vocab.json") == b"{}"
    assert {"merges.txt", "tokenizer.model", "added_tokens.json"}.isdisjoint(asked)
    assert not any(path.startswith(".medusa/blobs") for path in asked)  # it stands in the manifest


def test_without_a_bundle_everything_is_asked_for_and_nothing_is_said(
    published: Published, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    published.origin.requests.clear()
    assert fill(region, published.url) == []
    check(region)
    asked = {path.removeprefix("/m/") for path, *_ in published.origin.requests}
    assert {"merges.txt", "vocab.json", ".medusa/manifest.json"} <= asked
    assert caplog.records == []


def test_none_asks_for_no_bundle(published: Published, region: Region) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    published.origin.requests.clear()
    assert fill(region, published.url, state="none") == []
    assert not any(".medusa" in path for path, *_ in published.origin.requests)


def test_a_bundle_elsewhere_is_found_by_its_address(published: Published, region: Region) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    for path in list(published.origin.objects):
        if ".medusa" in path:
            published.origin.put(path.replace("/m/.medusa", "/other"), published.origin.objects.pop(path))
    assert used(fill(region, published.url, state=f"{published.origin.url}/other")) == {"weight-index"}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{origin}/nothing", "expected a state bundle in {origin}/nothing, found no manifest.json; make it"),
        ("{origin}/m/", "found no manifest.json; did you mean {origin}/m/.medusa?"),
        ("/no/such/folder", "/no/such/folder: expected a folder with a state bundle, found nothing"),
        ("ftp-of-old://x", "unknown scheme ftp-of-old://"),
    ],
)
def test_a_bundle_that_was_named_and_is_not_there_is_said(
    published: Published, region: Region, state: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    assert list(left_out(fill(region, published.url, state=state.format(origin=published.origin.url)))) == [
        "the state bundle"
    ]
    check(region)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert message.format(origin=published.origin.url) in caplog.text


def test_a_changed_checkpoint_invalidates_the_bundle(
    published: Published, region: Region, safetensors_file: Callable[..., bytes]
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    changed = TENSORS | {"layers.1.w": ("U8", [MIB], os.urandom(MIB))}
    published.origin.put("/m/model.safetensors", safetensors_file(changed))
    published.origin.put("/m/merges.txt", b"of the new checkpoint")
    stages = fill(region, published.url)
    check(region, changed)
    assert "it was made for layout" in left_out(stages)["weight-index"]
    assert left_out(stages)["weight-index"].endswith("the checkpoint has changed; materialize again")
    assert not region.wait_index().recorded
    assert region.file("merges.txt") == b"of the new checkpoint"  # though the bundle says there is none


def test_weights_of_the_same_layout_are_not_held_against_old_checksums(
    published: Published, region: Region, safetensors_file: Callable[..., bytes], caplog: pytest.LogCaptureFixture
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    tuned = {name: (dtype, shape, data[::-1]) for name, (dtype, shape, data) in TENSORS.items()}
    published.origin.put("/m/model.safetensors", safetensors_file(tuned))
    fill(region, published.url)
    check(region, tuned)
    assert sum("belong to other weights" in record.message for record in caplog.records) >= 1


@pytest.mark.parametrize("pinned", [True, False])
def test_a_bit_that_flips_on_its_way_is_noticed(published: Published, region: Region, pinned: bool) -> None:
    published.publish((WEIGHT_INDEX, published.recorded(pinned=pinned)))
    published.origin.faults["/m/model.safetensors"] = ["", "flip"]
    fill(region, published.url)
    assert published.origin.faults["/m/model.safetensors"] == []
    check(region)


def test_weights_damaged_in_the_store_end_the_start(published: Published, region: Region) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    published.origin.faults["/m/model.safetensors"] = ["", *["flip"] * 50]
    with pytest.raises(CorruptError, match="also when fetched again"):
        fill(region, published.url)


def test_small_and_large_artifacts_reach_the_engine(published: Published, region: Region) -> None:
    published.publish((KV_PLAN, b"small"), (COMPILE_CACHE, LARGE))
    stages = fill(region, published.url)
    check(region)
    assert region.file(file_name("compile-cache"), timeout_s=60) == LARGE
    assert region.file(file_name("kv-plan")) == b"small"
    assert (used(stages), left_out(stages)) == ({"compile-cache", "kv-plan"}, {})


def test_a_plan_that_would_take_all_memory_is_not_read(published: Published, region: Region) -> None:
    published.publish((KV_PLAN, bytes(2 * MIB)))
    assert "expected at most 1,048,576" in left_out(fill(region, published.url))[KV_PLAN.name]
    check(region)


def test_what_is_for_another_engine_is_passed_over_in_silence(published: Published, region: Region) -> None:
    published.publish((KV_PLAN, b"small"), engine="torch 1.0")
    stages = fill(region, published.url)
    check(region)
    assert region.file(file_name("kv-plan")) is None
    assert (used(stages), left_out(stages)) == (set(), {})


# A prefetcher in a process of its own: this one has threads, and a fork of it may inherit a lock that one holds.
_PREFETCHER = """
import sys
import medusa_runtime.state.restore
medusa_runtime.state.restore._PATIENCE_S = 60.0
from medusa_runtime.config import Settings
from medusa_runtime.state.restore import BundleRestorer
from medusa_runtime.timeline import Timeline
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
import medusa_vllm
settings = Settings(engine="vllm", connections=2, trust_state=sys.argv[2])
timeline = Timeline.create("prefetcher")
region = Region(int(sys.argv[1]))
prefetch(region, sys.argv[2], settings=settings, timeline=timeline, bundle=BundleRestorer(settings, timeline))
"""


def prefetcher(region: Region, url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PREFETCHER, str(region.fd), url]
    process = subprocess.Popen(command, pass_fds=[region.fd])
    deadline = time.monotonic() + 60
    while region.progress().state == "empty":
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def test_readers_in_other_processes_wait_for_a_large_artifact(published: Published, region: Region) -> None:
    published.publish((COMPILE_CACHE, LARGE))
    with prefetcher(region, published.url) as process:
        assert region.file(file_name("compile-cache"), timeout_s=60) == LARGE
        check(region)
        assert process.wait(60) == 0


def damage_flip(published: Published, artifact: Artifact) -> None:
    body = bytearray(published.origin.objects[f"/m/.medusa/blobs/{artifact.sha256}"])
    body[len(body) // 2] ^= 1
    published.origin.put(f"/m/.medusa/blobs/{artifact.sha256}", bytes(body))


def damage_truncate(published: Published, artifact: Artifact) -> None:
    body = published.origin.objects[f"/m/.medusa/blobs/{artifact.sha256}"]
    published.origin.put(f"/m/.medusa/blobs/{artifact.sha256}", body[:-1])


def damage_remove(published: Published, artifact: Artifact) -> None:
    del published.origin.objects[f"/m/.medusa/blobs/{artifact.sha256}"]


def damage_size(published: Published, artifact: Artifact) -> None:
    published.manifest(lambda document: document["artifacts"][1].update(size=1 << 50))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_flip, "sha256 is wrong"),
        (damage_truncate, "bytes, expected 9,437,184"),
        (damage_remove, "no such object"),
        (damage_size, "expected at most"),
    ],
)
def test_a_damaged_artifact_is_left_out_alone_and_said_once(
    published: Published, region: Region, damage: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = published.publish((WEIGHT_INDEX, published.recorded()), (COMPILE_CACHE, LARGE))
    damage(published, manifest.artifacts[1])
    stages = fill(region, published.url)
    check(region)
    assert used(stages) == {"weight-index"}
    assert reason in left_out(stages)["compile-cache"]
    assert region.file(file_name("compile-cache"), timeout_s=60) is None
    assert [reason in record.message for record in caplog.records] == [True]


def test_the_bundle_of_another_machine_is_used_as_far_as_it_goes(published: Published, region: Region) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()), (COMPILE_CACHE, LARGE), isa="riscv64", torch="9.9")
    published.origin.requests.clear()
    stages = fill(region, published.url)
    check(region)
    assert used(stages) == {"weight-index"}
    assert "it was made for torch 9.9, here it is" in left_out(stages)["compile-cache"]
    assert not any("blobs" in path for path, *_ in published.origin.requests)  # nor is it fetched


def test_the_artifact_that_fits_is_chosen_among_several(published: Published, region: Region) -> None:
    first = published.publish((COMPILE_CACHE, b"x" * MIB), isa="riscv64")
    with BundleWriter(published.folder) as writer:
        fitting = Facts(Subject(published.index, {"config.json": b'{"model_type": "llama"}'}, Settings(engine="vllm")))
        added = writer.add("compile-cache", fitting.key(COMPILE_CACHE.facts), LARGE)
        writer.commit(Manifest((*first.artifacts, added), None))
    published.upload()
    assert left_out(fill(region, published.url)) == {}
    assert region.file(file_name("compile-cache"), timeout_s=60) == LARGE


def test_a_kind_of_the_future_is_passed_over_in_silence(
    published: Published, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()), (Kind("hologram", ("layout",)), b"?"))
    assert used(fill(region, published.url)) == {"weight-index"}
    assert caplog.records == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda document: document.update(schema=2), "expected schema 1, found 2"),
        (lambda document: document.update(artifacts=None), "expected a list of artifacts"),
        (lambda document: document["artifacts"][0].update(sha256="../../secret"), "64 hexadecimal digits"),
        (lambda document: document["artifacts"][0].update(inline="AAAA"), "its blob has 3 bytes"),
    ],
)
def test_a_bad_manifest_costs_its_artifacts_and_is_said_once(
    published: Published, region: Region, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    published.manifest(change)
    stages = fill(region, published.url)
    check(region)
    assert used(stages) == set()
    assert [reason in record.message for record in caplog.records] == [True]


def test_names_that_lead_out_of_the_folder_are_never_asked_for(published: Published, region: Region) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    published.manifest(lambda document: document.update(files=["../secret", "/etc/passwd", "vocab.json"]))
    published.origin.put("/secret", b"secret")
    published.origin.requests.clear()
    fill(region, published.url)
    assert not any("secret" in path or "passwd" in path for path, *_ in published.origin.requests)
    assert region.file("vocab.json") == b"{}"


def test_a_weight_index_that_is_none_is_left_out(published: Published, region: Region) -> None:
    published.publish((WEIGHT_INDEX, b"not compressed"))
    assert "expected a weight index" in left_out(fill(region, published.url))["weight-index"]
    check(region)


def test_a_manifest_that_never_comes_is_not_waited_for(
    published: Published, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()))
    published.origin.faults["/m/.medusa/manifest.json"] = ["stall"]
    monkeypatch.setattr("medusa_runtime.state.restore._PATIENCE_S", 0.1)
    assert "did not come within" in left_out(fill(region, published.url))["the state bundle"]
    check(region)
    published.origin.stopping.set()
    for thread in threading.enumerate():
        if thread.name == "state":
            thread.join(60)


@pytest.mark.parametrize("again", ["same", "gone"])
def test_a_killed_prefetcher_is_continued_with_its_bundle_or_without(
    published: Published, region: Region, again: str
) -> None:
    (_, artifact) = published.publish((WEIGHT_INDEX, published.recorded()), (COMPILE_CACHE, LARGE)).artifacts
    published.origin.bytes_per_s = 2e6
    with prefetcher(region, published.url) as process:
        deadline = time.monotonic() + 60
        while region.progress().fetched_bytes < MIB:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
    published.origin.bytes_per_s = None
    if again == "gone":
        del published.origin.objects["/m/.medusa/manifest.json"]
    fill(region, published.url)
    check(region)
    assert list(region.wait_index().order) == ORDER
    restored = region.file(file_name("compile-cache"), timeout_s=60)
    assert restored == (LARGE if again == "same" else None)
    assert artifact.size == len(LARGE)


def test_artifacts_that_do_not_fit_beside_the_weights_are_left_out(
    published: Published, region: Region, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    published.publish((WEIGHT_INDEX, published.recorded()), (COMPILE_CACHE, LARGE))
    room = sum(SIZES.values()) + len(LARGE) // 2 + (64 << 20)  # what the prefetcher itself needs
    monkeypatch.setattr("medusa_runtime.container_limits.memory_available_bytes", lambda: room)
    monkeypatch.setattr("medusa_runtime.state.bundle.reader.memory_available_bytes", lambda: room)
    fill(region, published.url)
    check(region)
    assert region.file(file_name("compile-cache")) is None
    assert ["no room for large artifacts" in record.message for record in caplog.records] == [True]


@pytest.fixture
def archived(origin: Any, tmp_path: Path) -> Callable[[dict[str, bytes]], str]:
    """A file of torch.save at ``/p``, with the bundle of what was there first."""
    import torch

    def save(tensors: dict[str, bytes]) -> str:
        path = tmp_path / "p" / "model.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save({name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in tensors.items()}, path)
        origin.put("/p/model.pt", path.read_bytes())
        if not (tmp_path / "p" / ".medusa").exists():
            with Materialization(Settings(model=str(path), engine="none"), None) as making:
                making.prepare()
                making.commit()
            for blob in (tmp_path / "p" / ".medusa").rglob("*"):
                if blob.is_file():
                    origin.put(f"/p/{blob.relative_to(tmp_path / 'p')}", blob.read_bytes())
        origin.requests.clear()
        return f"{origin.url}/p/model.pt"

    return save


def test_a_pytorch_file_is_indexed_by_the_bundle_in_one_read(
    archived: Callable[[dict[str, bytes]], str], origin: Any, region: Region
) -> None:
    data = {f"layers.{number}.w": os.urandom(MIB // 4 + number) for number in range(8)}
    url = archived(data)
    assert used(fill(region, url)) == {"weight-index"}
    check(region, {name: ("U8", [len(body)], body) for name, body in data.items()})
    reads = [start for start, _ in origin.asked("/p/model.pt") if start]
    assert sum(start > 2 * MIB for start in reads) == 1  # the directory; everything else is weights
    assert not any(stop == 520 for _, stop in origin.asked("/p/model.pt"))  # nor the head


def test_another_pytorch_file_of_the_same_size_is_indexed_anew(
    archived: Callable[[dict[str, bytes]], str], region: Region
) -> None:
    data = {f"layers.{number}.w": os.urandom(MIB // 4) for number in range(4)}
    archived(data)
    changed = dict(zip(reversed(data), data.values(), strict=True))
    fill(region, archived(changed))
    check(region, {name: ("U8", [len(body)], body) for name, body in changed.items()})
