"""The error tree: stable codes that survive the way from one process to another."""

from __future__ import annotations

from collections.abc import Iterator

from medusa_runtime import errors
from medusa_runtime.errors import MedusaError, OverloadedError, from_code


def kinds(kind: type[MedusaError] = MedusaError) -> Iterator[type[MedusaError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from kinds(child)


def test_codes_are_distinct_and_come_back() -> None:
    codes = [kind.code for kind in kinds()]
    assert len(set(codes)) == len(codes)
    for kind in kinds():
        error = from_code(kind.code, "expected a, found b")
        assert type(error) is kind
        assert str(error) == "expected a, found b"


def test_an_unknown_code_is_kept_in_the_message() -> None:
    error = from_code("Later.Version", "why")
    assert type(error) is MedusaError
    assert str(error) == "Later.Version: why"


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = errors.__doc__ or ""
    for kind in kinds():
        assert kind.__name__ in drawn
        if kind is not MedusaError:
            assert kind.code in drawn


def test_overload_says_when_to_try_again() -> None:
    assert OverloadedError("full", retry_after_s=2.5).retry_after_s == 2.5
