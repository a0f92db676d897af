"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import aiohttp
from waiting import until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE_S = 60.0


class Browser:
    """One page of a browser of its own; a context manager."""

    def __enter__(self) -> Self:
        assert CHROMIUM is not None
        self._folder = Path(tempfile.mkdtemp(prefix="browser-"))
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.errors: list[str] = []
        self._process = subprocess.Popen(
            [
                *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
                *("--remote-debugging-port=0", f"--user-data-dir={self._folder}", "about:blank"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        port_file = self._folder / "DevToolsActivePort"
        deadline = time.monotonic() + _PATIENCE_S
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < deadline
            assert self._process.poll() is None
            time.sleep(0.1)
        self._loop.run_until_complete(self._connect(int(port_file.read_text().split()[0])))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait(_PATIENCE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _connect(self, port: int) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            page = next(found for found in await answer.json() if found["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **parameters: Any) -> Any:
        return self._loop.run_until_complete(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(_PATIENCE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                    self.errors.append(str(message["params"]))
                if message.get("id") == self._number:
                    assert "error" not in message, message
                    return message["result"]

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show a page in a window of this size, and wait until it is loaded."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && !!document.querySelector('main')")

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        until(lambda: self.value(expression), lambda: expression)

    def picture(self, file: Path) -> None:
        """Take a picture of the whole page."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))
