"""What the driver says of a machine's GPUs, asked of a fake library."""

from __future__ import annotations

import pytest
from medusa_runtime.device.nvml import GpuInfo, Nvml
from medusa_runtime.errors import DeviceError


def test_gpus_are_described(fake_nvml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GPUS", "NVIDIA H200,GPU-a,150000,149000,5,16\nNVIDIA GB10,GPU-b,0,0,99,1")
    nvml = Nvml(fake_nvml)
    assert nvml.gpus() == [
        GpuInfo("GPU-a", "NVIDIA H200", 150 * 10**9, 149 * 10**9, pytest.approx(55.4e9, rel=0.01)),  # type: ignore[arg-type]
        GpuInfo("GPU-b", "NVIDIA GB10", 0, 0, 0.0),  # shares the host's memory, and its link is of an unknown kind
    ]
    nvml.close()


def test_what_the_library_cannot_do_is_said(fake_nvml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML", "nvmlDeviceGetCount_v2")
    with pytest.raises(DeviceError, match="nvmlDeviceGetCount_v2 failed with NVML's error 999"):
        Nvml(fake_nvml).gpus()
    monkeypatch.setenv("FAKE_NVML", "nvmlInit_v2")
    with pytest.raises(DeviceError, match="nvmlInit_v2 failed"):
        Nvml(fake_nvml)
    with pytest.raises(DeviceError, match="cannot be loaded"):
        Nvml("/nowhere/libnvidia-ml.so.1")


def test_of_a_gpu_in_mig_mode_the_parts_are_described(fake_nvml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = "H100 MIG 1g.10gb,MIG-a,10000,9000,0,0\nH100 MIG 2g.20gb,MIG-b,20000,8000,0,0"
    empty = "H100,GPU-e,80000,79000,5,16\nnone,MIG-0,1,1,0,0"
    monkeypatch.setenv("FAKE_GPUS", f"H100,GPU-x,80000,70000,5,16\n{parts}\nL4,GPU-y,24000,23000,4,8\n{empty}")
    nvml = Nvml(fake_nvml)
    link = pytest.approx(55.4e9, rel=0.01)
    assert nvml.gpus() == [
        GpuInfo("MIG-a", "H100 MIG 1g.10gb", 10 * 10**9, 9 * 10**9, link),  # type: ignore[arg-type]
        GpuInfo("MIG-b", "H100 MIG 2g.20gb", 20 * 10**9, 8 * 10**9, link),  # type: ignore[arg-type]
        GpuInfo("GPU-y", "L4", 24 * 10**9, 23 * 10**9, pytest.approx(13.9e9, rel=0.01)),  # type: ignore[arg-type]
    ]
    assert [gpu.is_part for gpu in nvml.gpus()] == [True, True, False]
    monkeypatch.setenv("FAKE_NVML", "nvmlDeviceGetMigMode")  # a driver that does not know it
    assert [gpu.uuid for gpu in nvml.gpus()] == ["GPU-x", "GPU-y", "GPU-e"]
    nvml.close()


def test_a_gpu_that_is_hidden_or_lost_hides_no_other(fake_nvml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "A10,{},24000,9000,4,16"
    monkeypatch.setenv("FAKE_GPUS", "\n".join(map(line.format, ("error 4", "GPU-a", "error 15", "GPU-b"))))
    nvml = Nvml(fake_nvml)
    assert [(gpu.uuid, gpu.lost) for gpu in nvml.gpus()] == [("GPU-a", False), ("", True), ("GPU-b", False)]
    parts = "1g,MIG-a,10000,9000,0,0\n1g,MIG-lost,10000,9000,0,0"  # lost while its parts are listed
    monkeypatch.setenv("FAKE_GPUS", f"{line.format('GPU-a')}\n{parts}\n{line.format('GPU-b')}")
    assert [(gpu.uuid, gpu.lost) for gpu in nvml.gpus()] == [("", True), ("GPU-b", False)]
    monkeypatch.setenv("FAKE_GPUS", line.format("error 999"))
    with pytest.raises(DeviceError, match="nvmlDeviceGetHandleByIndex_v2 failed with NVML's error 999"):
        nvml.gpus()
    nvml.close()
