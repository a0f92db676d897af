"""The origin of a fetch benchmark: an object store on loopback, in several variants."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from medusa_runtime.errors import MedusaError, MissingPackageError

from benchmarks.ports import free_port

NGINX_HINT = "nginx is not installed; the built-in server answers instead. Install it with: apt-get install nginx-light"
_START_TIMEOUT_S = 10.0


class Variant(NamedTuple):
    """A variant of the origin: the bytes per second of each connection, the delay of each answer, and TLS."""

    name: str
    rate_bytes_per_s: int | None = None
    latency_s: float = 0.0
    tls: bool = False


VARIANTS = (
    Variant("plain"),
    Variant("tls", tls=True),
    Variant("limited", rate_bytes_per_s=100_000_000),
    Variant("latency", latency_s=0.02),
)


class Origin:
    """A server of the files in ``root``, in processes of its own, as a context manager.

    Its ``url`` has no trailing slash. The server is nginx if it is installed, except with latency, which only the
    built-in server can add. For reading it is path-style S3: ranges, ETag, If-Match and S3's error bodies, with any
    credentials or none. With ``counting`` it keeps a log of the bytes that it sends. Otherwise only a variant with a
    limited rate does.
    """

    def __init__(
        self, root: Path, scratch: Path, variant: Variant, *, builtin: bool = False, counting: bool = False
    ) -> None:
        self.variant = variant
        self.server = "built-in" if builtin or variant.latency_s or not nginx_path() else "nginx"
        self.url = ""
        self.ca_file: Path | None = None
        self._root = root
        self._scratch = scratch / variant.name
        self._log = self._scratch / "access.log" if counting or variant.rate_bytes_per_s else None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._scratch.mkdir(parents=True)
        try:
            if self.variant.tls:
                self.ca_file = make_certificate(self._scratch)
            port = self._start_nginx() if self.server == "nginx" else self._start_builtin()
        except BaseException:
            self._stack.close()
            raise
        self.url = f"{'https' if self.variant.tls else 'http'}://127.0.0.1:{port}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def connections(self) -> int | None:
        """Return how many connections have carried an object's bytes so far; None if the server keeps no log."""
        if self._log is None or not self._log.exists():
            return None
        return len({connection for connection, sent in self._sent() if sent > 1 << 20})

    def sent_bytes(self) -> int:
        """Return the bytes that have been sent so far, in answers that have ended. Needs ``counting``."""
        return sum(sent for _, sent in self._sent())

    def _sent(self) -> list[tuple[str, int]]:
        """Return the connection and the bytes of each answer."""
        assert self._log is not None, "an origin that is not counting"
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(line.split()[0], int(line.split()[1])) for line in lines if line.count(" ") == 1]

    def _start_builtin(self) -> int:
        command = [sys.executable, str(Path(__file__).with_name("ranged_server.py")), str(self._root)]
        command += ["--latency", str(self.variant.latency_s)]
        command += ["--rate", str(self.variant.rate_bytes_per_s)] if self.variant.rate_bytes_per_s else []
        command += ["--cert", str(self.ca_file)] if self.ca_file else []
        command += ["--log", str(self._log)] if self._log else []
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent
        )
        self._stack.callback(_stop, process)
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            raise MedusaError("the built-in origin server did not start; its message is above")
        return int(line)

    def _start_nginx(self) -> int:
        for _ in range(3):  # another process may take the port before nginx binds it
            port = free_port()
            config = self._scratch / "nginx.conf"
            config.write_text(_nginx_config(self._root, self._scratch, self.variant, port, self.ca_file, self._log))
            log = self._scratch / "error.log"
            process = subprocess.Popen(
                [str(nginx_path()), "-p", str(self._scratch), "-c", str(config), "-e", str(log)],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_die_with_parent,
            )
            self._stack.callback(_stop, process)
            if _answers(process, port):
                return port
            _stop(process)
        raise MedusaError(f"nginx did not start: {log.read_text()[-500:] if log.exists() else 'it left no log'}")


def nginx_path() -> str | None:
    return shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


def make_certificate(folder: Path) -> Path:
    """Make a self-signed certificate for 127.0.0.1, which is the clients' CA file. Its key is beside it as .key."""
    if not shutil.which("openssl"):
        raise MissingPackageError("the TLS origin needs a certificate made by openssl: apt-get install openssl")
    pem, key = folder / "origin.pem", folder / "origin.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(pem)),
        ],
        check=True,
        capture_output=True,
    )
    return pem


def _nginx_config(root: Path, scratch: Path, variant: Variant, port: int, pem: Path | None, log: Path | None) -> str:
    temp_paths = "\n".join(
        f"  {kind}_temp_path {scratch}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return f"""
{"user root;" if os.geteuid() == 0 else ""}
daemon off; worker_processes {len(os.sched_getaffinity(0))}; pid {scratch}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
{temp_paths}
  log_format connections '$connection $bytes_sent';
  access_log {f"{log} connections" if log else "off"};
  sendfile on; tcp_nopush on; keepalive_requests 1000000; default_type application/octet-stream;
  server {{
    listen 127.0.0.1:{port}{" ssl" if pem else ""};
    {f"ssl_certificate {pem}; ssl_certificate_key {pem.with_suffix('.key')}; ssl_protocols TLSv1.3;" if pem else ""}
    root {root};
    {f"limit_rate {variant.rate_bytes_per_s};" if variant.rate_bytes_per_s else ""}
    error_page 403 404 = @missing;
    location @missing {{ default_type application/xml; return 404 "<Error><Code>NoSuchKey</Code></Error>"; }}
  }}
}}
"""


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process.poll() is None
        except OSError:
            time.sleep(0.02)
    return False


def _stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: the server ends even if the benchmark is killed
