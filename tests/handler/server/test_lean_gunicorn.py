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
late = ("_ssl", "csv", "email.message", "email.utils", "logging.config", "ssl", "zipfile")
first = [name for name in late if name in sys.modules]
"""
USED = """
import importlib, logging, socket
from gunicorn import glogging, sock, util
glogging.dictConfig({"version": 1, "loggers": {"one": {"level": "ERROR"}}})
dates = [util.http_date(at) for at in (0, 951_782_400, 1_234_567_890.9, 4_102_444_799)]
ours, theirs = socket.socketpair()
util.write_error(ours, 400, "Bad <Request>", "<b>")
page = theirs.recv(4096).decode()
import importlib.metadata
import email.utils, logging.config, platform, shutil, ssl, tempfile, textwrap
from html.entities import html5
from importlib.metadata import version
print(json.dumps({
    "first": first, "page": page, "entity": html5["lt;"], "files": "csv" in sys.modules,
    "versions": [importlib.metadata.version("gunicorn"), version("gunicorn"), version("flask")],
    "dates": dates, "level": logging.getLogger("one").level, "system": platform.system(), "tls": str(ssl.PROTOCOL_TLS),
    "error": issubclass(ssl.SSLError, OSError), "context": sock.ssl.SSLContext is ssl.SSLContext,
    "dedented": textwrap.dedent(" a"), "date": email.utils.formatdate(0, usegmt=True), "copy": shutil.copy.__name__,
    "configurator": logging.config.DictConfigurator.__name__, "folder": tempfile.gettempdir(),
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
    assert "ssl" in plain.pop("first")  # and others, depending on the version of Python
    assert lean == plain
    assert "&lt;b&gt;" in str(lean["page"])
    assert lean["dates"][2] == "Fri, 13 Feb 2009 23:31:30 GMT"
