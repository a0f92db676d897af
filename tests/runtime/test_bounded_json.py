"""JSON whose values would take thirty times its memory: how many there are is known before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_runtime.bounded_json import TooManyValuesError, count_values, parse_json

VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='",[{\\a\U0001f600', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='",[{\\', max_size=3), inner),
    max_leaves=30,
)


def values_of(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + sum(map(values_of, value.values() if isinstance(value, dict) else value))
    return 1


@settings(max_examples=200, deadline=None, database=None)
@given(VALUES, st.booleans(), st.sampled_from(["utf-8", "utf-16", "utf-32-le"]))
def test_no_value_is_left_out(value: Any, ascii_only: bool, encoding: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode(encoding)
    assert count_values(text, exact_above=0) >= values_of(value)
    assert parse_json(text) == value


def test_values_within_strings_do_not_count() -> None:
    text = json.dumps({"prompt": 'a, "b", [c] {d} \\", ' * 100_000}).encode()
    assert count_values(text) == 2
    assert parse_json(text, 2)


@pytest.mark.parametrize("kind", [b"[],", b"{},", b'"",', b"1,", b'{"":[[]]},'])
def test_too_many_values_are_not_parsed(kind: bytes) -> None:
    text = b"[" + kind * 1000 + b"0]"
    with pytest.raises(TooManyValuesError, match="at most 999 values"):
        parse_json(text, 999)
    with pytest.raises(TooManyValuesError):
        parse_json(text.decode(), 999)
    assert len(parse_json(text, 10_000)) == 1001
