"""What the adapters cost: a small JSON function behind each, against a bare Flask route under the same gunicorn.

    python -m benchmarks.server.overhead --json out/overhead.json

One client, one connection; the contestants answer in turn, request by request, so that a busy machine is busy for all.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import sys
import tempfile
import time
from pathlib import Path

from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_adapters.bench.served_instance import ServedInstance, serve_command

from benchmarks.ports import free_port

_HANDLER = 'def handle(request):\n    return {"hello": request.json["name"]}\n'
_BARE = """
from flask import Flask, request
app = Flask("bare")

@app.post("/")
def handle():
    return {"hello": request.get_json()["name"]}
"""
_MOST_TIMES = 1.5
_BODY = b'{"name": "you"}'
_PLATFORMS: dict[str, tuple[str, dict[str, str]]] = {
    "local": ("/", {}),
    "knative": ("/", {"K_SERVICE": "f"}),
    "openfaas": ("/", {"suppress_lock": "true", "metrics_port": "0"}),
    "sagemaker": ("/invocations", {}),
}


def call(connection: http.client.HTTPConnection, path: str) -> float:
    """Milliseconds of one request."""
    began = time.perf_counter()
    connection.request("POST", path, _BODY, {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = response.read()
    elapsed_ms = (time.perf_counter() - began) * 1e3
    if response.status != 200 or b"you" not in body:
        raise SystemExit(f"{path}: {response.status} {body!r}")
    return elapsed_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of each contestant")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = Result()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="m"))
        Path(folder, "handler.py").write_text(_HANDLER)
        Path(folder, "bare.py").write_text(_BARE)
        port = free_port()
        bare = [sys.executable, "-m", "gunicorn", "-k", "gthread", "--threads", "32", "-b", f"127.0.0.1:{port}"]
        bare += ["--keep-alive", "75", "--log-level", "warning", "bare:app"]
        servers = {"bare flask": (stack.enter_context(ServedInstance(bare, folder=Path(folder), port=port)), "/")}
        for name, (path, env) in _PLATFORMS.items():
            serve = serve_command("--handler", "handler.py:handle", "--platform", name)
            server = ServedInstance(serve, env | {"TMPDIR": folder}, folder=Path(folder))
            servers[name] = (stack.enter_context(server), path)
        contestants = {
            name: (stack.enter_context(contextlib.closing(server.connect(30))), path)
            for name, (server, path) in servers.items()
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for connection, path in contestants.values():
            for _ in range(50):
                call(connection, path)
        for _ in range(arguments.requests):
            for name, (connection, path) in contestants.items():
                times[name].append(call(connection, path))
    for name, samples in times.items():
        result.add(name, "request", "ms", samples)
    ratios = {name: result.ratio("request", name, "bare flask") for name in _PLATFORMS}
    targets = [
        Target(f"times a bare Flask route at p50, {name}", ratio, _MOST_TIMES, at_least=False)
        for name, ratio in ratios.items()
        if ratio is not None
    ]
    print(result.table(), targets_table(targets), sep="\n\n")
    if arguments.json is not None:
        result.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
