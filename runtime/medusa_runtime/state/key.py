"""State keys, which say what an artifact is valid for: facts about the checkpoint, the settings and the machine.

An artifact's key holds only the facts that it depends on (``kinds.py``). The checkpoint's place, the user's home, the
host and the number of processes are not facts, so they invalidate nothing. All facts are found without importing torch
or touching a GPU, because it is the prefetcher that compares keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..checkpoint.index import WeightIndex
from ..config import Settings
from ..errors import StateError
from ..registry import NO_ENGINE, bundle_engine, engine_kind, engines_using
from .bundle.manifest import Artifact, Manifest
from .kinds import WEIGHT_INDEX, Kind

Key = dict[str, str]

# Fields of a config.json that do not change the result of a computation, or that are facts of their own.
_IGNORED_FIELDS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
# The CPU's flags for vector extensions, on which generated code depends. Other flags vary with the hypervisor.
_ISA_FLAGS = re.compile(
    r"^(ssse3|sse4_\d|avx\w*|amx\w*|fma|f16c|bmi\d|adx|abm|movbe|popcnt|gfni|v?aes|v?pclmulqdq|sha_ni"
    r"|neon|asimd\w*|sve\w*|bf16|i8mm)$"
)
_LONG = 60  # characters; for longer facts, messages show only the differences
_DEVICES = Path("/dev")
_NVIDIA = Path("/proc/driver/nvidia")


@dataclass(frozen=True, slots=True)
class Subject:
    """The checkpoint and the settings from which facts are taken."""

    index: WeightIndex
    files: Mapping[str, bytes]
    settings: Settings

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json; empty if it cannot be read, which is an error of the code that needs it."""
        try:
            config = json.loads(self.files.get("config.json", b"{}"))
        except (ValueError, RecursionError):
            return {}
        return config if isinstance(config, dict) else {}


def layout(subject: Subject) -> str:
    """Return a digest of where each byte of the weights is: shards, sizes and tensors; no store, path or version."""
    shards = [(shard.name, shard.size_bytes, shard.data_start) for shard in subject.index.shards]
    return _digest([shards, sorted(subject.index.tensors.items())])


def shape(subject: Subject) -> str:
    """Return a digest of the architecture: config.json, and tensors' names, types and shapes, but not their shards."""
    config = {name: value for name, value in subject.config.items() if name not in _IGNORED_FIELDS}
    tensors = sorted((name, entry.dtype, entry.shape) for name, entry in subject.index.tensors.items())
    return _digest([config, tensors])


def engine(subject: Subject) -> str:
    name = bundle_engine(subject.settings.engine)
    return f"{name} {engine_version(name)}"


def dtype(subject: Subject) -> str:
    """Return the type to compute in. ``auto`` is resolved, so that it equals naming the checkpoint's own type."""
    config = subject.config
    if subject.settings.dtype != "auto":
        return subject.settings.dtype
    return str(config.get("dtype") or config.get("torch_dtype") or "the weights' own")


def max_model_len(subject: Subject) -> str:
    config = subject.config
    return str(subject.settings.max_model_len or config.get("max_position_embeddings") or "the model's own")


def gpu(subject: Subject) -> str:
    """Return the GPUs' names; ``none`` if the CPU computes."""
    return "none" if subject.settings.device == "cpu" else _gpu_names()


def engine_version(name: str) -> str:
    """Return the version of an engine: vLLM's, or that of this package. Raises ConfigError for an unknown name."""
    return package_version(*("medusa_runtime",) if name == NO_ENGINE else engine_kind(name).distributions)


def package_version(*names: str) -> str:
    """Return the version of the first of these packages that is installed.

    It is read from the name of the metadata folder, because importlib.metadata takes 30 ms.
    """
    found = _installed(tuple(sys.path))
    return next((found[name] for name in names if name in found), "not installed")


def find_machine_facts() -> None:
    """Determine the facts about this machine ahead of time."""
    isa()
    _gpu_names()
    _installed(tuple(sys.path))


@cache
def _installed(path: tuple[str, ...]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for folder in path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith(".dist-info"):
                name, _, version = entry.removesuffix(".dist-info").partition("-")
                versions.setdefault(name, version)
    return versions


@cache
def isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the machine's architecture and the vector extensions of its CPU."""
    flags: set[str] = set()
    try:
        for line in cpuinfo.read_text().splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags = {flag for flag in words.split() if _ISA_FLAGS.match(flag)}
                break
    except OSError:
        pass
    return " ".join([os.uname().machine, *sorted(flags)])


@cache
def _gpu_names() -> str:
    names = []
    for path in sorted(_NVIDIA.glob("gpus/*/information")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    if not names and any(_DEVICES.glob("nvidia[0-9]*")):
        return "of unknown name"  # some sandboxes have no such /proc; CUDA graphs compare the device's own properties
    return ", ".join(names) or "none"


@cache
def driver_version() -> str:
    """Return the GPU driver's version; ``none`` without a driver, or if it does not report one."""
    try:
        match = re.search(r"\s(\d+(?:\.\d+)+)\s", (_NVIDIA / "version").read_text())
    except OSError:
        match = None
    return match[1] if match else "none"


FACTS: dict[str, Callable[[Subject], str]] = {
    "layout": layout,
    "shape": shape,
    "engine": engine,
    "torch": lambda _: package_version("torch"),
    "python": lambda _: sys.implementation.cache_tag,
    "isa": lambda _: isa(),
    "gpu": gpu,
    "driver": lambda _: driver_version(),
    "dtype": dtype,
    "max_model_len": max_model_len,
    "max_batched_tokens": lambda subject: str(subject.settings.max_batched_tokens),
}


class Facts:
    """The facts of one start. Each is found when it is first needed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._known: Key = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._known:
            self._known[name] = FACTS[name](self.subject)
        return self._known[name]

    def key(self, names: tuple[str, ...]) -> Key:
        return {name: self[name] for name in names}

    def is_for_engine(self, key: Mapping[str, str]) -> bool:
        """Return whether an artifact with this key is for this engine, in any version.

        A bundle may serve several engines.
        """
        return key.get("engine", self["engine"]).partition(" ")[0] == bundle_engine(self.subject.settings.engine)

    def difference(self, key: Mapping[str, str], names: tuple[str, ...]) -> str | None:
        """Return why an artifact with this key is not valid here; None when it is."""
        for name in names:
            if name not in key:
                return f"its key does not say for which {name} it was made"
            if key[name] != self[name]:
                return _difference(name, key[name], self[name])
        return None


def _uses(engine: str, kind: Kind) -> bool:
    return kind.name == WEIGHT_INDEX.name or engine in engines_using(kind.name)


def choose_artifact(manifest: Manifest, kind: Kind, candidates: Sequence[Facts]) -> Artifact | None:
    """Return an artifact that is valid here; None if the bundle has none for these engines.

    Raises StateError, which says what differs, if there are only artifacts that are not valid here.
    """
    reason = None
    for facts in candidates:
        for artifact in manifest.of_kind(kind.name) if _uses(facts.subject.settings.engine, kind) else ():
            difference = facts.difference(artifact.key, kind.facts)
            if difference is None:
                check_size(artifact, kind)
                return artifact
            reason = reason or (difference if facts.is_for_engine(artifact.key) else None)
    if reason is not None:
        raise StateError(reason)
    return None


def check_size(artifact: Artifact, kind: Kind) -> None:
    """Raise StateError if an artifact is larger than one of its kind can be: reading it might take all memory."""
    if artifact.size > kind.most_bytes:
        raise StateError(f"it is said to have {artifact.size:,} bytes, expected at most {kind.most_bytes:,}")


_CHECKPOINT_FACTS = ("layout", "shape")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def _difference(name: str, there: str, here: str) -> str:
    """Return a message about a fact that differs. For long lists, such as a CPU's flags, show only the differences."""
    if max(len(there), len(here)) <= _LONG:
        if name in _CHECKPOINT_FACTS:  # these are digests, which mean nothing to a reader
            changed = "the checkpoint has changed; materialize again"
            return f"it was made for {name} {there[:8]}, here it is {here[:8]}: {changed}"
        return f"it was made for {name} {there}, here it is {here}"
    there_only = " ".join(sorted(set(there.split()) - set(here.split()))) or "nothing"
    here_only = " ".join(sorted(set(here.split()) - set(there.split()))) or "nothing"
    return f"it was made for another {name}: only there {there_only[:200]}, only here {here_only[:200]}"


__all__ = [
    "FACTS",
    "Facts",
    "Key",
    "Subject",
    "check_size",
    "choose_artifact",
    "driver_version",
    "engine_version",
    "isa",
    "package_version",
]
