"""The primary context, made in a thread by a driver that the test controls."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from medusa_runtime.device.context import DeviceContext
from medusa_runtime.errors import DeviceError
from medusa_runtime.timeline import Timeline


def test_retains_and_releases_the_primary_context(fake_cuda: str) -> None:
    timeline = Timeline.create("engine")
    retained = ctypes.CDLL(fake_cuda).fake_retained
    with DeviceContext(library=fake_cuda, timeline=timeline) as context:
        info = context.wait()
        assert info == ("Fake 40", 1 << 37, 0x1234)
        assert retained() == 1
        context.close()
        assert retained() == 0
    assert retained() == 0
    (stage,) = timeline.stages()
    assert (stage.name, stage.process, stage.detail) == ("context", "engine", {"device": "Fake 40"})


def test_python_goes_on_while_the_context_is_made(
    fake_cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("FAKE_CUDA_GATE", str(gate))
    context = DeviceContext(library=fake_cuda)
    done = threading.Event()
    threading.Thread(target=lambda: (context.wait(), done.set()), daemon=True).start()
    subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=240)  # Python runs, waits, and runs on
    assert not done.is_set()
    gate.touch()
    assert done.wait(60)
    context.close()


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_what_the_driver_refuses_is_told(fake_cuda: str, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", function)
    context = DeviceContext(library=fake_cuda)
    with pytest.raises(DeviceError, match=rf"{function} failed: unknown error \(999\)"):
        context.wait()
    context.close()


def test_a_device_that_is_not_there(fake_cuda: str) -> None:
    with pytest.raises(DeviceError, match="expected a GPU number 1, found 1 of them"):
        DeviceContext(1, library=fake_cuda).wait()


def test_a_gpu_that_the_image_was_not_built_for_is_one_error(
    fake_cuda: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake GPU is 9.0. The error comes before a context is made."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    record = tmp_path / "medusa-gpus.txt"
    record.write_text("8.0\n8.9\n")
    wanted = r"compute capability 8\.0 or 8\.9, for which .* found Fake 40 of 9\.0; .* GPU=9\.0, or without"
    before = ctypes.CDLL(fake_cuda).fake_retained()
    with pytest.raises(DeviceError, match=wanted):
        DeviceContext(library=fake_cuda).wait()
    assert ctypes.CDLL(fake_cuda).fake_retained() == before
    record.write_text("8.0\n9.0\n")
    with DeviceContext(library=fake_cuda) as context:
        assert context.wait().name == "Fake 40"


def test_no_driver() -> None:
    with pytest.raises(DeviceError, match=r"cannot be loaded.*--device cpu"):
        DeviceContext(library="libcuda-that-is-nowhere.so").wait()
