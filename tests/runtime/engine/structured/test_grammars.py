"""The grammars that the process of structured outputs keeps."""

from __future__ import annotations

import llguidance
import pytest
from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.engine.structured.worker import Grammars

LENIENT = 'start: %json {"type": "string", "format": "of-nobody", "x-guidance": {"lenient": true}}'


@pytest.mark.parametrize(("grammar", "kept"), [('start: "a"', True), (LENIENT, False), ("start: (", False)])
def test_only_grammars_that_are_used_are_kept(grammar: str, kept: bool) -> None:
    grammars = Grammars(llguidance.LLTokenizer("byte"))
    answer = grammars.open(1, StructuredOutputs("grammar", grammar))
    assert (not answer["error"] and not answer["warnings"]) == kept
    assert (1 in grammars._matchers) == kept
