"""The files of shards in a socket, from which any number of engine processes take them."""

from __future__ import annotations

import os
from pathlib import Path

from medusa_runtime.node.messages import MOST_INTERNAL_DESCRIPTORS
from medusa_runtime.node.shard_files import held_files, hold


def test_each_engine_process_takes_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    files = [os.open(tmp_path / name, os.O_RDONLY) for name in "ab"]
    held = hold(files)
    assert held is not None
    with held:
        for file in files:
            os.close(file)
        for _ in range(2):
            taken = held_files(os.dup(held.fileno()))
            assert [os.pread(file, 2, 0) for file in taken] == [b"a", b"b"]
            for file in taken:
                assert not os.get_inheritable(file)
                os.close(file)


def test_no_file_and_too_many_are_not_held(tmp_path: Path) -> None:
    file = os.open(tmp_path, os.O_RDONLY)
    assert hold([]) is None
    assert hold([file] * (MOST_INTERNAL_DESCRIPTORS + 1)) is None
    os.close(file)
