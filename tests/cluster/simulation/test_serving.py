"""An instance's batches, without steps."""

from __future__ import annotations

import pytest
from medusa_cluster.simulation.network import call_after
from medusa_cluster.simulation.profiles import LinearSpeed
from medusa_cluster.simulation.serving import ServedRequest, Server, relieved_s

simpy = pytest.importorskip("simpy")
SPEED = LinearSpeed(0.1, 0.001, 0.01, 0.01)


def server(env: object, ended: list[ServedRequest], **changes: float) -> Server:
    return Server(env, "s", SPEED, 8, lambda _, request: request and ended.append(request), **changes)  # type: ignore[arg-type]


def test_a_request_alone() -> None:
    env, ended = simpy.Environment(), []
    request = ServedRequest(0.0, 0, 100, 11)
    server(env, ended).admit(request)
    env.run()
    assert ended == [request]
    assert (request.ttft_s, request.tpot_s) == (pytest.approx(0.2), pytest.approx(0.02))


def test_a_batch_decodes_slower_and_a_prefill_stops_it() -> None:
    env, ended = simpy.Environment(), []
    one = server(env, ended)
    first, second = ServedRequest(0.0, 0, 100, 101), ServedRequest(1.0, 0, 100, 2)
    one.admit(first)
    call_after(env, 1.0, lambda: one.admit(second))
    env.run()
    assert second.ttft_s == pytest.approx(0.2)
    assert second.done_s == pytest.approx(1.2 + 0.03)  # a batch of two
    assert first.done_s == pytest.approx(0.2 + 100 * 0.02 + 0.2 + 0.01)


def test_a_prompt_waits_for_the_end_of_the_decode_step_that_runs() -> None:
    env, ended = simpy.Environment(), []
    one = server(env, ended)
    first, second = ServedRequest(0.0, 0, 100, 101), ServedRequest(1.005, 0, 100, 1)
    one.admit(first)
    call_after(env, 1.005, lambda: one.admit(second))
    env.run()
    assert second.first_s == pytest.approx(1.02 + 0.2)  # steps end at 0.2 and each 0.02 s later
    assert first.done_s == pytest.approx(0.2 + 100 * 0.02 + 0.2)


def test_prompts_that_wait_are_prefilled_together() -> None:
    env, ended = simpy.Environment(), []
    one = server(env, ended)
    requests = [ServedRequest(0.0, 0, 100, 1) for _ in range(3)]
    for request in requests:
        one.admit(request)
    env.run()
    assert [request.ttft_s for request in requests] == pytest.approx([0.2, 0.5, 0.5])
    assert one.running == 0


def test_a_group_passes_activations_on_and_holds_more_at_once() -> None:
    env, ended = simpy.Environment(), []
    group = server(env, ended, size=4, hop_s=0.001)
    assert group.free == 32
    request = ServedRequest(0.0, 0, 100, 11)
    group.admit(request)
    call_after(env, 0.25, lambda: group.become(1, 0.0, SPEED))
    env.run()
    assert request.ttft_s == pytest.approx(0.204)
    slow = 0.01 + 0.01 / 4 + 0.004
    assert request.done_s == pytest.approx(0.25 + (10 - (0.25 - 0.204) / slow) * 0.02)


def test_decoding_elsewhere_and_a_relieved_prefill() -> None:
    env, ended = simpy.Environment(), []
    prefill, decode = server(env, ended), server(env, ended)
    prefill.decoder, prefill.relieved = lambda request: decode.take_over(request) is None, lambda seconds: seconds / 2
    request = ServedRequest(0.0, 0, 100, 11)
    prefill.admit(request)
    env.run()
    assert request.ttft_s == pytest.approx(0.1)
    assert request.tpot_s == pytest.approx(0.02)
    assert (prefill.running, decode.running) == (0, 0)


def test_a_prefilled_request_keeps_its_place_until_a_decode_instance_has_room() -> None:
    env, ended = simpy.Environment(), []
    prefill, decode = server(env, ended), server(env, ended)
    prefill.decoder = lambda request: False
    request = ServedRequest(0.0, 0, 100, 11)
    prefill.admit(request)
    env.run(until=3.0)
    assert prefill.running == 1
    assert request.first_s < 0  # the decode instance samples it
    decode.take_over(request)
    prefill.leave(request)
    assert (prefill.running, prefill.work) == (0, 0.0)
    assert request.ttft_s == pytest.approx(3.0)


def test_a_prefill_is_relieved_more_as_layers_arrive() -> None:
    assert relieved_s(2.0, 0.0, 0.0) == 2.0  # nothing has arrived
    assert relieved_s(2.0, 0.5, 1.0) == relieved_s(2.0, 1.0, 0.0) == 1.0  # half of the work each
    steps, work, step_s = 0, 0.0, 1e-4
    while work < 2.0:  # the same by small steps
        work += step_s / (1 - min(0.1 + 0.3 * steps * step_s, 0.5))
        steps += 1
    assert relieved_s(2.0, 0.1, 0.3) == pytest.approx(steps * step_s, abs=1e-3)


def test_an_idle_instance_takes_a_batch_from_the_shared_queue() -> None:
    env, ended = simpy.Environment(), []
    one, queue = server(env, ended), [ServedRequest(0.0, 0, 100, 1) for _ in range(3)]
    one.pull = lambda tokens: [queue.pop(0) for _ in range(min(tokens // 4096, len(queue)))]
    one.take()
    assert (one.running, len(queue)) == (2, 1)
    one.take()  # it is not idle
    assert (one.running, len(queue)) == (2, 1)
    env.run()
    assert sorted(request.ttft_s for request in ended) == pytest.approx([0.3, 0.3, 0.5])
    assert one.running == 0
