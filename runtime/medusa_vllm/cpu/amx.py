"""Permission for AMX's tile registers, which Linux gives a process only when it asks."""

from __future__ import annotations


def ask_for_tiles() -> None:
    """Ask for them where the CPU has them; processes that are forked from this one inherit the permission.

    vLLM's bf16 attention uses them without asking, and the kernel ends a process that does so by SIGILL. oneDNN asks at
    its first product with them, to which a small model may never come.
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()
