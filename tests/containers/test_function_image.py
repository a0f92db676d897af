"""The user's Dockerfile: packages are installed beside the runtime, and never in place of what it stands on."""

from __future__ import annotations

import re
import shlex
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import BASE, EXAMPLE, HANDLER, ROOT, load, podman

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


def test_a_constraint_of_this_machine_holds_and_its_other_settings_do_not_matter(
    build_function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "constraints.txt").write_text("iniconfig<2.1\n")
    (tmp_path / "pip.conf").write_text(
        f"[global]\nconstraint = {tmp_path}/constraints.txt\nrequire-virtualenv = true\nuser = true\n"
        f"target = {tmp_path}/target\nclient-cert = {tmp_path}/client.pem\n"
        + "".join(f"{key} = {value}\n" for key, value in load("host").pip_settings().items() if key != "constraint")
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    name, output = build_function("iniconfig\n")
    assert name is not None, output
    code = "import importlib.metadata as m; print(m.version('iniconfig'))"
    assert podman("run", "--rm", "--entrypoint", "python", name, "-c", code).stdout.strip() == "2.0.0"


def test_handler_has_bytecode(function_image: str) -> None:
    listed = podman("run", "--rm", "--entrypoint", "ls", function_image, "/function/__pycache__").stdout
    assert "handler.cpython" in listed


def test_the_commands_of_the_page_run(
    start: Callable[..., Any], base_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/images.md: its Dockerfile, `podman build` and `podman run`, beside a folder ``model``; on another port."""
    if base_image != BASE:
        pytest.skip(f"{BASE} is what the page's FROM means; MEDUSA_TEST_IMAGE names another")
    section = (ROOT / "docs/images.md").read_text().partition("## A function on it")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r"(?ms)^```(\w*)\n(.*?)^```", section))
    build, run = (shlex.split(command) for command in blocks[""].replace("\\\n", "").splitlines())
    assert (build[:2], run[:5]) == (["podman", "build"], ["podman", "run", "--rm", "-p", "8080:8080"])
    function = tmp_path / "function"
    function.mkdir()
    (function / "Dockerfile").write_text(blocks["dockerfile"])
    (function / "handler.py").write_text(HANDLER)
    (function / "requirements.txt").write_text("iniconfig==2.1.0\n")
    shutil.copytree(EXAMPLE, function / "model", ignore=shutil.ignore_patterns(".medusa"))
    monkeypatch.chdir(function)
    name = f"localhost/medusa-test-{uuid.uuid4().hex[:12]}"
    try:
        lent = load("host").user_build_flags(tmp_path)  # as the page says, where the network has an index of its own
        words = [name if word == "my-function" else word for word in build[2:]]
        podman("build", "--network", "host", *lent, *words, timeout_s=600)
        container = start(name, *run[5:-1])
        container.wait_ready()
        assert container.request("POST", "/", {"name": "you"})[1] == {"hello": "you", "uid": 1000, "iniconfig": True}
        program = podman("exec", container.name, "readlink", "/proc/1/exe").stdout.strip()
        assert program.endswith("/medusa-resume"), "expected it to continue from the snapshot in the image"
        container.remove()
    finally:
        podman("rmi", "--force", name, check=False)
