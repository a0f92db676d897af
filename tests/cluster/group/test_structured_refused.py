"""A group of workers cannot constrain what its last worker samples, and says so."""

from __future__ import annotations

import pytest
from medusa_cluster.group.member import Member
from medusa_runtime.engine.base import GenerateRequest, SamplingParams, StructuredOutputs
from medusa_runtime.errors import RequestError


def test_structured_outputs_are_refused() -> None:
    member = Member.__new__(Member)
    form = StructuredOutputs("regex", "a")
    with pytest.raises(RequestError, match="a group of workers") as refused:
        member._constraint(GenerateRequest("r", "a", SamplingParams(structured_outputs=form)))
    assert refused.value.param == "structured_outputs"
    assert member._constraint(GenerateRequest("r", "a", SamplingParams())) is None
