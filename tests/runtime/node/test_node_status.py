"""What an agent reports of itself, however many models it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import TooLargeError
from medusa_runtime.node.messages import channel_pair
from medusa_runtime.node.regions.fetching import report_sources
from medusa_runtime.storage.local import LocalStore
from medusa_runtime.storage.peer import PeerStore
from medusa_runtime.storage.peer_access import PeerAccess
from medusa_runtime.storage.sources import SourcesStore

pytestmark = [pytest.mark.timeout(120), pytest.mark.forked]


def ask_for_models_of_long_names(node: Any, tmp_path: Path, safetensors_file: Callable[..., bytes], count: int) -> None:
    for number in range(count):
        folder = tmp_path.joinpath(str(number), *["m" * 250] * 12)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(safetensors_file({"w": ("U8", [64], bytes(64))}))
        (folder / "config.json").write_text("{}")
        with closing(node.client()) as client:
            client.region(str(folder)).close()


def test_models_of_long_names_leave_the_status_readable(
    start_node: Callable[..., Any], tmp_path: Path, safetensors_file: Callable[..., bytes]
) -> None:
    """The node server takes an agent whose status cannot be had for one that is away."""
    node = start_node()
    ask_for_models_of_long_names(node, tmp_path, safetensors_file, 26)
    status = node.status()
    assert status["count"] == 26
    assert 5 <= len(status["regions"]) < 26


def test_many_models_do_not_hide_the_one_that_other_nodes_read(
    start_node: Callable[..., Any],
    put_model: Callable[..., str],
    tmp_path: Path,
    safetensors_file: Callable[..., bytes],
) -> None:
    node = start_node()
    ask_for_models_of_long_names(node, tmp_path, safetensors_file, 14)
    with closing(node.client()) as client:
        url = put_model("m")
        client.region(url).close()
    listed = node.status()["regions"]
    assert len(listed) < 15, "there is no room for all of them"
    assert listed[0]["url"] == url


def test_peers_of_long_names_fail_no_fetch(tmp_path: Path) -> None:
    """What comes from where may be more than a message has room for."""
    ours, theirs = channel_pair()
    urls = [f"http://{'n' * 2000}{number}:1" for number in range(40)]
    sources = SourcesStore(
        LocalStore(str(tmp_path)),
        lambda url: PeerStore(url, "http://store/model", PeerAccess("0123456789abcdef"), None),
        find_peers=lambda again: urls,
    )
    with closing(ours), closing(theirs), closing(sources):
        assert len(str(sources.status())) > 1 << 16
        report_sources(ours, sources)


def test_the_memory_of_a_replaced_model_counts_until_nobody_has_it(
    start_node: Callable[..., Any], put_model: Callable[..., str]
) -> None:
    url, other = put_model("m", 4 << 20), put_model("other", 4 << 20)
    node = start_node("--memory-budget", "10MB")
    old, new = node.client(), node.client()
    old.region(url).close()
    node.until(lambda: "is complete" in node.output())
    new.region(url, fresh=True).close()
    node.until(lambda: node.output().count("is complete") == 2)
    status = node.status()
    assert status["left_bytes"] == status["regions"][0]["memory_bytes"] == status["used_bytes"] // 2
    with pytest.raises(TooLargeError, match="of which 8 MB are in use"):
        node.client().region(other)
    old.close()
    node.until(lambda: node.status()["left_bytes"] == 0)
    node.client().region(other).close()
    new.close()
