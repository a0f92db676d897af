"""A model whose prefill and decode are on instances of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.policy.state import ChangeRole, StopInstance
from medusa_runtime.errors import ConfigError
from waiting import until_async

Run = Callable[..., None]
MODEL = {"name": "m", "url": "http://store/m", "max": 3, "disaggregated": True}


async def asked(cluster: Cluster, condition: Callable[[], Any], **load: int) -> Any:
    """Report a load until the condition holds."""

    def again() -> Any:
        cluster._report({"gateway": "g", "url": None, "loads": {"m": load}})
        return condition()

    return await until_async(again)


def confirmed(cluster: Cluster, role: str, *, helping: bool | None = None) -> list[Any]:
    found = [one for one in cluster.state.instances.values() if one.role == role and one.confirmed]
    return [one for one in found if helping is None or one.helping == helping]


def routed(cluster: Cluster) -> set[str]:
    return {item["id"] for item in cluster.state.routes.current["models"]["m"]["instances"]}


async def started(net: Any, cluster: Cluster, **given: Any) -> tuple[Any, Any]:
    """Deploy, ask, and return the first instance that decodes and the first that prefills for it."""
    await cluster.answer({"op": "deploy", "arguments": MODEL | given})
    await until_async(lambda: cluster.models.get(MODEL["url"]))

    def both() -> Any:
        decoding, prefilling = confirmed(cluster, "decode"), confirmed(cluster, "prefill", helping=True)
        return decoding and prefilling and (decoding[0], prefilling[0])

    decode, prefill = await asked(cluster, both, waiting=1)
    net.nodes[prefill.node].become(prefill.id, "prefilling")
    await until_async(lambda: not prefill.loading)
    return decode, prefill


def starts(net: Any) -> dict[str, Any]:
    return {call["id"]: call.get("group") for call in net.calls() if call["op"] == "start"}


def test_one_decodes_and_has_the_requests_and_another_one_prefills_for_it(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster)
        assert routed(cluster) == {decode.id}
        assert prefill.helps == decode.id
        waits, helps = starts(net)[decode.id], starts(net)[prefill.id]
        common = ("group", "token", "leader", "mode", "size")
        assert [waits[name] for name in common] == [helps[name] for name in common]
        assert (waits["rank"], helps["rank"], waits["mode"]) == (0, 1, "disaggregated")
        assert helps["listen"] != helps["leader"]
        assert waits["token"] not in str(await cluster.answer({"op": "status"}))

    run(scenario, "n1", "n2", "n3")


@pytest.mark.parametrize("live", [True, False])
def test_with_live_scaling_one_more_relieves_those_that_prefill_while_it_loads(run: Run, live: bool) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster, live_scaling=live, max=2)
        for node in net.nodes.values():
            node.arrives = True

        def more() -> Any:
            return [one for one in confirmed(cluster, "prefill", helping=True) if one.id != prefill.id]

        found = await asked(cluster, more, running=8, waiting=24)
        assert [(one.helps, starts(net)[one.id]["relieves"]) for one in found] == [(decode.id, live)]
        assert not starts(net)[prefill.id].get("relieves")
        assert "relieves" not in starts(net)[decode.id]
        texts = [event["text"] for event in cluster.state.events if event["kind"] == "live"]
        assert ["layers that it has" in text for text in texts] == [False, live]

    run(scenario, "n1", "n2", "n3", "n4", "n5")


def test_without_a_place_for_both_one_does_both(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        await cluster.answer({"op": "deploy", "arguments": MODEL})
        (one,) = await asked(cluster, lambda: confirmed(cluster, "decode"), waiting=1)
        assert routed(cluster) == {one.id}
        assert starts(net)[one.id]["rank"] == 0

    run(scenario, "n1")


def test_when_the_one_that_decodes_dies_its_partner_serves_and_gets_one_itself(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster)
        decode.since_s -= 60.0  # else its model would not be started again at once
        net.nodes[decode.node].instances[decode.id] |= {"state": "failed", "failure": "it was killed"}
        await until_async(lambda: decode.id not in cluster.state.instances)
        net.nodes[prefill.node].become(prefill.id, "released")
        await until_async(lambda: prefill.id in routed(cluster))
        new = await asked(cluster, lambda: confirmed(cluster, "prefill", helping=True), running=1)
        decoding = {one.id: one for one in confirmed(cluster, "decode")}
        assert prefill.id in decoding
        plan = starts(net)[new[0].id]
        source = decoding[new[0].helps]
        assert plan["leader"] == source.meets.place
        if source is prefill:
            assert plan["leader"] == starts(net)[prefill.id]["listen"]

    run(scenario, "n1", "n2", "n3")


def test_a_new_one_waits_for_the_partner_that_has_yet_to_hand_over_what_it_prefilled(run: Run) -> None:
    """One that came to decode instead would be ended at once, and the next one would come only after a pause."""

    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster, max=1)
        node, before = net.nodes[prefill.node], set(starts(net))

        async def release(_: dict[str, Any]) -> dict[str, Any]:
            return {}  # it takes a moment

        node.release = release
        del net.nodes[decode.node].instances[decode.id]
        end = time.monotonic() + 1
        await asked(cluster, lambda: time.monotonic() > end, waiting=1)
        assert prefill.helping
        assert set(starts(net)) == before
        node.become(prefill.id, "released")
        (new,) = await asked(cluster, lambda: confirmed(cluster, "prefill", helping=True), waiting=1)
        assert new.helps == prefill.id
        assert set(starts(net)) == before | {new.id}
        assert not [call for call in net.calls() if call["op"] == "stop"]

    run(scenario, "n1", "n2", "n3")


def test_one_that_lost_its_partner_stays_and_the_partner_is_ended(run: Run) -> None:
    """The partner may hang, which its node has not noticed yet."""

    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster, max=1)
        net.nodes[decode.node].instances[decode.id]["running"] = 8
        await asked(cluster, lambda: decode.running, running=8)
        net.nodes[prefill.node].become(prefill.id, "released")
        await asked(cluster, lambda: decode.id not in cluster.state.instances, running=8)
        assert routed(cluster) == {prefill.id}
        (new,) = await asked(cluster, lambda: confirmed(cluster, "prefill", helping=True), running=8)
        assert new.helps == prefill.id
        assert [call["id"] for call in net.calls() if call["op"] == "stop"] == [decode.id]
        (event,) = [event for event in cluster.state.events if event["kind"] == "role"]
        text = f"{prefill.id} takes requests of its own: it has lost {decode.id}, for which it prefilled"
        assert event["text"] == text

    run(scenario, "n1", "n2", "n3")


def test_one_for_which_another_one_prefills_again_is_as_good_as_others(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster, min=2)
        net.nodes[prefill.node].become(prefill.id, "released")
        await asked(cluster, lambda: decode.deserted, waiting=1)

        def again() -> list[Any]:
            for one in confirmed(cluster, "prefill", helping=True):
                net.nodes[one.node].become(one.id, "prefilling")
            return [one for one in confirmed(cluster, "prefill", helping=True) if one.helps == decode.id]

        await asked(cluster, again, waiting=30)
        await asked(cluster, lambda: not decode.deserted, waiting=30)

    run(scenario, "n1", "n2", "n3", "n4", "n5", "n6")


def test_one_that_prefills_decodes_when_such_are_missing(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        _, prefill = await started(net, cluster)
        cluster.execution.begin(ChangeRole(prefill.id, prefill.node, "decode", "decode instances are missing"))
        assert prefill.id not in routed(cluster)
        assert (prefill.role, prefill.loading) == ("decode", True)
        await until_async(lambda: prefill.id in routed(cluster))
        assert {"op": "release", "id": prefill.id} in net.calls()
        assert "role" in [event["kind"] for event in cluster.state.events]

    run(scenario, "n1", "n2", "n3")


def test_a_new_controller_knows_who_does_what(run: Run) -> None:
    nets: list[Any] = []

    async def before(net: Any, cluster: Cluster) -> None:
        await started(net, cluster)
        nets.append(net)

    async def after(net: Any, cluster: Cluster) -> None:
        (decode,) = await asked(cluster, lambda: confirmed(cluster, "decode"), running=1)
        (prefill,) = confirmed(cluster, "prefill", helping=True)
        assert prefill.helps == decode.id
        assert not prefill.loading
        assert routed(cluster) == {decode.id}
        old = set(starts(net))
        third = await asked(
            cluster, lambda: [one for one in confirmed(cluster, "prefill") if one.id not in old], waiting=9
        )
        plan = starts(net)[third[0].id]
        assert plan["token"] == net.group_token(plan["group"])
        assert plan["leader"] in {one.meets.place for one in confirmed(cluster, "decode")}

    run(before, "n1", "n2", "n3", "n4")
    run(after, net=nets[0])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"disaggregated": 1}, "disaggregated: expected true or false, found 1"),
        ({"engine": "vllm"}, "disaggregated: expected the engine torch without adapters, found the engine vllm"),
    ],
)
def test_what_cannot_be_apart_is_refused(run: Run, given: dict[str, Any], named: str) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        with pytest.raises(ConfigError, match=named):
            await cluster.answer({"op": "deploy", "arguments": MODEL | given})

    run(scenario, "n1")


def test_nothing_is_started_and_ended_again_while_the_load_stays(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster)
        calls = len([call for call in net.calls() if call["op"] in ("start", "stop", "release")])
        end = time.monotonic() + 3
        await asked(cluster, lambda: time.monotonic() > end, running=1)
        assert set(cluster.state.instances) == {decode.id, prefill.id}
        assert len([call for call in net.calls() if call["op"] in ("start", "stop", "release")]) == calls

    run(scenario, "n1", "n2", "n3")


def test_one_that_is_refused_is_not_started_again_and_again(run: Run) -> None:
    """Such as on a CPU with other instructions: the two would not get the same tokens."""

    async def scenario(net: Any, cluster: Cluster) -> None:
        await cluster.answer({"op": "deploy", "arguments": MODEL})
        await until_async(lambda: cluster.models.get(MODEL["url"]))
        end = time.monotonic() + 5

        def refused() -> bool:
            for node in net.nodes.values():
                for name, worker in node.workers.items():
                    if worker.plan.rank and name in node.instances:
                        node.become(name, "released")
            return time.monotonic() > end

        await asked(cluster, refused, running=1, waiting=0)
        tried = [plan for plan in starts(net).values() if plan["rank"]]
        assert 1 <= len(tried) <= 3
        assert confirmed(cluster, "decode")

    run(scenario, "n1", "n2", "n3")


@pytest.mark.parametrize("ends", ["drains", "is forgotten"])
def test_one_whose_partner_ends_decodes(run: Run, ends: str) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster)
        if ends == "drains":
            net.nodes[decode.node].busy.add(decode.id)
            cluster.execution.begin(StopInstance(decode.id, decode.node))
        else:
            del net.nodes[decode.node].instances[decode.id]
        await until_async(lambda: prefill.id in routed(cluster))
        assert {"op": "release", "id": prefill.id} in net.calls()
        net.nodes[decode.node].resumed.set()

    run(scenario, "n1", "n2", "n3")


@pytest.mark.parametrize("flag", ["disaggregated", "live_scaling"])
def test_an_encoder_is_started_as_a_whole_and_one_event_says_so(run: Run, flag: str) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        for node in net.nodes.values():
            node.generates = False
        given = {**MODEL, "disaggregated": False, "ttft_slo_s": 0.01, "min": 2, flag: True}
        await cluster.answer({"op": "deploy", "arguments": given})
        await until_async(lambda: cluster.models.get(MODEL["url"]))
        end = time.monotonic() + 2
        await asked(cluster, lambda: time.monotonic() > end, running=30, waiting=5)
        named = [event["text"] for event in cluster.state.events if event["kind"] == "whole"]
        assert len(named) == 1
        assert "is ignored for m: it is an encoder" in named[0]
        await asked(cluster, lambda: len(routed(cluster)) == 3, running=30, waiting=5)
        late = [plan for name, plan in starts(net).items() if name in routed(cluster)]
        assert not [plan for plan in late if plan and plan["rank"]]
        assert not confirmed(cluster, "prefill")
        kinds = {event["kind"] for event in cluster.state.events}
        assert not kinds & {"group", "live", "start-failed", "instance-died"}

    run(scenario, "n1", "n2", "n3")


def test_nothing_prefills_before_a_node_has_described_the_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may turn out to be an encoder."""

    async def scenario(net: Any, cluster: Cluster) -> None:
        monkeypatch.setattr(cluster.models, "update", lambda *_: None)
        await cluster.answer({"op": "deploy", "arguments": MODEL})
        await asked(cluster, lambda: confirmed(cluster, "decode"), waiting=1)
        end = time.monotonic() + 1
        await asked(cluster, lambda: time.monotonic() > end, running=5)
        assert not [plan for plan in starts(net).values() if plan is None or plan["rank"]]
        monkeypatch.undo()
        await asked(cluster, lambda: confirmed(cluster, "prefill", helping=True), running=5)

    run(scenario, "n1", "n2", "n3")


def test_one_event_says_that_no_node_can_describe_the_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medusa_cluster.controller.models._AGAIN_S", 0.1)
    monkeypatch.setattr("medusa_cluster.controller.models._LONGEST_AGAIN_S", 0.1)

    async def scenario(net: Any, cluster: Cluster) -> None:
        def texts() -> list[str]:
            return [event["text"] for event in cluster.state.events if event["kind"] == "whole"]

        for node in net.nodes.values():
            node.describes_not = "its layers are not known"
        for name, given in (("m", {}), ("other", {"disaggregated": False, "live_scaling": True})):
            await cluster.answer({"op": "deploy", "arguments": {**MODEL, "name": name, **given}})
        end = time.monotonic() + 2
        await asked(cluster, lambda: time.monotonic() > end, running=1, waiting=1)
        (text,) = texts()
        assert "--disaggregated waits for m: each instance does all until a node can describe the model; n" in text
        assert text.endswith(": its layers are not known")
        shown = (await cluster.answer({"op": "status"}))["events"]
        assert [event["model"] for event in shown if event["kind"] == "whole"] == ["m"]
        assert not confirmed(cluster, "prefill")
        net.nodes["n2"].describes_not = None  # one is enough
        await asked(cluster, lambda: confirmed(cluster, "prefill", helping=True), running=5)
        assert texts() == [text]

    run(scenario, "n1", "n2", "n3")


def test_nothing_is_learned_from_the_start_of_one_that_prefilled_first(run: Run) -> None:
    async def scenario(net: Any, cluster: Cluster) -> None:
        _, prefill = await started(net, cluster)
        cluster.execution.begin(ChangeRole(prefill.id, prefill.node, "decode", "decode instances are missing"))
        await asked(cluster, lambda: prefill.id in routed(cluster), running=30, waiting=9)
        shown = net.nodes[prefill.node]
        turned(net, prefill)
        shown.instances[prefill.id]["start"] = {"ttft_s": 99.0, "begins_s": 1.0, "prefill_s": 0.1}
        await asked(cluster, lambda: not prefill.helping, running=30, waiting=9)
        await learns_nothing(net, cluster)
        nets.append(net)

    async def learns_nothing(net: Any, cluster: Cluster) -> None:
        await until_async(lambda: cluster.models.get(MODEL["url"]))
        end = time.monotonic() + 0.5
        await asked(cluster, lambda: time.monotonic() > end, running=30, waiting=9)
        assert "cold-start" not in [event["kind"] for event in cluster.state.events]
        assert not cluster.models.starts(MODEL["url"])

    nets: list[Any] = []
    run(scenario, "n1", "n2", "n3")
    run(learns_nothing, net=nets[0])  # a new controller


def turned(net: Any, prefill: Any, *, lost: bool = False) -> None:
    """Let an instance that prefilled for another one decode, as its node shows it."""
    node = net.nodes[prefill.node]
    node.workers[prefill.id] = node.workers[prefill.id].as_instance(lost=lost)
    node.become(prefill.id, "released")


@pytest.mark.parametrize("before_the_restart", [True, False])
def test_a_new_controller_ends_the_one_whose_partner_left_it(run: Run, before_the_restart: bool) -> None:
    """That one may hang, and the last controller is gone before, or after, the partner left it."""
    kept: list[Any] = []

    async def before(net: Any, cluster: Cluster) -> None:
        decode, prefill = await started(net, cluster, max=1)
        net.nodes[decode.node].instances[decode.id]["running"] = 8
        await asked(cluster, lambda: decode.running, running=8)
        kept.extend((net, decode, prefill))

    async def after(net: Any, cluster: Cluster) -> None:
        _, decode, prefill = kept
        if not before_the_restart:
            await asked(cluster, lambda: {decode.id, prefill.id} <= set(cluster.state.instances), running=8)
            turned(net, prefill, lost=True)
        await asked(cluster, lambda: decode.id not in cluster.state.instances, running=8)
        assert [call["id"] for call in net.calls() if call["op"] == "stop"] == [decode.id]
        await asked(cluster, lambda: prefill.id in routed(cluster), running=8)  # one more may start beside it
        assert decode.id not in routed(cluster)
        (text,) = [event["text"] for event in cluster.state.events if event["kind"] == "role"]
        assert text == f"{prefill.id} takes requests of its own: it has lost {decode.id}, for which it prefilled"

    run(before, "n1", "n2", "n3")
    if before_the_restart:
        turned(kept[0], kept[2], lost=True)
    run(after, net=kept[0])


def test_a_new_controller_takes_none_for_lost_that_was_told_to_decode(run: Run) -> None:
    kept: list[Any] = []

    async def before(net: Any, cluster: Cluster) -> None:
        kept.extend((net, *await started(net, cluster)))

    async def after(net: Any, cluster: Cluster) -> None:
        _, decode, prefill = kept
        one = await asked(cluster, lambda: cluster.state.instances.get(prefill.id), running=30)
        assert (one.role, one.helping) == ("decode", True)
        turned(net, prefill)
        await asked(cluster, lambda: not one.helping, running=30)
        end = time.monotonic() + 0.5
        await asked(cluster, lambda: time.monotonic() > end, running=30)
        assert not cluster.state.instances[decode.id].deserted
        assert "role" not in [event["kind"] for event in cluster.state.events]

    run(before, "n1", "n2", "n3")
    net, _, prefill = kept
    node = net.nodes[prefill.node]
    node.workers[prefill.id] = node.workers[prefill.id].released()
    node.become(prefill.id, "prefilling")
    run(after, net=net)
