"""Behind nginx as it is by default, which buffers answers: early streams come through piece by piece all the same."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
CONF = """
daemon off; pid {folder}/pid; error_log {folder}/errors; worker_processes 1;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{behind}; }} }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, behind: int) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    conf = folder / "nginx.conf"
    conf.write_text(CONF.format(folder=folder, port=port, behind=behind))
    process = subprocess.Popen([NGINX, "-e", folder / "errors", "-c", conf])
    try:
        for _ in range(3000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, (folder / "errors").read_text()
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.skipif(not Path(NGINX).exists(), reason="needs nginx")
@pytest.mark.parametrize(
    "env", [{"MEDUSA_PLATFORM": "local"}, {"K_SERVICE": "f"}, {"fprocess": "x", "suppress_lock": "1"}]
)
def test_heartbeats_pass_before_the_function_is_loaded(
    launch: Callable[..., Any], tmp_path: Path, env: dict[str, str]
) -> None:
    instance = launch(
        handler="slow_load/handler.py:Handler", wait=False, MEDUSA_HEARTBEAT="0.1", metrics_port="0", **env
    )
    with nginx(tmp_path, instance.port) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
        with contextlib.closing(connection):
            connection.request("POST", "/", b"", {"Accept": "text/event-stream"})
            response = connection.getresponse()
            assert (response.status, response.getheader("Server", "")[:5]) == (200, "nginx")
            assert [response.readline() for _ in range(6)] == [b": waiting\n", b"\n"] * 3
            (instance.folder / "go").touch()
            events = [line for line in response.read().splitlines() if line.startswith(b"data: ")]
    assert events == [b"data: loaded", b"data: [DONE]"]
