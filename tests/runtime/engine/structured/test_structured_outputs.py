"""Structured outputs of the torch engine: whatever the weights say, the text has the form that was asked for."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine.base import StructuredOutputs
from medusa_runtime.errors import EngineError, OverloadedError, RequestError

pytest.importorskip("llguidance", reason="structured outputs need llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
DIGITS = StructuredOutputs("regex", "[0-9]{3}-[0-9]{4}")


def schema(value: Any) -> StructuredOutputs:
    return StructuredOutputs("json_schema", json.dumps(value))


def ask(served: Any, form: StructuredOutputs, prompt: Any = "Tokens flow", **params: Any) -> Any:
    given = {"ignore_eos": False, "max_tokens": 200, **params}
    return served.ask(prompt, structured_outputs=form, **given)


def test_text_has_the_form_that_was_asked_for(serve: Any) -> None:
    served = serve()
    for seed in range(3):
        person = json.loads(ask(served, schema(PERSON), temperature=1.0, seed=seed).text)
        assert set(person) == {"name", "age", "tags"}
        assert 0 <= person["age"] <= 120
    assert re.fullmatch(DIGITS.text, ask(served, DIGITS).text)
    assert ask(served, StructuredOutputs("choice", '["yes", "no", "don\'t \\"know\\""]')).text in (
        "yes", "no", 'don\'t "know"',
    )  # fmt: skip
    assert re.fullmatch(
        "(ab)+c", ask(served, StructuredOutputs("grammar", 'root ::= ("ab")+ "c"'), max_tokens=400).text
    )
    assert ask(served, StructuredOutputs("grammar", 'start: "x" "y"')).text == "xy"
    answer = ask(served, DIGITS)
    assert answer.last.finish_reason == "stop"


def test_the_same_seed_gives_the_same_text_whatever_runs_beside_it(serve: Any) -> None:
    served = serve()
    alone = ask(served, schema(PERSON), temperature=1.0, seed=5).text
    answers = [ask(served, schema(PERSON), temperature=1.0, seed=5) for _ in range(3)]
    free = [served.ask([5 + n, 6], temperature=1.0, max_tokens=30) for n in range(3)]
    assert {answer.text for answer in answers} == {alone}
    assert all(len(answer.tokens) == 30 for answer in free)


def test_what_runs_beside_it_is_not_changed(serve: Any) -> None:
    served = serve()
    alone = served.ask([5, 6, 7], max_tokens=40).tokens
    beside = served.ask([5, 6, 7], max_tokens=40)
    ask(served, schema(PERSON)).wait()
    assert beside.tokens == alone


def test_preempted_sequences_keep_their_form(serve: Any) -> None:
    served = serve(kv_cache_mb=1, max_model_len=512)
    numbers = StructuredOutputs("regex", r"([0-9][0-9],){60}")
    answers = [ask(served, numbers, list(range(10, 200)), max_tokens=300, seed=n, temperature=1.0) for n in range(8)]
    for answer in answers:
        assert re.fullmatch(numbers.text, answer.text)
    assert served.engine.stats()["preemptions_total"] > 0


def test_stop_strings_and_tokens_end_it_earlier(serve: Any) -> None:
    served = serve()
    stopped = ask(served, DIGITS, stop=("-",))
    assert re.fullmatch("[0-9]{3}", stopped.text)
    assert stopped.last.stop_reason == "-"
    assert ask(served, DIGITS, max_tokens=2).last.finish_reason == "length"


def test_logprobs_are_of_what_the_grammar_allows(serve: Any) -> None:
    answer = ask(serve(), StructuredOutputs("regex", "x"), logprobs=2)
    first = answer.wait().deltas[0].logprobs[0]
    assert first.text == "x"
    assert first.logprob == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (schema({"type": "objekt"}), "this json_schema cannot be used: Invalid type: objekt"),
        (schema({"not": {"type": "object"}}), 'cannot be used: .*"not"'),
        (schema(False), "nsatisfiable"),
        (StructuredOutputs("json_schema", "[1"), "json_schema cannot be used"),
        (StructuredOutputs("regex", "[a"), "unclosed character class"),
        (StructuredOutputs("regex", "(?=a)b"), "look-around"),
        (StructuredOutputs("grammar", "nonsense %%"), "grammar cannot be used"),
        (StructuredOutputs("grammar", "start: missing"), "grammar cannot be used"),
        (StructuredOutputs("poem", "x"), "expected one of json_schema, regex, choice, grammar, found poem"),
    ],
)
def test_what_is_no_grammar_is_refused(serve: Any, form: StructuredOutputs, message: str) -> None:
    served = serve()
    with pytest.raises(RequestError, match=message) as refused:
        ask(served, form)
    assert refused.value.param == "structured_outputs"
    assert len(served.engine._requests) == 0


def test_what_contradicts_a_grammar_is_refused(serve: Any) -> None:
    served = serve()
    for params, name in (({"min_tokens": 5}, "min_tokens"), ({"ignore_eos": True}, "ignore_eos")):
        with pytest.raises(RequestError, match=name):
            served.ask("x", structured_outputs=DIGITS, max_tokens=9, **{"ignore_eos": False, **params})


def test_what_is_refused_for_another_reason_has_no_grammar_compiled(serve: Any) -> None:
    served = serve(max_concurrency=1, max_waiting=0)
    unreadable: Any = StructuredOutputs(["regex"], "a")  # type: ignore[arg-type]
    for form, prompt, params in (
        (DIGITS, "x", {"temperature": -1.0}),
        (DIGITS, "x", {"stop": 5}),
        (DIGITS, [5] * 600, {}),
        (unreadable, "x", {}),
    ):
        with pytest.raises((RequestError, TypeError)):
            ask(served, form, prompt, **params)
    running = served.ask([5, 6], max_tokens=400)
    with pytest.raises(OverloadedError):
        ask(served, DIGITS)
    assert served.engine._constraints._process is None, "a grammar was compiled"
    running.wait()
    assert re.fullmatch(DIGITS.text, ask(served, DIGITS).text)


def test_a_lost_process_ends_its_requests_and_the_next_one_starts_another(serve: Any) -> None:
    served = serve()
    endless = ask(served, StructuredOutputs("regex", "[a-z ]{5000}"))
    endless.next()
    process = served.engine._constraints._process
    os.kill(process._process.pid, signal.SIGKILL)
    last = endless.last
    assert last.finish_reason == "error"
    assert "grammars of structured outputs" in last.error[1]
    assert re.fullmatch(DIGITS.text, ask(served, DIGITS).text)


def chain(rules: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(rules)) + f'\nr{rules}: "a"'


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs("regex", "a?" * 60_000 + "a" * 10),  # minutes
        StructuredOutputs("regex", "".join(f"[^{chr(97 + i % 26)}]*" for i in range(3_000))),
        StructuredOutputs("choice", json.dumps([str(number) for number in range(200_000)])),  # minutes, in Python too
        StructuredOutputs("grammar", chain(100_000)),  # overflowed the stack
        StructuredOutputs("grammar", "start: " + '"a"* ' * 30_000),
        StructuredOutputs("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(20_000)}})),
    ],
    ids=["time", "memory", "choices", "depth", "width", "schema"],
)
@pytest.mark.slow
def test_a_grammar_that_takes_too_much_harms_nobody_else(serve: Any, form: StructuredOutputs) -> None:
    served = serve()
    other = ask(served, StructuredOutputs("regex", "[a-z ]{400}"), max_tokens=400)
    other.next()
    process = served.engine._constraints._process
    with pytest.raises(RequestError, match="cannot be used") as refused:
        ask(served, form)
    assert len(str(refused.value)) < 2500
    assert not other.last.error
    assert served.engine._constraints._process is process
    assert re.fullmatch(DIGITS.text, ask(served, DIGITS).text)


def test_a_grammar_whose_masks_take_too_long_ends_alone(serve: Any) -> None:
    served = serve()
    other = ask(served, StructuredOutputs("regex", "[a-z ]{30}"))
    try:
        fault = ask(served, StructuredOutputs("grammar", "start: " + '"a"? ' * 12_000)).last.error[1]
    except RequestError as error:  # the first mask is tried before
        fault = str(error)
    assert "could not be followed" in fault or "cannot be used" in fault
    assert len(other.text) == 30


def test_a_grammar_that_is_too_large_is_the_requests_fault(serve: Any) -> None:
    """A 503 would make clients send it again."""
    names = [f"r{number}" for number in range(2100)]
    grammar = f"start: {' | '.join(names)}\n" + "\n".join(f'{name}: "x{name}"' for name in names)
    code, message = ask(serve(), StructuredOutputs("grammar", grammar)).last.error
    assert code == RequestError.code
    assert message.startswith("structured_outputs: this grammar could not be followed any further: ")


def test_a_slow_grammar_lets_others_pass(serve: Any) -> None:
    served = serve()
    ask(served, DIGITS).wait()
    slow = schema({"properties": {f"p{i}": {"properties": {"a": {"pattern": "[a-z]{3,9}"}}} for i in range(700)}})
    waiting = threading.Thread(target=lambda: served.engine._constraints.open(slow, lambda: True))
    waiting.start()
    while not served.engine._constraints._process._slow.lock.locked():
        assert waiting.is_alive(), "it was not slow"
        time.sleep(0.002)
    assert ask(served, StructuredOutputs("regex", "[0-9]{5}"))
    assert waiting.is_alive()
    waiting.join(60)


def test_a_cancelled_request_needs_no_grammar(serve: Any) -> None:
    served = serve()
    ask(served, DIGITS).wait()
    process = served.engine._constraints._process
    caught: list[EngineError] = []

    def open_another() -> None:
        try:
            ask(served, StructuredOutputs("regex", "[0-9]{6}"))
        except EngineError as error:
            caught.append(error)

    with process._quick.lock:
        waiting = threading.Thread(target=open_another)
        waiting.start()
        while not len(served.engine._requests):
            assert waiting.is_alive()
            time.sleep(0.002)
        served.engine.cancel(f"r{served.count}")
    waiting.join(60)
    assert "cancelled" in str(caught[0])
    assert len(served.engine._requests) == 0


def test_the_process_ends_with_its_engine(serve: Any) -> None:
    served = serve()
    ask(served, DIGITS).wait()
    process = served.engine._constraints._process._process
    served.close()
    assert process.returncode is not None
    with pytest.raises(EngineError):
        served.engine._constraints.open(DIGITS, lambda: True)


def test_a_model_may_end_with_a_token_that_its_tokenizer_has_not() -> None:
    from medusa_runtime.engine.structured.process import GrammarProcess

    tokenizer = (Path(__file__).parents[4] / "examples/pydoc-lm/tokenizer.json").read_bytes()
    process = GrammarProcess(tokenizer, vocab_size=2060, eos_token_ids=(0, 2055), rows=1)
    try:
        assert process.open(DIGITS, lambda: True)
    finally:
        process.close()


def test_a_process_that_cannot_be_started_for_want_of_descriptors_leaves_none_open() -> None:
    from medusa_runtime.engine.structured.process import GrammarProcess

    tokenizer = (Path(__file__).parents[4] / "examples/pydoc-lm/tokenizer.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    process = None
    for most in range(3, soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            process = GrammarProcess(tokenizer, vocab_size=2060, eos_token_ids=(0,), rows=1)
        except EngineError as error:
            found = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if process is not None:
            break
        assert re.search("could be started: expected room for .* open files", found)
        assert os.listdir("/proc/self/fd") == before
    assert process is not None
    process.close()


def test_nothing_of_it_is_there_before_it_is_asked_for(serve: Any) -> None:
    served = serve()
    served.ask([5, 6]).wait()
    assert served.engine._constraints._process is None
    late = ("llguidance", "medusa_runtime.engine.structured.process", "medusa_runtime.engine.structured.worker")
    code = f"import sys, medusa_runtime.engine.torch.engine; print([name for name in {late} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
