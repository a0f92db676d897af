"""Strangers at the port of a group's worker, those who listen in its place, and workers that send nonsense."""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import resource
import socket
import threading
import time
from array import array
from collections.abc import Iterator

import pytest
import torch
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_cluster.group.gathering import send_blocks
from medusa_cluster.group.identity import disagreement
from medusa_cluster.group.live.handover import Batch, HandoverReader, offered
from medusa_cluster.group.steps import StepReader, ending_spans, forbid, read_scores, read_tokens
from medusa_cluster.group.wire.channel import Greeting, Listener, connect
from medusa_cluster.group.wire.handshake import is_answer, make_challenge, make_greeting, read_greeting
from medusa_cluster.group.wire.message import HEADER_BYTES, Kind, Message, hidden_states, json_message, parse_header
from medusa_runtime.engine import frames
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.torch.kv_cache import KvCache, KvShape
from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.models.layer_range import LayerRange
from medusa_runtime.storage.peer_access import PeerAccess
from waiting import until

GROUP, TOKEN = 7, "the group's secret"


def batch(*lengths: int) -> Batch:
    """An offered batch of prompts with so many tokens."""
    request = GenerateRequest("a", (), SamplingParams())
    spans = StepReader(()).read(
        {
            "gone": [],
            "spans": [
                {"number": number, "start": 0, "stop": length, "tokens": [1] * length, "keep": 0, "blocks": [0],
                 "prompt": length, "ends": True, "roll": 0.5, "request": frames.request_to_frame(request)}
                for number, length in enumerate(lengths)
            ],
        }
    )  # fmt: skip
    return Batch(7, spans, [span.sequence.blocks for span in spans], 0)


class Door:
    """A listener, and who was let in."""

    def __init__(self) -> None:
        self.let_in: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
        self.listener = Listener(
            "127.0.0.1", 0, group=GROUP, access=PeerAccess(TOKEN), accept=self.let_in.put, link=None
        )

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.listener.port), timeout=60)

    def lets_a_member_in(self) -> None:
        member = connect(
            f"127.0.0.1:{self.listener.port}", group=GROUP, access=PeerAccess(TOKEN), rank=1, purpose="steps",
            deadline=time.monotonic() + 60,
        )  # fmt: skip
        greeting = self.let_in.get(timeout=60)
        assert greeting.rank == 1
        greeting.channel.close()
        member.close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.listener.close()


def handshakes() -> int:
    return sum(thread.name == "group-greet" for thread in threading.enumerate())


def test_many_strangers_that_say_nothing_hold_few_threads_and_keep_nobody_out(door: Door) -> None:
    strangers = [door.stranger() for _ in range(200)]
    door.lets_a_member_in()
    until(lambda: handshakes() <= 64, handshakes)
    for each in strangers:
        each.close()


def test_a_byte_now_and_then_gives_a_stranger_no_more_time(door: Door) -> None:
    began = time.monotonic()
    with door.stranger() as stranger:
        while time.monotonic() - began < 60:
            try:
                stranger.send(b"M")
            except OSError:
                break
            time.sleep(0.2)
    assert time.monotonic() - began < 30


def test_a_worker_without_descriptors_takes_connections_again_when_it_has_some(door: Door) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    filled = [os.dup(0) for _ in range(used)]  # what lies below
    used = max(filled)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 6, hard))
    try:
        with contextlib.suppress(OSError):
            for _ in range(20):
                held.append(door.stranger())
        time.sleep(0.2)  # either side may be the one that lacked a descriptor
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in filled:
            os.close(number)
        for each in held:
            each.close()
    door.lets_a_member_in()


def test_who_listens_in_the_place_of_a_worker_does_not_learn_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        heard: list[bytes] = []

        def listen() -> None:
            connection, _ = taken.accept()
            with connection:
                asked = make_challenge(GROUP)
                connection.sendall(asked.header() + asked.body)
                heard.append(connection.recv(4096))
                wrong = asked._replace(body=bytes(32))
                connection.sendall(wrong.header() + wrong.body)

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(MedusaError, match="could not be reached"):
            connect(
                f"127.0.0.1:{taken.getsockname()[1]}", group=GROUP, access=PeerAccess(TOKEN), rank=1, purpose="steps",
                deadline=time.monotonic(),
            )  # fmt: skip
        thread.join()
    assert heard
    assert TOKEN.encode() not in heard[0]


def test_a_greeting_that_was_recorded_or_changed_opens_nothing(door: Door) -> None:
    asked = make_challenge(GROUP)
    recorded = make_greeting(TOKEN, asked, GROUP, 1, {"purpose": "steps"})
    assert read_greeting(TOKEN, asked, recorded) == {"purpose": "steps"}
    for changed in (
        recorded._replace(rank=2),
        recorded._replace(group=8),
        recorded._replace(body=recorded.body.replace(b"steps", b"block")),
    ):
        assert read_greeting(TOKEN, asked, changed) is None
    assert read_greeting("another group's", asked, recorded) is None
    with door.stranger() as stranger:
        stranger.sendall(recorded.header() + recorded.body)
        while stranger.recv(4096):
            pass
    assert door.let_in.empty()


def test_a_partner_fills_no_memory_by_what_it_was_not_offered() -> None:
    cache = KvCache(KvShape(2, 1, 4, torch.float32), 4)
    reader = HandoverReader({7: batch(3, 2)}.get)
    block = Message(Kind.BLOCK, GROUP, 7, 1, 1, 4, 1, bytearray(16))
    with pytest.raises(MedusaError, match="expected a batch that was offered, found number 8"):
        reader.take(block._replace(step=8), cache)
    with pytest.raises(MedusaError, match="expected a batch that was offered, found number 8"):
        reader.take(json_message(Kind.HANDOVER, GROUP, {"parts": [1], "lengths": [3]}, step=8), cache)
    for _ in range(4):  # two layers of two prompts
        assert reader.take(block, cache) is None
    with pytest.raises(MedusaError, match="expected the keys and values of 5 tokens in a batch, found more"):
        reader.take(block, cache)
    large = Message(Kind.BLOCK, GROUP, 7, 1, 1, 81, 1, bytearray(324))
    with pytest.raises(MedusaError, match="expected the keys and values of 5 tokens in a batch, found more"):
        HandoverReader({7: batch(3, 2)}.get).take(large, cache)


def test_a_batch_that_was_passed_on_comes_back_with_no_layer_twice() -> None:
    cache = KvCache(KvShape(2, 1, 4, torch.float32), 4)
    block = Message(Kind.BLOCK, GROUP, 7, 1, 1, 6, 4, bytearray(96))  # one layer of three tokens
    for layers, is_right in ((1, True), (2, False)):
        reader = HandoverReader({7: batch(3)._replace(done=1)}.get)
        for _ in range(layers):
            assert reader.take(block, cache) is None
        reader.take(json_message(Kind.HANDOVER, GROUP, {"parts": [1] * layers, "lengths": [3]}, step=7), cache)
        hidden = hidden_states(GROUP, 7, 1, torch.zeros(3, 4))
        hidden = hidden._replace(body=bytearray(hidden.body))
        if is_right:
            found = reader.take(hidden, cache)
            assert found is not None
            assert (found.done, len(found.caches[0])) == (2, 1)
        else:
            with pytest.raises(MedusaError, match="expected a batch of up to 2 layers"):
                reader.take(hidden, cache)


def test_a_peer_that_takes_no_blocks_is_made_no_further_ones(door: Door) -> None:
    """It asks for the same block ten thousand times, and reads nothing: 10 GB, if each of them waited in memory."""
    member = connect(
        f"127.0.0.1:{door.listener.port}", group=GROUP, access=PeerAccess(TOKEN), rank=1, purpose="blocks",
        deadline=time.monotonic() + 60,
    )  # fmt: skip
    channel = door.let_in.get(timeout=60).channel
    cache = KvCache(KvShape(4, 8, 512, torch.float32), 4)
    sending = threading.Thread(target=send_blocks, args=(cache, LayerRange(0, 4, 4), channel, GROUP, 0), daemon=True)
    sending.start()
    member.send(json_message(Kind.FETCH, GROUP, {"blocks": [0] * 10_000}))
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        assert channel.sent_bytes < 64 << 20
        time.sleep(0.01)
    member.close()
    sending.join(60)
    assert not sending.is_alive()


def test_a_prompt_with_fewer_scores_than_tokens_is_refused() -> None:
    request = frames.request_to_frame(GenerateRequest("a", (), SamplingParams(prompt_logprobs=1)))
    step = {"number": 1, "start": 0, "stop": 3, "tokens": [1, 2, 3], "keep": 0, "blocks": [0], "prompt": 3,
            "ends": True, "roll": 0.5, "request": request}  # fmt: skip

    def read(count: int) -> None:
        spans = StepReader(()).read({"gone": [], "spans": [step]})
        arrays = array("i", [3, 4] * count), array("f", [-1, -2] * count), array("i", [1] * count)
        read_scores({"scores": [[0, *(base64.b64encode(values).decode() for values in arrays)]]}, spans, 8)

    read(2)
    for count in (0, 1):
        with pytest.raises(EngineError, match="fewer scores than tokens"):
            read(count)


def test_fuzzed_messages_end_in_one_error() -> None:
    """Whatever a worker that has the token sends: each reader takes it, or refuses it with an EngineError."""
    cache = KvCache(KvShape(2, 1, 4, torch.float32), 4)
    request = frames.request_to_frame(GenerateRequest("a", (), SamplingParams()))
    scored_request = frames.request_to_frame(GenerateRequest("a", (), SamplingParams(prompt_logprobs=1)))
    spans = [{"number": 1, "start": 0, "stop": 2, "tokens": [1, 2], "keep": 0, "blocks": [0], "prompt": 2,
              "ends": True, "roll": 0.5, "allowed": "/w==", "request": request}]  # fmt: skip
    asked = make_challenge(GROUP)
    scored = StepReader(()).read({"gone": [], "spans": [spans[0] | {"request": scored_request, "prompt": 90}]})
    one_score = [
        base64.b64encode(values).decode() for values in (array("i", [3, 4]), array("f", [-1, -2]), array("i", [1]))
    ]
    seeds = [
        make_greeting(TOKEN, asked, GROUP, 1, {"purpose": "steps"}),
        json_message(Kind.STEP, GROUP, {"spans": spans, "gone": [3]}, step=1),
        json_message(Kind.TOKENS, GROUP, {"tokens": [[3, -0.5, [[4, -1.0]]]], "scores": [[0, *one_score]]}, step=1),
        json_message(Kind.HEARTBEAT, GROUP, {"sent": 1, "echo": [1, 2], "loaded": True}),
        json_message(Kind.OFFER, GROUP, {"prompts": [[1, 2], [3]], "done": 2}, step=1),
        json_message(Kind.HANDOVER, GROUP, {"parts": [1], "lengths": [2]}, step=1),
        Message(Kind.BLOCK, GROUP, 1, 1, 1, 4, 4, bytearray(64)),
        hidden_states(GROUP, 1, 0, torch.zeros(2, 4)),
    ]

    def read(data: bytes) -> None:
        if len(data) < HEADER_BYTES:
            return
        try:
            message = parse_header(data[:HEADER_BYTES]).message._replace(body=bytearray(data[HEADER_BYTES:]))
        except MedusaError:
            return
        for reader in (_greeting, _step, _tokens, _offer, _handover, Message.tensor, _identity):
            try:
                reader(message)
            except MedusaError:
                pass

    def _greeting(message: Message) -> None:
        read_greeting(TOKEN, asked, message)
        assert not is_answer(TOKEN, asked, seeds[0], message)

    def _step(message: Message) -> None:
        values = message.values()
        found = StepReader((0,)).read(values)
        forbid(torch.zeros(len(found), 8), values, ending_spans(values, found))

    def _tokens(message: Message) -> None:
        for one in read_tokens(message.values(), 1, 8):
            assert 0 <= one.token < 8
        read_scores(message.values(), scored, 8)
        assert all(0 <= token < 8 for token in scored[0].sequence.prompt_scores._token_ids)

    def _offer(message: Message) -> None:
        _, done = offered(message, 4)
        assert 0 <= done < 4

    def _handover(message: Message) -> None:
        reader = HandoverReader(lambda number: batch(2) if number == 1 else None)
        reader.take(seeds[5], cache)
        reader.take(seeds[6], cache)
        reader.take(message, cache)

    def _identity(message: Message) -> None:
        disagreement({"model": "a"}, message.values())

    starts = [seed.header() for seed in seeds]
    drawn = st.tuples(st.sampled_from(starts), st.binary(max_size=200)).map(b"".join)
    fuzz(drawn, read, [seed.header() + bytes(seed.body) for seed in seeds])
