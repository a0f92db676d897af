"""`medusa build`: the Dockerfile that it makes, what it refuses, and an image by the tools that are here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from medusa_adapters.cli.project.build import TOOLS
from medusa_command import medusa


def build(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return medusa("build", *arguments, folder=folder, environ=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "handler.py").write_text("def handle(request):\n    return 1\n")
    return tmp_path


def test_the_dockerfile_of_a_folder(folder: Path) -> None:
    assert build(folder, "--show").stdout.splitlines() == [
        "FROM medusa-runtime", "RUN medusa snapshot --if-possible", "COPY . ./", 'ENV MEDUSA_HANDLER="handler.py"',
    ]  # fmt: skip
    (folder / "requirements.txt").write_text("numpy\n")
    shown = build(folder, "--show", "--base", "b:1", "--handler", "handler.py:handle", "--model", "s3://b/m").stdout
    assert shown.splitlines() == [
        "FROM b:1", "COPY requirements.txt ./", "RUN medusa-install", "RUN medusa snapshot --if-possible",
        "COPY . ./",
        'ENV MEDUSA_HANDLER="handler.py:handle"', 'ENV MEDUSA_MODEL="s3://b/m"',
    ]  # fmt: skip
    (folder / "Dockerfile").write_text("FROM scratch\n")
    assert build(folder, "--show").stdout == "FROM scratch\n"
    assert "expected neither --handler nor --model with it" in build(folder, "--show", "--model", "").stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nowhere",), "expected a folder"),
        (("--tag", "Upper Case"), "--tag: expected an image's name"),
        (("--handler", "other.py"), "expected the file"),
        (("--tool", "docker"), "expected docker on the PATH"),
        ((), "expected podman, docker or buildah on the PATH"),
    ],
)
def test_what_cannot_be_built_is_said(folder: Path, arguments: tuple[str, ...], text: str) -> None:
    done = build(folder, *arguments, PATH="/nowhere")
    assert done.returncode == 2
    assert text in done.stderr


def test_a_build_that_fails_says_where_the_base_image_comes_from(folder: Path) -> None:
    (folder / "podman").write_text("#!/bin/sh\necho no such image >&2\nexit 125\n")
    (folder / "podman").chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = build(folder, "--tool", "podman", PATH=path)
    assert done.returncode == 1
    assert "ended with status 125" in done.stderr
    assert "does this machine have medusa-runtime? `make image`" in done.stderr
    assert "make image" not in build(folder, "--tool", "podman", "--base", "registry.example/b:1", PATH=path).stderr


def test_neither_flags_nor_links_put_instructions_into_the_dockerfile(folder: Path) -> None:
    """What is between ENV's quotes means itself, and nothing begins a line of its own."""
    model = 's3://b/$HOME/"x"/\\y`z`'
    shown = build(folder, "--model", model, "--show").stdout
    assert shown.endswith('ENV MEDUSA_MODEL="s3://b/\\$HOME/\\"x\\"/\\\\y\\`z\\`"\n')
    for flags in (
        ("--base", "a\nRUN x"), ("--base", "--platform=x a"), ("--model", "m\nRUN x"), ("--handler", "h:f\nRUN x"),
        ("--model", "m\u2028RUN"),
    ):  # fmt: skip
        found = build(folder, *flags, "--show")
        assert (found.returncode, found.stdout) == (2, ""), found
        assert f"{flags[0]}: expected" in found.stderr
    (folder / "a\nRUN x.py").write_text("")
    assert "RUN x" not in build(folder, "--show").stdout
    (folder / "Dockerfile").symlink_to("/etc/hostname")
    found = build(folder, "--show")
    assert (found.returncode, found.stdout) == (2, "")
    assert "found a link to /etc/hostname" in found.stderr


def test_files_that_the_images_user_cannot_read_are_named(folder: Path) -> None:
    tools = folder / "tools"
    (folder / ".git").mkdir()
    tools.mkdir()
    (tools / "podman").write_text("#!/bin/sh\nexit 0\n")
    (tools / "podman").chmod(0o755)
    for name in (".git/config", ".env", "open.bin"):
        (folder / name).write_text("")
        (folder / name).chmod(0o644 if name == "open.bin" else 0o600)
    path = f"{tools}:{os.environ['PATH']}"
    assert build(folder, "--tool", "podman", PATH=path).stderr == ""
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "model.safetensors").chmod(0o600)  # as safetensors' save_file leaves it
    said = build(folder, "--tool", "podman", PATH=path).stderr
    assert said.startswith("medusa: model.safetensors can be read by the owner alone")
    assert "chmod a+r model.safetensors\n" in said


def test_a_folder_with_nothing_to_serve_is_refused(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 2
    assert "expected handler.py" in done.stderr


def works(tool: str) -> bool:
    """Return whether the tool is there and, for docker, its daemon."""
    return bool(shutil.which(tool)) and subprocess.run([tool, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.containers
@pytest.mark.parametrize("tool", TOOLS)
def test_an_image_is_built(folder: Path, tool: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not works(tool):
        pytest.skip(f"{tool} does not work here")
    base = _base_whose_commands_do_nothing(tmp_path_factory.mktemp("base"), tool)
    (folder / ".env").write_text("SECRET=1\n")
    done = build(folder, "--base", base, "--tag", "medusa-test-build:1", "--tool", tool)
    assert done.returncode == 0, done.stderr
    assert "built medusa-test-build:1" in done.stdout
    other = "podman" if tool == "buildah" else tool
    if other == "podman":
        made = ["podman", "create", "medusa-test-build:1", "x"]
        box = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()
        files = subprocess.run(
            f"podman export {box} | tar t; podman rm {box}", shell=True, capture_output=True, text=True
        )
        assert "handler.py" in files.stdout
        assert ".env" not in files.stdout
    subprocess.run([other, "rmi", "medusa-test-build:1", base], capture_output=True, check=False)


def _base_whose_commands_do_nothing(folder: Path, tool: str) -> str:
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY sh /bin/sh\n")
    compiler = ["gcc", "-static", "-nostdlib", "-x", "c", "-", "-o", folder / "sh"]
    program = 'void _start(void) { __asm__("mov $60, %eax; xor %edi, %edi; syscall"); }'
    subprocess.run(compiler, input=program, text=True, check=True)
    tag = "localhost/medusa-test-base:1"
    subprocess.run([tool, "build", "--tag", tag, folder], capture_output=True, check=True)
    return tag


@pytest.mark.containers
@pytest.mark.parametrize("tool", TOOLS[:1])
def test_a_build_that_fails_is_said(folder: Path, tool: str) -> None:
    if not works(tool):
        pytest.skip(f"{tool} does not work here")
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY missing ./\n")
    done = build(folder, "--tag", "medusa-test-build:2", "--tool", tool)
    assert done.returncode == 1
    assert "ended with status" in done.stderr
