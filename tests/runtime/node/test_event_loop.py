"""The agent's event loop: its callers take turns."""

from __future__ import annotations

import socket
import time
from collections import Counter
from functools import partial

from medusa_runtime.node.event_loop import EventLoop


def test_an_account_with_many_channels_holds_up_nobody() -> None:
    loop, calls, pairs = EventLoop(), Counter[str](), []
    order: list[str] = []  # of mallory's calls
    accounts: list[tuple[str | None, str, float]] = [("mallory", f"m{n}", 0.001) for n in range(100)]
    accounts += [("alice", "alice", 0.0), (None, "own", 0.0), (None, "own too", 0.0)]

    def answer(name: str, takes_s: float) -> None:
        calls[name] += 1
        if name.startswith("m"):
            order.append(name)
        time.sleep(takes_s)

    for account, name, takes_s in accounts:
        mine, theirs = socket.socketpair()
        pairs += [mine, theirs]
        loop.watch(mine, partial(answer, name, takes_s), account)
        theirs.send(b"1")
    loop.run_once(1.0, lambda: None)
    assert calls["alice"] == calls["own"] == calls["own too"] == 1
    assert 1 <= sum(calls[f"m{n}"] for n in range(100)) <= 3
    rounds = 1
    while len(calls) < len(accounts):
        loop.run_once(1.0, lambda: None)
        rounds += 1
    assert calls["alice"] == rounds
    assert len(set(order[:100])) == 100, "the one that has waited for longest comes first"
    loop.close()
    for one in pairs:
        one.close()
