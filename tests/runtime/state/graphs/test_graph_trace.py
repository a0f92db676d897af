"""The oracle's indirect index pointers, compared with a search through every event."""

from __future__ import annotations

import random

import pytest
from allocation_trace import AllocationTrace, replay


def test_figure_6() -> None:
    """Two allocations return one address; a pointer at a launch belongs to the one that is live."""
    trace = AllocationTrace()
    trace.malloc(0xA000, 512)
    trace.launch("g")
    trace.free(0xA000)
    trace.malloc(0xA000, 512)
    trace.malloc(0xB000, 512)
    trace.launch("g")
    found = trace.indices({("g", 0): [0xA000, 0xB000], ("g", 1): [0xA010, 0xB1FF, 0xB200]})
    assert found == {("g", 0, 0xA000): (0, 0), ("g", 1, 0xA010): (1, 16), ("g", 1, 0xB1FF): (2, 511)}
    assert [tuple(event) for event in trace.events] == [(0xA000, 512), (0, 0), (0xA000, 512), (0xB000, 512)]


def test_what_is_unknown_is_left_out() -> None:
    trace = AllocationTrace()
    trace.free(0x1000)  # allocated before the trace began
    trace.malloc(0x1000, 0)
    trace.launch("g")
    assert trace.indices({("g", 0): [0x1000]}) == {}
    assert trace.events == ()


@pytest.mark.parametrize("seed", range(30))
def test_random_traces(seed: int) -> None:
    """Search backwards from each launch for the first allocation with the pointer that was not released since."""
    numbers = random.Random(seed)
    trace, live, history = AllocationTrace(), {}, []
    pointers: dict[tuple[str, int], list[int]] = {}
    launches = 0
    for _ in range(400):
        choice = numbers.random()
        if choice < 0.4:
            start, size = numbers.randrange(40) * 100, numbers.choice([50, 100, 250])
            if all(start + size <= other or other + length <= start for other, length in live.items()):
                live[start] = size
                trace.malloc(start, size)
                history.append(("malloc", start, size))
        elif choice < 0.7 and live:
            start = numbers.choice(sorted(live))
            del live[start]
            trace.free(start)
            history.append(("free", start, 0))
        else:
            trace.launch("g")
            pointers["g", launches] = [numbers.randrange(4300) for _ in range(5)]
            history.append(("launch", launches, 0))
            launches += 1
    expected = {}
    for at, (kind, launch, _) in enumerate(history):
        for pointer in pointers["g", launch] if kind == "launch" else ():
            released = set()
            for before in range(at - 1, -1, -1):
                event, start, size = history[before]
                if event == "free":
                    released.add(start)
                elif event == "malloc":
                    if start not in released and start <= pointer < start + size:
                        index = sum(1 for entry in history[:before] if entry[0] == "malloc")
                        expected["g", launch, pointer] = (index, pointer - start)
                        break
                    released.discard(start)
    assert trace.indices(pointers) == expected
    assert expected


def test_replay_gives_each_allocation_its_address() -> None:
    trace = AllocationTrace()
    trace.malloc(0xA000, 512)
    trace.free(0xA000)
    trace.malloc(0xA000, 256)
    calls: list[tuple[str, int]] = []

    def malloc(size: int) -> int:
        calls.append(("malloc", size))
        return 0x5000 + len(calls)

    addresses = replay(trace.events, malloc, lambda address: calls.append(("free", address)))
    assert addresses == {"allocation 0": 0x5001, "allocation 1": 0x5003}
    assert calls == [("malloc", 512), ("free", 0x5001), ("malloc", 256)]
