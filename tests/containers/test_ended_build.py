"""A build whose podman is ended: podman says 0 then (4.3), and nothing may be taken for the image."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_tree import children, descendants

from .conftest import ROOT, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]  # the first test may build the base

BUILD = """
import sys
from pathlib import Path
images, folder, base, name = sys.argv[1:]
sys.path.insert(0, images)
import build
build.ROOT, build.NAME = Path(folder), name
build.build("slim", base, build.host.build_flags(Path(folder)), Path(folder))
"""
DOCKERFILE = "FROM {base} AS packages\nRUN echo begun; exec sleep 600\n"


@pytest.fixture
def base(base_image: str) -> Iterator[str]:
    """By a name of its own, which what the ended build leaves is found by."""
    name = f"localhost/medusa-test-{uuid.uuid4().hex[:12]}:base"
    podman("tag", base_image, name)
    yield name
    # Not by podman's filter (ancestor=…): of builds' containers it gives everybody's.
    for line in podman("ps", "--all", "--external", "--format", "{{.ID}} {{.Image}}").stdout.splitlines():
        if line.endswith(f" {name}"):
            podman("rm", "--force", line.split()[0], check=False)
    podman("rmi", name, check=False)


def test_a_build_that_is_ended_is_one_error(base: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.format(base=base))
    name = base.removesuffix(":base")
    command = [sys.executable, "-c", BUILD, str(ROOT / "images"), str(tmp_path), base, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said, family = [], [process.pid]
        try:
            for line in process.stdout:
                said.append(line)
                if line.strip() == "begun":
                    break
            (podman_build,) = children(process.pid)
            family += descendants(process.pid)
            os.kill(podman_build, signal.SIGTERM)
            status = process.wait(60)
        finally:
            for pid in family:  # podman leaves what the step runs, which holds the pipe
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        said += process.stdout
    assert status == 1, "".join(said)
    assert said[-1].startswith("nothing was built: expected an image of podman build, it ended with status ")
    assert podman("image", "exists", f"{name}:slim", check=False).returncode == 1
