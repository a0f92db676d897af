"""The contract with user code and the server that calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .contract import Context, HttpError, Request, Response

if TYPE_CHECKING:
    from .batching import batch

__all__ = ["Context", "HttpError", "Request", "Response", "batch"]


def __getattr__(name: str) -> Any:
    """Import ``batch`` at its first use, because every start imports this package."""
    if name != "batch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .batching import batch

    return batch
