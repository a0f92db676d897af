"""What loading a compiled model imports: 0.3 s that an idle process need not leave to the first request."""

from __future__ import annotations

import importlib

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


def import_compiled() -> None:
    """For a process that will only fork, on a machine that computes on the CPU: compiles nothing, starts no thread."""
    import torch

    for module in _MODULES:
        importlib.import_module(module)
    # The first function that is wrapped has torch look for its backends; calling it is what would compile.
    torch.compile(_nothing)


def _nothing() -> None:
    pass
