"""With more models than places, each has its turn, and a model without requests gives way to one that has some."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from cluster_model import MB, ClusterModel, model, nodes, of
from medusa_cluster.policy.counting import RoleCount
from medusa_cluster.policy.state import Deployment, Instance, Load, Measured, Processor, StartInstance
from medusa_cluster.policy.turns import TURN_S, turn
from medusa_runtime.state.stage_times import StageTimes

TICK_S = 0.5


@dataclass
class Busy:
    """A cluster whose models all have requests all the time. Times are in seconds."""

    cluster: ClusterModel
    served: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    tick_s: float = TICK_S

    def run(self, seconds: float, names: Iterable[str] | None = None) -> None:
        """Let time pass, in which only the models of these names have requests."""
        for _ in range(round(seconds / self.tick_s)):
            for name in names or self.cluster.deployments:
                serves = bool(self.cluster.instances(name))
                self.waited[name] = 0.0 if serves else self.waited.get(name, 0.0) + self.tick_s
                self.longest[name] = max(self.longest.get(name, 0.0), self.waited[name])
                self.served[name] = self.served.get(name, 0.0) + self.tick_s * serves
                self.cluster.loads[name] = Load(
                    0 if serves else 3,
                    3 if serves else 0,
                    longest_wait_s=self.waited[name],
                    last_request_s=self.cluster.now_s,
                )
            self.cluster.tick(self.tick_s)


@pytest.mark.parametrize(("models", "machines"), [("ab", 1), ("abc", 1), ("abcde", 3)])
@pytest.mark.parametrize("first", [0, -1])
def test_models_that_are_always_busy_take_turns(models: str, machines: int, first: int) -> None:
    busy = Busy(ClusterModel(nodes(machines), [model(name) for name in models]))
    busy.run(5, models[first])
    busy.run(600)
    fair_s = 600 * machines / len(models)
    assert all(0.7 * fair_s < busy.served[name] < 1.3 * fair_s for name in models), busy.served
    turns = len(models) - machines
    assert max(busy.longest.values()) < turns * (TURN_S + 5) + 5, "no wait is longer than the turns of the others"
    assert len(of(StartInstance, busy.cluster.log)) < 600 / TURN_S * machines + machines, "few turns are cut short"


def test_a_larger_weight_is_a_longer_turn() -> None:
    busy = Busy(ClusterModel(nodes(1), [model("a"), model("b", weight=3.0)]))
    busy.run(1200)
    assert 2 < busy.served["b"] / busy.served["a"] < 4


def test_a_model_that_takes_all_gpus_has_its_turn() -> None:
    busy = Busy(ClusterModel(nodes(1, devices=4), [model("x", devices=4), model("y")]))
    busy.run(600)
    assert min(busy.served.values()) > 200


def test_a_model_of_several_gpus_has_its_turn_where_others_end_one_at_a_time() -> None:
    busy = Busy(ClusterModel(nodes(1, devices=4), [*map(model, "abcdef"), model("x", devices=4)]))
    for number in range(1, 5):
        busy.run(TURN_S / 4, "abcd"[:number])
    busy.run(600)
    assert max(busy.longest.values()) < 3 * TURN_S, busy.longest


@pytest.mark.parametrize("seed", range(6))
def test_no_model_waits_for_long_because_it_needs_several_gpus_of_one_node(seed: int) -> None:
    """Up to 16 nodes of several sizes, and models that want up to twice as many GPUs as there are."""
    drawn = random.Random(seed)
    sizes = drawn.choice([(2,), (4,), (8,), (2, 4), (4, 8)])
    machines = [replace(node, devices=drawn.choice(sizes)) for node in nodes(drawn.randint(4, 16))]
    most = max(node.devices for node in machines)
    least, models = drawn.uniform(1.1, 2.0) * sum(node.devices for node in machines), list[Deployment]()
    while sum(each.devices for each in models) < least:
        devices = min(drawn.choice([1, 1, 1, 1, 2, 4, most]), most)
        models.insert(drawn.randint(0, len(models)), model(f"m{len(models)}", MB, devices=devices, max=1))
    busy = Busy(ClusterModel(machines, models), tick_s=0.5)
    for number in range(5):  # so that their turns do not end together
        busy.run(8, [each.name for each in models[number::5]])
    busy.run(300)
    assert max(busy.longest.values()) < 3 * TURN_S, busy.longest
    assert min(busy.served.values()) > 2 * TURN_S, busy.served


def test_a_model_that_no_turn_of_others_can_make_room_for_takes_no_turn_from_them() -> None:
    small = [model("a", min=1), *map(model, "bcdef")]
    busy = Busy(ClusterModel(nodes(1, devices=4), [*small, model("x", devices=2), model("y", devices=4)]))
    for number in range(1, 5):
        busy.run(TURN_S / 4, "abcd"[:number])
    busy.run(600)
    assert not busy.served.pop("y")
    assert min(busy.served.values()) > 60, busy.served


@pytest.mark.parametrize(("idle", "asked"), ["ab", "ba"])
def test_a_model_without_requests_gives_its_place_soon(idle: str, asked: str) -> None:
    cluster = ClusterModel(nodes(1), [model(idle), model(asked)])
    cluster.load(idle, waiting=2)
    cluster.run(5)
    assert cluster.instances(idle)
    cluster.load(idle)
    cluster.load(asked, waiting=2)
    cluster.run(5)
    assert cluster.instances(asked)


@pytest.mark.parametrize(("held", "asked"), ["ab", "ba"])
def test_a_model_that_serves_keeps_its_place_for_a_turn(held: str, asked: str) -> None:
    busy = Busy(ClusterModel(nodes(1), [model(held), model(asked)]))
    busy.run(5, held)
    busy.run(TURN_S - 6)
    assert busy.cluster.instances(held)


def test_a_moment_without_requests_costs_no_place() -> None:
    cluster = ClusterModel(nodes(1), [model("a"), model("b")])
    cluster.load("a", waiting=2)
    cluster.run(5)
    cluster.load("b", waiting=2)
    for _ in range(20):
        cluster.load("a", running=1)
        cluster.run(0.5)
        cluster.load("a")
        cluster.run(0.5)
    assert cluster.instances("a")
    assert len(of(StartInstance, cluster.log)) == 1


def test_a_turn_and_the_patience_with_an_idle_model_are_long_where_starts_are() -> None:
    times = StageTimes(1.0, 1.0, 1.0, 0.1, 0.1, 100 * MB, 1e9, 20.0, 1)
    slow = replace(model("a"), measured={Processor.of(0, "", "", "auto"): Measured(times)})
    for deployment, busy, idle in ((model("a"), 2, 4), (slow, 0, 0)):
        assert turn(served_for(70.0, deployment), Load(0, 1), 100.0)[0] == busy
        assert turn(served_for(70.0, deployment), Load(last_request_s=90.0), 100.0)[0] == idle
        assert turn(served_for(90.0, deployment), Load(last_request_s=70.0), 100.0)[0] == 4


def served_for(seconds: float, deployment: Deployment) -> RoleCount:
    return RoleCount(deployment, "both", [Instance("i", "a", "n0", "ready", 100.0 - seconds)])
