"""The kinds of artifacts that a state bundle can hold, and what each depends on."""

from __future__ import annotations

from typing import NamedTuple

# The folder in which an instance that `medusa materialize` has started records the prompts that it is asked.
RECORDING_VARIABLE = "MEDUSA_RECORDING"


class Kind(NamedTuple):
    """One kind of artifact.

    ``facts`` are the names of the facts in its key (see ``key.FACTS``). If anything else changes, it stays valid.
    ``code`` says whether it contains code that is run. One of more than ``most_bytes`` is not read.
    ``registry.EngineKind`` says which engines make and use it.
    """

    name: str
    facts: tuple[str, ...]
    code: bool = False
    most_bytes: int = 64 << 30


COMPUTED_FACTS = ("shape", "engine", "torch", "isa", "gpu", "dtype", "max_model_len")

WEIGHT_INDEX = Kind("weight-index", ("layout",), most_bytes=64 << 20)
KV_PLAN = Kind("kv-plan", (*COMPUTED_FACTS, "max_batched_tokens"), most_bytes=1 << 20)
STAGE_TIMES = Kind("stage-times", ("shape", "engine", "torch", "isa", "gpu", "dtype"), most_bytes=1 << 20)
# Which weights the prompts are for is not known until these are there: the engine checks it (fingerprint.py).
PROMPTS = Kind("prompts", ("shape", "engine", "gpu", "dtype", "max_model_len"), most_bytes=96 << 10)
PROMPT_KV = Kind("prompt-kv", PROMPTS.facts)
CUDA_GRAPHS = Kind("cuda-graphs", (*COMPUTED_FACTS, "driver"), code=True)

KINDS = {kind.name: kind for kind in (WEIGHT_INDEX, KV_PLAN, STAGE_TIMES, PROMPTS, PROMPT_KV, CUDA_GRAPHS)}


def register(kind: Kind) -> None:
    """Register another kind of artifact, for a package above this one."""
    KINDS[kind.name] = kind


def is_code(kind: str) -> bool:
    """Return whether artifacts of a kind may contain code; true of a kind that is not known here."""
    return kind not in KINDS or KINDS[kind].code


def file_name(kind: str) -> str:
    """Return the name of a restored artifact among a region's files."""
    return f".medusa/{kind}"


__all__ = [
    "COMPUTED_FACTS",
    "CUDA_GRAPHS",
    "KINDS",
    "KV_PLAN",
    "PROMPTS",
    "PROMPT_KV",
    "RECORDING_VARIABLE",
    "STAGE_TIMES",
    "WEIGHT_INDEX",
    "Kind",
    "file_name",
    "is_code",
    "register",
]
