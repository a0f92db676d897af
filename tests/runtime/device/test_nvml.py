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
