"""A model hub on loopback that answers as the Hugging Face Hub does: redirects, commits, tokens and error codes.

Weights lie on a content network, at another port, whose addresses are signed and expire. The Hub's own client reads
from it, too (`tests/runtime/storage/test_hugging_face.py`).
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote, urlsplit

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class HubServer:
    """One model with some commits, of which ``main`` is the last one. It answers only those that bear the token."""

    def __init__(self, model: str, token: str, files: dict[str, bytes]) -> None:
        self.model, self.token = model, token
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.asked: Counter[str] = Counter()  # how often each revision was asked for
        self.strangers: list[str] = []  # what the content network was told that is none of its business
        self.gated = False
        self.limit = ""  # the RateLimit of answers, while there are to be no others than 429
        self.signature = 1  # the one that is valid now
        self.push("main", files)
        hub, network = (type(name, (_Answers,), {"hub": self}) for name in ("_Hub", "_Network"))
        network.network = True  # type: ignore[attr-defined]
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), answers) for answers in (hub, network)]
        self.url, self.network_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        self._threads = [
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}) for server in self._servers
        ]

    def push(self, branch: str, files: dict[str, bytes]) -> str:
        """Make a commit, and let the branch point to it."""
        commit = sha1(json.dumps([branch, len(self.commits)]).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubServer
    network = False

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if self.network:
            return self._from_network(path, url.query)
        if self.hub.limit:
            return self._send(429, b"", {"RateLimit": self.hub.limit, "RateLimit-Policy": '"resolvers";q=3000;w=300'})
        if "Authorization" not in self.headers:
            return self._send(401, b'{"error": "no token"}', {"X-Error-Code": "RepoNotFound"})
        if self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"})
        if self.hub.gated:
            return self._send(403, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
        cached = f"/api/resolve-cache/models/{self.hub.model}/"
        if path.startswith(cached):
            commit, _, name = path.removeprefix(cached).partition("/")
            return self._send_file(self.hub.commits[commit][name], {"X-Repo-Commit": commit})
        if path.startswith("/api/models/"):
            return self._describe(path.removeprefix("/api/models/"))
        return self._resolve(url.path)

    do_HEAD = do_GET

    def _resolve(self, path: str) -> None:
        before = f"/{self.hub.model}/resolve/"
        if not path.startswith(before):
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        revision, name = map(unquote, path.removeprefix(before).partition("/")[::2])
        self.hub.asked[revision] += 1
        commit = self.hub.branches.get(revision, revision)
        if commit not in self.hub.commits:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        named = {"X-Repo-Commit": commit}
        data = self.hub.commits[commit].get(name)
        if data is None:
            return self._send(404, b"{}", named | {"X-Error-Code": "EntryNotFound"})
        if not name.endswith(_WEIGHTS):
            place = (
                f"/api/resolve-cache/models/{self.hub.model}/{commit}/{quote(name)}?etag=%22{sha1(data).hexdigest()}%22"
            )
            return self._send(307, b"", named | {"Location": place, "ETag": f'"{sha1(data).hexdigest()}"'})
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{sha256(data).hexdigest()}"'}
        place = f"{self.hub.network_url}/{commit}/{name}?Expires=1&Signature={self.hub.signature}"
        return self._send(302, b"", named | linked | {"Location": place})

    def _from_network(self, path: str, query: str) -> None:
        if "Authorization" in self.headers:
            self.hub.strangers.append(self.headers["Authorization"])
        if not query.endswith(f"Signature={self.hub.signature}"):
            return self._send(403, b"<Error><Code>AccessDenied</Code></Error>", {})
        commit, _, name = path.removeprefix("/").partition("/")
        return self._send_file(self.hub.commits[commit][name], {"Cache-Control": "public, max-age=31536000"})

    def _describe(self, path: str) -> None:
        sha = self.hub.branches["main"]
        siblings = [{"rfilename": name} for name in self.hub.commits[sha]]
        known = path.startswith(self.hub.model)
        body: dict[str, Any] = {"id": self.hub.model, "sha": sha, "siblings": siblings}
        self._send(200 if known else 404, json.dumps(body).encode(), {})

    def _send_file(self, data: bytes, headers: dict[str, str]) -> None:
        headers |= {"ETag": f'"{sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            return self._send(412, b"", {})
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if not wanted:
            return self._send(200, data, headers)
        start, stop = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return self._send(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
        return self._send(206, data[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...
