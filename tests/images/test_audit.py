"""The audit of an image's packages: it says when it could look nothing up, and finds what there is."""

from __future__ import annotations

import http.server
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[2] / "images" / "audit.py"
KNOWN = {("pip", "9.0.0"), ("jinja2", "2.4.1")}


@pytest.fixture
def advisories() -> Iterator[str]:
    """OSV's API on loopback, with advisories of ``KNOWN`` alone."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            package = (asked["package"]["name"], asked["version"])
            advisory = {
                "id": "TEST-1",
                "summary": "bad",
                "modified": "2026-01-01T00:00:00Z",
                "affected": [
                    {
                        "package": asked["package"],
                        "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99"}]}],
                    }
                ],
            }
            body = json.dumps({"vulns": [advisory]} if package in KNOWN else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()


def audit(tmp_path: Path, requirements: str, url: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "requirements.txt").write_text(requirements)
    command = [sys.executable, str(AUDIT), str(tmp_path / "requirements.txt"), "--osv-url", url]
    environ: dict[str, Any] = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=240)


def test_without_a_source_it_fails_in_one_line(tmp_path: Path) -> None:
    ran = audit(tmp_path, "jinja2==3.1.6\n", "http://127.0.0.1:1/v1/query")
    assert ran.returncode == 3
    (line,) = ran.stderr.splitlines()
    assert "nothing was looked up" in line


@pytest.mark.skipif(importlib.util.find_spec("pip_audit") is None, reason="needs pip-audit: pip install pip-audit")
def test_what_is_known_is_found(tmp_path: Path, advisories: str) -> None:
    clean = audit(tmp_path, "flask==3.1.3\n", advisories)
    assert clean.returncode == 0, clean.stderr
    found = audit(tmp_path, "flask==3.1.3\njinja2==2.4.1\n", advisories)
    assert found.returncode == 1
    assert "jinja2" in found.stdout
    assert "TEST-1" in found.stdout
