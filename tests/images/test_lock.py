"""The locks' hashes are those that an index publishes, and podman takes no base of another digest."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
SIX = "4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274"


def test_a_hash_that_no_index_publishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: dict[str, Any] = runpy.run_path(str(ROOT / "images" / "lock.py"))
    verify = module["verify"]
    verify.__globals__["LOCKS"] = tmp_path
    for name, digest in (("six", SIX), ("torch", "0" * 64)):
        (tmp_path / "index" / name).mkdir(parents=True)
        (tmp_path / "index" / name / "index.html").write_text(f'<a href="../{name}.whl#sha256={digest}">{name}.whl</a>')
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "torch-1+cpu.whl").write_bytes(b"torch")
    ours = hashlib.sha256(b"torch").hexdigest()
    (tmp_path / "slim.txt").write_text(
        f"# Made.\nsix==1.17.0 ; python_version > '3' \\\n    --hash=sha256:{SIX}\n"
        f"torch==1+cpu \\\n    --hash=sha256:{ours}\n"
    )
    with serving(partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "index")) as url:
        monkeypatch.setenv("UV_DEFAULT_INDEX", url)
        verify("slim", None, str(tmp_path / "wheels"))
        with pytest.raises(SystemExit, match=r"has all hashes of torch$"):
            verify("slim", None, None)
        (tmp_path / "slim.txt").write_text(f"six==1.17.0 \\\n    --hash=sha256:{SIX[::-1]}\n")
        with pytest.raises(SystemExit, match=r"has all hashes of six$"):
            verify("slim", None, None)


def locked(*packages: str, **digests: str) -> str:
    """A lock of ``packages`` (a name with a version, perhaps a marker), each with a file for ``digests``' machine."""
    return "".join(f"{each} \\\n    --hash=sha256:{digests.get(each[:5], 'a') * 64}\n" for each in packages)


def test_one_lock_serves_both_architectures() -> None:
    merge = runpy.run_path(str(ROOT / "images" / "lock.py"))["merge"]
    x86_64 = locked("intel==1", "six==2", "torch===3", torch="b")
    aarch64 = locked("six==2", "torch===3", torch="c")
    both = merge({"x86_64": x86_64, "aarch64": aarch64})
    assert both == (
        locked("intel==1 ; platform_machine == 'x86_64'", "six==2")
        + f"torch===3 \\\n    --hash=sha256:{'b' * 64} \\\n    --hash=sha256:{'c' * 64}\n"
    )
    # A machine that has the wheel of torch for one of them alone keeps what it cannot see of the other one.
    assert merge({"x86_64": x86_64}, both) == both
    newer = x86_64.replace("===3", "===4").replace("bbb", "ddd")
    assert "c" * 64 not in merge({"x86_64": newer}, both)  # the hash of another version
    with pytest.raises(SystemExit, match=r"one version of six for all architectures, found ==2, ==3$"):
        merge({"x86_64": x86_64, "aarch64": locked("six==3")})
    with pytest.raises(SystemExit, match=r"a wheel of torch for one of x86_64, aarch64 in the folder, found none$"):
        merge({})


@pytest.mark.slow
def test_the_index_has_the_files_that_build_the_wheel() -> None:
    try:
        urlopen("https://pypi.org/simple/hatchling/", timeout=10).close()
    except OSError as error:
        pytest.skip(f"PyPI does not answer: {error}")
    subprocess.run([sys.executable, ROOT / "images" / "lock.py", "--verify", "build"], check=True)


class Registry(http.server.BaseHTTPRequestHandler):
    """Answers as registries do (OCI distribution), and has one manifest, which it gives for every digest."""

    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": []}
    ).encode()

    def do_GET(self) -> None:
        found = self.path == "/v2/" or (self.path.startswith("/v2/known/"))
        body = self.manifest if self.path.startswith("/v2/known/") else b"{}"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.mark.containers
@pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed")
@pytest.mark.parametrize("repository", ["known", "unknown"])
def test_a_registry_with_another_base_ends_the_build(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Registry) as url:
        host = url.removeprefix("http://")
        (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
        script = (
            "import sys, runpy\nfrom pathlib import Path\nsys.path.insert(0, 'images')\n"
            "build = runpy.run_path('images/build.py')\nfind = build['find_base']\n"
            f"find.__globals__.update(PUBLIC_BASE='{host}/{repository}@sha256:{'a' * 64}', OWN_BASE='localhost/none')\n"
            f"find(Path({str(tmp_path)!r}))"
        )
        run = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=os.environ | {"CONTAINERS_REGISTRIES_CONF": str(tmp_path / "registries.conf")},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert run.returncode == 1
    assert run.stderr.startswith(f"expected {host}/{repository}@sha256:")
    assert "--base" in run.stderr
    assert ("digest" if repository == "known" else "404") in run.stderr


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
