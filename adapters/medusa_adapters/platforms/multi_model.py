"""SageMaker's multi-model API: models are loaded, invoked and unloaded by request.

Here, too, an instance runs one model: each loaded model is an instance of its own (`medusa serve` on a loopback port),
with its own processes, function and failures. Unloading it frees all of its memory. This process passes requests on.
The price is that each model starts its own processes, and that models share no memory.
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
from medusa_runtime.errors import json_excerpt
from medusa_runtime.process import terminate

if TYPE_CHECKING:
    from medusa_handler.contract import Request, Response
    from medusa_handler.platform import Route
    from medusa_runtime.config import Settings

_NAME = re.compile(r"[\w.-]{1,256}")
_CHILD = (
    "import sys; from medusa_runtime.process import die_with_parent; die_with_parent(int(sys.argv.pop(1)));"
    "from medusa_adapters.cli.main import main; sys.exit(main())"
)
_NOT_INHERITED = (
    *("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_BIND_TO_PORT", "MEDUSA_MODEL", "MEDUSA_HANDLER", "MEDUSA_TOKEN"),
    *("MEDUSA_HOST", "PORT"),
)
_HOP_BY_HOP = ("connection", "transfer-encoding", "content-length", "server", "date", "host", "keep-alive")
_JSON = {"description": "As in SageMaker's contract", "content": {"application/json": {"schema": {}}}}
_ANYTHING = {"description": "What the model answers", "content": {"*/*": {"schema": {}}}}
_STATUSES = {"Weights.TooLarge": 507, "Config.Invalid": 400}  # by the code with which an instance ends
_POLL_S = 0.1
_END_S = 30.0
_TIMEOUT_S = 600.0  # longer than SageMaker waits for an answer; for an instance that hangs


@dataclass
class LoadedModel:
    """A model, the process of its instance, and the port on which the instance listens once that is known."""

    url: str
    process: subprocess.Popen[str]
    port: int = 0
    ready: bool = False


class ModelHost:
    """The models of one host, each in an instance of its own."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        """``settings`` apply to every model: the host's flags reach the instances as environment variables."""
        given = {**environ, **to_env(settings)}
        self._environ = {name: value for name, value in given.items() if name not in _NOT_INHERITED}
        self._lock = threading.RLock()
        self._loaded: dict[str, LoadedModel] = {}
        self._timeout_s = settings.timeout_s or _TIMEOUT_S
        # A child is killed when the thread that started it ends, so one thread starts them all.
        self._starter = ThreadPoolExecutor(1, "start-model")

    def routes(self) -> list[Route]:
        from medusa_handler.platform import Route

        return [
            Route("GET", "/models", self._list),
            Route("POST", "/models", self._load, metric="/models"),
            Route("GET", "/models/<name>", lambda _, name: _describe(name, self._find(name))),
            Route("DELETE", "/models/<name>", lambda _, name: _describe(name, self.unload(name))),
            Route("POST", "/models/<name>/invoke", self._invoke, metric="/models/invoke"),
        ]

    @staticmethod
    def openapi_paths() -> dict[str, Any]:
        """Describe the routes for /openapi.json."""
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

    def _list(self, _: Request) -> dict[str, Any]:
        with self._lock:
            return {"models": [_describe(name, loaded) for name, loaded in self._loaded.items()]}

    def _load(self, request: Request) -> dict[str, str]:
        name, url = request.object.get("model_name"), request.object.get("url")
        return _describe(str(name), self.load(name, url))

    def _invoke(self, request: Request, name: str) -> Response:
        from medusa_handler.contract import HttpError

        try:
            return _proxy(self._find(name).port, request, self._timeout_s)
        except HttpError:
            self._find(name)  # raises 404 if the model has been unloaded meanwhile, which explains the error
            raise

    def load(self, name: Any, url: Any) -> LoadedModel:
        """Start the model's instance and wait until it is ready. Raises HttpError 400, 409, 500 or 507."""
        from medusa_handler.contract import HttpError

        if not isinstance(name, str) or not _NAME.fullmatch(name):
            expected = "model_name: expected up to 256 letters, digits, '.', '_' and '-'"
            raise HttpError(400, f"{expected}, found {json_excerpt(name)}")
        if not isinstance(url, str) or not url.startswith("/") or "\0" in url or not Path(url).is_dir():
            raise HttpError(400, f"url: expected the path of a folder in this container, found {json_excerpt(url)}")
        _check_memory(Path(url))
        with self._lock:
            if name in self._loaded:
                raise HttpError(409, f"the model {name!r} is loaded, from {self._loaded[name].url}")
            loaded = self._loaded[name] = LoadedModel(url, self._starter.submit(self._start, url).result())
        try:
            self._wait(loaded)
        except BaseException:
            with self._lock:
                self._loaded.pop(name, None)
            terminate(loaded.process, _END_S)
            raise
        return loaded

    def _start(self, url: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), "serve", "--host", "127.0.0.1", "--port", "0"]
        environ = self._environ | {"SM_MODEL_DIR": url, "MEDUSA_PLATFORM": "sagemaker", "PYTHONUNBUFFERED": "1"}
        environ["MEDUSA_LOG_FORMAT"] = "text"  # what it says is read below
        return subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def _wait(self, loaded: LoadedModel) -> None:
        from medusa_handler.contract import HttpError

        process, last = loaded.process, [""]
        assert process.stdout is not None
        log = threading.Thread(target=_copy_log, args=(process, last), name="model-log", daemon=True)
        log.start()
        for line in process.stdout:
            if line.startswith("listening on "):
                loaded.port = int(line.rpartition(":")[2])
                break
        # The chart of the start is read only so that a full pipe does not stop the instance.
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

    def unload(self, name: str) -> LoadedModel:
        """End the model's instance once it has answered its requests. Of two callers, one gets HttpError 404."""
        with self._lock:
            loaded = self._find(name)
            del self._loaded[name]
        terminate(loaded.process, _END_S)
        return loaded

    def _find(self, name: str) -> LoadedModel:
        from medusa_handler.contract import HttpError

        with self._lock:
            loaded = self._loaded.get(name)
        if loaded is None or not loaded.ready:
            raise HttpError(404, f"there is no model {name!r}; load it with POST /models")
        return loaded

    def close(self) -> None:
        """Let the instances drain, at SIGTERM."""
        with self._lock:
            for loaded in self._loaded.values():
                loaded.process.terminate()


def _describe(name: str, loaded: LoadedModel) -> dict[str, str]:
    return {"modelName": name, "modelUrl": loaded.url}


def _check_memory(folder: Path) -> None:
    from medusa_handler.contract import HttpError
    from medusa_runtime.container_limits import memory_available_bytes

    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = memory_available_bytes()
    if needed > free:
        raise HttpError(507, f"{folder} has {needed / 1e6:,.0f} MB of weights, {free / 1e6:,.0f} MB are free")


def _copy_log(process: subprocess.Popen[str], last: list[str]) -> None:
    """Copy the instance's stderr to ours, and keep in ``last`` its last line, which says why it ended."""
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


def _proxy(port: int, request: Request, timeout_s: float) -> Response:
    """Return the answer of the instance on ``port``. A stream is passed on piece by piece.

    Raises HttpError 503 if it cannot be reached or breaks off, and 504 if it is silent for ``timeout_s``.
    """
    from medusa_handler.contract import Headers, HttpError, Response

    not_passed_on = (*_HOP_BY_HOP, "authorization")
    kept = {name: value for name, value in request.headers.items() if name.lower() not in not_passed_on}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", "/invocations", request.body, kept)
        answer = connection.getresponse()
    except TimeoutError:
        connection.close()
        raise HttpError(504, f"the model's instance did not answer within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise HttpError(503, f"the model's instance does not answer: {error}") from None
    found = Headers((name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP)
    return Response(_ResponseStream(connection, answer), answer.status, found, found.get("content-type"))


class _ResponseStream:
    """The bytes of an answer, as they come. ``close`` closes the connection."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection = connection
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if piece := self._answer.read1(65536):
            return piece
        raise StopIteration

    def close(self) -> None:
        self._connection.close()
