"""Origins and names that lead to a service that only this machine reaches, in a network of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

INSIDE = """
import json, socket, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote
from medusa_runtime.errors import MedusaError
from medusa_runtime.storage.http.store import HttpStore
from medusa_runtime.storage.retry import RetryPolicy

ORIGIN, METADATA, LOOPBACK = "10.9.8.7", "169.254.169.254", "127.0.0.1"
for words in ("link set lo up", f"addr add {ORIGIN}/32 dev lo", f"addr add {METADATA}/32 dev lo"):
    subprocess.run(["ip", *words.split()], check=True)
asked, names = [], {"feb.test": ORIGIN, "127.test": ORIGIN, "moved.test": ORIGIN}
find = socket.getaddrinfo

def look_up(host, *more, **options):
    host = host.decode() if isinstance(host, bytes) else host
    address = names.get(host, host)
    if host == "moved.test":
        names[host] = LOOPBACK  # its next answer
    return find(address, *more, **options)

socket.getaddrinfo = look_up

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        host = self.server.server_address[0]
        asked.append(host)
        if host == ORIGIN and self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", "http://" + unquote(self.path.removeprefix("/to/")) + "/credentials")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("ETag", '"v"')
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"secret")

    def log_message(self, *_): ...

places = ((ORIGIN, 80), (METADATA, 80), (LOOPBACK, 80), (LOOPBACK, 81))
servers = [ThreadingHTTPServer(place, Handler) for place in places]
for server in servers:
    threading.Thread(target=server.serve_forever, daemon=True).start()

def read(url, key):
    store = HttpStore(url, RetryPolicy(attempts=1), {})
    asked.clear()
    try:
        return [store.read(key, 0, 6)[0].decode(), list(asked)]
    except MedusaError as error:
        return [str(error), list(asked)]
    finally:
        store.close()

print(json.dumps({
    "metadata": read(f"http://{ORIGIN}/to", METADATA),
    "loopback": read(f"http://{ORIGIN}/to", LOOPBACK),
    "localhost": read(f"http://{ORIGIN}/to", "localhost"),
    "mapped": read(f"http://{ORIGIN}/to", f"[::ffff:{METADATA}]"),
    "likeness": read("http://feb.test/to", METADATA),
    "like loopback": read("http://127.test/to", LOOPBACK),
    "rebound": read("http://moved.test/to", "moved.test:81"),
    "itself": read(f"http://{ORIGIN}/to", ORIGIN),
    "named": read(f"http://{METADATA}", "credentials"),
    "own": read(f"http://{LOOPBACK}", "credentials"),
}))
"""


def may_unshare() -> bool:
    return (
        os.geteuid() == 0
        and bool(shutil.which("unshare") and shutil.which("ip"))
        and not subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode
    )


@pytest.mark.skipif(not may_unshare(), reason="needs root, unshare and ip for a network of its own")
def test_no_redirect_leads_to_what_only_this_machine_reaches() -> None:
    command = ["unshare", "--net", sys.executable, "-c", INSIDE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("metadata", "loopback", "localhost", "mapped", "likeness", "like loopback", "rebound"):
        text, asked = found[name]
        assert "which only this machine can reach" in text, (name, text)
        assert asked == ["10.9.8.7"], "no request may get there"
    for name in ("itself", "named", "own"):
        assert found[name][0] == "secret", found
