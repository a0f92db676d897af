"""The logs of a node's processes, for ``medusa cluster logs``: ``GET /logs`` and ``GET /logs/<name>``."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from medusa_runtime.errors import ConfigError, UnknownNameError

from ..json_lines import error_answer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_ENDING = ".log"
_MOST_BYTES = 256 << 10  # of one answer


class Logs:
    """The files in a node's folder of logs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def routes(self) -> Iterable[web.RouteDef]:
        return web.get("/logs", self._list), web.get("/logs/{name}", self._read)

    async def _list(self, _: web.Request) -> web.Response:
        """Answer with the names of the logs and their bytes."""
        return web.json_response({"ok": await asyncio.to_thread(self._sizes)})

    def _sizes(self) -> dict[str, int]:
        with os.scandir(self._folder) as entries:
            logs = [entry for entry in entries if entry.name.endswith(_ENDING)]
        sizes = {}
        for log in logs:
            with suppress(FileNotFoundError):  # an instance's goes with it
                sizes[log.name.removesuffix(_ENDING)] = log.stat(follow_symlinks=False).st_size
        return sizes

    async def _read(self, request: web.Request) -> web.Response:
        """Answer with the last 256 KiB of a log at most, or with what has come ``?after=`` an earlier answer.

        The answer is ``{"text", "start", "end"}``: also where in the file the text starts and ends, in bytes. A
        ``start`` after ``?after=`` shows what was left out.
        """
        name, after = request.match_info["name"], request.query.get("after", "")
        if not _NAME.fullmatch(name) or not re.fullmatch("[0-9]{0,18}", after):
            error = ConfigError("expected the name of a log, and a number of bytes as ?after=")
            return web.json_response(error_answer(error), status=400)
        try:
            text, start, end = await asyncio.to_thread(self._read_file, name, int(after) if after else None)
        except OSError:
            return web.json_response(error_answer(UnknownNameError(f"this node has no log {name}")), status=404)
        return web.json_response({"ok": {"text": text, "start": start, "end": end}})

    def _read_file(self, name: str, after: int | None) -> tuple[str, int, int]:
        with open(self._folder / (name + _ENDING), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            start = max(size_bytes - _MOST_BYTES, 0)
            if after is not None:
                start = max(start, after if after <= size_bytes else 0)  # a shorter file was begun anew
            file.seek(start)
            data = file.read(size_bytes - start)
        end = start + len(data)
        if start not in (0, after):
            data = data[data.find(b"\n") + 1 :]  # its first line is not whole
        return data.decode(errors="replace"), end - len(data), end


__all__ = ["Logs"]
