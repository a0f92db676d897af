"""Checkpoints on a web server on loopback, small and with known bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

TENSORS = 8


@pytest.fixture
def put_model(origin: Any, safetensors_file: Callable[..., bytes]) -> Callable[..., str]:
    """Put a checkpoint of about this many bytes on the origin; its URL."""

    def put(name: str, size_bytes: int = 1 << 20) -> str:
        part = size_bytes // TENSORS
        tensors = {f"model.layers.{n}.weight": ("U8", [part], bytes([n + len(name)]) * part) for n in range(TENSORS)}
        origin.put(f"/{name}/model.safetensors", safetensors_file(tensors))
        origin.put(f"/{name}/config.json", json.dumps({"model_type": name}).encode())
        return f"{origin.url}/{name}"

    return put
