"""The wheel: built with and without a C compiler, read, installed into an empty folder and imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ["runtime", "handler", "adapters", "templates", "pyproject.toml", "README.md", "hatch_build.py"]
PACKAGES = ["medusa_runtime", "medusa_handler", "medusa_adapters"]
LIBRARY = "medusa_runtime/kernels/libmedusa_kernels.so"

pytest.importorskip("hatchling", reason="the wheel is built offline, by the hatchling that is installed")


def build_wheel(folder: Path, compiler: str) -> tuple[Path, str]:
    """A wheel of a copy of the sources, and what the build said."""
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", ".kernels-*")
            )
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=source,
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (folder / "dist").iterdir()
    return wheel, built.stdout + built.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Compiled as ever, but in a third of the time: the last -O counts.
    return build_wheel(tmp_path_factory.mktemp("wheel"), """sh -c 'exec cc "$@" -O0' cc""")[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, "--disable-pip-version-check", str(wheel)], check=True, capture_output=True)
    return target


def run_installed(installed: Path, code: str) -> str:
    script = f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=installed)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_wheel_has_every_source_file(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        (top,) = ROOT.glob(f"*/{package}")
        sources = {
            str(path.relative_to(top.parent)) for path in top.rglob("*") if path.suffix in (".py", ".typed", ".c", ".h")
        }
        assert f"{package}/py.typed" in sources
        assert sources <= packed
    assert not [name for name in packed if name.startswith(("tests/", "benchmarks/", "examples/"))]


def test_wheel_has_the_templates(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    top = "medusa_adapters/templates/"
    packed = {name.removeprefix(top): archive.read(name) for name in archive.namelist() if name.startswith(top)}
    there = [path for path in (ROOT / "templates").rglob("*") if path.is_file() and "cache" not in str(path)]
    assert packed == {str(path.relative_to(ROOT / "templates")): path.read_bytes() for path in there}


def test_installed_package_makes_projects(installed: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from medusa_adapters.cli import new, template_folder
assert new.__file__.startswith(sys.path[0])
assert str(template_folder.template_folder("chat")).startswith(sys.path[0])
for name in new.TEMPLATES:
    new.create(name, name, Path({str(tmp_path)!r}))
"""
    run_installed(installed, code)
    assert (tmp_path / "classify" / "model" / "model.safetensors").stat().st_size > 60_000
    assert (tmp_path / "embed" / ".dockerignore").exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_wheel_with_kernels_names_its_platform(wheel: Path) -> None:
    assert "-py3-none-linux_" in wheel.name
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def test_wheel_without_a_compiler_is_pure_and_says_so(tmp_path: Path) -> None:
    wheel, said = build_wheel(tmp_path, "no-such-compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
    assert "without its CPU kernels" in said
    assert "no-such-compiler" in said


def test_installed_package_imports_without_torch(installed: Path) -> None:
    code = "import medusa_runtime; print('torch' in sys.modules, medusa_runtime.__file__)"
    assert run_installed(installed, code) == f"False {installed}/medusa_runtime/__init__.py"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_installed_kernels_are_used(installed: Path) -> None:
    code = """
import torch
from medusa_runtime import kernels
from medusa_runtime.kernels import cpu, native
assert kernels.__file__.startswith(sys.path[0]), kernels.__file__
if cpu.features() >= cpu.NEEDED:
    x, weight = torch.randn(9, 40).bfloat16(), torch.randn(7, 40).bfloat16()
    found = native.NativeKernels(256).linear(x, weight, None)
    assert torch.allclose(found.float(), (x.float() @ weight.float().T), atol=0.1, rtol=0.01)
print(kernels.describe())
"""
    assert "no compiled kernel" not in run_installed(installed, code)


def test_installed_command_is_named(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert b"medusa = medusa_adapters.cli.main:main" in archive.read(entry_points)
