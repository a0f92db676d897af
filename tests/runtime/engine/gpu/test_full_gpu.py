"""A start, and steps, on a GPU whose memory is full or nearly so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_gpu import (
    PROMPTS,
    Bundled,
    HostGpu,
    Recorder,
    answers,
    no_triton,
    region,
    runner_of,
    start,
)
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.engine.torch import engine as torch_engine
from medusa_runtime.errors import ConfigError, DeviceError
from torch import Tensor
from waiting import until

__all__ = ["no_triton", "region", "start"]

TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Process 7 has 77.85 GiB memory in use. Of the allocated memory 77.00 GiB is allocated by PyTorch."
)
ENDS = (
    "the GPU's memory has no room for a step beside the weights and the KV cache (Tried to allocate 2.00 GiB. GPU 0 "
    "has a total capacity of 79.10 GiB of which 1.25 GiB is free); use a larger GPU, lower --max-batched-tokens, "
    "--max-concurrency or --kv-cache-mb, or end what else runs on this one"
)


class FullGpu(HostGpu):
    """Has no memory for what is ``missing``."""

    def __init__(self, recorder: Recorder, missing: str) -> None:
        super().__init__(recorder)
        self.missing = missing
        self.freed: list[str] = []

    def memory(self, name: str, size_bytes: int) -> Tensor:
        if name == self.missing:
            raise DeviceError(f"the {name} cannot be placed: memory: expected 64 MiB of free memory, found 3 MiB")
        return super().memory(name, size_bytes)

    def free(self, name: str) -> None:
        self.freed.append(name)


@pytest.mark.parametrize("missing", ["graph inputs", "graph outputs"])
def test_without_memory_for_graphs_decoding_goes_on(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    expected = answers(start(None))
    served = start(gpu := FullGpu(Recorder(), missing))
    assert runner_of(served).graphs is None
    assert answers(served) == expected
    assert gpu.freed == ["graph inputs", "graph outputs"], "the other one may have been mapped"
    assert f"decode steps run without a CUDA graph: the {missing} cannot be placed: memory: " in caplog.text


def test_without_memory_for_a_kv_cache_one_line_says_what_to_do(start: Callable[..., Any]) -> None:
    class NoCache(HostGpu):
        def free_bytes_beside_weights(self, loader: Any) -> int:
            super().free_bytes_beside_weights(loader)
            return 1 << 10

    expected = (
        r"^the KV cache has room for 0 tokens, but one sequence needs \d+ \(1 MiB\): expected \d+ MiB of free memory "
        r"beside the weights \(\d+ MiB of it for all else\), found 0 MiB; use a larger GPU, or end what else runs on "
        r"this one$"
    )
    with pytest.raises(ConfigError, match=expected):
        start(NoCache(Recorder()), kv_cache_mb=None)


@pytest.mark.parametrize("data", [b"1", b"damaged"])
def test_memory_of_graphs_that_are_of_no_use_is_freed_before_others_are_captured(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """The bundle has one size, which does not fit here, or nothing."""
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(data))
    served = start(gpu := HostGpu(recorder := Recorder()))
    until(lambda: len(recorder.captured) == 4)
    assert gpu.closed == 1
    assert len(served.ask(PROMPTS[0], max_tokens=5).tokens) == 5


def test_memory_of_graphs_that_are_used_is_kept(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(b"1 2 4 8"))
    served = start(gpu := HostGpu(recorder := Recorder()))
    until(lambda: len(recorder.captured) == 1)  # of one sequence, which does not fit here
    assert len(served.ask(PROMPTS[0], max_tokens=5).tokens) == 5
    assert gpu.closed == 0


def fail(served: Any, monkeypatch: pytest.MonkeyPatch, times: int, error: Exception | None = None) -> None:
    """Let the next steps run out of the GPU's memory."""
    runner, left = runner_of(served), [times]
    step = runner.step

    def full(spans: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error or torch.OutOfMemoryError(TORCHS)
        return step(spans)

    monkeypatch.setattr(runner, "step", full)


def test_a_step_without_memory_ends_its_requests_with_one_line(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = start(HostGpu(None))
    fail(served, monkeypatch, 1)
    assert served.ask(PROMPTS[0], max_tokens=5).last.error == (DeviceError.code, ENDS)
    assert len(served.ask(PROMPTS[0], max_tokens=5).tokens) == 5
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == f"a step failed; its 1 requests end: {ENDS}"
    assert record.exc_info is None


@pytest.mark.parametrize(
    ("said", "full"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`", False),
    ],
)
def test_a_library_without_memory_of_the_gpu_is_known_by_what_it_says(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, said: str, full: bool
) -> None:
    """torch's allocator is not the only one: handles, and the code of kernels that run first, take memory beside it."""
    served = start(HostGpu(None))
    fail(served, monkeypatch, 1, RuntimeError(said))
    code, message = served.ask(PROMPTS[0], max_tokens=5).last.error
    assert (code == DeviceError.code) is full
    assert message.startswith("the GPU's memory has no room for a step") is full
    assert said.partition("\n")[0] in message


def test_if_no_step_has_memory_the_engine_ends_with_one_line(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = start(HostGpu(None))
    fail(served, monkeypatch, 3)
    for _ in range(2):
        assert served.ask(PROMPTS[0], max_tokens=5).last.error == (DeviceError.code, ENDS)
    served.ask(PROMPTS[0], max_tokens=5)
    until(lambda: not served.thread.is_alive())
    assert [(type(error), str(error)) for error in served.errors] == [(DeviceError, ENDS)]


def test_a_gpu_that_is_full_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: object) -> None:
        raise torch.OutOfMemoryError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "set_device", full)
    expected = r"^the GPU cannot be opened: CUDA error: out of memory; expected some hundred MiB free for .* GPU$"
    with pytest.raises(DeviceError, match=expected):
        Gpu()
