"""Serve the bundled model, stream one completion from it, and show where the time of its cold start went."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

MODEL = Path(__file__).parent / "pydoc-lm"
PROMPT = "This function returns"


def main() -> int:
    medusa = Path(sys.executable).with_name("medusa")
    print(f"$ medusa serve --model {os.path.relpath(MODEL)} --port 0\n")
    began = time.monotonic()
    server = subprocess.Popen(
        [medusa, "serve", "--model", MODEL, "--host", "127.0.0.1", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        port = bound_port(server)
        stream_completion(port, began)
        wait_ready(port)
        print_server(server)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
    return server.returncode


def bound_port(server: subprocess.Popen[str]) -> int:
    """Return the server's port. The server prints its address long before the model is loaded."""
    assert server.stdout is not None
    for line in server.stdout:
        if "http://" in line:
            return int(line.rsplit(":", 1)[1].split()[0].strip("/"))
    raise SystemExit("medusa serve ended before it was listening")


def stream_completion(port: int, began: float) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0.0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read().decode()}")
    first = None
    print(PROMPT, end="")
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.monotonic() - began
            print(json.loads(line[6:])["choices"][0]["text"], end="", flush=True)
    print(f"\n\nfirst token {first:.2f} s after the process was started\n")


def wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return
        except OSError:
            time.sleep(0.1)


def print_server(server: subprocess.Popen[str]) -> None:
    """Print what the server has printed meanwhile: the timeline of its start."""
    assert server.stdout is not None
    os.set_blocking(server.stdout.fileno(), False)
    time.sleep(1.0)
    print(server.stdout.read() or "", end="")


if __name__ == "__main__":
    sys.exit(main())
