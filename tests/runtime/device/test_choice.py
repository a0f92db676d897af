"""The choice of CPU or GPU, from the files in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.device.choice import choose, warn_without_effect
from medusa_runtime.errors import DeviceError


def machine(root: Path, *, node: str | None = "nvidiactl", cuda: str | None = "'13.0'") -> dict[str, Path]:
    (root / "dev").mkdir()
    (root / "torch").mkdir()
    if node:
        (root / "dev" / node).touch()
    if cuda:
        (root / "torch/version.py").write_text(f"__version__ = '2'\ncuda: Optional[str] = {cuda}\nhip = None\n")
    return {"root": root, "torch": root / "torch"}


@pytest.mark.parametrize("node", ["nvidiactl", "dxg"])
def test_auto_takes_a_gpu_that_torch_can_use(tmp_path: Path, node: str) -> None:
    there = machine(tmp_path, node=node)
    assert choose("auto", {}, **there) == "cuda"
    for visible in ("0", "1,0", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-a6a1ba2b-7b9c-5b1f-a1a4-1b1b2a0c3d4e"):
        assert choose("cuda", {"CUDA_VISIBLE_DEVICES": visible}, **there) == "cuda"
    assert choose("cpu", {}, **there) == "cpu"


@pytest.mark.parametrize(
    ("parts", "environ", "reason"),
    [
        ({"node": None}, {}, "expected a GPU's device files"),
        ({"cuda": "None"}, {}, "expected a torch built for CUDA"),
        ({"cuda": None}, {}, "expected a torch built for CUDA"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES='-1' hides all GPUs"),
        ({}, {"CUDA_VISIBLE_DEVICES": "-1,0"}, "CUDA_VISIBLE_DEVICES='-1,0' hides all GPUs"),
    ],
)
def test_what_stands_against_it(
    tmp_path: Path, parts: dict[str, str | None], environ: dict[str, str], reason: str
) -> None:
    there = machine(tmp_path, **parts)
    assert choose("auto", environ, **there) == "cpu"
    with pytest.raises(DeviceError, match=reason):
        choose("cuda", environ, **there)


def test_this_machine_decides_without_importing_torch() -> None:
    import subprocess
    import sys

    code = (
        "import os, sys; from medusa_runtime.device.choice import choose; "
        "choose('auto', os.environ); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_settings_without_effect_on_the_device_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for settings, expected in (
        (
            Settings(device="cpu", host_weights="release"),
            ["--host-weights release has no effect on a CPU; it is for GPUs"],
        ),
        (Settings(device="cuda", host_weights="release", graphs="capture"), []),
        (Settings(device="cuda", threads=2), ["--threads 2 has no effect on a GPU; it is for CPUs"]),
        (
            Settings(device="cuda", threads=2, engine="vllm", kernels="library"),
            ["--kernels library has no effect on a GPU; it is for CPUs"],
        ),
        (Settings(device="cpu", threads=2), []),
    ):
        caplog.clear()
        warn_without_effect(settings)
        assert caplog.messages == expected
