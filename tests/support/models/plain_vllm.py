"""An unmodified `vllm serve`, with which ours is compared."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_adapters.bench.served_instance import ServedInstance
from plain_environ import plain_environ

_PATIENCE_S = 300.0


class PlainVllm(ServedInstance):
    """Its process."""

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the body, parsed when it is JSON."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        answer = self.exchange(method, path, None if body is None else json.dumps(body), headers, timeout_s=_PATIENCE_S)
        return answer.status, answer.json if "json" in answer.headers.get("Content-Type", "") else answer.text


@contextmanager
def plain_vllm(model: Path, name: str, *flags: str) -> Iterator[PlainVllm]:
    """Serve a model under a name until the end of this context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory(prefix="m") as temporary:
        environ = plain_environ() | {
            "HF_HUB_OFFLINE": "1", "TMPDIR": temporary, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        with PlainVllm(command, environ, port=port) as serving:
            serving.wait_ready("/health", 0.1)
            yield serving
