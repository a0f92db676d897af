"""The wheel: built with and without a C compiler, read, installed into an empty environment, and served from."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from built_once import built_once
from medusa_adapters.bench.served_instance import ServedInstance, serve_command
from medusa_runtime.kernels import build

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "docs", "monitoring"]
PARTS = ["runtime", "handler", "adapters", "templates", "pyproject.toml", "hatch_build.py", *DOCUMENTS]
PACKAGES = ["medusa_snapshot", "medusa_runtime", "medusa_handler", "medusa_adapters"]
LIBRARY = "medusa_runtime/kernels/libmedusa_kernels.so"
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-gcc")

pytest.importorskip("hatchling", reason="the wheel is built offline, by the hatchling that is installed")


def build_wheel(folder: Path, compiler: str, kernels: bool = True) -> tuple[Path, str]:
    """A wheel of a copy of the sources, and what the build said. Without ``kernels``, these are empty files."""
    source = folder / "source"
    source.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", ".kernels-*")
            )
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    for path in () if kernels else source.glob("runtime/medusa_runtime/kernels/source/**/*.c"):
        path.write_text("")
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
    compiler = """sh -c 'exec cc "$@" -O0' cc"""
    if shutil.which("cc") and build.is_fresh():
        compiler = str(compiled_already(tmp_path_factory.mktemp("compiler")))
    (made,) = built_once(tmp_path_factory, "wheel", lambda folder: build_wheel(folder, compiler)).glob("dist/*")
    return made


def compiled_already(folder: Path) -> Path:
    """A compiler that gives what the installation has compiled of the same sources. `make wheels` compiles them."""
    (script := folder / "cc").write_text(
        f"""#!/bin/sh
for argument; do
    [ "$before" = -o ] && made=$argument
    before=$argument
done
case "$*" in
    *-dumpmachine*) exec cc "$@" ;;
    -shared*) exec cp '{build.LIBRARY_DIR / build.LIBRARY_NAME}' "$made" ;;
    *" -c "*) exec touch "$made" ;;
    *) exec cp '{build.LIBRARY_DIR / build.PROGRAM_NAME}' "$made" ;;
esac
"""
    )
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    command += ["--target", str(target), "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
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


def test_wheel_has_the_documents_and_all_that_they_link_to(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    top = next(name for name in archive.namelist() if name.endswith("/README.md") and ".data/" in name)
    assert top.endswith(".data/data/share/doc/medusa-runtime/README.md")
    folder = Path(top).parent
    packed = {os.path.relpath(name, folder) for name in archive.namelist()}
    assert {"docs/troubleshooting.md", "monitoring/prometheus-alerts.yaml"} <= packed
    pages = [name for name in packed if name.endswith(".md") and not name.startswith("..")]
    assert len(pages) > 40
    for page in pages:
        for link in re.findall(r"\]\(([^)#\s]+)", archive.read(f"{folder}/{page}").decode()):
            there = os.path.normpath(Path(page).parent / link)
            assert "://" in link or there in packed, f"{page} links to {link}"


def test_help_says_where_the_documents_are(wheel: Path, tmp_path: Path) -> None:
    made = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", tmp_path / "empty"]
    subprocess.run(made, check=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        tmp_path / "empty/bin/python",
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run(
        [*command, "--no-index", "--no-compile", "--ignore-installed", wheel], check=True, capture_output=True
    )
    ran = subprocess.run([tmp_path / "empty/bin/medusa", "--help"], capture_output=True, text=True, check=True)
    assert f"\ndocuments: {tmp_path}/empty/share/doc/medusa-runtime/README.md\n" in ran.stdout


def test_installed_package_makes_projects(installed: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from medusa_adapters.cli.project import new, template_folder
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


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="snapshots are for x86-64 and aarch64")
def test_an_installed_package_makes_snapshots(installed: Path, tmp_path: Path) -> None:
    assert os.access(installed / "medusa_runtime/kernels/medusa-resume", os.X_OK)
    command = "from medusa_adapters.cli.main import main\nsys.exit(main(['snapshot', '--out', sys.argv[1]]))"
    script = f"import sys; sys.path.insert(0, {str(installed)!r})\n{command}"
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    made = subprocess.run([sys.executable, "-c", script, tmp_path], env=environ, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert b"installed" in next(tmp_path.glob("torch-*/conditions")).read_bytes()


@pytest.mark.skipif(CROSS_COMPILER is None, reason="no aarch64-linux-gnu-gcc")
def test_wheel_names_the_platform_that_the_compiler_is_for(tmp_path: Path) -> None:
    wheel, _ = build_wheel(tmp_path, str(CROSS_COMPILER), kernels=False)
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")
    library = zipfile.ZipFile(wheel).read(LIBRARY)
    assert int.from_bytes(library[18:20], "little") == 183  # EM_AARCH64


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
from medusa_runtime.imports.lazy_torch import import_torch
import_torch()  # a second less than plainly
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


def test_the_command_is_a_module_too(installed: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "medusa_adapters", "--version"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=installed)
    assert (
        ran.stdout
        == "medusa-runtime "
        + run_installed(installed, "import medusa_runtime; print(medusa_runtime.__version__)")
        + "\n"
    )


def _is_newer_glibc() -> bool:
    """Whether this machine has a newer glibc than Debian 12, on which wheels are built."""
    _, _, found = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    return tuple(map(int, found.split("."))) > (2, 36) if found else True


@pytest.mark.skipif(shutil.which("objdump") is None or shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(_is_newer_glibc(), reason="it would be linked against this machine's glibc")
def test_kernels_need_no_newer_glibc_than_torch(wheel: Path, tmp_path: Path) -> None:
    """torch's wheels are for glibc 2.28 and newer."""
    library = zipfile.ZipFile(wheel).extract(LIBRARY, tmp_path)
    symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    needed = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", symbols)}
    assert needed
    assert max(needed) <= (2, 28)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheels` builds."""
    source = tmp_path_factory.mktemp("wheels") / "source"
    source.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = ["make", "wheels", f"BIN={Path(sys.executable).parent}", "-o", "setup-dev"]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return source / "dist"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None or shutil.which("git") is None, reason="no C compiler, or no git")
def test_make_wheels_builds_one_for_every_machine(wheels: Path, tmp_path: Path) -> None:
    """pip takes the compiled one on x86-64, on aarch64 where that was cross-compiled, and else the pure one."""
    with tarfile.open(next(wheels.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kernel = "runtime/medusa_runtime/kernels/source/compute/linear.c"
    assert {"LICENSE", "hatch_build.py", kernel, "tests/test_packaging.py"} <= names
    assert {"CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml", ".dockerignore"} <= names  # README.md and make name them
    for system, tag in (
        ("manylinux_2_27_x86_64", "-py3-none-manylinux_2_27_x86_64."),
        ("manylinux_2_27_aarch64", f"-py3-none-{'manylinux_2_27_aarch64' if CROSS_COMPILER else 'any'}."),
        ("manylinux_2_27_ppc64le", "-py3-none-any."),
    ):
        for python in ("3.11", "3.15"):
            target = tmp_path / f"{system}-{python}"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-index", "--find-links"]
            command += [str(wheels), "--only-binary=:all:", "--platform", system, "--python-version", python]
            subprocess.run([*command, "--dest", str(target), "medusa-runtime"], check=True, capture_output=True)
            (found,) = target.iterdir()
            assert tag in found.name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [f"manylinux*_{os.uname().machine}", "none-any"])
def test_a_function_is_served_from_an_empty_environment(wheels: Path, tmp_path: Path, kind: str) -> None:
    (wheel,) = wheels.glob(f"*{kind}*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    constraint = tmp_path / "constraint"  # the same build of torch, not gigabytes of another
    constraint.write_text(f"torch=={version('torch')}\n")
    command = [str(tmp_path / "empty/bin/python"), "-m", "pip", "install", "--quiet", "--constraint", str(constraint)]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MEDUSA_", "PYTHON"))}
    serve = serve_command("--model", ROOT / "examples/pydoc-lm", python=str(tmp_path / "empty/bin/python"))
    with ServedInstance(serve, environment, inherit=False, folder=tmp_path, tied=False) as instance:
        body = json.dumps({"prompt": "Return the", "max_tokens": 4})
        answer = instance.exchange("POST", "/v1/completions", body, {"Content-Type": "application/json"}, timeout_s=120)
        instance.process.terminate()
        status = instance.process.wait(60)
        assert answer.json["choices"][0]["text"], instance.output()
    assert status == 0
