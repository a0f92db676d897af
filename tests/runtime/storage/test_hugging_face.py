"""hf:// as docs/storage.md describes it, against a hub of our own on loopback that speaks the Hub's HTTP protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from medusa_adapters.trial import Trial

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"
MODEL, TOKEN = "org/tiny", "hf_secret"


class Hub(BaseHTTPRequestHandler):
    """One model with the files of the example and two revisions. It answers only callers that bear the token."""

    protocol_version = "HTTP/1.1"
    revisions: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, posted: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b'{"error": "no token"}')
        if path.startswith(f"/api/models/{MODEL}"):
            rest = path.removeprefix(f"/api/models/{MODEL}").strip("/").split("/")
            if rest[0] in ("revision", "tree", "paths-info"):
                self.revisions.add(rest[1])
            files = [describe(file) for file in sorted(EXAMPLE.iterdir()) if file.is_file()]
            if rest[0] == "paths-info":
                asked = json.loads(posted)["paths"] if posted.startswith(b"{") else []
                files = [file for file in files if file["path"] in asked]
            body = files if rest[0] in ("tree", "paths-info") else {"id": MODEL, "sha": "0" * 40, "siblings": []}
            return self._send(200, json.dumps(body).encode())
        file = EXAMPLE / path.rpartition("/")[2]
        if not path.startswith(f"/{MODEL}/resolve/") or not file.is_file():
            return self._send(404, b"{}")
        self.revisions.add(path.split("/")[4])
        return self._send(200, file.read_bytes())

    def _send(self, status: int, body: bytes) -> None:
        wanted, headers = self.headers.get("Range"), {"Content-Type": "application/json", "ETag": '"1"'}
        if status == 200 and wanted:
            start, _, stop = wanted.removeprefix("bytes=").partition("-")
            headers["Content-Range"] = f"bytes {start}-{stop}/{len(body)}"
            status, body = 206, body[int(start) : int(stop) + 1]
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def describe(file: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {"type": "file", "path": file.name, "size": len(data), "oid": sha1(data).hexdigest()}


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.revisions.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(url: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`medusa fetch` as a user calls it; the Hub's client reads its variables once, so in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MEDUSA_"))}
    command = [sys.executable, "-m", "medusa_adapters.cli.main", "fetch", url, "--to", str(folder / "to")]
    environ = clean | {"HF_HOME": str(folder / "home")} | environ
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(("url", "revision"), [(f"hf://{MODEL}", "main"), (f"hf://{MODEL}@v1.0", "v1.0")])
def test_a_model_and_its_revision_are_fetched_with_the_token(hub: str, tmp_path: Path, url: str, revision: str) -> None:
    ran = fetch(url, tmp_path, HF_ENDPOINT=hub, HF_TOKEN=TOKEN)
    assert ran.returncode == 0, ran.stderr
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "to" / file).read_bytes() == (EXAMPLE / file).read_bytes()
    assert Hub.revisions == {revision}


def test_without_the_token_it_is_one_line_that_says_so(hub: str, tmp_path: Path) -> None:
    ran = fetch(f"hf://{MODEL}", tmp_path, HF_ENDPOINT=hub)
    assert ran.returncode == 1
    assert "[Storage.Forbidden]" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_model_is_served_from_the_hub(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_ENDPOINT": hub, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    with Trial("--model", f"hf://{MODEL}") as function:
        answer = function.post("/v1/completions", '{"prompt": "This", "max_tokens": 2}')
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] == 2
