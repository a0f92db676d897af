"""Copies of keys and values between the host and a GPU, beside the steps of the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

NUMBERS = [20, 3, 7, 16]
_CYCLES = 300_000_000  # a sixth of a second of a GPU's clock


def elsewhere(work: Callable[[], Any]) -> Any:
    """Run this in a thread of its own, as a worker's connections do, and return what it returns."""
    found: list[Any] = []

    def run() -> None:
        with torch.inference_mode():
            found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("where", ["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_blocks_are_copied_behind_the_steps_that_began_before(where: str, request: pytest.FixtureRequest) -> None:
    from medusa_runtime.engine.torch.kv_cache import KvCache, KvShape
    from medusa_runtime.engine.torch.transfers import BlockCopies, on_host

    device = request.getfixturevalue("cuda") if where == "gpu" else torch.device("cpu")

    def a_step_is_under_way() -> None:
        if where == "gpu":
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]

    def memory(_: str, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    cache = KvCache(KvShape(4, 2, 64, torch.bfloat16), 32, memory)
    wanted = torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    there = wanted.to(device)
    a_step_is_under_way()
    cache.pool.copy_(there)
    copies = elsewhere(lambda: BlockCopies(cache, 1, 3))
    read = elsewhere(lambda: copies.read(NUMBERS))
    assert read.is_cpu
    for place, number in enumerate(NUMBERS):
        assert torch.equal(read[place], wanted[1:3, :, number]), "what the step wrote is not in it"

    given = [block.clone() for block in read.flip(0)]
    a_step_is_under_way()
    cache.pool.zero_()  # by a step that began before
    elsewhere(lambda: copies.write(NUMBERS, given))
    found = on_host(cache.pool)
    for block, number in zip(given, NUMBERS, strict=True):
        assert torch.equal(found[1:3, :, number], block), "the step wrote over it"
    found[1:3, :, NUMBERS] = 0
    assert not found.any(), "other blocks or layers were written"
    a_step_is_under_way()
    assert torch.equal(on_host(there + 0), wanted), "it was read before it was computed"
