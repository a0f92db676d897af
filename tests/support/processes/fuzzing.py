"""Fuzzing of parsers: hypothesis makes inputs, each of which is also changed at random, and nothing may leak.

FUZZ_INPUTS says how many inputs each parser gets; `make fuzz` takes 100,000.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

INPUTS = int(os.environ.get("FUZZ_INPUTS", "1000"))
CHANGES = 20  # inputs made of each that hypothesis draws
MOST_GROWTH_MB = 64
_MOMENT_S = 5.0
_INTERESTING = (
    b"\x00",
    b"\xff",
    b"\r\n",
    b"\n",
    b"\x80",
    b" ",
    b'"',
    b"9" * 30,
    b"-1",
    b"\xff\xff\xff\xff",
    b"PK\x03\x04",
)


def fuzz(inputs: st.SearchStrategy[bytes], check: Callable[[bytes], Any], seeds: list[bytes]) -> None:
    """Give ``check`` INPUTS inputs: what the strategy draws, changed ``seeds`` and changed draws. No leaks."""
    given_to = 0

    @settings(
        max_examples=max(INPUTS // CHANGES, 1),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs, st.integers(0, 2**32))
    def run(drawn: bytes, seed: int) -> None:
        nonlocal given_to
        chance = random.Random(seed)
        for number in range(CHANGES):
            data = drawn if number == 0 else changed(chance.choice([drawn, *seeds]), chance)
            try:
                check(data)
            except BaseException:
                print(f"the input: {data!r}")
                raise
            given_to += 1

    with nothing_left():
        run()
    print(f"{given_to} inputs")
    assert given_to >= min(INPUTS, CHANGES)


def changed(data: bytes, chance: random.Random) -> bytes:
    """A few random changes: bytes set, cut out, doubled, put in."""
    text = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(text))
        length = chance.choice((1, 1, 1, 2, 4, 8, 64))
        kind = chance.randrange(5)
        if kind == 0:
            text[at : at + length] = chance.randbytes(length)
        elif kind == 1:
            del text[at : at + length]
        elif kind == 2:
            text[at:at] = text[at : at + length] * chance.randint(1, 3)
        elif kind == 3:
            text[at:at] = chance.choice(_INTERESTING)
        else:
            other = chance.randint(0, len(text))
            text[at : at + length] = text[other : other + length]
    return bytes(text)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Descriptors, threads and memory are at the end what they were at the beginning."""
    descriptors, threads, memory_mb = _descriptors(), threading.active_count(), _memory_mb()
    yield
    gc.collect()
    # Fewer there may be: what other tests of this process left behind may end meanwhile. And another thread, such as
    # that of an event loop, may have a file open for a moment.
    deadline = time.monotonic() + _MOMENT_S
    while _descriptors() > descriptors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _descriptors() <= descriptors
    assert threading.active_count() <= threads
    print(f"memory grew by {_memory_mb() - memory_mb:.1f} MB")
    assert _memory_mb() - memory_mb < MOST_GROWTH_MB


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
