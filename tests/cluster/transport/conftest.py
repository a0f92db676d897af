"""Nodes on loopback, and a checkpoint on an origin that counts what it sends."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from fork_server import ForkServer
from peer_nodes import Model, Node

from benchmarks.origin import Origin, Variant

TENSORS = 12


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    made = Path(tempfile.mkdtemp(prefix="medusa-transport-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def token_file(folder: Path) -> Path:
    file = folder / "token"
    file.touch(0o600)
    file.write_text("0123456789abcdef0123456789abcdef\n")
    return file


@pytest.fixture
def nodes(folder: Path, token_file: Path, cluster_fork_server: ForkServer) -> Iterator[Callable[..., list[Node]]]:
    """Start some nodes on addresses of their own."""
    started: list[Node] = []

    def start(count: int, certificates: Sequence[Path] = (), wrapper: Sequence[str] = ()) -> list[Node]:
        for _ in range(count):
            number = len(started) + 1
            host = f"127.0.0.{10 + number}"
            own = folder / f"n{number}"
            started.append(Node(own, host, token_file, certificates, wrapper, fork_server=cluster_fork_server))
        return started[-count:]

    yield start
    for node in started:
        node.close()


@pytest.fixture
def model(folder: Path) -> Iterator[Model]:
    """A checkpoint of 12 MB with random bytes, on an origin that counts."""
    with _served(folder, 1_000_003) as model:
        yield model


@pytest.fixture
def large_model(folder: Path) -> Iterator[Model]:
    """The same of 48 MB."""
    with _served(folder, 4_000_003) as model:
        yield model


@contextmanager
def _served(folder: Path, part: int) -> Iterator[Model]:
    names = {f"model.layers.{n}.weight": {"dtype": "U8", "shape": [part]} for n in range(TENSORS)}
    for number, entry in enumerate(names.values()):
        entry["data_offsets"] = [number * part, (number + 1) * part]
    head = json.dumps(names).encode()
    file = folder / "served" / "model" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(len(head).to_bytes(8, "little") + head + os.urandom(TENSORS * part))
    (file.parent / "config.json").write_text('{"model_type": "random"}')
    (file.parent / "tokenizer.json").write_text("{}" * 1000)
    with Origin(folder / "served", folder / "scratch", Variant("plain"), builtin=True, counting=True) as origin:
        yield Model(origin, file, 8 + len(head))
