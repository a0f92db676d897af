"""Fixtures of tests that run groups of workers."""

from __future__ import annotations

import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import make_certificates
from engine_fixtures import checkpoint, make_checkpoint, serve, serve_region
from group_fixtures import group
from host_gpu import no_triton
from live_fixtures import pair, slow
from waiting import until

from benchmarks.ports import free_port

__all__ = ["checkpoint", "group", "make_checkpoint", "no_triton", "pair", "serve", "serve_region", "slow"]


@pytest.fixture(params=["folder", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, or the URL of one in a store, for the objects of connections."""
    if request.param == "folder":
        return str(tmp_path / "shared")
    pytest.importorskip("fsspec")
    return f"memory://{tmp_path}" if request.param == "memory" else request.getfixturevalue("s3").place


class S3:
    """moto's S3 server as a process, and a folder in a bucket of it."""

    def __init__(self, port: int) -> None:
        import boto3

        self.url, self.place = f"http://127.0.0.1:{port}", f"s3://bucket/{secrets.token_hex(4)}"
        command = [sys.executable, "-m", "moto.server", "-p", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: is_open(port))
        client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        client.close()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    for package in ("s3fs", "moto.server"):
        pytest.importorskip(package)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    made = S3(free_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # those of other servers
    yield made
    made.close()


def is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A cluster's CA, and a node's certificate and key."""
    return made_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Those of another cluster."""
    return made_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def old_certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Those of another cluster, whose node's certificate has expired."""
    return made_certificates(tmp_path_factory.mktemp("certificates"), days=-1)


def made_certificates(folder: Path, days: int = 2) -> tuple[str, str, str]:
    if not shutil.which("openssl"):
        pytest.skip("needs openssl, to make certificates")
    ca, certificate, key = map(str, make_certificates(folder, days))
    return ca, certificate, key
