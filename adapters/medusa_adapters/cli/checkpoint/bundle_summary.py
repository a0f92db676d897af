"""What a state bundle contains, and what of it a start here would use."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from medusa_runtime.checkpoint.reader import Checkpoint
from medusa_runtime.config import Settings
from medusa_runtime.errors import StateError, StorageError
from medusa_runtime.registry import engines_using
from medusa_runtime.state.bundle.locate import FOLDER, missing_manifest, open_bundle_store
from medusa_runtime.state.bundle.manifest import Artifact
from medusa_runtime.state.bundle.reader import Bundle
from medusa_runtime.state.graphs.blob_format import IDENTITY_BYTES, digest_of
from medusa_runtime.state.graphs.restoration.quarantine import Quarantine
from medusa_runtime.state.key import Facts, Subject
from medusa_runtime.state.kinds import CUDA_GRAPHS, KINDS, KV_PLAN, PROMPTS, STAGE_TIMES, WEIGHT_INDEX
from medusa_runtime.state.kv_plan import KvPlan
from medusa_runtime.state.prompts import RecordedPrompts
from medusa_runtime.state.stage_times import StageTimes
from medusa_runtime.state.trust import Trust
from medusa_runtime.state.weight_index import RecordedIndex
from medusa_runtime.storage.base import redacted

from ..progress import size


def summarize(checkpoint: Checkpoint, settings: Settings, *, verify: bool) -> dict[str, Any] | None:
    """Return the bundle as plain values. ``verify``: read every blob, not only the small ones.

    None when there is none beside the weights. Raises StateError when one cannot be read, or is not where ``--state``
    says, and StorageError.
    """
    store = checkpoint.store if settings.state is None else open_bundle_store(settings.state)
    bundle = Bundle(store, f"{FOLDER}/" if settings.state is None else "")
    try:
        manifest = bundle.manifest()
        if manifest is None:
            if settings.state is not None:
                raise missing_manifest(settings.state, store)
            return None
        facts = Facts(Subject(checkpoint.index, checkpoint.files, settings))
        artifacts = [_artifact(artifact, bundle, facts, verify) for artifact in manifest.artifacts]
        quarantine = Quarantine(replace(settings, model=checkpoint.store.url), os.environ)
        for artifact, found in zip(manifest.artifacts, artifacts, strict=True):
            if artifact.kind in KINDS and KINDS[artifact.kind].code and found["problem"] is None:
                found["problem"] = bundle.objection(Trust.of(settings), manifest)
            if artifact.kind == CUDA_GRAPHS.name and (reason := _quarantined(artifact, bundle, quarantine)):
                found["problem"] = f"its graphs broke the device's context here: {reason}; materialize again"
        artifacts += [{"kind": kind, "problem": reason} for kind, reason in manifest.rejected]
        url = redacted(store.url)
        signed = None if manifest.signature is None else manifest.signature.key
        place = url if settings.state else f"{url.rstrip('/')}/{FOLDER}"
        return {"url": place, "signed": signed, "artifacts": artifacts}
    finally:
        bundle.close()
        if store is not checkpoint.store:
            store.close()


def _quarantined(graphs: Artifact, bundle: Bundle, quarantine: Quarantine) -> str | None:
    """Return why graphs must not be used here; None if nothing is known."""
    try:
        return quarantine.reason(digest_of(bundle.read_start(graphs, IDENTITY_BYTES)))
    except (StateError, StorageError):  # reading all of it, with --verify, reports that
        return None


def _artifact(artifact: Artifact, bundle: Bundle, facts: Facts, verify: bool) -> dict[str, Any]:
    """Return one artifact as plain values. ``problem`` says why a start here would not use it."""
    found: dict[str, Any] = {"kind": artifact.kind, "bytes": artifact.size, "key": artifact.key, "problem": None}
    kind = KINDS.get(artifact.kind)
    if kind is None:
        return found | {"problem": "this version does not know this kind"}
    engines = engines_using(kind.name)
    if engines and facts.subject.settings.engine not in engines:
        found["problem"] = f"it is for --engine {' or '.join(engines)}"
    else:
        found["problem"] = facts.difference(artifact.key, kind.facts)
    if artifact.inline is None and not verify:
        return found
    try:
        return found | {"content": _content(artifact.kind, bundle.read(artifact))}
    except (StateError, StorageError) as error:
        return found | {"problem": str(error)}


def _content(kind: str, data: bytes) -> str | None:
    """Describe the content in one line. Raises StateError if it is not of the form of its kind."""
    if kind == WEIGHT_INDEX.name:
        recorded = RecordedIndex.from_bytes(data)
        order = "order of a forward" if recorded.index.recorded else "order by names"
        return f"{len(recorded.index.tensors)} tensors, {order}, checksums by {', '.join(recorded.checksums) or 'none'}"
    if kind == KV_PLAN.name:
        plan = KvPlan.from_bytes(data)
        return f"{plan.tokens} tokens, {size(plan.cache_bytes)}, activations {size(plan.activation_bytes)}"
    if kind == STAGE_TIMES.name:
        times = StageTimes.from_bytes(data)
        return f"{times.starts} start{'s' * (times.starts != 1)}, first token after {times.ttft_s * 1e3:.0f} ms"
    if kind == PROMPTS.name:
        return f"{len(RecordedPrompts.from_bytes(data).tokens):,} tokens"
    return None


def as_text(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["  state    none; make it with medusa materialize"]
    count = len(found["artifacts"])
    signed = f", signed with {found['signed'][:60]}" if found.get("signed") else ""
    lines = [f"  state    {count} artifact{'s' * (count != 1)} in {found['url']}{signed}"]
    for artifact in found["artifacts"]:
        text = artifact.get("content") or ""
        if artifact["problem"]:
            text = f"not used here: {artifact['problem']}"
        lines.append(f"    {artifact['kind']:14} {size(artifact.get('bytes', 0)):>10}  {text}")
    return lines


__all__ = ["as_text", "summarize"]
