"""One request after another to a function, of mixed kinds: whole, streamed, left, malformed, too large, too slow."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

JSON = {"content-type": "application/json"}
_WORDS = (
    "This",
    "function",
    "returns",
    "the",
    "value",
    "of",
    "a",
    "list",
    "if",
    "not",
    "open",
    "file",
    "class",
    "None",
)
# Of a request that is right: it was answered, took too long, or came when too many waited or an engine had just ended.
_FINE = (200, 429, 503, 504)


class Wrong(Exception):
    """An answer that no request of this kind should get."""


class Client:
    """Sends requests to a function on a port of this machine, each of another kind. Not for several threads."""

    def __init__(
        self, port: int, model: str, adapters: Sequence[Path], patience_s: float, seed: int, only: str = ""
    ) -> None:
        self._port, self._model, self._adapters, self._patience_s = port, model, adapters, patience_s
        self._random = random.Random(seed)
        self.kinds: dict[str, Callable[[], int]] = {
            name.removeprefix("_ask_"): getattr(self, name)
            for name in dir(self)
            if name.startswith("_ask_") and (not only or name.removeprefix("_ask_") in only.split(","))
        }

    def ask(self) -> tuple[str, int]:
        """Send a request of some kind. Returns the kind and the answer's status; 0: the client left.

        Raises Wrong for an answer that it should not get, and TimeoutError if there was none for too long.
        """
        kind = self._random.choice(list(self.kinds))
        try:
            return kind, self.kinds[kind]()
        except Wrong as wrong:
            raise Wrong(f"{kind}: {wrong}") from None
        except TimeoutError:
            raise TimeoutError(f"{kind}: no answer within {self._patience_s:g} s") from None

    def _prompt(self, words: int | None = None) -> str:
        return " ".join(self._random.choices(_WORDS, k=words or self._random.choice((1, 3, 10, 40, 150))))

    def _completion(self, **fields: Any) -> dict[str, Any]:
        tokens = self._random.choice((1, 4, 16, 48))
        return {"model": self._model, "prompt": self._prompt(), "max_tokens": tokens} | fields

    def _send(self, method: str, path: str, body: object = None, expected: Sequence[int] = _FINE) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._patience_s)) as link:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            link.request(method, path, data, JSON)
            response = link.getresponse()
            found = response.read()
            if response.status not in expected:
                raise Wrong(f"expected one of {expected}, found {response.status}: {found[:300]!r}")
            return response.status

    def _stream(self, path: str, body: dict[str, Any], leave_after: int | None = None) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._patience_s)) as link:
            link.request("POST", path, json.dumps(body | {"stream": True}).encode(), JSON)
            response = link.getresponse()
            if response.status not in _FINE:
                raise Wrong(f"status {response.status}: {response.read()[:300]!r}")
            events, last = 0, b""
            for line in response if response.status == 200 else ():
                if line.startswith(b"data:"):
                    events, last = events + 1, line
                if leave_after is not None and events >= leave_after:
                    return 0
            if response.status == 200 and last.strip() != b"data: [DONE]":
                raise Wrong(f"the stream ended with {last!r}")
            return response.status

    def _raw(self, data: bytes, wait_s: float, pause_s: float = 0.0) -> int:
        """Send bytes, slowly if asked, and return the status of what comes; 0 if nothing does."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=self._patience_s) as link:
            for byte in [data] if not pause_s else [data[place : place + 1] for place in range(len(data))]:
                link.sendall(byte)
                time.sleep(pause_s)
            link.settimeout(wait_s)
            with contextlib.suppress(TimeoutError):
                found = link.recv(4096)
                return int(found.split()[1]) if found.startswith(b"HTTP/1.1 ") else 0
        return 0

    def _ask_completion(self) -> int:
        return self._send("POST", "/v1/completions", self._completion())

    def _ask_same_prefix(self) -> int:
        prompt = "This function returns the value of a list if not open " * 8 + self._prompt(2)
        return self._send("POST", "/v1/completions", self._completion(prompt=prompt, temperature=0, max_tokens=4))

    def _ask_many_choices(self) -> int:
        return self._send(
            "POST", "/v1/completions", self._completion(n=3, logprobs=2, seed=self._random.getrandbits(30))
        )

    def _ask_chat(self) -> int:
        messages = [{"role": "user", "content": self._prompt()}]
        return self._send("POST", "/v1/chat/completions", {"model": self._model, "messages": messages, "max_tokens": 8})

    def _ask_stream(self) -> int:
        return self._stream("/v1/completions", self._completion())

    def _ask_function(self) -> int:
        return self._send("POST", "/", {"prompt": self._prompt(3), "max_tokens": 4}, (*_FINE, 400))

    def _ask_function_stream(self) -> int:
        return self._stream("/", {"prompt": self._prompt(3), "max_tokens": 8})

    def _ask_leave_a_stream(self) -> int:
        return self._stream(
            "/v1/completions", self._completion(max_tokens=200, ignore_eos=True), self._random.randrange(6)
        )

    def _ask_leave_while_waiting(self) -> int:
        body = json.dumps(self._completion(max_tokens=100, ignore_eos=True)).encode()
        return self._raw(_with_head(body), self._random.random() * 0.2) * 0

    def _ask_reset(self) -> int:
        """Reset the connection in the middle of a stream instead of closing it."""
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._patience_s)
        link.request("POST", "/v1/completions", json.dumps(self._completion(max_tokens=90, stream=True)).encode(), JSON)
        link.getresponse().read1(20)
        if link.sock is not None:
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
        return 0

    def _ask_new_stop(self) -> int:
        return self._send("POST", "/v1/completions", self._completion(stop=[uuid.uuid4().hex[:12], uuid.uuid4().hex]))

    def _ask_new_schema(self) -> int:
        name = f"f{uuid.uuid4().hex[:10]}"
        schema = {
            "type": "object",
            "properties": {name: {"type": "integer"}},
            "required": [name],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
        return self._send("POST", "/v1/completions", self._completion(response_format=form), _FINE)

    def _ask_new_expression(self) -> int:
        return self._send(
            "POST", "/v1/completions", self._completion(structured_outputs={"regex": f"[a-f]{{4}}{uuid.uuid4().hex}"})
        )

    def _ask_bad_schema(self) -> int:
        form = {"json": {"not": {"const": uuid.uuid4().hex}}}
        return self._send("POST", "/v1/completions", self._completion(structured_outputs=form), (400, *_FINE[1:]))

    def _ask_new_tool(self) -> int:
        name = f"tool_{uuid.uuid4().hex}"
        tool = {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        }
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": "go"}],
            "max_tokens": 60,
            "tools": [tool],
        }
        return self._send("POST", "/v1/chat/completions", body | {"tool_choice": "required"}, (*_FINE, 400))

    def _ask_adapter(self) -> int:
        """Load an adapter under a new name, use it, and unload it or leave it."""
        name = f"lora-{uuid.uuid4().hex[:8]}"
        place = {"lora_name": name, "lora_path": str(self._random.choice(self._adapters))}
        loaded = self._send("POST", "/v1/load_lora_adapter", place)
        if loaded == 200:
            self._send("POST", "/v1/completions", self._completion(model=name, max_tokens=4))
            self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name}, (*_FINE, 404))
        return loaded

    def _ask_no_adapter(self) -> int:
        place = {"lora_name": uuid.uuid4().hex, "lora_path": str(self._adapters[0].parent / uuid.uuid4().hex)}
        return self._send("POST", "/v1/load_lora_adapter", place, (404, 429, 503, 504))

    def _ask_unknown(self) -> int:
        bad = self._random.choice(
            (
                {"model": uuid.uuid4().hex},
                {uuid.uuid4().hex: 1},
                {"max_tokens": -1},
                {"prompt": 3},
                {"temperature": "x"},
            )
        )
        return self._send("POST", "/v1/completions", self._completion(**bad), (400, 404, *_FINE[1:]))

    def _ask_malformed(self) -> int:
        bad = self._random.choice((b"{", b"\xff\xfe", b"[" * 4000, b"nonsense", b'{"prompt": ' + b"9" * 3000 + b"}"))
        return self._send("POST", "/v1/completions", bad, (400, *_FINE[1:]))

    def _ask_no_http(self) -> int:
        return self._raw(
            self._random.choice((b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"X" * 9000, b"\r\n\r\n")), 1.0
        )

    def _ask_no_route(self) -> int:
        method = self._random.choice(("GET", "POST", "PUT", "DELETE", "BREW"))
        return self._send(method, f"/v1/{uuid.uuid4().hex}?{uuid.uuid4().hex}", None, (404, 405, 501, *_FINE[1:]))

    def _ask_too_large(self) -> int:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            return self._send("POST", "/v1/completions", b" " * (2 << 20), (413, *_FINE[1:]))
        return 413

    def _ask_large(self) -> int:
        return self._send("POST", "/v1/completions", self._completion(prompt="word " * 100_000), (400, *_FINE[1:]))

    def _ask_slow_sender(self) -> int:
        return self._raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 400\r\n\r\n{", 5.0, 0.005)

    def _ask_slow_reader(self) -> int:
        body = json.dumps(self._completion(max_tokens=200, ignore_eos=True, stream=True, logprobs=5)).encode()
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            link.settimeout(self._patience_s)
            link.connect(("127.0.0.1", self._port))
            link.sendall(_with_head(body))
            time.sleep(1.0)
        return 0

    def _ask_tokenize(self) -> int:
        return self._send("POST", "/tokenize", {"prompt": self._prompt()})

    def _ask_metrics(self) -> int:
        return self._send(
            "GET", self._random.choice(("/metrics", "/timeline", "/openapi.json", "/v1/models", "/readyz"))
        )


def _with_head(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body
