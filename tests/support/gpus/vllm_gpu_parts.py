"""vLLM's own classes for a GPU, and what the tests give them in its place."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest


class FakeGraph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def parts() -> Any:
    """vLLM's classes, imported here because collecting tests must not take twenty seconds."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what they import
        from medusa_vllm.gpu import graphs as gpu_graphs
        from medusa_vllm.gpu import worker as gpu_worker
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu import cudagraph_utils

    return SimpleNamespace(torch=torch, graphs=gpu_graphs, worker=gpu_worker, modes=CUDAGraphMode, vllm=cudagraph_utils)


def describe(parts: Any, tokens: int, mode: str = "FULL") -> Any:
    return parts.vllm.BatchExecutionDescriptor(
        cg_mode=parts.modes[mode], num_tokens=tokens, num_reqs=tokens, uniform_token_count=1
    )


@pytest.fixture
def manager(parts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's manager for batches of 4, 2 and 1, made without the distributed state that its constructor asks for.

    What it would capture on a GPU are fake graphs here.
    """
    made = parts.vllm.ModelCudaGraphManager.__new__(parts.vllm.ModelCudaGraphManager)
    full = [describe(parts, tokens) for tokens in (4, 2, 1)]
    made.__dict__.update(
        graphs={},
        hidden_states=None,
        use_aux_hidden_state_outputs=False,
        is_last_pp_rank=True,
        _capture_descs={parts.modes.FULL: full},
        _candidates={(tokens, 0): [describe(parts, size)] for tokens, size in ((1, 1), (2, 2), (3, 4), (4, 4))},
        _lora_dispatch_map={},
        _max_lora_case=0,
        _graphs_captured=False,
        _capture_mem_samples=None,
        captured=[],
    )

    def capture(self: Any, *arguments: Any, **options: Any) -> None:
        for descriptions in self._capture_descs.values():
            for description in descriptions:
                assert description not in self.graphs, "it has one already"
                self.graphs[description] = FakeGraph()
                self.captured.append(description.num_tokens)
        self._graphs_captured = True

    monkeypatch.setattr(parts.vllm.ModelCudaGraphManager, "capture", capture)
    return made


def adopt(parts: Any, manager: Any, restore: Any) -> Any:
    return parts.graphs.GraphManager.of(manager, restore, parts.graphs.NoTimeline())
