"""What a state bundle can hold, what each artifact depends on, and who makes it."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of artifact.

    ``facts``: what its key holds (see ``key.FACTS``), so a change of anything else leaves it valid. ``engines``: whose
    start uses it. ``code``: whether what is in it runs. ``capture``: ``module:function`` that makes its blob, by
    ``(model, settings, folder) -> Path | None`` (None: there is nothing to keep); empty for what ``materialize`` makes
    itself.
    """

    name: str
    facts: tuple[str, ...]
    engines: tuple[str, ...] = ("torch", "vllm")
    capture: str = ""
    code: bool = False


_COMPUTED = ("shape", "engine", "torch", "isa", "gpu", "dtype", "max_model_len")

WEIGHT_INDEX = Kind("weight-index", ("layout",), ("torch", "vllm", "none"))
_VLLM_PLAN = "medusa_vllm.cpu.kv_profile:capture"
KV_PLAN = Kind("kv-plan", (*_COMPUTED, "max_batched_tokens"), ("torch", "vllm"), _VLLM_PLAN)
STAGE_TIMES = Kind("stage-times", ("shape", "engine", "torch", "isa", "gpu", "dtype"), ())
COMPILE_CACHE = Kind("compile-cache", (*_COMPUTED, "python"), ("vllm",), "medusa_vllm.compiled.cache:capture", True)
CUDA_GRAPHS = Kind(
    "cuda-graphs", (*_COMPUTED, "driver"), capture="medusa_runtime.engine.gpu.graph_capture:capture", code=True
)

KINDS = {kind.name: kind for kind in (WEIGHT_INDEX, KV_PLAN, STAGE_TIMES, COMPILE_CACHE, CUDA_GRAPHS)}


def file_name(kind: str) -> str:
    """Under which name a restored artifact is among a region's files."""
    return f".medusa/{kind}"


__all__ = ["KINDS", "Kind", "file_name"]
