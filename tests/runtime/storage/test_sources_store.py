"""The store of a checkpoint that peers may have, asked by several threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from medusa_runtime.storage.local import LocalStore
from medusa_runtime.storage.peer import PeerStore
from medusa_runtime.storage.peer_access import PeerAccess
from medusa_runtime.storage.sources import SourcesStore


def test_a_peer_that_two_threads_learn_of_is_opened_once(tmp_path: Path) -> None:
    opened: list[str] = []

    def open_peer(url: str) -> PeerStore:
        opened.append(url)
        time.sleep(0.05)
        return PeerStore(url, "http://store/model", PeerAccess("0123456789abcdef"), None)

    store = SourcesStore(LocalStore(str(tmp_path)), open_peer, ask=lambda again: [])
    threads = [threading.Thread(target=store._add, args=(["http://127.0.0.1:1"],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert opened == ["http://127.0.0.1:1"]
