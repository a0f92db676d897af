"""Reading a page that an instance has about itself, such as its timeline or its metrics."""

from __future__ import annotations

from aiohttp import ClientError, ClientSession

from .instances import RunningInstance

_MOST_BYTES = 16 << 20
# What a page raises while it is read and understood that is no page of ours: another process may have the port now.
UNREADABLE = (ClientError, TimeoutError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)


async def read_page(session: ClientSession, instance: RunningInstance, path: str) -> str:
    """Return the page at ``path``. Raises one of UNREADABLE, also if it has more than 16 MiB."""
    url, data = f"http://127.0.0.1:{instance.port}{path}", bytearray()
    async with session.get(url, headers={"Authorization": f"Bearer {instance.secret}"}) as answer:
        async for piece in answer.content.iter_any():
            data += piece
            if len(data) > _MOST_BYTES:
                raise ValueError(f"{path}: expected at most {_MOST_BYTES} bytes, found more")
        return data.decode(answer.charset or "utf-8")


__all__ = ["UNREADABLE", "read_page"]
