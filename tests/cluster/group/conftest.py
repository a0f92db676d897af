"""Fixtures of tests that run groups of workers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from certificates import make_certificates
from engine_fixtures import checkpoint, make_checkpoint, serve, serve_region
from group_fixtures import group
from host_gpu import no_triton
from live_fixtures import pair, slow

__all__ = ["checkpoint", "group", "make_checkpoint", "no_triton", "pair", "serve", "serve_region", "slow"]


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
