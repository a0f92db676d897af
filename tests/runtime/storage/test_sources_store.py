"""The store of a checkpoint that peers may have, asked by several threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from medusa_runtime.errors import StorageError, UnreachableError
from medusa_runtime.storage.local import LocalStore
from medusa_runtime.storage.peer import PeerStore
from medusa_runtime.storage.peer_access import PeerAccess
from medusa_runtime.storage.retry import RetryPolicy, RetryState, TransientError
from medusa_runtime.storage.sources import SourcesStore


def test_a_peer_that_two_threads_learn_of_is_opened_once(tmp_path: Path) -> None:
    opened: list[str] = []

    def open_peer(url: str) -> PeerStore:
        opened.append(url)
        time.sleep(0.05)
        return PeerStore(url, "http://store/model", PeerAccess("0123456789abcdef"), None)

    store = SourcesStore(LocalStore(str(tmp_path)), open_peer, find_peers=lambda again: [])
    threads = [threading.Thread(target=store._add, args=(["http://127.0.0.1:1"],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert opened == ["http://127.0.0.1:1"]


def test_a_peer_may_fail_more_often_than_a_pause_can_be_doubled(tmp_path: Path) -> None:
    url = "http://127.0.0.1:1"
    store = SourcesStore(
        LocalStore(str(tmp_path)),
        lambda url: PeerStore(url, "http://store/model", PeerAccess("0123456789abcdef"), None),
        find_peers=lambda again: [url],
    )
    peer: Any = store._peers[url]
    for _ in range(1100):
        store._record_failure(peer, UnreachableError("the peer does not answer"))
    store.close()
    assert 0 < peer.retry_at - time.monotonic() <= 10


def test_an_operation_may_be_tried_more_often_than_a_pause_can_be_doubled() -> None:
    pauses: list[float] = []
    state = RetryState(RetryPolicy(attempts=2000, patience_s=1e9), pauses.append)
    for _ in range(1100):
        state.back_off(TransientError(StorageError("the store does not answer")))
    assert 0.05 <= pauses[0] <= 0.1
    assert 2 <= pauses[-1] <= 4
