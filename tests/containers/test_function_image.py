"""The user's Dockerfile: packages are installed beside the runtime, and never in place of what it stands on."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]  # the first test may build the base


def test_requirements_are_installed_and_torch_stays(base_image: str, function_image: str) -> None:
    code = "import importlib.metadata as m; print(m.version('iniconfig'), m.version('torch'))"
    in_function = podman("run", "--rm", "--entrypoint", "python", function_image, "-c", code).stdout.split()
    code = "import importlib.metadata as m; print(m.version('torch'))"
    in_base = podman("run", "--rm", "--entrypoint", "python", base_image, "-c", code).stdout.strip()
    assert in_function == ["2.1.0", in_base]


def test_another_torch_is_refused(build_function: Any) -> None:
    name, output = build_function("torch==2.7.0\n")
    assert name is None
    assert "torch" in output
    assert "conflict" in output.lower() or "cannot install" in output.lower()


def test_handler_has_bytecode(function_image: str) -> None:
    listed = podman("run", "--rm", "--entrypoint", "ls", function_image, "/function/__pycache__").stdout
    assert "handler.cpython" in listed
