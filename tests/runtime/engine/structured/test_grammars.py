"""The grammars that the process of structured outputs keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.engine.structured import trial, worker
from medusa_runtime.engine.structured.trial import Trial, try_grammar
from medusa_runtime.engine.structured.worker import Grammars

LENIENT = 'start: %json {"type": "string", "format": "of-nobody", "x-guidance": {"lenient": true}}'


@pytest.mark.parametrize(("grammar", "kept"), [('start: "a"', True), (LENIENT, False), ("start: (", False)])
def test_only_grammars_that_are_used_are_kept(grammar: str, kept: bool) -> None:
    grammars = Grammars(llguidance.LLTokenizer("byte"))
    answer = grammars.open(1, StructuredOutputs("grammar", grammar))
    assert (not answer["error"] and not answer["warnings"]) == kept
    assert (1 in grammars._matchers) == kept


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """The trials that there were."""
    found: list[Trial] = []

    def noted(make: Callable[[], Any], cpu_s: float) -> Trial:
        found.append(try_grammar(make, cpu_s))
        return found[-1]

    monkeypatch.setattr(worker, "try_grammar", noted)
    return found


def test_a_refused_grammar_is_not_tried_again(trials: list[Trial]) -> None:
    """Each request with it once took up to three seconds, for which the grammars of all others waited."""
    grammars = Grammars(llguidance.LLTokenizer("byte"))
    bad, good = StructuredOutputs("regex", "(((a{2000}){2000}){2000}"), StructuredOutputs("regex", "a+")
    said = {grammars.open(number, bad)["error"] for number in range(1, 4)}
    assert len(said) == len(trials) == 1
    assert said != {""}
    assert not grammars.open(4, good)["error"]
    assert len(trials) == 2


def test_a_grammar_that_takes_longer_than_others_wait_is_not_refused_yet() -> None:
    grammars = Grammars(llguidance.LLTokenizer("byte"))
    slow = StructuredOutputs("choice", json.dumps([f"choice {number}" for number in range(20_000)]))
    assert grammars.open(1, slow, 0.02) == {"type": "slow"}
    assert not grammars.open(1, slow)["error"]


def test_refusals_are_limited_and_evict_no_grammar(trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_MOST_REFUSALS", 3)
    grammars = Grammars(llguidance.LLTokenizer("byte"))
    good = StructuredOutputs("regex", "a+")
    assert not grammars.open(1, good)["error"]
    bad = [StructuredOutputs("regex", "(" * number) for number in range(1, 6)]
    for form in bad:
        assert grammars.open(2, form)["error"]
    assert len(grammars._refused) == 3
    assert len(trials) == 6
    for form in (good, *bad[2:]):
        grammars.open(3, form)
    assert len(trials) == 6, "the last three are remembered, and the one that is used"
    grammars.open(4, bad[0])
    assert len(trials) == 7


def test_a_refusal_ends_after_a_while(trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(llguidance.LLTokenizer("byte"))
    bad = StructuredOutputs("regex", "(")
    grammars.open(1, bad)
    monkeypatch.setattr(worker, "_REFUSED_S", 0.0)
    grammars.open(1, bad)
    assert len(trials) == 2


def test_a_trial_that_got_no_cpu_time_is_repeated(trials: list[Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(llguidance.LLTokenizer("byte"))
    good = StructuredOutputs("regex", "a+")
    with monkeypatch.context() as busy:
        busy.setattr(trial, "_LEAST_CPUS", 1e9)
        busy.setattr(trial, "die_with_parent", lambda _: os.kill(os.getpid(), signal.SIGSTOP))  # first in its process
        assert grammars.open(1, good, 0.1) == {"type": "slow"}, "others go first, and then it is tried again"
        assert "s on this busy machine; try again" in grammars.open(1, good)["error"]
    assert not grammars.open(1, good)["error"]


CROWDED = """
import os, resource
import llguidance
from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.engine.structured.worker import Grammars
grammars, form = Grammars(llguidance.LLTokenizer("byte")), StructuredOutputs("regex", "a+")
limits, files = resource.getrlimit(resource.RLIMIT_NPROC), len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NPROC, (1, limits[1]))
os.setresuid(54321, 54321, 0)  # a user without processes
print(grammars.open(1, form)["error"])
os.setresuid(0, 0, 0)
resource.setrlimit(resource.RLIMIT_NPROC, limits)
assert len(os.listdir("/proc/self/fd")) == files
assert not grammars.open(1, form)["error"]
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_grammar_is_refused_for_now_where_no_process_can_be_made() -> None:
    """The process that keeps all grammars once waited until it was killed for this."""
    ended = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "no further process or thread could be made" in ended.stdout


FORMS = [
    (StructuredOutputs("json_schema", '{"type": "object", "required": ["a"], "additionalProperties": false,'
                       ' "properties": {"a": {"type": "integer"}}}'), '{"a": 12}'),
    (StructuredOutputs("regex", "[0-9]{3}"), "123"),
    (StructuredOutputs("choice", '["yes", "no"]'), "no"),
    (StructuredOutputs("grammar", 'start: "x" other\nother: "y"'), "xy"),
    (StructuredOutputs("grammar", 'root ::= "x" ("y" | "z")'), "xz"),
]  # fmt: skip


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>"), ("</think>",)])
@pytest.mark.parametrize(("form", "text"), FORMS)
def test_a_form_begins_behind_the_closing_tag(tokens: tuple[str, ...], form: StructuredOutputs, text: str) -> None:
    """A tag may be one token, which llguidance then takes for a special one, or text in several tokens."""
    from engine_fixtures import byte_level_tokenizer

    written = byte_level_tokenizer()
    written.add_tokens(list(tokens))
    grammars = Grammars(llguidance.LLTokenizer(written.to_str()))

    def fits(form: StructuredOutputs, text: str) -> bool:
        assert grammars.open(1, form) == {"type": "opened", "error": "", "warnings": []}
        matcher = grammars._matchers[1]
        taken = matcher.consume_tokens(written.encode(text, add_special_tokens=False).ids)
        return bool(taken and matcher.is_accepting())

    inside = form._replace(closing="</think>")
    assert fits(inside, f"One </thin\n € line. </think>{text}")
    assert fits(inside, f"</think>{text}")
    assert not fits(inside, text)
    assert not fits(inside, f"a</think>b</think>{text}")
    assert not fits(inside, f"a</think>{text}b")
    before = inside._replace(opening="<think>")
    assert fits(before, text)
    assert fits(before, f"<think>\n</think>{text}")
    assert not fits(before, f"a</think>{text}")
    assert not fits(before, "<think>a")
