"""The contract with user code and the server that calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .contract import Context, HttpError, Request, Response

if TYPE_CHECKING:
    from .batching import batch
    from .user_code.model import Model

__all__ = ["Context", "HttpError", "Model", "Request", "Response", "batch"]


def __getattr__(name: str) -> Any:
    """Import ``batch`` and ``Model`` at their first use, because every start imports this package."""
    if name == "batch":
        from .batching import batch

        return batch
    if name == "Model":
        from .user_code.model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
