"""allowed_token_ids and bad_words: what may not come does not come, together with other parameters too."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from medusa_runtime.engine.base import GenerateRequest, SamplingParams, StructuredOutputs
from medusa_runtime.engine.server import _is_slow_to_add
from medusa_runtime.engine.serving.sequence import Sequence
from medusa_runtime.engine.serving.transcript import Transcript
from medusa_runtime.engine.torch.penalties import Adjustment, adjust
from medusa_runtime.errors import RequestError

PROMPT = "Tokens flow from storage"


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_k": 2, "seed": 3}])
def test_only_allowed_tokens_come(serve: Any, params: dict[str, Any]) -> None:
    served = serve()
    company = served.ask("A", max_tokens=30)
    answer = served.ask(PROMPT, allowed_token_ids=(7, 90, 211), max_tokens=30, logprobs=4, **params)
    assert set(answer.tokens) <= {7, 90, 211}
    assert company.tokens == served.ask("A", max_tokens=30).tokens
    # Log-probabilities are those of the model, so the likeliest tokens are others.
    assert {token for one in answer.deltas for token, _, _ in one.logprobs[0].top} - {7, 90, 211}


def test_all_tokens_allowed_change_nothing(serve: Any) -> None:
    served = serve()
    expected = served.ask(PROMPT, max_tokens=20).tokens
    assert served.ask(PROMPT, max_tokens=20, allowed_token_ids=tuple(range(320))).tokens == expected


def test_bias_and_penalties_choose_among_allowed_tokens(serve: Any) -> None:
    served = serve()
    allowed = {"allowed_token_ids": (7, 90), "max_tokens": 8}
    assert set(served.ask(PROMPT, **allowed, logit_bias={90: 100.0, 5: 100.0}).tokens) == {90}
    assert served.ask(PROMPT, **allowed, ignore_eos=False, min_tokens=4, stop_token_ids=(7,)).tokens[:4] == [90] * 4


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (7, 90)},
        {"logit_bias": {7: 50.0}},
        {"bad_words": ("e",)},
        {"min_tokens": 3, "stop_token_ids": (7,)},
    ],
)
def test_no_step_waits_until_they_are_made(serve: Any, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]) -> None:
    """To make the tensors of 150,000 tokens takes 30 ms, in which all other sequences would wait."""
    threads: list[threading.Thread] = []
    make = Adjustment.__init__

    def record(self: Adjustment, sequence: Sequence, vocab_size: int) -> None:
        threads.append(threading.current_thread())
        make(self, sequence, vocab_size)

    monkeypatch.setattr(Adjustment, "__init__", record)
    served = serve()
    assert served.ask(PROMPT, max_tokens=5, **params).last.finish_reason == "length"
    assert threads == [threading.current_thread()]


def test_a_request_with_many_of_them_is_added_beside_others() -> None:
    many = range(1 << 17)
    for params in (SamplingParams(allowed_token_ids=tuple(many)), SamplingParams(logit_bias=dict.fromkeys(many, 1.0))):
        assert _is_slow_to_add(GenerateRequest("r", "a", params))
    assert _is_slow_to_add(GenerateRequest("r", tuple(many), SamplingParams()))
    assert not _is_slow_to_add(
        GenerateRequest("r", (1, 2), SamplingParams(allowed_token_ids=(1,), logit_bias={1: 1.0}))
    )


def words_of(served: Any, ids: list[int]) -> str:
    return str(served.engine.detokenize(ids))


def test_a_bad_word_does_not_come(serve: Any) -> None:
    served = serve()
    for word in ("e", "the", "memory", "é"):
        free = served.ask(PROMPT, max_tokens=1, logit_bias={served.engine.tokenize(word, False)[0]: 100.0}).text
        assert free
        text = served.ask(PROMPT, max_tokens=60, bad_words=(word,), temperature=1.0, seed=1).tokens
        for form in (word, " " + word):
            ids = served.engine.tokenize(form, False)
            if form == word or len(ids) == len(served.engine.tokenize(word, False)):
                assert not any(text[at : at + len(ids)] == ids for at in range(len(text)))


def test_a_bad_word_of_several_tokens_keeps_only_its_last_token_away(serve: Any) -> None:
    served = serve()
    free = served.ask(PROMPT, max_tokens=6).tokens
    word = words_of(served, free[1:4])
    assert served.engine.tokenize(word, False) == free[1:4] or pytest.skip("the text has other tokens")
    found = served.ask(PROMPT, max_tokens=6, bad_words=(word,)).tokens
    assert found[:3] == free[:3]
    assert found[3] != free[3]


def test_where_nothing_may_come_the_request_ends_with_an_error(serve: Any) -> None:
    served = serve()
    company = served.ask("A", max_tokens=30)
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 3}):
        answer = served.ask(
            PROMPT, allowed_token_ids=(7,), stop_token_ids=(7,), min_tokens=2, max_tokens=5, logprobs=1, **params
        )
        assert answer.last.finish_reason == "error"
        assert "found none" in answer.last.error[1]
    only = served.ask(PROMPT, allowed_token_ids=tuple(served.engine.tokenize("e", False)), bad_words=("e",))
    assert only.last.finish_reason == "error"
    assert company.last.finish_reason == "length"
    assert served.engine.stats()["kv_tokens_used"] == 0


def test_where_no_token_is_asked_for_none_has_to_be_left(serve: Any) -> None:
    restricted = {"allowed_token_ids": (7,), "stop_token_ids": (7,), "logit_bias": {7: 1.0}}
    word = {"allowed_token_ids": tuple(serve().engine.tokenize("e", False)), "bad_words": ("e",)}
    for params in (restricted, word):
        last = serve().ask(PROMPT, max_tokens=0, prompt_logprobs=1, **params).last
        assert (last.finish_reason, last.error) == ("length", None)
        assert last.prompt_logprobs is not None


def test_with_a_grammar_both_hold(serve: Any) -> None:
    pytest.importorskip("llguidance")
    served = serve()
    form = StructuredOutputs("regex", "(a|e)(a|e)")
    options = {"structured_outputs": form, "ignore_eos": False, "max_tokens": 4}
    (a,), (e,) = served.engine.tokenize("a", False), served.engine.tokenize("e", False)
    assert served.ask(PROMPT, bad_words=("a",), **options).text == "ee"
    assert served.ask(PROMPT, allowed_token_ids=(a, 1), **options).text == "aa"
    assert served.ask(PROMPT, allowed_token_ids=(a, e, 1), bad_words=("e",), **options).text == "aa"
    assert served.ask(PROMPT, allowed_token_ids=(7,), **options).last.finish_reason == "error"
    assert served.ask(PROMPT, **options).last.finish_reason == "stop"  # the grammars' process is still there


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids: expected between 1 and the vocabulary's 320 ids, found 0"),
        ({"allowed_token_ids": (1,) * 321}, "allowed_token_ids: expected between 1 .* found 321"),
        ({"allowed_token_ids": (1, 320)}, "allowed_token_ids: expected token ids between 0 and 319, found 320"),
        ({"allowed_token_ids": (1, -1)}, "allowed_token_ids: expected token ids .* found -1"),
        ({"allowed_token_ids": (1, True)}, "allowed_token_ids: expected token ids .* found true"),
        ({"allowed_token_ids": (1, "2")}, "allowed_token_ids: expected token ids"),
        ({"bad_words": ("a",) * 129}, "bad_words: expected at most 128 words, found 129"),
        ({"bad_words": ("",)}, "bad_words: expected words of 1 to 1024 characters"),
        ({"bad_words": ("a" * 1025,)}, "bad_words: expected words of 1 to 1024 characters"),
        ({"bad_words": (3,)}, "bad_words: expected words of 1 to 1024 characters, found 3"),
        ({"bad_words": ("  ",)}, "bad_words: expected words of at least one token"),
    ],
)
def test_what_cannot_be_used_is_refused(serve: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        serve().ask(PROMPT, **params)


def test_forms_after_a_space_count_among_the_words(serve: Any) -> None:
    served = serve()
    letter = next(each for each in "fmsabt" if len(served.engine.tokenize(f" {each}", False)) == 1)
    words = tuple(f"{letter}{number}" for number in range(10, 75))
    served.ask(PROMPT, bad_words=words[:64])
    with pytest.raises(RequestError, match="bad_words: expected at most 128 with their forms after a space, found 130"):
        served.ask(PROMPT, bad_words=words)


def made(
    token_ids: tuple[int, ...] | None = None, bias: dict[int, float] | None = None, words: tuple[list[int], ...] = ()
) -> Sequence:
    """A sequence with copies of these values, as each frame of a request brings them, and what changes its logits."""
    params = SamplingParams(
        allowed_token_ids=None if token_ids is None else (*token_ids[:1], *token_ids[1:]),
        logit_bias=None if bias is None else dict(bias),
        bad_words=tuple(map(str, words)),
    )
    found = Sequence(
        GenerateRequest("r", (1, 2), params), [1, 2], lambda _: None, limit=9, eos_token_ids=frozenset(),
        transcript=Transcript(None, (), include_stop=False), bad_words=[list(word) for word in words],
    )  # fmt: skip
    found.adjustment = Adjustment(found, VOCAB)
    return found


VOCAB = 100_000
EACH = {"token_ids": tuple(range(50_000)), "bias": dict.fromkeys(range(50000), 1.0), "words": ([3], [4, 5])}


@pytest.mark.parametrize("name", EACH)
def test_the_sequences_of_a_request_share_their_restrictions(name: str) -> None:
    given: dict[str, Any] = {name: EACH[name]}
    first = made(**given)
    tracemalloc.start()
    others = [made(**given) for _ in range(20)]
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shared = first.adjustment._shared  # type: ignore[union-attr]
    assert all(other.adjustment._shared is shared for other in others)  # type: ignore[union-attr]
    assert kept_bytes < 20 * 20_000
    expected, found = torch.zeros(VOCAB), torch.zeros(VOCAB)
    adjust(expected, made(**given))
    adjust(found, others[0])
    assert torch.equal(expected, found)
    assert not torch.equal(found, torch.zeros(VOCAB))
    assert others[0].request.params is others[0].params
    assert others[0].params == made(**given).params
    reference = weakref.ref(shared)
    del first, others, shared
    gc.collect()
    assert reference() is None  # with the last sequence


def test_other_restrictions_are_not_shared() -> None:
    found = [made(ids) for ids in ((1,), (2,), (1, 2), (2, 1))]
    found += [made(None, bias) for bias in ({1: 1.0}, {1: 2.0}, {2: 1.0})]
    found += [made(None, None, words) for words in (([1],), ([1], [2]), ([1, 2],))]
    found += [made((1,), {1: 1.0}), made((1,), None, ([1],))]
    assert len({id(one.adjustment._shared) for one in found}) == len(found)  # type: ignore[union-attr]


def test_restrictions_that_are_added_at_once_are_made_for_all() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: made(**EACH), range(16)))  # type: ignore[arg-type]
    assert len({id(one.adjustment._shared) for one in found}) == 1  # type: ignore[union-attr]


def test_an_engine_starts_without_what_only_restrictions_need() -> None:
    """hashlib loads OpenSSL."""
    code = """
import sys
from medusa_runtime.imports.lazy_torch import import_torch
import_torch(numpy=False)
before = "hashlib" in sys.modules
import medusa_runtime.engine.torch.engine
assert before or "hashlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
