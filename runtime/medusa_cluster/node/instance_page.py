"""Reading a page that an instance has about itself, such as its timeline or its metrics."""

from __future__ import annotations

from aiohttp import ClientError, ClientSession

from ..connections import read_body
from .instances import RunningInstance

_MOST_BYTES = 16 << 20
# What a page raises while it is read and understood that is no page of ours: another process may have the port now.
UNREADABLE = (ClientError, TimeoutError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)


async def read_page(session: ClientSession, instance: RunningInstance, path: str) -> str:
    """Return the page at ``path``. Raises one of UNREADABLE, also if it has more than 16 MiB."""
    url = f"http://127.0.0.1:{instance.port}{path}"
    async with session.get(url, headers={"Authorization": f"Bearer {instance.secret}"}) as answer:
        return (await read_body(answer, _MOST_BYTES)).decode(answer.charset or "utf-8")


__all__ = ["UNREADABLE", "read_page"]
