"""GPUs in the policy: their memory and links, groups and live pairs on one kind of processor, instances on several."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from cluster_model import ClusterModel, model, of
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.placement import Placement
from medusa_cluster.policy.sizing import CandidateNode, Goal, choose
from medusa_cluster.policy.state import Copy, Instance, Measured, Node, Processor, StartInstance, StopInstance
from medusa_runtime.state.stage_times import StageTimes

GB = 10**9
OVERHEAD = 2 << 30
TIMES = StageTimes(0.2, 0.1, 0.0, 0.5, 0.05, 8 * GB, math.inf, 0.0, 1)
OPTIONS = Options(largest_group=4, pool=False)


def gpus(count: int, prefix: str = "g", free: float = 24, **changes: Any) -> list[Node]:
    each = (int(free * GB) + OVERHEAD,) * changes.get("devices", 1)
    given = {"devices": 1, "device_bytes": 24 * GB, "device_free_bytes": each, **changes}
    return [Node(f"{prefix}{i}", link_bytes_per_s=2 * GB, memory_bytes=100 * GB, **given) for i in range(count)]


def large(name: str = "m", **changes: Any) -> Any:
    """8 GB over links of 2 GB/s: 4.5 s on one node, 1.5 s on four."""
    return model(name, 8 * GB, **{"times": TIMES, "layers": 8, "ttft_slo_s": 1.6, "max": 16, **changes})


def started(made: list[Node], deployment: Any, waiting: int = 1, options: Options = OPTIONS) -> list[StartInstance]:
    cluster = ClusterModel(made, [deployment], options)
    cluster.load(deployment.name, waiting=waiting)
    return of(StartInstance, cluster.tick())


def test_the_workers_of_a_group_compute_on_one_kind_of_gpu() -> None:
    made = [*gpus(3, "a", device_name="A10"), *gpus(4, "v", device_name="V100")]
    assert {start.node for start in started(made, large())} == {"v0", "v1", "v2", "v3"}
    assert len(started(made[:-1], large())) == 1  # three of each kind do not meet the SLO
    of_kinds = [*gpus(2, "x", device_kind="x"), *gpus(4, "y", device_kind="y"), *gpus(4, "z", device_kind="z")]
    assert {start.node[0] for start in started(of_kinds, large(device_kind="z"))} == {"z"}


def test_processors_and_gpus_are_not_mixed_unless_the_deployment_uses_no_gpu() -> None:
    processors = [Node(f"c{number}", link_bytes_per_s=2 * GB, memory_bytes=100 * GB) for number in range(2)]
    made = [*gpus(2), *processors]
    assert len(started(made, large())) == 1
    assert {start.node for start in started(made, large(device="cpu"))} == {"c0", "c1", "g0", "g1"}
    assert started(processors, large(device="cuda")) == []
    assert started(made, large())[0].node == "g0"


def test_a_model_that_lies_with_a_processor_starts_on_a_free_gpu_that_meets_its_goal() -> None:
    had = Copy("s3://m", 8 * GB, 8 * GB)
    head = Node("a", link_bytes_per_s=2 * GB, memory_bytes=100 * GB, copies=(had,))
    for slo in (math.inf, 9.0):
        assert [start.node for start in started([head, *gpus(1)], large(ttft_slo_s=slo))] == ["g0"]
    assert len(started([head, *gpus(4)], large())) == 4
    taken = (Instance("i", "other", "g0", "ready"),)
    for busy in (gpus(1, instances=taken), gpus(1, free=1), gpus(1, device_bytes=4 * GB, free=1)):
        assert [start.node for start in started([head, *busy], large(ttft_slo_s=math.inf))] == ["a"]
        assert [start.node for start in started([head, *busy], large(times=None))] == ["a"]
    assert [start.node for start in started([head, *gpus(1)], large())] == ["a"]  # a GPU would be late
    assert [start.node for start in started([head, *gpus(1)], large(device="cpu"))] == ["a"]


def test_groups_that_cannot_use_gpus_are_made_of_processors() -> None:
    processors = [Node(f"c{number}", link_bytes_per_s=2 * GB, memory_bytes=100 * GB) for number in range(4)]
    assert {start.node[0] for start in started([*gpus(4), *processors], large(gpu_groups=False))} == {"c"}
    (start,) = started(gpus(4), large(gpu_groups=False))
    assert start.group is None


def test_a_worker_that_will_be_the_model_has_room_for_it_with_its_keys_and_values() -> None:
    made = [*gpus(3, "a", free=4.1), *gpus(1, "z", free=11.5)]
    starts = started(made, large(kv_bytes=2 * GB))
    assert [(start.node, start.full) for start in starts] == [("z0", True), ("a0", False), ("a1", False), ("a2", False)]
    (start,) = started(made, large(kv_bytes=3 * GB))  # a part needs 5 GB
    assert (start.node, start.group) == ("z0", None)


def test_as_many_workers_have_all_memory_as_the_load_needs_instances() -> None:
    starts = started(gpus(4), large(), waiting=16)
    assert [start.full for start in starts] == [True, True, True, False]


def test_workers_are_where_fetching_and_loading_take_the_shortest() -> None:
    slow, fast = CandidateNode("a", 2 * GB, 1 * GB), CandidateNode("b", 1.5 * GB, 20 * GB)
    found = choose([slow, fast], TIMES, Goal(9.0, 1.0))
    assert found is not None
    assert (found.nodes, found.ttft_s) == (("b",), pytest.approx(8 / 1.5 + 0.5))
    both = choose([slow, fast], TIMES, Goal(5.0, 1.0))
    assert both is not None
    assert both.ttft_s == pytest.approx(0.3 + 4.0 + 0.5)  # of the slow one's PCIe link
    made = [*gpus(4, "a", load_bytes_per_s=0.5 * GB), *gpus(4, "b", load_bytes_per_s=20 * GB)]
    assert {start.node[0] for start in started(made, large())} == {"b"}


def test_starts_are_predicted_by_those_on_the_same_processor() -> None:
    made = [*gpus(4, device_name="A10"), *gpus(4, "v", device_name="V100")]
    slow = Measured(StageTimes(9.0, 0.0, 0.0, 0.5, 0.05, 8 * GB, math.inf, 0.0, 1))
    starts = started(made, large(measured={Processor(True, "", "A10"): slow}))
    assert {start.node[0] for start in starts} == {"v"}


def test_an_instance_starts_on_a_gpu_that_has_room_for_it_and_waits_for_one() -> None:
    small, roomy = gpus(2, "a", device_bytes=6 * GB, free=3.0), gpus(1, "z", free=20)
    whole = large(ttft_slo_s=math.inf)
    assert [start.node for start in started([*small, *roomy], whole)] == ["z0"]
    busy = gpus(1, "z", free=20, instances=(Instance("i", "other", "z0", "ready"),))
    assert started([*small, *busy], whole) == []
    assert len(started(small, whole)) == 1  # none could ever: its engine says why
    held = gpus(1, "a", free=3.0, copies=(Copy("s3://m", 8 * GB, 8 * GB),))
    assert [start.node for start in started([*held, *roomy], large())] == ["z0"]


def test_each_gpu_of_a_node_has_a_memory_of_its_own() -> None:
    free = (20 * GB, 20 * GB, 3 * GB)  # another program has the rest
    assert len(started(gpus(1, devices=3, device_free_bytes=free), large(ttft_slo_s=math.inf), waiting=64)) == 2
    assert started(gpus(1, devices=3, device_free_bytes=(20 * GB, 3 * GB)), large(devices=2)) == []


def test_an_instance_that_shares_its_layers_takes_as_many_gpus() -> None:
    made = gpus(2, devices=4, free=5)
    starts = started(made, model("m", 8 * GB, devices=2, max=8), waiting=64)
    assert sorted(start.node for start in starts) == ["g0", "g0", "g1", "g1"]
    taken = (Instance("i", "m", "g0", "ready", slots=2), Instance("j", "m", "g0", "ready"))
    assert Node("g0", devices=4, instances=taken).free_slots() == 1
    assert started(gpus(1, instances=taken, devices=4), model("x", devices=2)) == []


def test_an_instance_relieves_one_that_computes_on_the_same() -> None:
    for name, partner in (("A10", "i"), ("V100", None)):
        had = Copy("s3://m", GB, GB)
        loaded = Instance("i", "m", "a0", "ready", running=8)
        first = gpus(1, "a", device_name="A10", copies=(had,), instances=(loaded,))
        cluster = ClusterModel([*first, *gpus(1, "b", device_name=name)], [model("m", GB)], Options(live=True))
        cluster.load("m", waiting=8, running=8)
        (start,) = of(StartInstance, cluster.tick())
        assert (start.node, start.partner) == ("b0", partner)


def decided(made: list[Node], deployment: Any) -> list[Any]:
    cluster = ClusterModel(made, [deployment], OPTIONS)
    cluster.load(deployment.name, waiting=1)
    return [one for one in cluster.tick() if isinstance(one, StartInstance | StopInstance)]


def test_a_new_version_does_not_leave_the_gpu_for_a_free_processor() -> None:
    head = Node("a", link_bytes_per_s=2 * GB, memory_bytes=100 * GB)
    old = Instance("i", "m", "g0", "ready", version="1")
    given = large(version="2", min=1, max=1, ttft_slo_s=math.inf)
    (stop,) = decided([head, *gpus(1, instances=(old,), device_free_bytes=())], given)
    assert (stop.id, type(stop)) == ("i", StopInstance)
    ending = replace(old, state="draining")
    assert decided([head, *gpus(1, instances=(ending,), device_free_bytes=())], given) == [], "the GPU is waited for"
    (start,) = decided([head, *gpus(1)], given)
    assert start.node == "g0"


def test_a_new_version_starts_on_the_node_that_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str | None] = []

    def choose(placement: Placement, *arguments: Any) -> str | None:
        monkeypatch.setattr(Placement, "choose", lambda *_: None)  # what it would find by now
        chosen.append(found(placement, *arguments))
        return chosen[0]

    found = Placement.choose
    monkeypatch.setattr(Placement, "choose", choose)
    old = Instance("i", "m", "g0", "ready", version="1")
    given = large(version="2", min=1, max=1, ttft_slo_s=math.inf)
    (start,) = decided(gpus(2, devices=2, instances=(old,)), given)
    assert chosen == [start.node]


def test_a_new_version_makes_room_where_a_free_slot_is_not_enough() -> None:
    old = Instance("i", "m", "g0", "ready", version="1", slots=2)
    given = large(version="2", min=1, max=1, devices=2, device="cuda")
    (stop,) = decided(gpus(1, devices=3, instances=(old,), device_free_bytes=(24 * GB,)), given)
    assert stop.id == "i"


def test_a_model_that_uses_no_gpu_leaves_them_to_others() -> None:
    processors = [Node(f"z{number}", link_bytes_per_s=GB, memory_bytes=100 * GB) for number in range(2)]
    given = large(device="cpu", ttft_slo_s=math.inf, times=None)
    assert [start.node for start in started([*gpus(2), *processors], given)] == ["z0"]
    assert [start.node for start in started(gpus(2), given)] == ["g0"]
    two = large(devices=2, ttft_slo_s=math.inf)
    assert decided([*gpus(2), *processors], two) == [], "a processor is no place for a model of two GPUs"
