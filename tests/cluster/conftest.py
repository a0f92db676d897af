"""The cluster whose parts the tests of faults kill, stop and cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_cluster import BUDGET_MB, LARGE, NAMES, FaultyCluster, start
from fork_server import OF_CLUSTERS, ForkServer, server_of
from hypothesis import HealthCheck, settings
from medusa_cluster.lab.laboratory import Laboratory

# A machine may be busy: only what a test asserts decides, not how long an input took to make.
settings.register_profile("patient", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("patient")

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


@pytest.fixture(scope="session")
def cluster_fork_server() -> Iterator[ForkServer]:
    """Has imported what serves regions, and what a gateway consists of."""
    with server_of(*OF_CLUSTERS) as server:
        yield server


@pytest.fixture(scope="session")
def faulty_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    """Three nodes on links of 8 MB/s. The origin has the example, and folders for models that tests write."""
    root = tmp_path_factory.mktemp("models")
    folders = {name: root / name for name in (*NAMES, LARGE)}
    for folder in folders.values():
        folder.mkdir()
    with Laboratory(3, "64mbit", origin={"pydoc-lm": EXAMPLE, **folders}) as lab:
        yield start(lab, f"--memory-budget={BUDGET_MB}MB")
