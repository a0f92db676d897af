"""Makes a state bundle as ``medusa materialize --engine vllm`` does, and keeps a copy of its graphs."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import medusa_vllm  # noqa: F401  makes --engine vllm known
from medusa_runtime import registry
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu import graph_capture
from medusa_runtime.state.kinds import CUDA_GRAPHS
from medusa_runtime.state.materialize import ArtifactResult, Materialization

from benchmarks.gpu.serving import materialize

_EVIDENCE = ("second.dump", "unchecked")  # of graph_capture: what its processes have passed on
_folder: list[Path] = []  # the bundle's, for ``capture``, which is called with another one


def materialized(settings: Settings, folder: Path) -> dict[str, Any]:
    """Write a bundle into ``folder``, and beside it its graphs alone, and what they were made from."""
    kind = registry.engine_kind("vllm")
    registry.register(kind._replace(captures={**kind.captures, CUDA_GRAPHS.name: f"{__name__}:capture"}))
    _folder[:] = [folder]
    results: list[ArtifactResult] = []
    began = time.monotonic()
    with Materialization(replace(settings, state=None), folder, results.append) as made:
        made.prepare()
        made.commit()
    seconds = time.monotonic() - began
    found: dict[str, Any] = {
        "seconds": seconds,
        "artifacts": {one.kind: one.left_out or [one.size_bytes, one.took_s] for one in results},
    }
    blob = graphs_of(folder)
    if not blob.exists():
        raise RuntimeError(f"no graphs were materialized: {found['artifacts']}")
    return found | {"bytes": blob.stat().st_size} | counts(blob.read_bytes())


def materialized_by_command(settings: Settings, folder: Path) -> dict[str, Any]:
    """Do the same as a user does, by the command line."""
    seconds = materialize(settings, folder)
    artifacts = {one["kind"]: one for one in json.loads((folder / "manifest.json").read_text())["artifacts"]}
    if CUDA_GRAPHS.name not in artifacts:
        raise RuntimeError(f"no graphs were materialized: {sorted(artifacts)}")
    shutil.copy(folder / "blobs" / artifacts[CUDA_GRAPHS.name]["sha256"], graphs_of(folder))
    data = graphs_of(folder).read_bytes()
    sizes = {kind: [one["size"]] for kind, one in artifacts.items()}
    return {"seconds": seconds, "artifacts": sizes, "bytes": len(data), **counts(data)}


def graphs_of(folder: Path) -> Path:
    """Return the file beside a bundle's folder that has its graphs alone, which a run's tar takes along."""
    return Path(f"{folder}.graphs")  # a shape's name has dots, so that no suffix may be replaced


def capture(model: str, settings: Settings, folder: Path) -> Path | None:
    """Capture as the engine's own function does. The files in ``folder`` do not outlive this call; copies do."""
    (bundle,) = _folder
    try:
        made = graph_capture.capture(model, settings, folder)
    finally:
        for name in _EVIDENCE:
            if (folder / name).exists():
                shutil.copy(folder / name, graphs_of(bundle.with_name(f"{bundle.name}.{name}")))
    if made is not None:
        shutil.copy(made, graphs_of(bundle))
    return made


def counts(data: bytes) -> dict[str, Any]:
    """Return how many graphs of each kind are in a bundle, and how many were refused for which reason."""
    from medusa_runtime.engine.gpu.graph_state import summary
    from medusa_runtime.state.graphs.blob_format import decode_blueprints

    blueprints = decode_blueprints(data)
    keys = [graph.key for graph in blueprints.graphs]
    refused = Counter(f"{kind_of(key)}: {why.partition(':')[0]}" for key, why in blueprints.refused.items())
    return {
        **summary(blueprints),
        "kept": dict(Counter(map(kind_of, keys))),
        "refused_for": dict(refused),
        "pinned_by_kind": dict(Counter(kind_of(graph.key) for graph in blueprints.graphs if graph.pinned)),
    }


def kind_of(key: str) -> str:
    """Return "full" or "piecewise" for a graph's key (see medusa_vllm.gpu.graphs.key_of)."""
    return "piecewise" if " piece=" in key else "full"
