"""Bundles on disk: whole or not there, and every kind of damage named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import ConfigError, StateError
from medusa_runtime.state.bundle.manifest import SCHEMA, Artifact, Manifest
from medusa_runtime.state.bundle.reader import Bundle
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.materialize import bundle_folder
from medusa_runtime.storage.local import LocalStore

SMALL, LARGE = b"a small blob", os.urandom(20 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with BundleWriter(tmp_path / "state") as writer:
        made = writer.add("small", {"isa": "x"}, SMALL), writer.add("large", {"isa": "x"}, LARGE)
        writer.commit(Manifest(made, ("config.json",)))
    return tmp_path / "state"


def opened(folder: Path) -> tuple[Bundle, Manifest]:
    bundle = Bundle(LocalStore(str(folder)))
    manifest = bundle.manifest()
    assert manifest is not None
    return bundle, manifest


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def test_what_was_written_is_read(folder: Path) -> None:
    bundle, manifest = opened(folder)
    small, large = manifest.artifacts
    assert (bundle.read(small), bundle.read(large)) == (SMALL, LARGE)
    assert (small.inline, large.inline) == (SMALL, None)
    assert manifest.files == ("config.json",)
    assert (folder / "blobs" / large.sha256).read_bytes() == LARGE


def test_blobs_that_no_manifest_names_are_removed_by_the_next_commit(folder: Path) -> None:
    (folder / "blobs" / "123.part").write_bytes(b"of a writer that was killed")
    with BundleWriter(folder) as writer:
        kept = writer.existing().artifacts[0]
        writer.commit(Manifest((kept,), None))
    assert [path.name for path in (folder / "blobs").iterdir()] == [kept.sha256]


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    assert Bundle(LocalStore(str(tmp_path))).manifest() is None


@pytest.mark.parametrize("inline", [True, False])
def test_a_changed_byte_is_noticed(folder: Path, inline: bool) -> None:
    bundle, manifest = opened(folder)
    artifact = manifest.artifacts[0 if inline else 1]
    if inline:
        rewrite(folder, lambda document: document["artifacts"][0].update(inline="YSBzbWFsbCBiMG9i"))
        artifact = opened(folder)[1].artifacts[0]
    else:
        with open(folder / "blobs" / artifact.sha256, "r+b") as blob:
            blob.seek(len(LARGE) // 2)
            blob.write(bytes([LARGE[len(LARGE) // 2] ^ 1]))
    with pytest.raises(StateError, match="sha256 is wrong"):
        bundle.read(artifact)


def test_a_truncated_blob_and_a_missing_one_are_named(folder: Path) -> None:
    bundle, manifest = opened(folder)
    path = folder / "blobs" / manifest.artifacts[1].sha256
    os.truncate(path, 1000)
    with pytest.raises(StateError, match="has 1,000 bytes, expected 20,971,520"):
        bundle.read(manifest.artifacts[1])
    path.unlink()
    with pytest.raises(StateError, match="cannot be read: "):
        bundle.read(manifest.artifacts[1])


@pytest.mark.parametrize("schema", [SCHEMA + 1, "1", None, True])
def test_a_manifest_of_another_schema_is_refused(folder: Path, schema: object) -> None:
    rewrite(folder, lambda document: document.update(schema=schema))
    with pytest.raises(StateError, match=f"expected schema {SCHEMA}, found {schema!r}"):
        opened(folder)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"\xff\xfe", b'{"schema": 1', b'{"schema": 1, "artifacts": 5}'])
def test_what_is_no_manifest_is_refused(folder: Path, text: bytes) -> None:
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(StateError, match="expected"):
        opened(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"sha256": "../../../../etc/passwd"},
        {"sha256": "A" * 64},
        {"size": -1},
        {"size": 1.5},
        {"kind": "../escape"},
        {"key": ["no", "object"]},
        {"key": {"isa": 5}},
        {"inline": "no base64"},
        {"inline": 7},
    ],
)
def test_a_malformed_artifact_is_left_out_alone(folder: Path, change: dict[str, Any]) -> None:
    rewrite(folder, lambda document: document["artifacts"][0].update(change))
    bundle, manifest = opened(folder)
    assert [artifact.kind for artifact in manifest.artifacts] == ["large"]
    assert len(manifest.rejected) == 1
    assert bundle.read(manifest.artifacts[0]) == LARGE


def test_more_artifacts_than_a_bundle_can_have_are_refused(folder: Path) -> None:
    """A start once wrote a line for each of 200,000, and took half a minute."""
    rewrite(folder, lambda document: document["artifacts"].extend([{}] * 1000))
    with pytest.raises(StateError, match="at most 1,000 artifacts, found 1,002"):
        opened(folder)


@pytest.mark.parametrize("field", ["schema", "size"])
def test_a_message_quotes_the_beginning_of_a_value(folder: Path, field: str) -> None:
    value = ["long"] * 10_000
    rewrite(
        folder, lambda document: (document if field == "schema" else document["artifacts"][0]).update({field: value})
    )
    try:
        [(_, message)] = opened(folder)[1].rejected
    except StateError as error:
        message = str(error)
    assert "['long', " in message
    assert len(message) < 300


def test_unknown_fields_are_kept_out_and_harm_nobody(folder: Path) -> None:
    rewrite(folder, lambda document: (document.update(hint=1), document["artifacts"][0].update(hint=2)))
    assert opened(folder)[0].read(opened(folder)[1].artifacts[0]) == SMALL


def test_a_folder_that_cannot_be_written_is_one_clear_error() -> None:
    nowhere = Path("/proc/self/medusa-state")  # not even root may write there
    with pytest.raises(ConfigError, match="cannot be written there"), BundleWriter(nowhere):
        pass


def test_a_file_where_the_folder_should_be_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"")
    with pytest.raises(ConfigError, match="choose another with --out"), BundleWriter(tmp_path / "state"):
        pass


@pytest.mark.parametrize("found", ["a folder", "a pipe", "a device", "a socket"])
def test_a_manifest_that_is_no_file_is_named(found: str, tmp_path: Path) -> None:
    """It once counted as no bundle, in silence."""
    manifest = tmp_path / "manifest.json"
    with socket.socket(socket.AF_UNIX) as listener:
        {
            "a folder": manifest.mkdir,
            "a pipe": lambda: os.mkfifo(manifest),
            "a device": lambda: manifest.symlink_to("/dev/zero"),
            "a socket": lambda: listener.bind(str(manifest)),
        }[found]()
        with pytest.raises(StateError, match=f"manifest.json: expected a regular file, found {found}"):
            Bundle(LocalStore(str(tmp_path))).manifest()


@pytest.mark.timeout(100)
def test_a_pipe_in_the_manifests_place_is_replaced(tmp_path: Path) -> None:
    """`medusa materialize` once waited for a writer to it."""
    os.mkfifo(tmp_path / "manifest.json")
    with BundleWriter(tmp_path) as writer:
        assert writer.existing() == Manifest(())
        writer.commit(Manifest((writer.add("small", {}, SMALL),)))
    assert [artifact.kind for artifact in opened(tmp_path)[1].artifacts] == ["small"]


def test_a_folder_in_the_manifests_place_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    expected = r"cannot be written there \(manifest.json is a folder\)"
    with pytest.raises(ConfigError, match=expected), BundleWriter(tmp_path):
        pass


def test_links_of_a_checkpoints_author_are_not_followed(tmp_path: Path) -> None:
    """`medusa materialize` once removed whatever was in a folder to which ``blobs`` was a link."""
    (others := tmp_path / "others").mkdir()
    kept = {others / "letter": b"1", others / ("0" * 64): b"2", others / "manifest": b"3"}
    for path, data in kept.items():
        path.write_bytes(data)
    (state := tmp_path / "state").mkdir()
    (state / "blobs").symlink_to(others)
    with pytest.raises(ConfigError, match="blobs is a link"), BundleWriter(state):
        pass
    (state / "blobs").unlink()
    (state / "blobs").mkdir()
    for name in ("blobs/probe.part", f"blobs/{os.getpid()}.part", "manifest.json.part"):
        (state / name).symlink_to(others / "manifest")
    (state / "blobs" / "photos").mkdir()
    (state / "blobs" / "photos" / "1").write_bytes(b"4")
    with BundleWriter(state) as writer:
        writer.commit(Manifest((writer.add("small", {}, SMALL),)))
    assert {path: path.read_bytes() for path in others.iterdir()} == kept
    assert (state / "blobs" / "photos" / "1").exists()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".medusa").symlink_to(others)
    with pytest.raises(ConfigError, match="found a link"):
        bundle_folder(str(tmp_path / "model"))


def test_two_writers_do_not_meet(folder: Path) -> None:
    with BundleWriter(folder), pytest.raises(StateError, match="another medusa materialize"), BundleWriter(folder):
        pass
    with BundleWriter(folder):
        pass


# Adds a blob, says so, and waits to be killed: before the manifest, or while it is being replaced.
_KILLED = """
import os, sys, time
from pathlib import Path
from medusa_runtime.state.bundle.writer import BundleWriter
from medusa_runtime.state.bundle.manifest import Manifest
with BundleWriter(Path(sys.argv[1])) as writer:
    made = writer.add("small", {"isa": "y"}, b"a newer blob")
    if sys.argv[2] == "manifest":
        os.replace = lambda *_, **__: (print("ready", flush=True), time.sleep(600))
        writer.commit(Manifest((made,), None))
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("moment", ["blob", "manifest"])
def test_a_writer_killed_before_its_manifest_leaves_the_old_bundle(folder: Path, moment: str) -> None:
    before = opened(folder)[1]
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(folder), moment], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(120)
    bundle, after = opened(folder)
    assert after == before
    assert [bundle.read(artifact) for artifact in after.artifacts] == [SMALL, LARGE]
    with BundleWriter(folder) as writer:  # the lock died with it, and what it left is cleared away
        writer.commit(Manifest((writer.add("small", {"isa": "y"}, b"a newer blob"),), None))
    assert [path.name for path in (folder / "blobs").iterdir()] == [opened(folder)[1].artifacts[0].sha256]
    assert sorted(path.name for path in folder.iterdir()) in (["blobs", "manifest.json"],)


def test_artifacts_of_one_kind_stand_beside_each_other(folder: Path) -> None:
    with BundleWriter(folder) as writer:
        old = writer.existing().artifacts
        writer.commit(Manifest((*old, writer.add("small", {"isa": "other"}, b"for another machine")), None))
    _, manifest = opened(folder)
    assert [artifact.key for artifact in manifest.of_kind("small")] == [{"isa": "x"}, {"isa": "other"}]


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_is_added_as_its_bytes_are(folder: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "made").write_bytes(data)
    with BundleWriter(folder) as writer:
        from_file, from_bytes = writer.add("made", {}, tmp_path / "made"), writer.add("made", {}, data)
    assert from_file == from_bytes
    assert from_file.inline == (SMALL if data is SMALL else None)


def test_an_artifact_survives_json() -> None:
    artifact = Artifact("kv-plan", {"dtype": "bfloat16"}, "0" * 64, 3, b"\0\1\2")
    assert Manifest.parse(Manifest((artifact,), ("a",)).to_json()) == Manifest((artifact,), ("a",))
