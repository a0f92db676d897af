"""Imports what loading a compiled model needs. An idle process saves the first request these 0.3 s."""

from __future__ import annotations

from contextlib import suppress

from ..lean_imports import import_those_there

_MODULES = (
    "torch._dynamo.aot_compile",
    "torch._dynamo.backends.inductor",
    "torch._inductor.async_compile",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.memory_planning",
    "torch._functorch._aot_autograd.aot_autograd_result",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch.fx.experimental.validator",
    "vllm.compilation.backends",
    "vllm.compilation.caching",
    "medusa_vllm.compiled.model",
)


def import_compiled(*, on_gpu: bool) -> None:
    """Import what loading a compiled model needs. Compiles nothing, starts no thread and touches no GPU."""
    import torch

    import_those_there(_MODULES)  # not every version of torch and vLLM has each of them
    if not on_gpu:
        # Wrapping a first function makes torch look for its backends. Only a call would compile it.
        torch.compile(_nothing)
        return
    with suppress(Exception):  # loading a Triton kernel asks for a digest of torch's files, which is kept
        from torch._inductor.codecache import torch_key

        torch_key()


def _nothing() -> None:
    pass
