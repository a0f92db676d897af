"""A stream that was begun by one instance goes on from another one, without a lost, doubled or changed token."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from medusa_cluster.gateway.streaming.other_events import DivergedError
from medusa_cluster.gateway.streaming.replay import Transcript
from medusa_cluster.gateway.streaming.sse import Splitter, event


def completion(text: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None} | more


def chat(content: str | None, index: int = 0, **more: Any) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more


def opening(index: int = 0) -> dict[str, Any]:
    return chat("", index) | {"delta": {"role": "assistant", "content": ""}}


def logprobs(*tokens: str) -> dict[str, Any]:
    return {
        "tokens": list(tokens),
        "token_logprobs": [-0.5] * len(tokens),
        "top_logprobs": [None] * len(tokens),
        "text_offset": list(range(len(tokens))),
    }


class Run:
    """Feeds one run of a request to a transcript."""

    def __init__(self, transcript: Transcript, name: str) -> None:
        self.transcript = transcript
        self.name = name
        transcript.begin()

    def __call__(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any] | None:
        chunk = {"id": self.name, "created": len(self.name), "choices": list(choices)} | more
        data = json.dumps(chunk).encode()
        sent = self.transcript.take(event(chunk), data)
        if sent is None:
            return None
        (found,) = Splitter().feed(sent)
        assert found.data is not None
        answer: dict[str, Any] = json.loads(found.data)
        return answer


def test_the_second_run_sends_only_what_the_first_did_not() -> None:
    transcript = Transcript()
    first = Run(transcript, "first")
    assert first(completion(" a")) is not None
    assert first(completion(" b")) is not None
    second = Run(transcript, "second one")
    assert second(completion(" a")) is None
    assert second(completion(" b")) is None
    rest = second(completion(" c", finish_reason="stop"))
    assert rest is not None
    assert rest["choices"] == [completion(" c", finish_reason="stop")]
    assert (rest["id"], rest["created"]) == ("first", 5)
    assert transcript.tokens == 3


def test_choices_are_compared_one_by_one_in_whatever_order_they_come() -> None:
    transcript = Transcript()
    first = Run(transcript, "first")
    for choice in (
        completion("x", 0),
        completion("1", 1),
        completion("2", 1, finish_reason="stop"),
        completion("y", 0),
    ):
        assert first(choice) is not None
    second = Run(transcript, "second")
    assert second(completion("1", 1)) is None
    assert second(completion("2", 1, finish_reason="stop")) is None
    assert second(completion("x", 0)) is None
    assert second(completion("y", 0)) is None
    assert second(completion("z", 0, finish_reason="length")) is not None


def test_chunks_that_are_cut_elsewhere_are_cut_to_fit() -> None:
    transcript = Transcript()
    first = Run(transcript, "first")
    first(completion("ab", logprobs=logprobs("a", "b")))
    second = Run(transcript, "second")
    assert second(completion("a", logprobs=logprobs("a"))) is None
    rest = second(completion("bcd", logprobs=logprobs("b", "c", "d")))
    assert rest is not None
    choice = rest["choices"][0]
    assert choice["text"] == "cd"
    assert choice["logprobs"] == {
        "tokens": ["c", "d"], "token_logprobs": [-0.5] * 2, "top_logprobs": [None] * 2, "text_offset": [1, 2],
    }  # fmt: skip


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")])
def test_reasoning_is_text_that_may_be_cut_elsewhere(names: tuple[str, ...]) -> None:
    def delta(text: str, **more: str) -> dict[str, Any]:
        return chat(None) | {"delta": dict.fromkeys(names, text) | more}

    transcript = Transcript()
    first = Run(transcript, "first")
    assert first(delta("ö a")) is not None
    assert first(delta("b")) is not None
    assert transcript.tokens == 2
    second = Run(transcript, "second")
    assert second(delta("ö")) is None
    rest = second(delta(" abc"))
    assert rest is not None
    assert rest["choices"] == [delta("c")]
    assert second(delta("d", content="x")) is not None
    third = Run(transcript, "third")
    rest = third(delta("ö abcd", content="xy"))
    assert rest is not None
    assert rest["choices"] == [delta("", content="y")]
    with pytest.raises(DivergedError):
        Run(transcript, "fourth")(delta("other"))


def test_a_response_counts_the_tokens_of_its_reasoning() -> None:
    transcript = Transcript()
    transcript.begin()
    for kind in ("reasoning_text", "output_text"):
        data = json.dumps({"type": f"response.{kind}.delta", "delta": "a"}).encode()
        assert transcript.take(b"data: " + data, data) is not None
    assert transcript.tokens == 2


def test_a_chat_opens_each_choice_once() -> None:
    transcript = Transcript()
    first = Run(transcript, "first")
    first(opening())
    first(chat("Hé"))
    second = Run(transcript, "second")
    assert second(opening()) is None
    assert second(opening(1)) is not None
    assert second(chat("Hé")) is None
    rest = second(chat("llo"))
    assert rest is not None
    assert rest["choices"][0]["delta"] == {"content": "llo"}
    end = second(chat(None, finish_reason="stop"))
    assert end is not None
    assert end["choices"][0]["finish_reason"] == "stop"


def test_an_end_that_was_sent_is_not_sent_again_but_the_usage_is_once() -> None:
    transcript = Transcript()
    first = Run(transcript, "first")
    first(completion("a", finish_reason="length"))
    second = Run(transcript, "second")
    assert second(completion("a", finish_reason="length")) is None
    usage = second(usage={"total_tokens": 1})
    assert usage == {"id": "first", "created": 5, "choices": [], "usage": {"total_tokens": 1}}
    third = Run(transcript, "third")
    assert third(completion("a", finish_reason="length")) is None
    assert third(usage={"total_tokens": 1}) is None


@pytest.mark.parametrize(
    "chunk",
    [
        completion(" z"),
        completion("", finish_reason="stop"),
        completion(" a", logprobs=logprobs(" b")),
    ],
)
def test_another_answer_is_noticed(chunk: dict[str, Any]) -> None:
    transcript = Transcript()
    Run(transcript, "first")(completion(" a", logprobs=logprobs(" a")))
    second = Run(transcript, "second")
    with pytest.raises(DivergedError):
        second(chunk)


def test_more_after_the_end_is_another_answer() -> None:
    transcript = Transcript()
    Run(transcript, "first")(completion("a", finish_reason="stop"))
    second = Run(transcript, "second")
    second(completion("a"))
    with pytest.raises(DivergedError):
        second(completion("b"))


def test_tool_calls_are_compared_without_their_ids() -> None:
    def call(name: str, arguments: str) -> dict[str, Any]:
        calls = [{"index": 0, "id": name, "function": {"arguments": arguments}}]
        return chat(None) | {"delta": {"tool_calls": calls}}

    transcript = Transcript()
    Run(transcript, "first")(call("one", "{}"))
    second = Run(transcript, "second")
    assert second(call("two", "{}")) is None
    assert second(call("two", "[]")) is not None
    third = Run(transcript, "third")
    with pytest.raises(DivergedError):
        third(call("three", "[]"))


def test_frames_are_compared_by_their_token_ids() -> None:
    def frame(text: str, ids: list[int], finish: str | None = None) -> bytes:
        return json.dumps({"type": "delta", "id": "f", "values": [text, ids, [], finish, None, 1, 2, None]}).encode()

    transcript = Transcript()
    transcript.begin()
    assert transcript.take(b"raw", frame("", [5])) == b"raw"
    assert transcript.take(b"raw", frame("ab", [6])) == b"raw"
    transcript.begin()
    assert transcript.take(b"raw", frame("", [5])) is None
    rest = transcript.take(b"raw", frame("abc", [6, 7], "stop"))
    assert rest is not None
    assert json.loads(rest[6:])["values"][:4] == ["c", [7], [], "stop"]
    transcript.begin()
    with pytest.raises(DivergedError):
        transcript.take(b"raw", frame("", [4]))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_lost_whenever_the_client_gets_the_answer_once(seed: int) -> None:
    """Runs of random length, whose chunks are cut and mixed anew, make one whole answer."""
    chance = random.Random(seed)
    answers = [[chance.choice(("a", "é", "", "字", "bc ")) for _ in range(chance.randrange(1, 30))] for _ in range(3)]
    transcript = Transcript()
    texts, tokens, ends = [""] * 3, [list[str]() for _ in range(3)], [0] * 3
    for number in range(6):
        run = Run(transcript, f"run {number}")
        chunks = _mixed(chance, answers)
        for chunk in chunks if number == 5 else chunks[: chance.randrange(len(chunks) + 1)]:
            for sent in (run(chunk) or {"choices": []})["choices"]:
                texts[sent["index"]] += sent["text"]
                tokens[sent["index"]] += sent["logprobs"]["tokens"]
                ends[sent["index"]] += sent["finish_reason"] is not None
    assert texts == ["".join(answer) for answer in answers]
    assert tokens == answers
    assert ends == [1] * 3


def _mixed(chance: random.Random, answers: list[list[str]]) -> list[dict[str, Any]]:
    """The chunks of one run: each choice's in order, of one to three tokens, in any order among choices."""
    queues = []
    for index, answer in enumerate(answers):
        left, queue = list(answer), []
        while left:
            taken, left = left[: (count := chance.randint(1, 3))], left[count:]
            end = None if left else "length"
            queue.append(completion("".join(taken), index, logprobs=logprobs(*taken), finish_reason=end))
        queues.append(queue)
    found = []
    while queues := [queue for queue in queues if queue]:
        found.append(chance.choice(queues).pop(0))
    return found


def test_events_of_other_interfaces_are_compared_one_by_one_and_keep_their_ids() -> None:
    def events(run: str) -> list[tuple[bytes, bytes]]:
        values: list[dict[str, Any]] = [
            {"type": "response.created", "response": {"id": f"resp-{run}", "created_at": len(run)}},
            {"type": "response.output_text.delta", "item_id": f"msg-{run}", "delta": "a"},
            {"type": "response.output_text.delta", "item_id": f"msg-{run}", "delta": "b"},
            {"type": "response.completed", "response": {"id": f"resp-{run}", "output": [{"id": f"msg-{run}"}]}},
        ]
        datas = [json.dumps(value, separators=(",", ":")).encode() for value in values]
        return [(b"event: x\ndata: %s\n\n" % data, data) for data in datas]

    transcript = Transcript()
    transcript.begin()
    first = events("first")
    assert [transcript.take(raw, data) for raw, data in first[:2]] == [raw for raw, _ in first[:2]]
    transcript.begin()
    second = [transcript.take(raw, data) for raw, data in events("second one")]
    assert second == [None, None, first[2][0], first[3][0]]
    transcript.begin()
    raw, data = events("third")[0]
    assert transcript.take(raw, data) is None
    with pytest.raises(DivergedError):
        transcript.take(*events("third")[2])


def test_events_are_whole_however_the_bytes_come() -> None:
    text = b"data: one\n\n: waiting\n\ndata: two\ndata: lines\n\n"
    for size in range(1, len(text)):
        splitter = Splitter()
        events = [found for at in range(0, len(text), size) for found in splitter.feed(text[at : at + size])]
        assert [found.data for found in events] == [b"one", None, b"two\nlines"]
        assert b"".join(found.raw for found in events) == text
