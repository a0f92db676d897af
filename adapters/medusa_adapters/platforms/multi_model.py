"""SageMaker's multi-model API: models are loaded, invoked and unloaded by request.

An instance runs one model, and that stays so: each loaded model is an instance of its own (`medusa serve` on a loopback
port), with its own processes, function and failures, whose memory is back when it is unloaded. This process passes
requests on. What it costs is a process start per model, and no memory shared between models.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.config import to_env

if TYPE_CHECKING:
    from flask import Flask, Response
    from medusa_handler.service import Service
    from medusa_runtime.config import Settings

_NAME = re.compile(r"[\w.-]{1,256}")
_CHILD = (
    "import sys; from medusa_runtime.process import die_with_parent; die_with_parent(int(sys.argv.pop(1)));"
    "from medusa_adapters.cli.main import main; sys.exit(main())"
)
_NOT_THEIRS = (
    *("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_BIND_TO_PORT", "MEDUSA_MODEL", "MEDUSA_HANDLER", "MEDUSA_TOKEN"),
    *("MEDUSA_HOST", "PORT"),
)
_HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "server", "date", "host", "keep-alive")
_JSON = {"description": "As in SageMaker's contract", "content": {"application/json": {"schema": {}}}}
_ANYTHING = {"description": "What the model answers", "content": {"*/*": {"schema": {}}}}
_STATUSES = {"Weights.TooLarge": 507, "Config.Invalid": 400}  # of what an instance says when it ends
_POLL_S = 0.1
_END_S = 30.0


def described_paths() -> dict[str, Any]:
    """The routes, for /openapi.json."""
    text = {"type": "string"}
    fields = {
        "model_name": {"type": "string", "pattern": r"^[\w.-]{1,256}$"},
        "url": {"type": "string", "pattern": "^/"},
    }
    wanted = {"type": "object", "required": ["model_name", "url"], "properties": fields}
    name = [{"name": "name", "in": "path", "required": True, "schema": text}]
    own = {"parameters": name, "responses": {"200": _JSON, "404": _JSON}}
    anything: dict[str, Any] = {"content": {"*/*": {"schema": {}}}}
    load = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": wanted}}},
        "responses": dict.fromkeys(("200", "400", "409", "429", "500", "507"), _JSON),
    }
    invoke = {"parameters": name, "requestBody": anything, "responses": {"404": _JSON, "default": _ANYTHING}}
    return {
        "/models": {"get": {"responses": {"200": _JSON}}, "post": load},
        "/models/{name}": {"get": own, "delete": own},
        "/models/{name}/invoke": {"post": invoke},
    }


@dataclass
class Loaded:
    """One model: its instance and the port of that."""

    url: str
    process: subprocess.Popen[str]
    port: int = 0
    ready: bool = False


class Models:
    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        """``settings`` are each model's, too: what the host was told by flags reaches them as variables."""
        told = {**environ, **to_env(settings)}
        self._environ = {name: value for name, value in told.items() if name not in _NOT_THEIRS}
        self._lock = threading.Lock()
        self._loaded: dict[str, Loaded] = {}
        # A child is killed when the thread that started it ends, so one thread starts them all.
        self._starter = ThreadPoolExecutor(1, "start-model")

    def add_routes(self, app: Flask, service: Service) -> None:
        from flask import jsonify, request
        from medusa_handler.http.body import json_object
        from medusa_handler.http.work import Work

        work = Work(service)

        @app.get("/models")
        def models() -> Response:
            with self._lock:
                return jsonify({"models": [_described(name, loaded) for name, loaded in self._loaded.items()]})

        @app.post("/models")
        def load() -> Response:
            body = json_object()
            name, url = body.get("model_name"), body.get("url")
            return work.run("/models", lambda: jsonify(_described(str(name), self.load(name, url))))

        @app.get("/models/<name>")
        def model(name: str) -> Response:
            return jsonify(_described(name, self._find(name)))

        @app.delete("/models/<name>")
        def unload(name: str) -> Response:
            return jsonify(_described(name, self.unload(name)))

        @app.post("/models/<name>/invoke")
        def invoke(name: str) -> Response:
            return work.run("/models/invoke", lambda: _pass_on(self._find(name).port, dict(request.headers)))

    def load(self, name: Any, url: Any) -> Loaded:
        """Start the model's instance and wait until it is ready. Raises HttpError 400, 409, 507, 500."""
        from medusa_handler.user_code.contract import HttpError

        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise HttpError(400, f"model_name: expected up to 256 letters, digits, '.', '_' and '-', found {name!r}")
        if not isinstance(url, str) or not url.startswith("/") or "\0" in url or not Path(url).is_dir():
            raise HttpError(400, f"url: expected the full path of a folder in this container, found {url!r}")
        _check_memory(Path(url))
        with self._lock:
            if name in self._loaded:
                raise HttpError(409, f"the model {name!r} is loaded, from {self._loaded[name].url}")
            loaded = self._loaded[name] = Loaded(url, self._starter.submit(self._start, url).result())
        try:
            self._wait(loaded)
        except BaseException:
            with self._lock:
                self._loaded.pop(name, None)
            _end(loaded)
            raise
        return loaded

    def _start(self, url: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), "serve", "--host", "127.0.0.1", "--port", "0"]
        environ = self._environ | {"SM_MODEL_DIR": url, "MEDUSA_PLATFORM": "sagemaker", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def _wait(self, loaded: Loaded) -> None:
        from medusa_handler.user_code.contract import HttpError

        process, last = loaded.process, [""]
        assert process.stdout is not None
        log = threading.Thread(target=_tell_on, args=(process, last), name="model-log", daemon=True)
        log.start()
        for line in process.stdout:
            if line.startswith("listening on "):
                loaded.port = int(line.rpartition(":")[2])
                break
        # Nobody reads the chart of the start, but a full pipe would stop the instance.
        threading.Thread(target=process.stdout.read, name="model-output", daemon=True).start()
        while not loaded.ready:
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                loaded.ready = _ping(loaded.port) == 200
            else:
                log.join(_POLL_S)
                status = next((status for code, status in _STATUSES.items() if last[0].endswith(f"[{code}]")), 500)
                raise HttpError(status, f"the model could not be loaded: {last[0].removeprefix('medusa: ')}")

    def unload(self, name: str) -> Loaded:
        loaded = self._find(name)
        with self._lock:
            self._loaded.pop(name, None)
        _end(loaded)
        return loaded

    def _find(self, name: str) -> Loaded:
        from medusa_handler.user_code.contract import HttpError

        with self._lock:
            loaded = self._loaded.get(name)
        if loaded is None or not loaded.ready:
            raise HttpError(404, f"there is no model {name!r}; load it with POST /models")
        return loaded

    def close(self) -> None:
        """At SIGTERM: the instances drain by themselves."""
        with self._lock:
            for loaded in self._loaded.values():
                loaded.process.terminate()


def _described(name: str, loaded: Loaded) -> dict[str, str]:
    return {"modelName": name, "modelUrl": loaded.url}


def _check_memory(folder: Path) -> None:
    from medusa_handler.user_code.contract import HttpError
    from medusa_runtime.limits import memory_available_bytes

    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = memory_available_bytes()
    if needed > free:
        raise HttpError(507, f"{folder} has {needed / 1e6:,.0f} MB of weights, {free / 1e6:,.0f} MB are free")


def _tell_on(process: subprocess.Popen[str], last: list[str]) -> None:
    """The instance's stderr onto ours; its last line is why it ended."""
    assert process.stderr is not None
    for line in process.stderr:
        last[0] = line.strip()
        with contextlib.suppress(OSError):
            sys.stderr.write(line)


def _ping(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/ping")
            return connection.getresponse().status
        except OSError:
            return 0


def _pass_on(port: int, headers: dict[str, str]) -> Response:
    """This request, answered by the instance on ``port``; streams come through piece by piece."""
    from flask import Response
    from medusa_handler.http.body import read_body
    from medusa_handler.user_code.contract import HttpError

    body = read_body()
    kept = {name: value for name, value in headers.items() if name.lower() not in (*_HOP_BY_HOP, "authorization")}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/invocations", body, kept)
        answer = connection.getresponse()
    except OSError as error:
        connection.close()
        raise HttpError(503, f"the model's instance does not answer: {error}") from None

    def pieces() -> Iterator[bytes]:
        while piece := answer.read1(65536):
            yield piece

    found = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
    response = Response(pieces(), answer.status, found)
    response.call_on_close(connection.close)
    return response


def _end(loaded: Loaded) -> None:
    loaded.process.terminate()
    try:
        loaded.process.wait(_END_S)
    except subprocess.TimeoutExpired:
        loaded.process.kill()
        loaded.process.wait()
