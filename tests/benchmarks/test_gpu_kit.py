"""The kit for a GPU machine without a network: packed from a folder of wheels, and unpacked."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import kit

FATBIN = Path(__file__).parents[1] / "images/nothing.fatbin"  # code for all architectures
VLLM = "0.32.0"  # as in images/locks/cuda.txt


def library(folder: Path, *, code: bool) -> bytes:
    source = folder / "library.s"
    source.write_text(f'.section .nv_fatbin,"a",@progbits\n.incbin "{FATBIN}"\n' if code else ".data\n.byte 1\n")
    subprocess.run(["cc", "-shared", "-nostdlib", "-o", folder / "library.so", source], check=True)
    return (folder / "library.so").read_bytes()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source, with a wheel that has vLLM's name and some of its files."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = f"vllm-{VLLM}.dist-info"
    files = {
        "vllm/__init__.py": b"VALUE = 3\n",
        "vllm/_C.abi3.so": library(tmp_path, code=True),
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": library(tmp_path, code=False),
        "vllm/third_party/fmha_sm100/include/a.h": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}\nRequires-Dist: torch\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"vllm-{VLLM}-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    (tmp_path / "packages.txt").write_text("# a comment\nvllm\n")
    return folder


@pytest.mark.timeout(200)
def test_a_kit_has_the_machine_code_of_one_gpu_and_can_be_imported(wheels: Path, tmp_path: Path) -> None:
    archive, folder = tmp_path / "out/kit.tar.xz", tmp_path / "unpacked"
    kit.pack(archive, [90], "3.12", packages=tmp_path / "packages.txt")
    with tarfile.open(archive) as tar:
        names = {name.removeprefix("./") for name in tar.getnames()}
    assert {name for name in names if name.startswith("vllm/")} == {
        "vllm/__init__.py", "vllm/_C.abi3.so", "vllm/vllm_flash_attn", "vllm/third_party"
    }  # fmt: skip
    kit.unpack(archive, folder)
    whole, found = library(tmp_path, code=True), (folder / "vllm/_C.abi3.so").read_bytes()
    assert len(found) == len(whole)
    assert found.count(0) > whole.count(0) + len(FATBIN.read_bytes()) // 2, "the code of other GPUs is still there"
    assert list(folder.glob("vllm/__pycache__/*.pyc"))
    command = [sys.executable, "-c", "import vllm; print(vllm.VALUE)"]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
    (folder / "vllm/__init__.py").write_text("VALUE = 4\n")
    kit.unpack(archive, folder)
    assert (folder / "vllm/__init__.py").read_text() == "VALUE = 4\n", "it was unpacked twice"


@pytest.mark.timeout(200)
def test_what_was_unpacked_in_part_is_unpacked_again(wheels: Path, tmp_path: Path) -> None:
    archive, folder = tmp_path / "kit.tar.xz", tmp_path / "unpacked"
    kit.pack(archive, [90], "3.12", packages=tmp_path / "packages.txt")
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm/other.py").touch()
    kit.unpack(archive, folder)
    assert sorted(path.name for path in folder.glob("vllm/*.py")) == ["__init__.py"]


def test_a_gpu_without_machine_code_is_refused(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--gpu 1\.0: expected machine code"):
        kit.pack(tmp_path / "kit.tar.xz", [10], "3.12", packages=tmp_path / "packages.txt")
    assert not (tmp_path / "kit.tar.xz").exists()


def test_each_package_has_a_version_or_is_for_tests_alone() -> None:
    """Others would be of whatever version is newest on the day."""
    names = [line for line in kit._PACKAGES.read_text().split("\n") if line and not line.startswith("#")]
    locked = {line.partition("==")[0].replace("_", "-").lower() for line in kit._LOCK.read_text().splitlines()}
    free = {name for name in names if name.replace("_", "-").lower() not in locked}
    assert free == {"iniconfig", "pluggy", "pytest", "pytest-timeout"}
