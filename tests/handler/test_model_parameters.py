"""Sampling parameters as a handler gives them to ``context.model``."""

from __future__ import annotations

import pytest
from medusa_handler.contract import HttpError
from medusa_handler.user_code.model import _params
from medusa_runtime.engine.base import StructuredOutputs


def test_a_form_is_written_as_clients_write_it() -> None:
    assert _params({"structured_outputs": {"regex": "[a-z]+"}}).structured_outputs == StructuredOutputs(
        "regex", "[a-z]+"
    )
    schema = {"type": "object"}
    assert _params({"structured_outputs": {"json": schema}}).structured_outputs == StructuredOutputs(
        "json_schema", '{"type": "object"}'
    )
    assert _params({"structured_outputs": None, "stop": "x"}).stop == ("x",)
    assert _params({"stop": None}).stop == ()
    with pytest.raises(HttpError, match=r"structured_outputs\.xml"):
        _params({"structured_outputs": {"xml": "a"}})


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(HttpError, match=r"structured_outputs\.json"):
        _params({"structured_outputs": {"json": "[" * 100_000}})
