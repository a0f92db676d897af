"""Several iterators read as one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from medusa_handler.merge import Item, Merge
from medusa_runtime.prometheus import Histogram, gauge


def read_all(merge: Merge[int]) -> list[Item[int]]:
    items = []
    while not merge.done:
        item = merge.get(60)
        if item is not None:
            items.append(item)
    return items


def test_each_source_keeps_its_order() -> None:
    items = read_all(Merge([range(200), range(100, 300)], ahead=3))
    assert [item.value for item in items if item.source == 0] == list(range(200))
    assert [item.value for item in items if item.source == 1] == list(range(100, 300))


def test_silence_is_told_and_an_error_is_raised() -> None:
    go = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        go.wait()
        raise KeyError("lost")

    merge = Merge([source()])
    assert merge.get(60) == Item(0, 1)
    assert merge.get(0.01) is None
    go.set()
    with pytest.raises(KeyError, match="lost"):
        merge.get(60)


def test_closing_closes_a_source_that_is_ahead() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    merge = Merge([source()], ahead=2)
    assert merge.get(60) == Item(0, 1)
    merge.close()
    assert closed.wait(120)


def test_a_histogram_counts_up_its_buckets() -> None:
    histogram = Histogram("h", "Help.", (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.lines()) == [
        "# HELP h Help.",
        "# TYPE h histogram",
        'h_bucket{le="1.0"} 2',
        'h_bucket{le="2.0"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 12.0",
        "h_count 4",
    ]


def test_labels_are_escaped() -> None:
    assert list(gauge("g", "Help.", ((("a", 'x"\\\ny'),), 1)))[-1] == 'g{a="x\\"\\\\\\ny"} 1'
