"""The names of a served model's LoRA adapters."""

from __future__ import annotations

import pytest
from medusa_handler.contract import HttpError
from medusa_handler.model import adapters
from medusa_handler.model.adapters import Adapters
from medusa_runtime.config import Settings
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
