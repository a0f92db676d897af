"""Make a state bundle offline (MEDUSA §3). Artifacts are made one by one, and one that cannot be made is left out."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from ..checkpoint.reader import SMALL_FILES, split_url
from ..config import Settings
from ..errors import ConfigError, MedusaError
from ..fetch.prefetcher import prefetch
from ..models.backend import verify
from ..region.reader import Region
from ..registry import NO_ENGINE, engine_kind, imported
from ..storage.base import redacted, scheme_of
from ..storage.local import LocalStore
from ..timeline import Timeline
from .bundle.locate import FOLDER
from .bundle.manifest import Artifact, Manifest
from .bundle.writer import BundleWriter
from .key import Facts, Subject
from .kinds import KINDS, KV_PLAN, WEIGHT_INDEX, Kind, is_code
from .trust import Trust
from .weight_index import record_index

if TYPE_CHECKING:
    from .bundle.signing import Signer

logger = logging.getLogger(__name__)


class ArtifactResult(NamedTuple):
    """The outcome for one kind of artifact: its size and the seconds it took, or why there is none (``left_out``)."""

    kind: str
    size_bytes: int = 0
    took_s: float = 0.0
    left_out: str | None = None


class Materialization:
    """A bundle in the making, in the folder ``out`` or, without it, beside a local checkpoint.

    Call ``prepare``, then ``add`` for anything else, then ``commit``. Until then, the old bundle stays as it is.

    ``on_result`` is called with the outcome for each artifact. ``find_order`` returns the order in which a region's
    tensors are used, if no engine runs the model. ``signer`` signs the bundle. Raises ConfigError for a folder that
    cannot be written to, and the checkpoint's own errors.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path | None,
        on_result: Callable[[ArtifactResult], None] = lambda _: None,
        find_order: Callable[[Region], Sequence[str]] | None = None,
        signer: Signer | None = None,
    ) -> None:
        assert settings.model is not None
        self.folder = out or bundle_folder(settings.model)
        self._model = settings.model
        self._settings = replace(settings, state="none")
        self._on_result = on_result
        self._find_order = find_order
        self._signer = signer
        self._writer = BundleWriter(self.folder)
        self._region = Region.create()
        self._added: list[Artifact] = []
        self._facts: Facts | None = None
        self._replaced: tuple[str, ...] = ()  # the kinds of which older ones for the same start are not kept
        self.continues_text = True  # known after ``prepare``: False for an encoder, or a model that cannot be run

    def __enter__(self) -> Self:
        try:
            self._writer.__enter__()
        except BaseException:
            self._region.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._region.close()
        self._writer.__exit__(kind, value, trace)

    def prepare(self) -> None:
        """Read the checkpoint, run it once if its engine can, and make all artifacts that need no start.

        If no engine runs this model with these settings, raise the error that a start would raise.
        """
        settings = self._settings if self._settings.engine != "none" else replace(self._settings, engine="torch")
        prefetch(self._region, self._model, settings=settings, timeline=Timeline.create("materialize"))
        index = self._region.wait_index()
        if self._settings.engine != "none":
            verify(self._region.file, self._settings)
        files = {name: data for name in SMALL_FILES if (data := self._region.file(name)) is not None}
        self._facts = Facts(Subject(index, files, self._settings))
        began = time.monotonic()
        order, plan = self._find_order(self._region) if self._find_order else None, None
        engine = None if self._settings.engine == NO_ENGINE else engine_kind(self._settings.engine)
        try:
            # The engine's ``profile``, if it can run offline. It is imported by name: engines are above this package.
            if engine is not None and engine.profile:
                order, plan = imported(engine.profile)(self._region, self._settings)
                self.continues_text = plan is not None
        except MedusaError as error:
            self._on_result(ArtifactResult(KV_PLAN.name, left_out=str(error)))
            self.continues_text = False
        on_gpu = self._facts["gpu"] != "none"
        if plan is not None and not on_gpu:
            self.add(KV_PLAN, plan.to_bytes(), began)
        began = time.monotonic()
        recorded = record_index(self._region, order)
        self.add(WEIGHT_INDEX, recorded.to_bytes(), began)
        captures = engine.captures if engine is not None else {}
        succeeded = [self._capture(KINDS[name], capture) for name, capture in captures.items()]
        if engine is not None and all(succeeded):
            self._replaced = tuple(captures)  # one that was not made now, such as compiled code, would still be used
        if plan is not None and on_gpu and not any(made.kind == KV_PLAN.name for made in self._added):
            reason = "nothing was captured on the GPU, where it is measured; each start computes one"
            self._on_result(ArtifactResult(KV_PLAN.name, left_out=reason))

    def _capture(self, kind: Kind, target: str) -> bool:
        """Add what a capture makes. Return False if it failed, so that what it made before is still of use."""
        began = time.monotonic()
        try:
            function = imported(target)
        except (ImportError, AttributeError):
            logger.debug("nothing here makes a %s", kind.name)
            return False
        succeeded, blob = True, None
        with tempfile.TemporaryDirectory(prefix="medusa-materialize-") as scratch:
            try:
                blob = function(self._model, self._settings, Path(scratch))
            except MedusaError as error:
                self._on_result(ArtifactResult(kind.name, left_out=str(error)))
                succeeded = False
            if blob is not None:
                self.add(kind, blob, began)
            # A capture may leave other artifacts beside its own, each named after its kind, also before it fails.
            for other in sorted(Path(scratch).iterdir()):
                if other.name in KINDS and other.name != kind.name and other.is_file():
                    self.add(KINDS[other.name], other.read_bytes(), began)
        return succeeded

    def add(self, kind: Kind, data: bytes | Path, began: float) -> None:
        """Add an artifact. Work on it began at ``began``, a time of ``time.monotonic``."""
        assert self._facts is not None
        artifact = self._writer.add(kind.name, self._facts.key(kind.facts), data)
        self._added.append(artifact)
        self._on_result(ArtifactResult(kind.name, artifact.size, time.monotonic() - began))

    def commit(self) -> Manifest:
        """Write the bundle with the artifacts that were added, and return its manifest.

        Earlier artifacts of the bundle are kept if they are for the same checkpoint, and for another engine, GPU or
        length. Those for the same ones are kept if a capture has failed.
        """
        assert self._facts is not None
        names = tuple(name for name in SMALL_FILES if name in self._facts.subject.files)
        existing = self._writer.existing()
        kept = [artifact for artifact in existing.artifacts if self._is_valid(artifact)]
        kept = self._without_others_code(existing, kept)
        if self._signer is None and existing.signature is not None:
            self._on_result(
                ArtifactResult("signature", left_out="the bundle was signed and no longer is; expected --sign")
            )
        manifest = Manifest((*self._added, *kept), names)
        self._writer.commit(manifest, self._signer)
        return manifest

    def _without_others_code(self, existing: Manifest, kept: list[Artifact]) -> list[Artifact]:
        """Return the artifacts that our mark and signature may cover: no code that another has put into the folder.

        A signature covers only what was signed with the same key, and a mark what a start here would run.
        """
        if self._signer is None:
            held = self._writer.place
            ours = Trust.of(self._settings).objection(held, "", existing, held=held) is None
            how = "materialized by this user on this machine, nor trusted; materialize it"
        else:
            ours = Trust(keys=(self._signer.public,)).signature_objection(existing) is None
            how = "signed with this key; materialize it with --sign"
        if ours:
            return kept
        for artifact in kept:
            if is_code(artifact.kind):
                self._on_result(ArtifactResult(artifact.kind, left_out=f"it was there already, and not {how}"))
        return [artifact for artifact in kept if not is_code(artifact.kind)]

    def _is_valid(self, artifact: Artifact) -> bool:
        assert self._facts is not None
        if artifact.kind not in KINDS:
            return True  # a newer version made it
        if any((made.kind, made.key) == (artifact.kind, artifact.key) for made in self._added):
            return False
        if artifact.kind in self._replaced and artifact.key == self._facts.key(KINDS[artifact.kind].facts):
            return False
        return all(artifact.key.get(fact, self._facts[fact]) == self._facts[fact] for fact in ("layout", "shape"))


def bundle_folder(model: str) -> Path:
    """Return the folder of a checkpoint's bundle.

    Raises ConfigError if the checkpoint is not on this machine, or its author chose another folder by a link.
    """
    if scheme_of(model) not in ("", "file"):
        raise ConfigError(
            f"--model={redacted(model)!r} is not on this machine: expected --out DIR for the bundle. Upload that "
            f"folder as {FOLDER}/ beside the weights, or name where it lies with --state"
        )
    folder = LocalStore(split_url(model)[0]).local_path(FOLDER)
    if folder.is_symlink():
        raise ConfigError(f"{folder}: expected a folder, found a link; name the folder that it leads to with --out")
    return folder


__all__ = ["ArtifactResult", "Materialization", "bundle_folder"]
