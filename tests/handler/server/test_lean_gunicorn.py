"""The lean import of gunicorn, in a process of its own, as gunicorn can be imported once."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LEAN = "from medusa_handler.server.lean_gunicorn import import_leanly\nimport_leanly()\n"
IMPORT = """
import json, sys
import medusa_handler.server.gunicorn_worker
first = [name for name in ("csv", "email.message", "zipfile") if name in sys.modules]
"""
USED = """
import importlib, socket
from gunicorn import util
ours, theirs = socket.socketpair()
util.write_error(ours, 400, "Bad <Request>", "<b>")
page = theirs.recv(4096).decode()
import importlib.metadata
from html.entities import html5
from importlib.metadata import version
print(json.dumps({
    "first": first, "page": page, "entity": html5["lt;"], "files": "csv" in sys.modules,
    "versions": [importlib.metadata.version("gunicorn"), version("gunicorn"), version("flask")],
    "found": util.importlib_metadata.distribution("gunicorn").version,
}))
"""


def _run(code: str) -> dict[str, Any]:
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(out)
    return found


def test_what_gunicorn_needs_late_is_imported_late_and_is_the_same() -> None:
    lean, plain = _run(LEAN + IMPORT + USED), _run(IMPORT + USED)
    assert lean.pop("first") == []
    assert "zipfile" in list(plain.pop("first"))  # and the others, before Python 3.13
    assert lean == plain
    assert "&lt;b&gt;" in str(lean["page"])
