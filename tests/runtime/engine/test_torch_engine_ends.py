"""How a request ends: stop strings, stop tokens, EOS, length, and requests that cannot be served."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import ContextLengthError, CorruptError, MedusaError, MismatchError, RequestError

PROMPT = "Tokens flow from storage"


def test_a_stop_string_over_several_tokens_is_cut_and_never_shown(serve: Any) -> None:
    served = serve()
    whole = served.ask(PROMPT, max_tokens=40)
    start, stop = next(
        (at, whole.text[at : at + 4])
        for at in range(8, 60)
        if whole.text.find(whole.text[at : at + 4]) == at and "\ufffd" not in whole.text[at : at + 4]
    )
    answer = served.ask(PROMPT, max_tokens=40, stop=("never", stop))
    assert answer.text == whole.text[:start]
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", stop)
    assert answer.last.completion_tokens < 40
    included = served.ask(PROMPT, max_tokens=40, stop=(stop,), include_stop_str_in_output=True)
    assert included.text == whole.text[: start + 4]


def test_text_held_back_for_a_stop_string_comes_when_it_does_not(serve: Any) -> None:
    served = serve()
    whole = served.ask(PROMPT, max_tokens=20)
    answer = served.ask(PROMPT, max_tokens=20, stop=(whole.text[-3:] + "and more",))
    assert answer.text == whole.text
    assert answer.last.finish_reason == "length"


def test_min_tokens_hold_off_stops(serve: Any) -> None:
    served = serve()
    tokens = served.ask(PROMPT, max_tokens=30).tokens
    early = tokens[2]
    cut = served.ask(PROMPT, max_tokens=30, stop_token_ids=(early,))
    assert cut.tokens == tokens[: tokens.index(early) + 1]
    assert (cut.last.finish_reason, cut.last.stop_reason) == ("stop", early)
    later = served.ask(PROMPT, max_tokens=30, min_tokens=10, stop_token_ids=(early,))
    assert len(later.tokens) >= 10
    assert early not in later.tokens[:10]


def test_min_tokens_come_before_a_token_that_completes_a_stop_string(serve: Any) -> None:
    """As in vLLM."""
    served = serve()
    ask = functools.partial(served.ask, PROMPT, max_tokens=30)
    for place, token in enumerate(ask().tokens):
        stop = served.engine.detokenize([token])
        if stop not in ("", "\ufffd") and len(ask(stop=(stop,)).tokens) == place + 1 > 1:
            break
    assert len(ask(min_tokens=place, stop=(stop,)).tokens) == place + 1
    assert len(ask(min_tokens=place + 1, stop=(stop,)).tokens) > place + 1


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(serve: Any) -> None:
    served = serve()
    tokens = served.ask(PROMPT, max_tokens=30).tokens
    place = next(i for i, token in enumerate(tokens) if token >= 3 and tokens.index(token) == i > 3)
    decode = served.engine.detokenize
    params = {"max_tokens": 30, "stop_token_ids": (tokens[place],), "skip_special_tokens": False}
    assert served.ask(PROMPT, **params).text == decode(tokens[:place])
    with_stop = served.ask(PROMPT, include_stop_str_in_output=True, **params)
    assert with_stop.text == decode(tokens[: place + 1])


@pytest.mark.parametrize("eos", [1, 2])  # one is in config.json, the other in generation_config.json only
def test_every_eos_ends_a_request_unless_ignored(serve: Any, eos: int) -> None:
    served = serve()
    assert served.engine.info.eos_token_ids == (1, 2)
    answer = served.ask(PROMPT, ignore_eos=False, logit_bias={eos: 100.0})
    assert answer.tokens == [eos]
    assert answer.text == ""
    assert (answer.last.finish_reason, answer.last.stop_reason) == ("stop", None)
    ignored = served.ask(PROMPT, ignore_eos=True, logit_bias={eos: 100.0}, max_tokens=5)
    assert ignored.tokens == [eos] * 5
    waited = served.ask(PROMPT, ignore_eos=False, logit_bias={eos: 100.0}, min_tokens=3, max_tokens=9)
    assert len(waited.tokens) == 4
    assert waited.tokens[3] == eos


def test_without_max_tokens_a_request_goes_on_to_the_models_length(serve: Any) -> None:
    served = serve(max_model_len=40)
    answer = served.ask(list(range(10, 20)), max_tokens=None)
    assert len(answer.tokens) == 30
    assert served.ask(list(range(10, 20)), max_tokens=40).last.completion_tokens == 30
    with pytest.raises(ContextLengthError, match="length is 40 tokens, and 41 were asked for") as refused:
        served.ask(list(range(10, 20)), max_tokens=41)
    assert refused.value.param == "max_tokens"


def test_logprobs_are_the_models(serve: Any, checkpoint: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    served = serve()
    answer = served.ask(PROMPT, max_tokens=3, logprobs=4, temperature=1.0, seed=3, repetition_penalty=1.5)
    ids = served.engine.tokenize(PROMPT, True)
    with torch.no_grad():
        logits = LlamaForCausalLM.from_pretrained(checkpoint)(torch.tensor([ids + answer.tokens])).logits[0]
    for step, delta in enumerate(answer.deltas):
        (found,) = delta.logprobs
        expected = torch.log_softmax(logits[len(ids) - 1 + step], -1)
        values, best = expected.topk(4)
        assert found.token_id == answer.tokens[step]
        assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-3)
        assert [token for token, _, _ in found.top] == best.tolist()
        assert [value for _, _, value in found.top] == pytest.approx(values.tolist(), abs=1e-3)
        texts = [served.engine.detokenize([token]) for token in best.tolist()]  # a part of a character has none
        assert [text for _, text, _ in found.top] == ["" if text.endswith("\ufffd") else text for text in texts]
    assert served.ask(PROMPT, max_tokens=1, logprobs=0).last.logprobs[0].top == ()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected 0 or more, found -1.0"),
        ({"temperature": math.nan}, "temperature: expected 0 or more, found NaN"),
        ({"temperature": "hot"}, 'temperature: expected 0 or more, found "hot"'),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], found 0.0"),
        ({"top_k": -2}, "top_k: expected .*, found -2"),
        ({"min_p": 1.5}, r"min_p: expected a number in \[0, 1\], found 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number above 0, found 0.0"),
        ({"presence_penalty": 3.0}, r"presence_penalty: expected a number in \[-2, 2\], found 3.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"max_tokens": -1}, "max_tokens: expected 0 or more, found -1"),
        ({"min_tokens": 20}, "min_tokens: expected .* at most max_tokens, found 20"),
        ({"logprobs": 21}, "logprobs: expected between 0 and 20, found 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: expected between 0 and 20, found 21"),
        ({"seed": 1.5}, "seed: expected a whole number"),
        ({"seed": 1 << 64}, "seed: expected a whole number of at most 64 bits"),  # it ended vLLM's engine
        ({"seed": -(1 << 63) - 1}, "seed: expected a whole number of at most 64 bits"),
        ({"stop": ("",)}, "stop: expected strings that are not empty"),
        ({"stop_token_ids": (320,)}, "stop_token_ids: expected token ids between 0 and 319, found 320"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: expected token ids between 0 and 319, found -1"),
        ({"logit_bias": {1: 101.0}}, "logit_bias: expected values in"),
    ],
)
def test_a_bad_parameter_is_named_with_what_is_accepted(serve: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        serve().ask(PROMPT, **params)


def test_a_text_that_cannot_fit_is_refused_without_counting_its_tokens(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    monkeypatch.setattr(served.engine._tokenizer, "encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(RequestError, match="length is 512 tokens, and the prompt has 4000000 characters"):
        served.ask("word" * 1_000_000)


def test_bad_prompts_are_refused(serve: Any) -> None:
    served = serve(max_model_len=32)
    with pytest.raises(RequestError, match="found an empty prompt"):
        served.ask([])
    with pytest.raises(RequestError, match=r"length is 32 tokens, and the prompt has 32"):
        served.ask([5] * 32)
    with pytest.raises(RequestError, match="prompt: expected token ids between 0 and 319, found 320"):
        served.ask([5, 320])
    with pytest.raises(RequestError, match="token_ids: expected token ids"):
        served.engine.detokenize([-1])
    assert len(served.ask([5] * 31, max_tokens=9).tokens) == 1


def test_without_a_tokenizer_token_ids_still_work(serve: Any, checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint / name)
    served = serve(tmp_path)
    with pytest.raises(RequestError, match=r"no tokenizer\.json.*token ids"):
        served.ask(PROMPT)
    with pytest.raises(RequestError, match="use stop_token_ids"):
        served.ask([5, 6], stop=("x",))
    answer = served.ask([5, 6, 7], logprobs=1)
    assert answer.tokens == serve().ask([5, 6, 7]).tokens
    assert answer.text == ""


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer.json", "{}", CorruptError),
        ("config.json", "{", CorruptError),
        ("config.json", None, MismatchError),
        ("generation_config.json", json.dumps({"eos_token_id": "</s>"}), CorruptError),
    ],
)
def test_a_broken_file_is_named(
    serve: Any, checkpoint: Path, tmp_path: Path, name: str, content: str | None, error: type[MedusaError]
) -> None:
    for file in checkpoint.iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    if content is not None:
        (tmp_path / name).write_text(content)

    def start() -> None:
        serve(tmp_path).engine.wait_ready()

    with pytest.raises(error, match=name.replace(".", r"\.")):
        start()
