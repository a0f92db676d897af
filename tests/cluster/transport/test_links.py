"""Chains over links of their own: a link that is cut and comes back, and an origin that ends in the middle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from medusa_cluster.lab.laboratory import ORIGIN, Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from waiting import until

from benchmarks.cluster.weight_nodes import WeightNode, weight_nodes

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
]

_SIZE = 16_000_000
_LINK = LinkSpeed(4e6)  # four seconds for the model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    head = f'{{"w": {{"dtype": "U8", "shape": [{_SIZE}], "data_offsets": [0, {_SIZE}]}}}}'.encode()
    (made / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + os.urandom(_SIZE))
    return made


@pytest.fixture
def lab(folder: Path) -> Iterator[Laboratory]:
    with Laboratory(3, _LINK, origin={"model": folder}) as laboratory:
        yield laboratory


class Chain:
    """Three nodes, each of which reads from those before it."""

    def __init__(self, lab: Laboratory, nodes: list[WeightNode], threads: ThreadPoolExecutor) -> None:
        self.lab, self.nodes = lab, nodes
        self.url = f"{lab.origin_url}/model"
        self._threads = threads
        for place, node in enumerate(nodes):
            node.ask("plan", sources=[before.url for before in reversed(nodes[:place])])

    def fetch(self, *places: int) -> list[Callable[[], dict[str, Any]]]:
        """Begin fetches; each of what is returned waits for one."""
        return [self._threads.submit(self.nodes[place].ask, "fetch", url=self.url).result for place in places]

    def wait_received(self, place: int, size: int) -> None:
        node = self.nodes[place].name
        begun = self.lab.received_bytes(node)
        until(lambda: self.lab.received_bytes(node) - begun >= size, lambda: f"{node} receives nothing")


@pytest.fixture
def chain(lab: Laboratory) -> Iterator[Chain]:
    with weight_nodes(lab) as nodes, ThreadPoolExecutor(3) as threads:
        yield Chain(lab, nodes, threads)


@pytest.mark.parametrize(("cut", "seconds"), [(1, 1), (1, 10), (0, 1), (2, 10)])
def test_a_link_that_is_cut_for_a_while(chain: Chain, cut: int, seconds: float) -> None:
    assert chain.fetch(0)[0]()["state"] == "DONE"
    copies = chain.fetch(1, 2)
    chain.wait_received(2, _SIZE // 3)
    chain.lab.cut(chain.nodes[cut].name)
    time.sleep(seconds)
    chain.lab.restore(chain.nodes[cut].name)
    assert [copy()["state"] for copy in copies] == ["DONE", "DONE"]


def test_an_origin_that_ends_in_the_middle_and_comes_back(chain: Chain) -> None:
    copies = chain.fetch(0, 1, 2)
    chain.wait_received(2, _SIZE // 4)
    assert chain.lab.origin is not None
    chain.lab.crash(ORIGIN)
    time.sleep(1)
    chain.lab.boot(ORIGIN)
    chain.lab.start_origin()
    assert [copy()["state"] for copy in copies] == ["DONE"] * 3
