"""``vllm serve`` as a child process on a Unix socket, with weights from our region."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from medusa_runtime.config import Settings
from medusa_runtime.container_limits import signal_name
from medusa_runtime.errors import EngineError
from medusa_runtime.process import die_with_parent, hang_up, terminate
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from ..cpu.shares import VARIABLE, cpu_shares
from ..flags import MEDIA_DOMAINS, MEDIA_ENVIRONMENT, flag_words, names_media_domains
from ..plugin import ANY_VERSION_FORMAT, name_plugin
from ..scratch import Guard
from ..shared_memory import QUIET, remove_names
from ..weights.attached import loader_config
from . import launcher

_RETRY_S = 0.1
_END_S = 10.0
_MB_PER_GIB = 1024


class Exchange:
    """An answer that is being read. As a context manager, it closes the connection."""

    def __init__(self, connection: socket.socket, response: http.client.HTTPResponse) -> None:
        self._connection = connection
        self.response = response

    def hang_up(self) -> None:
        """End the connection, even while another thread reads from it."""
        hang_up(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.response.close()
        self._connection.close()


class VllmServer:
    """The process of `vllm serve`. ``folder`` has the checkpoint's small files; the socket is created there."""

    def __init__(
        self, folder: Path, region: Region, settings: Settings, timeline: Timeline, names: Sequence[str]
    ) -> None:
        self._socket = folder / "vllm.sock"
        extra = json.dumps(loader_config(region, timeline, settings))
        command = [sys.executable, "-m", launcher.__name__, "serve", str(folder), "--uds", str(self._socket)]
        command += ["--load-format", ANY_VERSION_FORMAT, "--model-loader-extra-config", extra]
        command += ["--served-model-name", *names, "--max-num-seqs", str(settings.max_concurrency)]
        command += ["--max-num-batched-tokens", str(max(settings.max_batched_tokens, settings.max_concurrency))]
        command += ["--no-enable-prefix-caching"] if settings.prefix_cache_mb == 0 else []
        if settings.compile != "always":
            command.append("--enforce-eager")
        if settings.max_model_len is not None:
            command += ["--max-model-len", str(settings.max_model_len)]
        if settings.dtype != "auto":
            command += ["--dtype", settings.dtype]
        if settings.tensor_parallel > 1:
            command += ["--tensor-parallel-size", str(settings.tensor_parallel)]
        flags = flag_words(settings)
        if not names_media_domains(flags):
            command += ["--allowed-media-domains", *MEDIA_DOMAINS]
        self._key = secrets.token_hex(16)
        environment = MEDIA_ENVIRONMENT | os.environ | {launcher.KEY: self._key}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        environment.setdefault("VLLM_RPC_BASE_PATH", str(folder))  # else its sockets stay in /tmp
        environment["PYTHONWARNINGS"] = ",".join(filter(None, (environment.get("PYTHONWARNINGS"), QUIET)))
        environment["TMPDIR"] = str(folder)  # vLLM leaves files of torch's compiler there
        name_plugin(environment)
        if settings.device == "cpu":
            environment.setdefault(
                "VLLM_CPU_KVCACHE_SPACE", str(max((settings.kv_cache_mb or _MB_PER_GIB) // _MB_PER_GIB, 1))
            )
            if settings.tensor_parallel > 1 or settings.threads:
                environment.setdefault(VARIABLE, cpu_shares(settings))
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(parent, signal.SIGTERM)  # at this signal, vLLM's server ends its own processes, too

        # A server that is still starting may take that signal for the end of something else, and then never end.
        self._guard = Guard(folder)
        self._process = subprocess.Popen([*command, *flags], env=environment, preexec_fn=prepare, process_group=0)
        self._guard.end_group(self._process.pid)

    def wait_ready(self) -> None:
        """Wait until the server answers. Raises EngineError if it ends first; its log says why."""
        while True:
            self.check()
            try:
                if self.get("/health")[0] == http.client.OK:
                    remove_names(self._pids())
                    return
            except OSError:
                time.sleep(_RETRY_S)

    def check(self) -> None:
        """Raise EngineError if the process has ended, and say how."""
        status = self._process.poll()
        if status is not None:
            how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
            raise EngineError(f"vLLM's own server {how}; its log says why")

    def _pids(self) -> Iterator[int]:
        """Yield the processes of the server, which are in one process group."""
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and os.getpgid(int(name)) == self._process.pid:
                    yield int(name)

    def connect(self) -> socket.socket:
        """Return a connection to the server. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._socket))
        except OSError:
            connection.close()
            raise
        return connection

    def get(self, path: str, timeout_s: float | None = None) -> tuple[int, bytes]:
        """Return the status and the body of a GET. Raises OSError, also after ``timeout_s`` without a byte."""
        with self.request("GET", path, None, timeout_s) as exchange:
            return exchange.response.status, exchange.response.read()

    def request(self, method: str, path: str, body: Any, timeout_s: float | None = None) -> Exchange:
        """Send a request, and return once the answer's head has come. Raises OSError."""
        http_connection = http.client.HTTPConnection("engine")
        http_connection.sock = connection = self.connect()
        connection.settimeout(timeout_s)
        try:
            headers = {
                "Connection": "close", "Content-Type": "application/json", "Authorization": f"Bearer {self._key}",
            }  # fmt: skip
            http_connection.request(method, path, None if body is None else json.dumps(body), headers)
            return Exchange(connection, http_connection.getresponse())
        except http.client.HTTPException as error:
            connection.close()
            raise OSError(f"no answer: {error}") from error
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        terminate(self._process, _END_S)
        self._guard.close()


__all__ = ["VllmServer"]
