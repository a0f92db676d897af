"""Who waits, who is refused, and which instance gets a request."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from medusa_cluster.gateway.dispatch import Dispatch, Lease
from medusa_cluster.gateway.faults import Fault
from medusa_cluster.gateway.health import Health
from medusa_cluster.gateway.metrics import Metrics
from medusa_cluster.gateway.routes import DeployedModel, Instance, Routes, node_server, parse
from medusa_runtime.errors import ClusterError

Work = Callable[[Dispatch], Awaitable[None]]


def routes(max_waiting: int = 256, **models: list[str]) -> Routes:
    """Models with the names of their ready instances, in which ``max_waiting`` requests may wait."""
    return Routes(
        "1",
        {
            name: DeployedModel(
                name,
                {"settings": {"max_concurrency": "4", "max_waiting": str(max_waiting)}},
                tuple(Instance(found, "n", f"http://n:8114/instances/{found}", "ready") for found in instances),
            )
            for name, instances in models.items()
        },
    )


def run(work: Work, max_waiting: int = 100) -> None:
    async def main() -> None:
        await work(Dispatch(max_waiting, Metrics(), lambda: None))

    asyncio.run(main())


async def lease(dispatch: Dispatch, model: str = "m", cost: float = 1.0, avoid: tuple[str, ...] = ()) -> Lease:
    return await dispatch.lease(model, cost, avoid=frozenset(avoid), deadline=asyncio.get_running_loop().time() + 30)


def test_the_instance_with_the_least_work_is_chosen() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=["a", "b"]))
        first = await lease(dispatch, cost=3)
        others = [await lease(dispatch), await lease(dispatch), await lease(dispatch)]
        assert [first.instance.id, *(one.instance.id for one in others)] == ["a", "b", "b", "b"]
        dispatch.release(first)
        assert (await lease(dispatch)).instance.id == "a"

    run(work)


def test_requests_for_an_adapter_wait_for_the_current_revision_and_others_do_not() -> None:
    async def work(dispatch: Dispatch) -> None:
        instances = [Instance(name, "n", f"http://n/instances/{name}", "ready", name) for name in ("old", "new")]
        for served in (instances[:1], instances):
            dispatch.update(Routes("1", {"m": DeployedModel("m", {}, tuple(served), revision="new")}))
            if len(served) == 1:
                deadline = asyncio.get_running_loop().time() + 30
                adapter = asyncio.create_task(
                    dispatch.lease("m", 1.0, avoid=frozenset(), deadline=deadline, current=True)
                )
                await asyncio.sleep(0)
                assert (await lease(dispatch)).instance.id == "old"
                assert not adapter.done()
                assert dispatch.waiting("m") == 1
        assert (await adapter).instance.id == "new"

    run(work)


def test_a_lost_instance_that_left_the_routes_gets_requests_when_it_comes_back() -> None:
    async def work(dispatch: Dispatch) -> None:
        async with aiohttp.ClientSession() as session:
            health = Health(session, {}, dispatch)
            dispatch.update(routes(m=["a"]))
            held = await lease(dispatch)  # its client takes nothing, so it stays when the instance is lost
            health._lose(held.instance)
            dispatch.update(routes(m=[]))
            health._start_probes()
            dispatch.update(routes(m=["a"]))
            assert (await asyncio.wait_for(lease(dispatch), 5.0)).instance.id == "a"
            for probe in health._probes.values():
                probe.cancel()

    run(work)


def test_nothing_is_kept_of_an_instance_whose_probe_failed_after_it_was_gone() -> None:
    async def work(dispatch: Dispatch) -> None:
        async with aiohttp.ClientSession() as session:
            health = Health(session, {}, dispatch)
            dispatch.update(routes(m=["a", "b"]))
            held = await lease(dispatch)
            async with health.watch(held.instance):
                dispatch.release(held)
                health._start_probes()  # forgets it, though the block still runs
            health._failures[held.instance.id] = 1  # a probe that was under way has failed
            health._start_probes()
            assert not health._failures
            assert not health._scopes

    run(work)


def test_requests_wait_for_room_in_the_order_in_which_they_came() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=["a"]))
        held = [await lease(dispatch) for _ in range(4)]
        got: list[int] = []

        async def wait(number: int) -> None:
            await lease(dispatch)
            got.append(number)

        assert dispatch.longest_wait_s("m") == 0
        tasks = [asyncio.create_task(wait(number)) for number in range(3)]
        await asyncio.sleep(0.1)
        assert 0.1 <= dispatch.longest_wait_s("m") < 10
        for one in held[:3]:
            dispatch.release(one)
            await asyncio.sleep(0.01)
        assert got == [0, 1, 2]
        await asyncio.gather(*tasks)

    run(work)


def test_one_that_is_larger_than_an_instance_gets_an_idle_one() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=["a"]))
        assert (await lease(dispatch, cost=100)).instance.id == "a"

    run(work)


def test_what_lost_a_request_is_avoided_unless_there_is_nothing_else() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=["a", "b"]))
        assert (await lease(dispatch, avoid=("a",))).instance.id == "b"
        dispatch.update(routes(m=["a"]))
        assert (await lease(dispatch, avoid=("a",))).instance.id == "a"

    run(work)


def test_a_paused_and_a_lost_instance_get_nothing_for_a_while() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=["a", "b"]))
        dispatch.pause("a")
        assert (await lease(dispatch)).instance.id == "b"
        began = time.monotonic()
        dispatch.set_lost("b", True)
        found = await lease(dispatch)
        assert found.instance.id == "a"
        assert time.monotonic() > began
        dispatch.set_lost("a", True)
        waiting = asyncio.create_task(lease(dispatch))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        dispatch.set_lost("b", False)
        assert (await waiting).instance.id == "b"

    run(work)


def test_a_longer_queue_gives_its_newest_request_up() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(a=[], b=[], c=[]))
        flood = [asyncio.create_task(lease(dispatch, "a")) for _ in range(6)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(lease(dispatch, name)) for name in ("b", "c", "b", "c")]
        await asyncio.sleep(0.01)
        assert [one.done() for one in flood] == [False, False, True, True, True, True]
        assert not any(one.done() for one in others)
        for name in ("a", "b", "c"):
            with pytest.raises(Fault) as caught:
                await lease(dispatch, name)
            assert caught.value.status == 503
            assert caught.value.headers()["Retry-After"]
        for one in flood[2:]:
            with pytest.raises(Fault):
                await one
        for one in (*flood, *others):
            one.cancel()
        await asyncio.gather(*flood, *others, return_exceptions=True)

    run(work, max_waiting=6)


def test_a_model_that_is_removed_ends_what_waits_for_it() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=[]))
        waiting = asyncio.create_task(lease(dispatch))
        await asyncio.sleep(0)
        dispatch.update(routes())
        with pytest.raises(Fault) as caught:
            await waiting
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")

    run(work)


def test_whatever_is_cancelled_leaves_no_trace() -> None:
    """Requests come, are cancelled and end at random, while instances come and go."""

    async def work(dispatch: Dispatch) -> None:
        chance = random.Random(4)

        async def request() -> None:
            found = await lease(dispatch, cost=chance.choice((1, 2, 5)))
            try:
                await asyncio.sleep(chance.random() * 0.01)
            finally:
                dispatch.release(found)

        running = set()
        for _ in range(600):
            task = asyncio.create_task(request())
            running.add(task)
            task.add_done_callback(running.discard)
            if chance.random() < 0.3:
                chance.choice(tuple(running)).cancel()
            if chance.random() < 0.1:
                dispatch.update(routes(m=chance.choice((["a"], ["a", "b"], ["b", "c", "d"]))))
            if chance.random() < 0.05:
                dispatch.pause(chance.choice("abcd"))
            await asyncio.sleep(0.001 * chance.random())
        dispatch.update(routes(m=["a", "b"]))
        await asyncio.gather(*running, return_exceptions=True)
        gauges = dispatch.gauges()
        assert (gauges["waiting"]["m"], gauges["running"]["m"]) == (0, 0)
        assert dispatch.busy() == []

    run(work)


def test_routes_are_read_and_what_is_none_is_refused() -> None:
    found = parse(
        {"version": 3, "models": {"m": {"instances": [{"id": 1, "url": "http://n/instances/1/", "state": "ready"}]}}}
    )
    assert found.version == "3"
    (instance,) = found.models["m"].instances
    assert (instance.id, instance.url, node_server(instance.url)) == ("1", "http://n/instances/1", "http://n")
    assert found.models["m"].concurrency == 64
    assert node_server("http://n:1") is None
    text = {"instances": [], "deployment": "text"}
    for bad in (
        None,
        [],
        {},
        {"models": []},
        *({"models": {"m": one}} for one in ({}, {"instances": [{"id": 1}]}, text)),
    ):
        with pytest.raises(ClusterError, match="expected routes"):
            parse(bad)


@pytest.mark.parametrize(("value", "expected"), [("8", 8), (None, 64), ("x", 64), ("0", 1), ([], 64)])
def test_the_places_of_an_instance_are_its_setting(value: object, expected: int) -> None:
    assert DeployedModel("m", {"settings": {"max_concurrency": value}}).concurrency == expected


def test_a_large_request_does_not_hold_up_others_until_an_instance_is_idle() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=["a"]))
        held = [await lease(dispatch) for _ in range(4)]
        large = asyncio.create_task(lease(dispatch, cost=128))
        small = asyncio.create_task(lease(dispatch))
        await asyncio.sleep(0.01)
        assert not large.done()
        dispatch.release(held[0])
        async with asyncio.timeout(1):
            dispatch.release(await large)  # the instance refuses it, for example
            assert (await small).instance.id == "a"

    run(work)


@pytest.mark.parametrize(
    ("settings", "cost", "expected"),
    [
        ({}, 1.5, 1.5), ({}, 128.0, 16), ({"max_waiting": "0"}, 128.0, 64), ({"max_waiting": "8"}, 128.0, 56),
        ({"max_waiting": "0"}, 3.0, 3.0), ({"max_concurrency": "2"}, 9.0, 1), ({"max_waiting": "x"}, 128.0, 16),
        ({"max_concurrency": "1" + "0" * 400}, 9.0, 9.0),
    ],
)  # fmt: skip
def test_a_quarter_of_an_instance_is_room_if_the_rest_may_wait_in_it(
    settings: dict[str, str], cost: float, expected: float
) -> None:
    assert DeployedModel("m", {"settings": settings}).room_for(cost) == expected


def test_those_behind_a_large_request_go_on_when_it_leaves() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(0, m=["a"]))
        await lease(dispatch)
        large = asyncio.create_task(lease(dispatch, cost=4))
        await asyncio.sleep(0)
        small = asyncio.create_task(lease(dispatch))
        await asyncio.sleep(0.01)
        assert not small.done()
        large.cancel()
        async with asyncio.timeout(1):
            assert (await small).instance.id == "a"

    run(work)


def test_an_instance_that_was_lost_with_its_node_is_used_when_both_are_back() -> None:
    async def work(dispatch: Dispatch) -> None:
        dispatch.update(routes(m=["a"]))
        held = await lease(dispatch)
        dispatch.update(routes(m=[]))  # the controller has lost the node
        dispatch.set_lost("a", True)  # and the instance owes this request an answer
        dispatch.pause("a")
        dispatch.release(held)
        dispatch.update(routes(m=["a"]))
        async with asyncio.timeout(1):
            assert (await lease(dispatch)).instance.id == "a"

    run(work)


def test_settings_mean_to_a_gateway_what_they_mean_to_an_instance() -> None:
    settings = {"hold_s": "5s", "max_concurrency": "1" + "0" * 400}
    deployed = DeployedModel("m", {"settings": settings})
    assert deployed.hold_s == 5.0
    assert deployed.concurrency == 10**400
    assert DeployedModel("m", {"settings": {"hold_s": "nan", "max_concurrency": 0}}).hold_s is None
