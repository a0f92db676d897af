"""An origin whose weights come when a file is there; until then it sends only the beginning of each file.

``python held_origin.py ADDRESS NAME=FOLDER OPENED`` prints a line once it listens, on port 80.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

_BEGINNING = 64 << 10  # an index is in it
_RANGE = re.compile(r"bytes=(\d+)-")


def application(name: str, folder: str, opened: Path) -> web.Application:
    @web.middleware
    async def hold(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        found = _RANGE.match(request.headers.get("Range", ""))
        while found and int(found[1]) >= _BEGINNING and not opened.exists():
            await asyncio.sleep(0.05)
        return await handler(request)

    made = web.Application(middlewares=[hold])
    made.router.add_static(f"/{name}", folder)
    return made


if __name__ == "__main__":
    address, (name, _, folder), opened = sys.argv[1], sys.argv[2].partition("="), Path(sys.argv[3])
    web.run_app(
        application(name, folder, opened), host=address, port=80, print=lambda *_: print("listening", flush=True)
    )
