"""What an agent reports of itself, however many models it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(120), pytest.mark.forked]


def test_models_of_long_names_leave_the_status_readable(
    start_node: Callable[..., Any], tmp_path: Path, safetensors_file: Callable[..., bytes]
) -> None:
    """The node server takes an agent whose status cannot be had for one that is away."""
    node = start_node()
    for number in range(26):
        folder = tmp_path.joinpath(str(number), *["m" * 250] * 12)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(safetensors_file({"w": ("U8", [64], bytes(64))}))
        (folder / "config.json").write_text("{}")
        with closing(node.client()) as client:
            client.region(str(folder)).close()
    status = node.status()
    assert status["count"] == 26
    assert 5 <= len(status["regions"]) < 26
