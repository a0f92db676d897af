"""The names of a served model's LoRA adapters."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from medusa_handler.contract import HttpError
from medusa_handler.model import adapters
from medusa_handler.model.adapters import AdapterLease, Adapters
from medusa_handler.openai.adapters import load_adapter
from medusa_runtime.config import Settings
from medusa_runtime.errors import LimitError, StorageError
from medusa_runtime.timeline import Timeline


def test_an_adapter_is_replaced_even_when_there_is_room_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_MOST_NAMES", 2)
    found = Adapters(Settings(), None, Timeline.create("test"))
    for name in ("a", "b"):
        found.add(name, f"/models/{name}")
    with pytest.raises(HttpError, match="at most 2 adapters"):
        found.add("c", "/models/c")
    found.add("a", "/models/new", replace=True)
    assert found.urls() == {"a": "/models/new", "b": "/models/b"}


@pytest.mark.parametrize("then", ["unloaded", "loaded from elsewhere"])
def test_a_load_that_fails_leaves_alone_what_another_request_did_meanwhile(then: str) -> None:
    class Racing(Adapters):
        def acquire(self, *_: Any) -> AdapterLease:
            self.remove("a")
            if then == "loaded from elsewhere":
                self.add("a", "/models/elsewhere")
            raise StorageError("there is no such file")

    found = Racing(Settings(), None, Timeline.create("test"))
    found.add("a", "/models/before")
    model = SimpleNamespace(name="base", adapters=found, wait_check=lambda check: check)
    service: Any = SimpleNamespace(model=model, engine=object(), settings=Settings(allow_lora="/models"))
    body = {"lora_name": "a", "lora_path": "/models/new", "load_inplace": True}
    with pytest.raises(StorageError):
        load_adapter(service, body, lambda: False)
    assert found.urls() == ({} if then == "unloaded" else {"a": "/models/elsewhere"})


def test_a_load_that_fails_brings_back_the_adapter_it_replaced() -> None:
    class Failing(Adapters):
        def acquire(self, *_: Any) -> AdapterLease:
            raise StorageError("there is no such file")

    found = Failing(Settings(), None, Timeline.create("test"))
    found.add("a", "/models/before")
    model = SimpleNamespace(name="base", adapters=found, wait_check=lambda check: check)
    service: Any = SimpleNamespace(model=model, engine=object(), settings=Settings(allow_lora="/models"))
    with pytest.raises(StorageError):
        load_adapter(service, {"lora_name": "a", "lora_path": "/models/new", "load_inplace": True}, lambda: False)
    assert found.urls() == {"a": "/models/before"}


def test_an_adapter_that_no_thread_could_fetch_is_fetched_for_the_next_request(tmp_path: Path) -> None:
    found = Adapters(Settings(node_socket="none", hold_s=60), None, Timeline.create("test"))
    found.add("a", str(tmp_path / "missing"))
    size = threading.stack_size(1 << 46)
    try:
        with pytest.raises(LimitError, match="no further process or thread could be made"):
            found.acquire("a", lambda: None)
    finally:
        threading.stack_size(size)
    with pytest.raises(HttpError, match=r"expected adapter_model\.safetensors or adapter_model\.bin"):
        found.acquire("a", lambda: None)
