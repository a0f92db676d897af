"""Places on GPUs: which of them a model takes, who makes room, who waits and for what, and what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cluster_model import ClusterModel, model, of
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.placement import Placement
from medusa_cluster.policy.state import (
    Copy,
    Deployment,
    Instance,
    Node,
    RequestNodes,
    SetSpare,
    StartInstance,
    StopInstance,
)

GB = 10**9
OPTIONS = Options(pool=False)
SMALL, LARGE = model("small", 8 * GB, max=4), model("large", 40 * GB, max=4)


def gpu(name: str, size: int = 24, devices: int = 1, **changes: Any) -> Node:
    taken = len(changes.get("instances", ()))
    free = (size * GB,) * (devices - taken)
    found = {"devices": devices, "device_bytes": size * GB, "device_free_bytes": free, **changes}
    return Node(name, link_bytes_per_s=2 * GB, memory_bytes=500 * GB, **found)


def processor(name: str) -> Node:
    return Node(name, link_bytes_per_s=2 * GB, memory_bytes=500 * GB)


def cluster(nodes: list[Node], *deployments: Deployment, options: Options = OPTIONS, **waiting: int) -> ClusterModel:
    made = ClusterModel(nodes, list(deployments), options)
    for name, count in waiting.items():
        made.load(name, waiting=count)
    return made


def starts(made: ClusterModel) -> list[tuple[str, str]]:
    return [(start.model, start.node) for start in of(StartInstance, made.tick())]


def test_an_instance_of_several_gpus_counts_as_many_in_the_shares() -> None:
    two = model("two", 8 * GB, devices=2, max=1)
    made = cluster([gpu("g", devices=4)], two, replace(SMALL, max=8), two=1, small=64)
    found = starts(made)
    assert sorted(found) == [("small", "g"), ("small", "g"), ("two", "g")]


def test_an_autoscaler_is_asked_for_as_many_gpus_as_the_instances_take() -> None:
    two = model("two", 8 * GB, devices=2, max=4)
    made = cluster([gpu("g", devices=4)], two, two=32)
    assert of(RequestNodes, made.tick()) == [RequestNodes(2, (4, 2))]  # two more instances: another node of four
    odd = cluster([gpu("g", devices=3)], two, two=32)
    assert of(RequestNodes, odd.tick()) == [RequestNodes(4, (3, 2, 2, 2))]  # each node has room for one
    single = cluster([gpu("g", devices=4)], replace(SMALL, max=8), small=64)
    assert of(RequestNodes, single.tick()) == [RequestNodes(2)]


def test_nodes_with_gpus_are_asked_for_where_processors_are_free() -> None:
    made = cluster([processor("head")], model("m", 8 * GB, device="cuda", devices=2), m=1)
    assert of(RequestNodes, made.tick()) == [RequestNodes(2, (2,))]
    many = cluster([processor("head"), gpu("g", devices=2)], model("m", 8 * GB, devices=4), m=1)
    assert of(RequestNodes, many.tick()) == [RequestNodes(3, (4, 2))], "no node of the cluster has four"


def test_spare_nodes_that_help_are_taken_back_before_others_are_asked_for() -> None:
    spare = [replace(node, spare=True, state="draining") for node in (processor("c"), gpu("h", devices=2))]
    made = cluster(
        [processor("head"), *spare], model("m", 8 * GB, device="cuda"), options=Options(pool=False, least_nodes=1), m=1
    )
    decisions = made.tick()
    assert of(SetSpare, decisions) == [SetSpare("h", spare=False)]
    assert of(RequestNodes, decisions) == []


def test_a_model_takes_the_smallest_gpu_that_will_do_where_another_model_needs_the_larger_one() -> None:
    big, little = gpu("a-big", 80), gpu("little", 24)
    assert starts(cluster([big, little], SMALL, LARGE, small=1)) == [("small", "little")]
    assert starts(cluster([big, little], SMALL, small=1)) == [("small", "a-big")], "the first, as ever"
    holds = replace(big, copies=(Copy("s3://small", 8 * GB, 8 * GB),))
    assert starts(cluster([holds, little], SMALL, LARGE, small=1)) == [("small", "little")]
    assert starts(cluster([holds], SMALL, LARGE, small=1)) == [("small", "a-big")]
    assert sorted(starts(cluster([big, little], SMALL, LARGE, small=16, large=1))) == [
        ("large", "a-big"),
        ("small", "little"),
    ]


def test_a_model_of_one_gpu_leaves_whole_nodes_to_one_of_several() -> None:
    four = model("four", 8 * GB, devices=4, max=1)
    begun = (Instance("i", "other", "z", "ready"),)
    nodes = [gpu("a", devices=4), gpu("z", devices=4, instances=begun)]
    other = model("other", 8 * GB, min=1)
    assert starts(cluster(nodes, SMALL, four, other, small=1)) == [("small", "z")]
    assert starts(cluster(nodes, SMALL, other, small=1)) == [("small", "a")]


def test_an_idle_small_instance_makes_room_for_a_large_model() -> None:
    idle = Instance("i", "small", "big", "ready")
    had = (Copy("s3://small", 8 * GB, 8 * GB),)
    big, little = gpu("big", 80, instances=(idle,), copies=had), gpu("little", 24)
    made = cluster([big, little], replace(SMALL, min=1), LARGE, large=1)
    (stop,) = of(StopInstance, made.tick())
    assert (stop.id, stop.reason) == ("i", "large needs its place")
    made.nodes["big"] = replace(made.nodes["big"], device_free_bytes=(80 * GB,))
    log = made.run(30)
    assert [(one.model, one.node) for one in of(StartInstance, log)] == [("large", "big"), ("small", "little")]
    assert of(StopInstance, log) == []


def test_an_instance_makes_room_only_where_it_can_go_elsewhere_and_runs_nothing() -> None:
    def stopped(*nodes: Node, least: int = 1) -> list[StopInstance]:
        made = cluster(list(nodes), replace(SMALL, min=least), LARGE, large=1)
        return of(StopInstance, made.tick())

    idle = Instance("i", "small", "big", "ready")
    big, little = gpu("big", 80, instances=(idle,)), gpu("little", 24)
    assert [stop.id for stop in stopped(big, little)] == ["i"]
    assert stopped(big) == []
    assert stopped(big, processor("c")) == [], "a processor is no place for it"
    assert stopped(replace(big, instances=(replace(idle, running=1),)), little) == []
    assert stopped(big, gpu("little", 24, instances=(Instance("j", "small", "little", "ready"),)), least=2) == []
    emptied = gpu("other", 80, instances=(Instance("k", "small", "other", "draining"),))
    assert stopped(big, little, emptied) == [], "that GPU becomes free"


def test_an_instance_that_prefills_for_others_makes_room_only_once_its_model_has_no_load() -> None:
    idle = Instance("i", "small", "big", "ready", role="prefill")  # its requests run where they are decoded
    nodes = [gpu("big", 80, instances=(idle,)), gpu("little", 24), gpu("other", 24), gpu("third", 24)]
    split = replace(SMALL, min=1, disaggregated=True)
    busy = cluster(nodes, split, LARGE, large=1)
    busy.load("small", running=1)
    assert of(StopInstance, busy.tick()) == []
    assert [stop.id for stop in of(StopInstance, cluster(nodes, split, LARGE, large=1).tick())] == ["i"]


@pytest.mark.parametrize("free", [24, 40])
def test_a_tick_looks_at_each_node_a_few_times_however_many_models_wait(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's watchdog ends it when a tick takes longer than 1.5 s. Free GPUs of 24 GB are no places."""
    looks = 0

    def counted(look: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal looks
            looks += 1
            return look(*args)

        return call

    idle, count = model("idle", 30 * GB, max=1000), 30
    there = [
        tuple(Instance(f"{number}-{gpu}", "idle", f"big{number}", "ready") for gpu in range(8))
        for number in range(count)
    ]
    nodes = [gpu(f"big{number}", 80, 8, instances=ones) for number, ones in enumerate(there)]
    nodes += [gpu(f"small{number}", free, 8) for number in range(count)]
    waiting = [model(f"w{number}", (60 + number) * GB) for number in range(8)]
    made = cluster(nodes, replace(idle, min=8 * count), *waiting, **{one.name: 1 for one in waiting})
    for name in ("can_hold", "usable_slots", "left", "_costs"):
        monkeypatch.setattr(Placement, name, counted(getattr(Placement, name)))
    monkeypatch.setattr(Node, "free_devices", property(counted(Node.free_devices.fget)))  # type: ignore[attr-defined]
    stops = of(StopInstance, made.tick())
    assert len(stops) == (8 if free == 40 else 0)
    assert made.memory.waiting.keys() == {one.name for one in waiting}
    assert looks < 10 * len(nodes)


def test_idle_instances_leave_a_node_for_a_model_of_several_gpus() -> None:
    four = model("four", 8 * GB, devices=4, max=1)
    a = gpu("a", devices=4, instances=(Instance("i", "small", "a", "ready"), Instance("j", "small", "a", "ready")))
    b = gpu("b", devices=4, instances=(Instance("k", "small", "b", "ready"),))
    made = cluster([a, b], replace(SMALL, min=3, max=3), four, four=1)
    assert [stop.id for stop in of(StopInstance, made.tick())] == ["k"], "of the node with the fewest"


@pytest.mark.parametrize("model_size", [8, 0])
def test_a_gpu_that_was_just_given_back_is_waited_for_where_a_processor_is_free(model_size: int) -> None:
    small = replace(SMALL, size_bytes=model_size * GB)
    returning = gpu("g", device_free_bytes=())
    made = cluster([processor("a"), returning], small, small=1)
    if model_size:
        assert starts(made) == []
        assert made.memory.waiting["small"].found == "g has one soon"
        made.nodes["g"] = gpu("g")
    assert starts(made) == [("small", "g")]


def test_a_model_of_several_gpus_gets_no_parts_of_one() -> None:
    two = model("two", 8 * GB, devices=2)
    parts = gpu("a", devices=4, devices_apart=True)
    assert starts(cluster([parts, gpu("z", devices=2)], two, two=1)) == [("two", "z")]
    assert starts(cluster([parts, processor("c")], two, two=1)) == [], "a processor is no place for it"
    made = cluster([parts], two, SMALL, two=1, small=1)
    assert starts(made) == [("small", "a")]
    assert made.memory.waiting.keys() == {"two"}


def test_a_model_for_which_every_gpu_is_too_small_tries_only_one_that_is_free() -> None:
    huge = model("huge", 200 * GB)
    assert starts(cluster([gpu("g", device_free_bytes=())], huge, huge=1)) == [], "it was just given back"
    assert starts(cluster([gpu("g")], huge, huge=1)) == [("huge", "g")], "its engine says what is missing"
    two = replace(huge, devices=2)
    assert starts(cluster([gpu("g", devices=2), processor("c")], two, huge=1)) == [("huge", "g")]


def test_a_model_that_can_start_nowhere_takes_no_share_from_one_that_can() -> None:
    used = gpu("g", devices=2, device_free_bytes=(14 * GB, 14 * GB))  # by other programs
    a, b = model("a", 30 * GB, devices=2, max=1), model("b", 10 * GB, devices=2, max=1)
    made = cluster([used], a, b, a=1, b=1)
    assert starts(made) == [("b", "g")]
    assert made.memory.waiting.keys() == {"a"}


def test_models_of_the_processor_take_no_gpu_and_one_processor_each() -> None:
    plain = model("plain", GB, device="cpu", max=4)
    on_processor = Instance("i", "plain", "g", "ready", device="cpu")
    node = gpu("g", instances=(on_processor,), device_free_bytes=(24 * GB,))
    assert starts(cluster([node], SMALL, plain, small=1, plain=8)) == [("small", "g")]
    full = gpu("g", instances=(Instance("j", "small", "g", "ready"),))
    assert starts(cluster([full], SMALL, plain, plain=1)) == [("plain", "g")]
    assert starts(cluster([gpu("g")], plain, plain=32)) == [("plain", "g")]
    assert starts(cluster([gpu("g"), processor("c")], plain, plain=1)) == [("plain", "c")]
    made = cluster([gpu("g")], plain, plain=16)
    assert of(RequestNodes, made.tick()) == [RequestNodes(2)]


def test_of_gpus_of_several_sizes_on_one_node_the_largest_decides_what_can_start_there() -> None:
    mixed = gpu("g", 24, 2, device_sizes=(80 * GB, 24 * GB), device_free_bytes=(80 * GB, 24 * GB))
    mixed = replace(mixed, device_free_sizes=(80 * GB, 24 * GB))
    assert starts(cluster([mixed], LARGE, large=8)) == [("large", "g")]
    busy = replace(mixed, instances=(Instance("i", "large", "g", "ready", running=8),))
    busy = replace(busy, device_free_bytes=(24 * GB,), device_free_sizes=(24 * GB,))
    made = cluster([busy], LARGE, large=8)
    assert starts(made) == [], "the other one is too small for it"
    made = cluster([mixed], SMALL, LARGE, small=1)
    assert starts(made) == [("small", "g")]
    assert of(StartInstance, cluster([mixed], SMALL, LARGE, small=1, large=1).tick())[0].model == "large"


def test_gpus_that_do_not_answer_are_no_places() -> None:
    lost = gpu("g", devices=2, devices_lost=1, device_free_bytes=(24 * GB,))
    assert (lost.free_slots(), lost.returning) == (1, 0)
    assert starts(cluster([lost], SMALL, small=32)) == [("small", "g")]
    dead = gpu("g", devices_lost=1, device_free_bytes=())
    made = cluster([dead, processor("c")], SMALL, small=1)
    assert starts(made) == [("small", "c")]
    assert starts(cluster([dead], model("plain", GB, device="cpu"), plain=1)) == [("plain", "g")]


def test_a_model_that_waits_says_for_what() -> None:
    def wait(nodes: list[Node], wanted: Deployment) -> tuple[str, str]:
        made = cluster(nodes, SMALL, wanted, **{wanted.name: 1, "small": 8 * any(node.instances for node in nodes)})
        made.tick()
        return made.memory.waiting[wanted.name]

    def there(node: str) -> tuple[Instance, ...]:
        return (Instance("i", "small", node, "ready", running=1),)

    busy = there("big")
    needed = "a GPU with 42.1 GB free"
    big, little = gpu("big", 80, instances=busy), gpu("little", 24)
    assert wait([big, little], LARGE) == (needed, "those of big are taken by small")
    used = gpu("big", 80, device_free_bytes=(30 * GB,))
    found = "of those that are free, the one with the most has 30.0 GB, on big"
    assert wait([used, little], LARGE) == (needed, found)
    ending = replace(big, instances=(replace(busy[0], state="draining"),))
    assert wait([ending, processor("c")], LARGE) == (f"{needed} or a node without GPUs", "big has one soon")
    two = model("two", 8 * GB, devices=2, device_kind="x")
    assert wait([gpu("g", devices=2, device_kind="x", instances=there("g")), little], two) == (
        "2 GPUs of one node with 6.1 GB free on each on a node with --device-kind x",
        "those of g are taken by small",
    )
    taken = replace(processor("c"), instances=there("c"))
    assert wait([taken], model("m", GB)) == (
        "a node on which no other model runs",
        "those of c are taken by small",
    )
    assert wait([], model("m", GB))[1] == "there is no such node"
    assert wait([replace(gpu("g"), memory_bytes=GB)], replace(SMALL, name="other")) == (
        "a GPU with 10.1 GB free",
        "no node has room in its memory for 8.0 GB of weights",
    )


def test_a_model_that_has_an_instance_or_gets_one_waits_for_nothing() -> None:
    made = cluster([gpu("g")], SMALL, small=16)
    made.tick()
    assert made.memory.waiting == {}
    made.tick()
    assert made.memory.waiting == {}
