"""vLLM's own routes over our running engine, by vLLM's code: whole, streamed, cancelled; flags behind ``--``."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import openai_examples
import pytest

PATIENCE_S = 300.0
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]
MODEL = "pydoc-lm"


def client_of(serving: Any) -> openai.OpenAI:
    url = f"http://127.0.0.1:{serving.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", timeout=PATIENCE_S, max_retries=0)


@pytest.fixture(scope="module")
def serving(start_shared: Callable[..., Any], example: Path) -> Iterator[Any]:
    made = start_shared("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    yield made
    assert made.stop() == 0  # and nothing is left behind, the folder of vLLM's server neither


@pytest.mark.parametrize("shown", [*openai_examples.GENERATING, openai_examples.responses])
def test_the_official_clients_examples_run(serving: Any, shown: Callable[[openai.OpenAI, str], None]) -> None:
    with client_of(serving) as client:
        shown(client, MODEL)


def test_a_field_that_our_route_does_not_cover_is_vllms(serving: Any) -> None:
    asked = {"prompt": "Return the", "max_tokens": 4, "temperature": 0}
    ours = serving.request("POST", "/v1/completions", asked, PATIENCE_S)[1]
    status, theirs, _ = serving.request("POST", "/v1/completions", asked | {"return_token_ids": True}, PATIENCE_S)
    assert status == 200, theirs
    assert theirs["choices"][0]["text"] == ours["choices"][0]["text"]
    assert len(theirs["choices"][0]["token_ids"]) == 4
    status, refused, _ = serving.request("POST", "/v1/completions", asked | {"max_token": 4})
    assert (status, refused["error"]["param"]) == (400, "max_token")  # vLLM would ignore it


def test_what_vllm_refuses_in_the_engine_ends_that_request_alone(serving: Any) -> None:
    """vLLM's own errors are no ValueErrors. One ended the engine, and with it the instance."""
    asked = {"prompt": "Return the", "max_tokens": 4}
    for stream in (False, True):
        status, refused, _ = serving.request("POST", "/v1/completions", asked | {"temperature": 3, "stream": stream})
        assert (status, refused["error"]["param"], refused["error"]["code"]) == (400, "temperature", "invalid_value")
    frame = {"id": "a", "prompt": "Return the", "params": {"temperature": 3.0}, "add_special_tokens": True}
    status, refused, _ = serving.request("POST", "/medusa/generate", {"frame": frame})  # whose values the engine checks
    assert (status, "temperature must be in [0, 2]" in refused["error"]["message"]) == (400, True)
    assert serving.request("POST", "/v1/completions", asked)[0] == 200


def test_values_that_our_routes_refuse_are_vllms_to_take(serving: Any) -> None:
    asked = {"prompt": "Return the", "max_tokens": 4, "temperature": 0}
    expected = serving.request("POST", "/v1/completions", asked)[1]["choices"][0]["text"]
    for more in ({"max_tokens": "4"}, {"temperature": "0"}, {"top_k": 2**40}, {"logprobs": True}):
        status, answer, _ = serving.request("POST", "/v1/completions", asked | more, PATIENCE_S)
        assert status == 200, answer
        assert answer["choices"][0]["text"] == expected
    more = {"structured_outputs": {"choice": ["yes"]}, "min_tokens": 1}
    assert serving.request("POST", "/v1/completions", asked | more, PATIENCE_S)[1]["choices"][0]["text"] == "yes"
    form = {"type": "structural_tag", "format": {"type": "const_string", "value": "hello"}}
    chat = {"messages": [{"role": "user", "content": "a"}], "response_format": form, "max_tokens": 9}
    status, answer, _ = serving.request("POST", "/v1/chat/completions", chat, PATIENCE_S)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello"), answer


def test_our_routes_have_the_checkpoints_defaults_as_vllms_have(
    start: Callable[..., Any], example: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(example, tmp_path / "model")
    generation = {"eos_token_id": 0, "temperature": 0, "repetition_penalty": 1.5, "max_new_tokens": 6}
    (model / "generation_config.json").write_text(json.dumps(generation))
    serving = start("--model", model, "--engine", "vllm", "--kv-cache-mb", "64")
    asked = {"messages": [{"role": "user", "content": "Return the value of the value of the"}]}
    ours, theirs = (
        serving.request("POST", "/v1/chat/completions", asked | more, PATIENCE_S)[1]["choices"][0]
        for more in ({}, {"return_token_ids": True})
    )
    assert ours["message"]["content"] == theirs["message"]["content"]
    assert ours["finish_reason"] == theirs["finish_reason"]
    assert len(theirs["token_ids"]) <= 6
    assert serving.stop() == 0


def test_a_prompts_log_probabilities_are_vllms(serving: Any) -> None:
    """A token that was generated has the same probability when it is the end of a prompt."""
    prompt = serving.request("POST", "/tokenize", {"prompt": "Return the"})[1]["tokens"]
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "return_token_ids": True}
    (choice,) = serving.request("POST", "/v1/completions", asked, PATIENCE_S)[1]["choices"]
    (generated,), expected = choice["token_ids"], choice["logprobs"]["token_logprobs"][0]
    for count in (0, 1):
        asked = {"prompt": [*prompt, generated], "max_tokens": 1, "temperature": 0, "prompt_logprobs": count}
        status, answer, _ = serving.request("POST", "/v1/completions", asked, PATIENCE_S)
        assert status == 200, answer
        first, *others = answer["choices"][0]["prompt_logprobs"]
        assert (first, len(others)) == (None, len(prompt))
        found = others[-1][str(generated)]
        assert found["rank"] == 1
        assert found["logprob"] == pytest.approx(expected, abs=0.05)
    asked = {"prompt": [*prompt, generated], "max_tokens": 1, "echo": True, "logprobs": 0}
    (choice,) = serving.request("POST", "/v1/completions", asked, PATIENCE_S)[1]["choices"]
    assert choice["logprobs"]["token_logprobs"][len(prompt)] == pytest.approx(expected, abs=0.05)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 1}
    status, answer, _ = serving.request("POST", "/v1/chat/completions", chat, PATIENCE_S)
    assert (status, answer["prompt_logprobs"][0]) == (200, None)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    status, refused, _ = serving.request("POST", "/v1/completions", asked | {"prompt_logprobs": 1, "stream": True})
    assert status == 400, refused


def test_json_schema_and_anthropic_messages_through_vllms_routes(serving: Any) -> None:
    form = {"type": "json_schema", "name": "e", "schema": {"enum": ["meeting", "party"]}}
    asked = {"model": MODEL, "input": "An event:", "max_output_tokens": 60, "text": {"format": form}}
    asked["enable_response_messages"] = True  # which only vLLM's route has
    status, answer, _ = serving.request("POST", "/v1/responses", asked, PATIENCE_S)
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["text"] in ('"meeting"', '"party"')
    asked = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Return the"}]}
    status, answer, _ = serving.request("POST", "/v1/messages", asked, PATIENCE_S)
    assert (status, answer["type"], answer["role"]) == (200, "message", "assistant")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_responses_make_forced_calls_without_a_tool_parser(serving: Any, choice: Any) -> None:
    """vLLM's own route ignores a forced call then, and answers with a message."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "additionalProperties": False}}
    asked = {"input": "?", "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    for _ in range(30):  # a model this small often writes white space until it ends
        status, answer, _ = serving.request("POST", "/v1/responses", asked | {"max_output_tokens": 60}, PATIENCE_S)
        assert status == 200, answer
        if answer["status"] == "completed":
            break
    (call,) = answer["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "f", {})


def test_vllms_errors_and_unknown_paths_are_passed_on(serving: Any) -> None:
    asked = {"model": "another", "input": "x", "enable_response_messages": True}
    status, answer, _ = serving.request("POST", "/v1/responses", asked, PATIENCE_S)
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    assert serving.request("GET", "/v1/nothing")[0] == 404
    assert serving.request("GET", "/version")[1]["version"]


def test_a_client_that_leaves_cancels_its_request_in_vllm(serving: Any) -> None:
    with client_of(serving) as client:
        body = {"ignore_eos": True, "enable_response_messages": True}
        stream = client.responses.create(
            model=MODEL, input="Return", max_output_tokens=480, stream=True, extra_body=body, temperature=0
        )
        assert next(iter(stream)).type == "response.created"
        deadline = time.monotonic() + 30
        while not serving.metric("medusa_engine_running"):
            assert time.monotonic() < deadline
        stream.close()
        while serving.metric("medusa_engine_running"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    status, answer, _ = serving.request("POST", "/v1/completions", {"prompt": "Return the", "max_tokens": 4})
    assert status == 200, answer


def test_flags_of_vllm_serve_and_a_request_before_the_first_token(start: Callable[..., Any], example: Path) -> None:
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--served-model-name", "one", "two")
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64", "--", *flags)
    messages = [{"role": "user", "content": "What does len return?"}]
    asked = {"messages": messages, "tools": [openai_examples.WEATHER], "model": "two", "max_tokens": 6}
    status, answer, _ = serving.request("POST", "/v1/chat/completions", asked, PATIENCE_S)  # waits for import and mount
    assert status == 200, answer
    assert answer["model"] in ("one", "two")
    models = serving.request("GET", "/v1/models", timeout_s=PATIENCE_S)[1]
    assert [model["id"] for model in models["data"]] == ["one", "two"]
    assert serving.stop() == 0
    serving = start("--model", example, "--engine", "vllm", "--", "--port", "9000")
    assert serving.process.wait(60) == 2
    assert "use medusa's --port" in serving.output()


def test_the_server_is_mounted_once_without_being_asked(start: Callable[..., Any], example: Path) -> None:
    serving = start("--model", example, "--engine", "vllm", "--kv-cache-mb", "64")
    asked = {"prompt": "Return the", "max_tokens": 4}
    assert serving.request("POST", "/v1/completions", asked, PATIENCE_S)[0] == 200
    deadline = time.monotonic() + PATIENCE_S
    while "vllm_server" not in [stage["name"] for stage in serving.request("GET", "/timeline")[1]["stages"]]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (stage,) = [stage for stage in serving.request("GET", "/timeline")[1]["stages"] if stage["name"] == "vllm_server"]
    assert stage["process"] == "engine"
    assert serving.stop() == 0


def test_a_model_that_embeds_answers_for_embeddings(start: Callable[..., Any], example: Path) -> None:
    serving = start("--model", example, "--engine", "vllm", "--", "--runner", "pooling", "--convert", "embed")
    with client_of(serving) as client:
        openai_examples.embeddings(client, MODEL)
    assert serving.stop() == 0


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=["our route", "vllm's own"])
def test_a_grammar_that_takes_too_much_is_refused_on_every_route(serving: Any, more: dict[str, Any]) -> None:
    """vLLM alone compiles each of these for more than 90 s, in the process that gives everybody's tokens."""
    asked = {"prompt": "Return the", "max_tokens": 4, **more}
    every_letter = {"allOf": [{"type": "string", "pattern": f".*{chr(97 + letter)}.*"} for letter in range(20)]}
    for bomb in ({"json": every_letter}, {"choice": ["x" * 50 + str(number) for number in range(100_000)]}):
        status, answer, _ = serving.request("POST", "/v1/completions", asked | {"structured_outputs": bomb}, PATIENCE_S)
        assert status == 400, answer
        assert "more than 3 s of CPU time" in answer["error"]["message"]
    status, answer, _ = serving.request(
        "POST", "/v1/completions", asked | {"structured_outputs": {"choice": ["yes"]}}, PATIENCE_S
    )
    assert answer["choices"][0]["text"] == "yes"


def test_callers_can_neither_stop_the_model_nor_load_anything(serving: Any) -> None:
    for path in (
        "scale_elastic_ep", "sleep", "collective_rpc", "reset_prefix_cache", "pause", "start_profile", "server_info",
        "v1/load_lora_adapter",
    ):  # fmt: skip
        asked = {"new_data_parallel_size": 2, "lora_name": "x", "lora_path": "/etc", "method": "x"}
        assert serving.request("POST", f"/{path}", asked, PATIENCE_S)[0] == 404


def test_media_are_read_from_a_request_alone(serving: Any) -> None:
    from medusa_vllm.flags import MEDIA_DOMAINS
    from vllm.multimodal.media import ImageMediaIO, MediaConnector

    text = {"type": "text", "text": "a"}
    image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
    asked = {"messages": [{"role": "user", "content": [text, image]}], "max_tokens": 1}
    assert serving.request("POST", "/v1/chat/completions", asked, PATIENCE_S)[0] == 400  # it is no multimodal model
    connector = MediaConnector(allowed_media_domains=MEDIA_DOMAINS)  # as models that are have it
    for url in ("http://169.254.169.254/latest", "https://localhost/a.png"):
        with pytest.raises(ValueError, match="--allowed-media-domains"):
            connector.load_from_url(url, ImageMediaIO())
    with pytest.raises((RuntimeError, ValueError)):
        connector.load_from_url("file:///etc/passwd", ImageMediaIO())
