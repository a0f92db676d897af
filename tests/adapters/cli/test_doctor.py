"""The doctor's findings on this machine, and on one with something wrong."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import medusa_runtime
import pytest
from medusa_adapters.cli import doctor
from medusa_runtime.config import Settings
from plain_environ import plain_environ

MEDUSA = Path(sys.executable).with_name("medusa")
# The command without its last check, which takes seconds to import torch.
QUICK = """
import sys
from medusa_adapters.cli import doctor
from medusa_adapters.cli.main import main
doctor._torch = lambda: iter(())
sys.exit(main(sys.argv[1:]))
"""


def test_this_machine_can_serve() -> None:
    """A machine on which the tests run fails in nothing; every line has level, name and finding."""
    environ = plain_environ()
    result = subprocess.run([MEDUSA, "doctor", "--port", "0"], capture_output=True, text=True, env=environ, timeout=240)
    assert result.returncode == 0, result.stdout
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines() if not line.strip().startswith("→")]
    assert {level for level, *_ in lines} <= {"ok", "-", "warn"}
    assert {"python", "cpus", "memory", "memfd", "torch", "port", "boto3"} <= {name for _, name, *_ in lines}


def test_a_port_in_use_fails_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = doctor._port(Settings(host="127.0.0.1", port=taken.getsockname()[1]))
    assert finding.level == "fail"
    assert "--port" in finding.advice


def test_a_temporary_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nothing"))
    finding = next(doctor._files())
    assert finding.level == "fail"
    assert "TMPDIR" in finding.advice


def test_a_missing_compiler_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images have none, and need none."""
    monkeypatch.setenv("CC", "no-such-compiler")
    (finding,) = doctor._compiler()
    assert (finding.level, finding.advice) == ("-", "")
    assert finding.found.startswith("no-such-compiler was not found; only building from source needs it")


@pytest.mark.parametrize(
    ("limit", "level"), [("-n 40", "fail"), ("-n 500", "warn"), ("-Sn 500", "ok"), ("-v 300000", "fail")]
)
def test_small_limits_are_findings(limit: str, level: str) -> None:
    script = f'ulimit {limit}; exec "$@"'
    medusa = [MEDUSA] if "-v" in limit else [sys.executable, "-c", QUICK]
    command = ["bash", "-c", script, "bash", *medusa, "doctor", "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines() if not line.strip().startswith("→")]
    name = "torch" if "-v" in limit else "open files"
    assert [found for found, rest in lines if rest.startswith(name)] == [level], result.stdout
    assert "Traceback" not in result.stderr
    assert result.returncode == (1 if level == "fail" else 0)


def test_kernels_that_were_not_compiled_come_with_what_compiles_them(tmp_path: Path) -> None:
    source = Path(medusa_runtime.__file__).parent
    shutil.copytree(source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    result = subprocess.run(
        [MEDUSA, "doctor", "--port", "0"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    warned = lines.index(f"{'warn':5} {'kernels':16} not compiled")
    assert lines[warned + 1].endswith("medusa_runtime/kernels/build.py")


def _installed_nowhere(name: str) -> str:
    raise PackageNotFoundError(name)


def test_a_missing_package_comes_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "version", _installed_nowhere)
    found = {finding.name: finding for finding in doctor._packages()}
    assert found["flask"].level == "fail"
    assert found["boto3"].level == "-"
    assert "pip install 'medusa-runtime[s3]'" in found["boto3"].found
    (torch,) = doctor._torch()
    assert (torch.level, torch.found) == ("fail", "not installed")
    assert "pip install torch --index-url https://download.pytorch.org/whl/cpu" in torch.advice


def test_a_build_of_torch_for_gpus_without_one_comes_with_the_command_for_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = next(doctor._torch())
    assert finding.level == "warn"
    assert f"{sys.executable} -m pip install torch --index-url https://download.pytorch.org/whl/cpu" in finding.advice


@pytest.mark.parametrize(
    ("here", "level", "found"),
    [
        ((9, 0), "ok", "only for compute capability 8.0 or 9.0"),
        (None, "ok", "only for compute capability 8.0 or 9.0"),
        ((8, 9), "fail", "expected a GPU of compute capability 8.0 or 9.0, for which this image was built, found X of"),
    ],
)
def test_an_image_for_some_gpus_says_for_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: tuple[int, int] | None, level: str, found: str
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: here)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert "gpu code" not in {finding.name for finding in doctor._torch()}
    (tmp_path / "medusa-gpus.txt").write_text("8.0\n9.0\n")
    (finding,) = [finding for finding in doctor._torch() if finding.name == "gpu code"]
    assert finding.level == level
    assert finding.found.startswith(found)


def test_a_torch_that_makes_starts_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untested version is imported plainly, which a start's log says once, and nobody looks there."""
    monkeypatch.setattr("medusa_runtime.imports.lazy_torch.TESTED", ("1.0.", "1.1."))
    finding = next(finding for finding in doctor._torch() if "plainly" in finding.found)
    assert finding.level == "warn"
    assert finding.found.endswith("the lean import was tested with 1.0.*, 1.1.*")


def test_the_author_of_a_checkpoint_changes_no_terminal(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[3] / "examples/pydoc-lm", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["\x1b]0;owned\x07" * 10_000]}))
    found = subprocess.run(
        [sys.executable, "-c", QUICK, "doctor", "--port", "0", str(tmp_path)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    (line,) = [line for line in found.stdout.splitlines() if "does not know the architecture" in line]
    assert line.isprintable()
    assert len(line) < 1000


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    (finding,) = doctor._storage(Settings(model=str(tmp_path / "nothing")), chosen=False)
    assert finding.level == "fail"
    assert "nothing" in finding.found
