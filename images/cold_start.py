"""Find the files below /opt/medusa that a cold start reads. This runs in the build, after everything is installed.

It starts a real `medusa serve` with the example model and sends it requests, once with each engine that the variant has
and this machine can run. A hook notes every file that is opened. vLLM for GPUs is only imported, because there is no
GPU here; the files that it reads only with a GPU are named in variants.toml (hot).
The list stays in the image as ``cold-start.txt``, and split.py makes the layers from it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

HOME = Path("/opt/medusa")
TRACE = Path("/tmp/opened")
URL = "http://127.0.0.1:8099"
# The prefetcher imports this client if MEDUSA_MODEL is the URL of such a store.
STORE = "import boto3; boto3.client('s3', region_name='us-east-1', aws_access_key_id='x', aws_secret_access_key='x')"
# The imports of a start of vLLM, before it needs the device.
VLLM = """
from medusa_runtime.config import from_env
from medusa_vllm.imports import preimport
preimport(from_env({}, engine="vllm", model="."))
print(open("/proc/self/maps").read())
"""
# First requests, which read more files than a start needs to become ready.
ASKED: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "This function returns"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "This function returns"}]},
}
ALWAYS = ("pyvenv.cfg", "bin/python", "bin/python3", "bin/medusa", "medusa-gpus.txt")


def main() -> None:
    model, variant = sys.argv[1:]
    opened = trace(model) | {HOME / name for name in ALWAYS} | named(variant)
    hot = {path for path in opened if path.is_file()}
    if len(hot) < 300:
        sys.exit(f"a cold start read {len(hot)} files of {HOME}; expected some hundreds, so the trace does not work")
    (HOME / "cold-start.txt").write_text("".join(f"{path.relative_to(HOME)}\n" for path in sorted(hot)))


def trace(model: str) -> set[Path]:
    env = {**os.environ, "PYTHONPATH": "/build/trace", "MEDUSA_TRACE": str(TRACE), "PYTHONDONTWRITEBYTECODE": "1"}
    python = str(HOME / "bin/python")
    if subprocess.run([python, "-c", "import boto3"], capture_output=True, check=False).returncode == 0:
        subprocess.run([python, "-c", STORE], env=env, check=True)
    libraries: set[Path] = set()
    for engine in engines(python):
        libraries |= imported(python, env) if engine == "vllm, imported" else start(model, engine, env)
    return {Path(os.path.normpath(line)) for line in TRACE.read_text().splitlines()} | libraries


def named(variant: str) -> set[Path]:
    (site,) = HOME.glob("lib/python3*/site-packages")
    hot = tomllib.loads(Path(__file__).with_name("variants.toml").read_text())[variant].get("hot", [])
    return {path for pattern in hot for path in site.glob(pattern)}


def engines(python: str) -> list[str]:
    """Return the engines to trace. vLLM for GPUs cannot start without a GPU, so it is only imported."""
    asked = "import importlib.util, torch; print(bool(importlib.util.find_spec('vllm')), torch.version.cuda is None)"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    return {"True True": ["torch", "vllm"], "True False": ["torch", "vllm, imported"]}.get(found, ["torch"])


def imported(python: str, env: dict[str, str]) -> set[Path]:
    maps = subprocess.run([python, "-c", VLLM], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    return libraries_of(maps.splitlines())


def start(model: str, engine: str, env: dict[str, str]) -> set[Path]:
    """Start an instance, send it each kind of request, and stop it. Return the libraries that were mapped."""
    command = [str(HOME / "bin/medusa"), "serve", "--model", model, "--host", "127.0.0.1", "--port", "8099"]
    server = subprocess.Popen([*command, "--engine", engine, "--kv-cache-mb", "64"], env=env)
    try:
        for path, body in ASKED.items():
            print(f"the example model says with {engine}: {ask(server, path, body)}", flush=True)
        libraries = mapped(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(30)
    if status != 0:
        sys.exit(f"medusa serve --engine {engine} ended with {status}; expected 0 after SIGTERM")
    return libraries


def ask(server: subprocess.Popen[bytes], path: str, body: dict[str, object]) -> str:
    content = json.dumps(body | {"max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(URL + path, content, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return json.dumps(json.load(response)["choices"][0])
        except ConnectionError:
            time.sleep(0.05)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
            time.sleep(0.05)
    sys.exit("medusa serve did not answer while the image was built")


def mapped(pid: int) -> set[Path]:
    """Return the shared libraries that a process and its descendants have mapped."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    found = set()
    for each in family:
        try:
            lines = Path(f"/proc/{each}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= libraries_of(lines)
    return found


def libraries_of(maps: list[str]) -> set[Path]:
    return {Path(line.split(None, 5)[5]) for line in maps if f" {HOME}/" in line}


if __name__ == "__main__":
    main()
