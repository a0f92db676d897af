"""The collector is off in the context, and behind it as it was."""

from __future__ import annotations

import gc

import pytest
from medusa_runtime.imports.gc_paused import gc_paused


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_off_and_then_as_it_was(collecting: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()
