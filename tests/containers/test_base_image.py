"""What the base image is and holds: labels, modes, bytecode, size, bill of materials."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import EXAMPLE, ROOT, podman

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]  # the first test may build the base

SLIM_LIMIT_GB = "1.2"


def inspected(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(podman("image", "inspect", image).stdout)[0]
    return found


def python(image: str, code: str, *options: str) -> str:
    options = ("--rm", "--network", "none", "--read-only", *options, "--entrypoint", "python")
    return podman("run", *options, image, "-c", code).stdout.strip()


def test_configuration(base_image: str) -> None:
    config = inspected(base_image)["Config"]
    assert config["Entrypoint"] == ["medusa"]
    assert config["Cmd"] == ["serve"]
    assert config["WorkingDir"] == "/function"
    assert not config.get("User")
    assert not config.get("OnBuild")
    labels = config["Labels"]
    assert labels["com.amazonaws.sagemaker.capabilities.accept-bind-to-port"] == "true"
    assert labels["org.opencontainers.image.title"] == "medusa-runtime"


def test_everything_is_readable_by_all_and_writable_by_root_alone(base_image: str) -> None:
    code = """
import os, stat
bad = []
for top in ("/opt/medusa", "/function"):
    for folder, folders, files in os.walk(top):
        for name in (".", *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            needed = 0o555 if stat.S_ISDIR(mode) else 0o444
            if not stat.S_ISLNK(mode) and (mode & needed != needed or mode & 0o022):
                bad.append((path, oct(mode)))
print(bad)
"""
    assert python(base_image, code) == "[]"


def test_modules_come_as_bytecode_that_no_time_invalidates(base_image: str) -> None:
    code = """
import importlib.util, os, pathlib
home = pathlib.Path("/opt/medusa")
read = [home / line for line in (home / "cold-start.txt").read_text().splitlines()]
sources = [path for path in read if path.suffix == ".py" and path.name != "version.py"]  # read as text, not imported
unbuilt = [str(path) for path in sources if pathlib.Path(importlib.util.cache_from_source(path)) not in read]
print(len(read) > 300, unbuilt)
(site,) = home.glob("lib/python3*/site-packages")
bad = []
for path in [*site.glob("medusa_*/**/*.py"), *site.glob("torch/nn/**/*.py"), *site.glob("flask/*.py")]:
    if "scripts" in path.parts: continue
    cached = pathlib.Path(importlib.util.cache_from_source(path))
    if not cached.exists() or cached.read_bytes()[4:8] != bytes([1, 0, 0, 0]): bad.append(str(path))
print(bad)
print(pathlib.Path(importlib.util.cache_from_source(os.__file__)).exists())
"""
    assert python(base_image, code).splitlines() == ["True []", "[]", "True"]


def test_what_a_start_reads_is_in_the_layer_for_it(start: Callable[..., Any], base_image: str) -> None:
    """A start from this image under the build's own hook: no file but the runtime's is outside of the hot layer."""
    trace = ("--volume", f"{ROOT / 'images/trace'}:/trace:ro", "--env", "PYTHONPATH=/trace")
    model = ("--volume", f"{EXAMPLE}:/model:ro", "--env", "MEDUSA_MODEL=/model")
    container = start(base_image, *trace, "--env", "MEDUSA_TRACE=/tmp/opened", *model)
    container.wait_ready()
    chat = {"messages": [{"role": "user", "content": "This"}], "max_tokens": 2, "stream": True}
    assert container.request("POST", "/v1/completions", {"prompt": "This", "max_tokens": 2})[0] == 200
    assert container.request("POST", "/v1/chat/completions", chat)[0] == 200
    code = """
import json, os, pathlib
home = pathlib.Path("/opt/medusa")
hot = set((home / "cold-start.txt").read_text().splitlines())
lines = {os.path.normpath(line) for line in pathlib.Path("/tmp/opened").read_text().splitlines()}
read = {os.path.relpath(line, home) for line in lines if os.path.isfile(line)} - {"cold-start.txt"}
print(json.dumps([len(read & hot), sorted(path for path in read - hot if "/medusa" not in path)]))
"""
    count, elsewhere = json.loads(container.run("python", "-S", "-c", code).stdout)
    assert elsewhere == []
    assert count > 200


def test_what_was_pruned_is_not_missed(base_image: str) -> None:
    code = """
import torch, torch.testing, torch.utils.data, torch.distributed, torch.export, sympy, boto3, pydantic, cloudevents
from medusa_runtime import kernels
module = torch.compile(torch.nn.Linear(4, 2), backend="aot_eager")
print(tuple(module(torch.ones(3, 4)).shape), torch.__version__.endswith("+cpu"), torch.cuda.is_available())
boto3.client("s3", region_name="us-east-1")
"""
    assert python(base_image, code, "--tmpfs", "/tmp").splitlines()[0] == "(3, 2) True False"


def test_doctor_finds_nothing_missing_and_says_nothing_else(base_image: str) -> None:
    ran = podman("run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", base_image, "doctor")
    assert "fail" not in {line.split()[0] for line in ran.stdout.splitlines()}
    assert ran.stderr == ""


def test_nothing_of_the_building_machine_stays(base_image: str) -> None:
    paths = "/etc/pip.conf /build /source /layers /run/secrets /dev/lent"
    assert python(base_image, f"import os; print([p for p in {paths.split()!r} if os.path.exists(p)])") == "[]"
    assert python(base_image, "import os; print(os.listdir('/opt'), os.listdir('/mnt'))") == "['medusa'] []"
    environment = "\n".join(inspected(base_image)["Config"]["Env"])
    assert "index" not in environment.lower()


def test_size(base_image: str) -> None:
    command = [sys.executable, str(ROOT / "images/layers.py"), base_image, "--limit-gb", SLIM_LIMIT_GB]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "libtorch" not in ran.stderr
    command[-1] = "0.1"
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_bill_of_materials(base_image: str) -> None:
    command = [sys.executable, str(ROOT / "images/sbom.py"), base_image]
    bill = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    purls = [component["purl"] for component in bill["components"]]
    assert len(set(purls)) == len(purls)
    for beginning in ("pkg:pypi/torch@2.", "pkg:pypi/flask@", "pkg:pypi/medusa-runtime@", "pkg:deb/debian/libc6@"):
        assert any(purl.startswith(beginning) for purl in purls), beginning
    pins = subprocess.run([*command, "--requirements"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert any(pin.startswith("torch==2.") and "+" not in pin for pin in pins)
    assert not any(pin.startswith("medusa") for pin in pins)


def test_the_base_of_the_cuda_variant_has_a_compiler(base_image: str) -> None:
    """Triton compiles with it. The variant itself is in test_cuda_image.py, where somebody has built it: gigabytes."""
    bases = [name for name in ("docker.io/library/python:3.11-slim-bookworm", "localhost/medusa-debian:bookworm")
             if podman("image", "exists", name, check=False).returncode == 0]  # fmt: skip
    assert bases, f"{base_image} was built from one of them"
    name = "localhost/medusa-test-cuda-base"
    build = ("build", "--network", "host", "--target", "base", "--build-arg", "VARIANT=cuda", "--tag", name)
    try:
        podman(*build, "--build-arg", f"BASE_IMAGE={bases[0]}", str(ROOT), timeout_s=600)
        assert "gcc" in podman("run", "--rm", "--network", "none", name, "gcc", "--version").stdout
    finally:
        podman("rmi", "--force", name, check=False)
