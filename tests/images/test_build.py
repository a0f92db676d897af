"""An image that was not built is not taken for one that was, whatever podman's exit status says."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

IMAGES = Path(__file__).parents[2] / "images"
# Of the real one: what it writes where it succeeds, and what it says of a tag.
PODMAN = """#!/bin/sh
if [ "$1" = build ]; then
    echo "$@" >> {folder}/calls
    {build}
    exit {status}
fi
echo {tagged}
"""
BUILT = 'echo -n sha256:new > "$3"'

Build = Callable[..., None]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """images/build.py's ``build`` with a podman that ends as it is told."""
    monkeypatch.syspath_prepend(IMAGES)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    module: dict[str, Any] = runpy.run_path(str(IMAGES / "build.py"))
    for name in ("host", "podman"):
        monkeypatch.delitem(sys.modules, name)

    def run(variant: str = "slim", gpus: str | None = None, architecture: str | None = None, **ends: object) -> None:
        podman = tmp_path / "podman"
        podman.write_text(PODMAN.format(folder=tmp_path, **({"build": BUILT, "status": 0, "tagged": "new"} | ends)))
        podman.chmod(0o755)
        module["build"](variant, "base", [], tmp_path, gpus, architecture)

    return run


def test_each_stage_is_a_call_and_the_last_one_is_tagged(build: Build, tmp_path: Path) -> None:
    build()
    packages, runtime, image = (tmp_path / "calls").read_text().splitlines()
    assert "--target packages" in packages
    assert "--target runtime" in runtime
    assert "--target" not in image
    assert "GPU=" not in (tmp_path / "calls").read_text()
    assert "--tag localhost/medusa-runtime:slim --tag localhost/medusa-runtime:latest" in image


def test_an_image_for_named_machines_does_not_take_the_place_of_this_ones(build: Build, tmp_path: Path) -> None:
    build(architecture="arm64")
    calls = (tmp_path / "calls").read_text()
    assert calls.count("--arch=arm64") == 3
    assert "--tag localhost/medusa-runtime:slim-arm64" in calls
    assert "latest" not in calls


def test_several_variants_are_built_with_what_pip_uses_here(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("a certificate\n")
    podman = tmp_path / "podman"
    podman.write_text(PODMAN.format(folder=tmp_path, build=BUILT, status=0, tagged="new"))
    podman.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PIP_CERT": str(tmp_path / "cert.pem")}
    command = [sys.executable, str(IMAGES / "build.py"), "--base", "base", "slim", "cpu"]
    ran = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["VARIANT=cpu" in call for call in calls] == [False] * 3 + [True] * 3
    assert all(":/dev/lent/pip:ro" in call for call in calls)


def test_the_gpus_are_passed_to_each_stage(build: Build, tmp_path: Path) -> None:
    build("cuda", "8.0,9.0")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["--build-arg GPU=8.0,9.0" in call for call in calls] == [True] * 3
    assert "ARG GPU\n" in (IMAGES.parent / "Dockerfile").read_text()


@pytest.mark.parametrize(("ends", "status"), [({"build": ":"}, 0), ({"build": ":", "status": 125}, 125)])
def test_a_podman_that_made_no_image_is_one_error(build: Build, ends: dict[str, object], status: int) -> None:
    with pytest.raises(SystemExit, match=f"expected an image of podman build, it ended with status {status}"):
        build(**ends)


def test_a_tag_of_another_image_is_one_error(build: Build) -> None:
    with pytest.raises(SystemExit, match="slim was not built: expected it to name the new image new"):
        build(tagged="old")
