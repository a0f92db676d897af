"""The requests that the last offline start answers, so that the kernels of an instance's first requests are kept."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from answering_engine import AnsweringEngine
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest
from medusa_runtime.engine.gpu.attempts import CHECK, Attempts
from medusa_runtime.engine.gpu.graph_capture import ATTEMPTS, errors_in_one_line
from medusa_runtime.errors import DeviceError, EngineError
from medusa_runtime.state.graphs import Blueprints
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import GraphBlueprint
from medusa_vllm import COMPILE_CACHE, TRITON_KERNELS
from medusa_vllm.compiled.model import INDEX

pytestmark = pytest.mark.vllm


class Engine(AnsweringEngine):
    """An engine whose context breaks at the request of this name: it cannot be closed then."""

    breaks = ""
    config = SimpleNamespace(compilation_config=SimpleNamespace(mode="NONE"))
    opened: Engine

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.broken = threading.Event()
        Engine.opened = self

    def run(self, stop: threading.Event) -> None:
        self._loaded.set()
        while not stop.wait(0.01):
            if self.broken.is_set():
                raise DeviceError("a replay failed")

    def add(self, request: GenerateRequest, sink: Callable[[Delta], None]) -> None:
        if request.id == self.breaks:
            self.broken.set()
        else:
            super().add(request, sink)

    def close(self) -> None:
        if self.broken.is_set():
            raise RuntimeError("CUDA error: the context is broken")


@pytest.fixture
def check(parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Path]:
    """A function that checks blueprints without graphs in this process, and returns the folder with the results."""
    from medusa_vllm import engine
    from medusa_vllm.gpu import graph_capture

    kernels = tmp_path / "caches" / "triton" / "ABC"
    kernels.mkdir(parents=True)
    (kernels / "add.cubin").write_bytes(b"kernel")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels.parent))
    monkeypatch.setattr(engine, "VllmEngine", Engine)
    monkeypatch.setattr(graph_capture, "fetch_and_import", lambda settings: (None, None))
    monkeypatch.setattr(parts.worker.GpuWorker, "check", None)
    save_blueprints(Blueprints(), tmp_path / "unchecked")

    def check(max_concurrency: int) -> Path:
        settings = Settings(engine="vllm", max_concurrency=max_concurrency)
        graph_capture._check(settings, tmp_path / "out", tmp_path / "unchecked")
        return tmp_path

    return check


@pytest.mark.timeout(120)
@pytest.mark.parametrize("most", [1, 256])
def test_batches_are_as_large_as_an_instances(check: Callable[[int], Path], most: int) -> None:
    made = check(most)
    batches = [(count, min(count, most)) for _ in range(3) for count in (1, 2, 16)]
    assert [len(prompt) for prompt in Engine.opened.asked] == [tokens for tokens, rows in batches for _ in range(rows)]
    assert (made / TRITON_KERNELS.name).exists()


@pytest.mark.timeout(120)
def test_prompts_are_as_long_as_the_model_takes(check: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "info", SimpleNamespace(vocab_size=64, max_model_len=8))
    check(256)
    assert max(len(prompt) for prompt in Engine.opened.asked) == 5


@pytest.mark.timeout(120)
def test_an_engine_that_breaks_in_a_request_leaves_graphs_and_kernels(
    check: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Engine, "breaks", "first-1-2-0")
    with caplog.at_level(logging.WARNING):
        made = check(256)
    assert decode_blueprints((made / "out").read_bytes()) == Blueprints()
    assert (made / TRITON_KERNELS.name).exists()
    assert "not all kernels of first requests can be kept: a replay failed" in caplog.text


@pytest.mark.timeout(120)
def test_graphs_with_which_a_request_breaks_the_context_are_left_out(
    check: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which of them did is not known. Another process starts without them, and answers the same requests."""
    from medusa_vllm.gpu.graph_check import GraphCheck

    unchecked = Blueprints(graphs=tuple(GraphBlueprint(key, (), (), b"") for key in ("one", "two")))
    save_blueprints(unchecked, tmp_path / "unchecked")
    with monkeypatch.context() as first:
        first.setattr(Engine, "breaks", "first-1-2-0")
        first.setattr(GraphCheck, "result", lambda self: self.unchecked)
        first.setattr(GraphCheck, "context_is_lost", lambda self: True)
        with pytest.raises(DeviceError, match="a replay failed"):
            check(256)
    attempts = Attempts(tmp_path / ATTEMPTS)
    assert attempts.unfinished() == [[CHECK, "one", "two"]]
    made = decode_blueprints((check(256) / "out").read_bytes())
    assert made.graphs == ()
    assert sorted(made.refused) == ["one", "two"]
    assert len(attempts.unfinished()) == 1


@pytest.mark.timeout(120)
def test_a_full_disk_is_one_error(
    check: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the compiled code of the first start is packed."""
    from medusa_vllm.gpu import graph_capture

    def start(*arguments: Any, capture: Path, **options: Any) -> Engine:
        (capture / INDEX).write_text("{}")
        (capture / "0.aot").write_bytes(os.urandom(1 << 20))
        return Engine()

    def record() -> None:
        with errors_in_one_line(), graph_capture._recorded(settings, tmp_path / "out", shifted=True):
            pytest.fail("there is no compiled code")

    settings = Settings(engine="vllm", compile="always")
    monkeypatch.setattr("medusa_vllm.engine.VllmEngine", start)
    monkeypatch.setattr("medusa_vllm.gpu.worker.GpuWorker.recording", None)
    (tmp_path / COMPILE_CACHE.name).symlink_to("/dev/full")
    with pytest.raises(SystemExit, match=r"there is no room left for the output: a disk, .* is full; make room"):
        record()


@pytest.mark.timeout(120)
def test_graphs_that_were_not_checked_are_not_kept(
    check: Callable[[int], Path], parts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def result(self: Any) -> None:
        raise EngineError("nothing was checked")

    monkeypatch.setattr("medusa_vllm.gpu.graph_check.GraphCheck.result", result)
    with pytest.raises(EngineError, match="nothing was checked"):
        check(1)
    assert not (tmp_path / "out").exists()
