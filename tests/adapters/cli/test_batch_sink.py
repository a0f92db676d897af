"""Where a batch writes its results: one batch at a time, and nothing behind a line that is broken."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from medusa_adapters.cli.batch import lines
from medusa_adapters.cli.batch.sink import Sink, open_sink
from medusa_runtime.errors import ConfigError, StorageError

LINE = lines.failure("a", "connection_lost", "x" * 100)


def begin(place: Path | str, *, resume: bool = False) -> tuple[Sink, list[str]]:
    found: list[str] = []
    return open_sink(str(place), resume=resume, note=found.append), found


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let files be only so large, as on a full disk: of a line that does not fit, a part is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_one_batch_at_a_time_writes_to_a_file(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for resume in (False, True):
        first, found = begin(output, resume=resume)
        first.write(LINE)
        with pytest.raises(ConfigError, match="another medusa batch writes to it"):
            begin(output, resume=True)
        first.close()
        assert found == ["a"] * resume
    with pytest.raises(ConfigError, match="there are results already"):
        begin(output)
    again, found = begin(output, resume=True)
    again.close()
    assert (found, output.read_bytes()) == (["a", "a"], LINE * 2)
    shared = [begin("/dev/null")[0] for _ in range(2)]  # what is no file may be
    for sink in shared:
        sink.write(LINE)
        sink.close()


def test_nothing_is_written_behind_a_line_that_does_not_fit(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    sink, _ = begin(output)
    with largest_file(len(LINE) + 50):
        sink.write(LINE)
        with pytest.raises(StorageError, match=r"out\.jsonl cannot be written: File too large"):
            sink.write(LINE)
    with pytest.raises(StorageError, match=r"out\.jsonl cannot be written"):
        sink.write(LINE)
    sink.close()
    assert output.read_bytes() == LINE + LINE[:50]
    again, found = begin(output, resume=True)
    again.write(LINE)
    again.close()
    assert (found, output.read_bytes()) == (["a"], LINE * 2)


def test_an_object_is_begun_with_its_first_result(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    output = tmp_path / "out.jsonl"
    begin(f"local://{output}")[0].close()
    assert list(tmp_path.iterdir()) == []
    sink, _ = begin(f"local://{output}")
    sink.write(LINE)
    sink.close()
    with open(output, "ab") as file:
        file.write(LINE[:9])
    sink, found = begin(f"local://{output}", resume=True)
    sink.close()
    assert (found, output.read_bytes(), list(tmp_path.iterdir())) == (["a"], LINE + LINE[:9], [output])
    sink, _ = begin(f"local://{output}", resume=True)
    sink.write(LINE)
    sink.close()
    assert (output.read_bytes(), list(tmp_path.iterdir())) == (LINE * 2, [output])


def test_an_object_that_cannot_be_copied_stays_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    output = tmp_path / "out.jsonl"
    output.write_bytes(LINE * 200)
    sink, found = begin(f"local://{output}", resume=True)
    with largest_file(len(LINE) * 100):
        for _ in range(2):
            with pytest.raises(StorageError, match=r"out\.jsonl cannot be written"):
                sink.write(LINE)
        sink.close()
    assert (len(found), output.read_bytes()) == (200, LINE * 200)
