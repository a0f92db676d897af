"""The contract with user code and the server that calls it."""

from .contract import Context, HttpError, Request, Response

__all__ = ["Context", "HttpError", "Request", "Response"]
