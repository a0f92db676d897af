"""Permission for AMX's tile registers, which Linux only gives a process on request."""

from __future__ import annotations


def request_amx_tiles() -> None:
    """Request tile registers if the CPU has them. Processes that are forked from this one inherit the permission.

    vLLM's bf16 attention uses them without a request, for which the kernel ends the process with SIGILL. oneDNN
    requests them at its first product that uses them, but a small model may have no such product.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()
