"""The contract with user code and the server that calls it."""

from .user_code.contract import Context, HttpError, Request, Response

__all__ = ["Context", "HttpError", "Request", "Response"]
