"""How many tokens of prompts vLLM's steps compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def watch_prefills(scheduler: Any, note: Callable[[int, int], None]) -> None:
    """Let ``note`` know how many tokens of prompts each step computes, and when it began (by the monotonic clock).

    Tokens that the prefix cache holds do not count, and a prompt that takes several steps counts in each with its part.
    The first step is left out, because it may wait for layers.
    """
    schedule, update = scheduler.schedule, scheduler.update_from_output
    began_ns: dict[int, int] = {}  # of steps under way
    first = True

    def begin(*arguments: Any, **named: Any) -> Any:
        start_ns = time.monotonic_ns()
        step = schedule(*arguments, **named)
        began_ns[id(step)] = start_ns
        return step

    def end(step: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal first
        start_ns, drafts = began_ns.pop(id(step)), step.scheduled_spec_decode_tokens
        tokens = sum(count for name, count in step.num_scheduled_tokens.items() if count > 1 and name not in drafts)
        if not first:
            note(tokens, start_ns)
        first = first and not step.num_scheduled_tokens
        return update(step, *arguments, **named)

    scheduler.schedule, scheduler.update_from_output = begin, end


__all__ = ["watch_prefills"]
