"""Restore a state bundle at a start: choose its valid artifacts, and fetch them. Runs in the prefetcher, without torch.

The manifest is requested together with the weights' headers. Small artifacts are in it, and large ones are fetched
beside the weights. An artifact that is not valid here, is damaged or does not come in time is left out, alone, and
logged once. A bundle never makes a start fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import StateError
from ..fetch.prefetcher import RestoredCheckpoint
from ..storage.base import Store, scheme_of
from .bundle.locate import BLOBS, FOLDER, MANIFEST, hold, missing_manifest, open_bundle_store, read_manifest
from .kinds import KINDS, WEIGHT_INDEX, file_name
from .unused import report_unused

# The modules that read a bundle are imported only if there is one: they take 10 ms, half of it for hashlib.
if TYPE_CHECKING:
    from ..checkpoint.index import WeightIndex
    from ..checkpoint.reader import ArchiveRecord, Checkpoint
    from ..config import Settings
    from ..region.late_files import LateFiles
    from ..region.writer import RegionWriter
    from ..timeline import Timeline
    from .bundle.manifest import Artifact, Manifest
    from .bundle.reader import Bundle
    from .key import Facts

_PATIENCE_S = 2.0  # how long to wait for the manifest once the headers are there


class BundleRestorer:
    """One start's use of a bundle: the one of ``settings.state`` ("none" for no bundle), or the one beside the weights.

    ``engines`` are the possible engines if the engine is not known yet, in the node agent. Each of them checks later
    that dtype and length are its own. No code is restored for them, because they may run as the agent's user (see
    ``attach_artifacts``). With ``for_peers``, the manifest and the blobs that were read are put into the region, from
    which other nodes read them.
    """

    def __init__(
        self, settings: Settings, timeline: Timeline, engines: Sequence[str] = (), *, for_peers: bool = False
    ) -> None:
        self._settings = settings
        self._shared = bool(engines)
        self._for_peers = for_peers
        self._engines = engines or (settings.engine,)
        self._timeline = timeline
        self._store: Store | None = None  # the bundle's own store, if it is not the checkpoint's
        self._held: Store | None = None  # the bundle's folder, if it is on this machine
        self._bundle: Bundle | None = None
        self._manifest: Manifest | None = None
        self._text = b""  # the manifest's
        self._error: Exception | None = None
        self._remote = False
        self._facts: list[Facts] = []  # one for each engine
        self._late_artifacts: dict[str, Artifact] = {}
        self._reading: threading.Thread | None = None
        self._given_up = False
        self._fetching: threading.Thread | None = None

    def begin(self, store: Store) -> None:
        """Start reading the manifest."""
        if self._settings.state == "none":
            return
        self._remote = store.local_path("config.json") is None
        # In a thread that a start need not wait for: the store may be slow to say that there is no bundle.
        self._reading = threading.Thread(target=self._read, args=(store,), name="state", daemon=True)
        self._reading.start()

    def _read(self, store: Store) -> None:
        try:
            prefix = f"{FOLDER}/"
            if self._settings.state is not None:
                self._store, prefix = open_bundle_store(self._settings.state), ""
            given = self._store or store
            found, prefix = hold(given, prefix)
            self._held = None if found is given else found
            text = read_manifest(found, prefix)
            if text is None:
                if self._settings.state is not None and self._store is not None:
                    self._error = missing_manifest(self._settings.state, self._store)
                return
            from . import key, trust, weight_index  # noqa: F401  restore needs them soon, and headers are still coming
            from .bundle.manifest import Manifest
            from .bundle.reader import Bundle

            self._bundle = Bundle(found, prefix)
            self._text, self._manifest = text, Manifest.parse(text)
            key.find_machine_facts()
        except Exception as error:  # noqa: BLE001  the start goes on without the bundle, whatever the error is
            self._error = error

    def _wait(self) -> Manifest | None:
        if self._reading is not None:
            began_ns = time.monotonic_ns()
            self._reading.join(_PATIENCE_S if self._is_remote() else None)
            if self._reading.is_alive():
                self._given_up = True
                report_unused(
                    "the state bundle", f"its manifest did not come within {_PATIENCE_S:g} s", self._timeline, began_ns
                )
            elif self._error is not None:
                report_unused("the state bundle", self._error, self._timeline, began_ns)
            elif self._manifest is not None:
                for kind, reason in self._manifest.rejected:
                    report_unused(kind, reason, self._timeline, began_ns)
            self._reading = None
        return None if self._given_up else self._manifest

    def _is_remote(self) -> bool:
        """Return whether the bundle is on another machine, so that reading it may take any time."""
        return self._remote if self._settings.state is None else scheme_of(self._settings.state) not in ("", "file")

    def files(self) -> Collection[str] | None:
        """Return the files that the manifest lists; None for a local checkpoint, which needs none."""
        manifest = self._wait()
        return manifest.files if manifest and self._remote else None

    def archive(self, name: str) -> ArchiveRecord | None:
        """Return a recorded index. It may come from any artifact, because the reader verifies it."""
        manifest = self._wait()
        for artifact in manifest.of_kind(WEIGHT_INDEX.name) if manifest and self._bundle else ():
            from .key import check_size
            from .weight_index import RecordedIndex

            assert self._bundle is not None
            try:
                check_size(artifact, WEIGHT_INDEX)
                known = RecordedIndex.from_bytes(self._bundle.read(artifact)).archive(name)
            except Exception:  # noqa: BLE001
                continue  # ``restore`` reports the error
            if known is not None:
                return known
        return None

    def confirms(self, index: WeightIndex, files: Mapping[str, bytes]) -> bool:
        from .key import Facts, Subject

        layout = Facts(Subject(index, files, self._settings))["layout"]
        manifest = self._wait()
        return manifest is not None and any(
            artifact.key.get("layout") == layout for artifact in manifest.of_kind(WEIGHT_INDEX.name)
        )

    def restore(self, checkpoint: Checkpoint) -> RestoredCheckpoint:
        """Return what the bundle adds to a fetch of this checkpoint: an order, checksums and more files."""
        manifest = self._wait()
        index, checksums = checkpoint.index, None
        if manifest is None:
            return RestoredCheckpoint(index, None, {}, {})
        from .bundle.reader import check_size
        from .key import Facts, Subject, choose_artifact
        from .trust import Trust
        from .weight_index import RecordedIndex

        for engine in self._engines:
            settings = replace(self._settings, engine=engine)
            self._facts.append(Facts(Subject(index, checkpoint.files, settings)))
        files: dict[str, bytes] = {}
        if self._for_peers:
            files[f"{FOLDER}/{MANIFEST}"] = self._text
        for kind in KINDS.values():
            if kind.code and self._shared:
                continue
            began_ns = time.monotonic_ns()
            try:
                artifact = choose_artifact(manifest, kind, self._facts)
                if artifact is None:
                    continue
                assert self._bundle is not None
                if kind.code:
                    self._bundle.check_trusted(Trust.of(self._settings), manifest)
                if kind is WEIGHT_INDEX:
                    blob = self._bundle.read(artifact)
                    recorded = RecordedIndex.from_bytes(blob)
                    if self._for_peers and artifact.inline is None:
                        files[f"{FOLDER}/{BLOBS}/{artifact.sha256}"] = blob
                    index = index.reordered(recorded.index.order) if recorded.index.recorded else index
                    checksums = recorded.checksums_for(index) if index.region_bytes else None
                elif artifact.inline is not None:
                    files[file_name(kind.name)] = self._bundle.read(artifact)
                else:
                    check_size(artifact)
                    self._late_artifacts[file_name(kind.name)] = artifact
                    continue
                self._record_restored(kind.name, artifact, began_ns)
            except Exception as error:  # noqa: BLE001  a bundle is not trusted, and the start goes on without this one
                report_unused(kind.name, error, self._timeline, began_ns)
        return RestoredCheckpoint(
            index, checksums, files, {name: artifact.size for name, artifact in self._late_artifacts.items()}
        )

    def start(self, writer: RegionWriter) -> None:
        """Start to fetch the large artifacts into the laid-out region, beside the weights."""
        if writer.late_files.pending():
            self._fetching = threading.Thread(
                target=self._fetch, args=(writer.late_files,), name="state-blobs", daemon=True
            )
            self._fetching.start()

    def _fetch(self, late_files: LateFiles) -> None:
        for name, memory in late_files.pending().items():
            kind = name.rpartition("/")[2]
            began_ns = time.monotonic_ns()
            try:
                with memory:
                    artifact = self._late_artifacts.get(name)
                    if artifact is None or artifact.size != len(memory):
                        raise StateError("the bundle was replaced while it was read")  # noqa: TRY301
                    assert self._bundle is not None
                    self._bundle.read_into(artifact, memory)
                late_files.publish(name)
                self._record_restored(kind, artifact, began_ns)
            except Exception as error:  # noqa: BLE001  whatever it is, the start goes on without
                late_files.withhold(name)
                report_unused(kind, error, self._timeline, began_ns)

    def finish(self) -> None:
        """Wait until each late file is there, or will certainly not come."""
        if self._fetching is not None:
            self._fetching.join()

    def close(self) -> None:
        for store in (self._store, self._held):
            if store is not None:
                store.close()

    def _record_restored(self, kind: str, artifact: Artifact, began_ns: int) -> None:
        self._timeline.record("restore", began_ns, time.monotonic_ns(), artifact=kind, bytes=artifact.size)


__all__ = ["BundleRestorer"]
