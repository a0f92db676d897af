"""Whatever comes and goes: no GPU has two instances or too little memory, and nobody waits in vain or in silence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cluster_model import ClusterModel, model, of
from hypothesis import given, settings
from hypothesis import strategies as st
from medusa_cluster.policy.accelerators import given as given_devices
from medusa_cluster.policy.accelerators import needed_bytes
from medusa_cluster.policy.decide import Options
from medusa_cluster.policy.scaling import Bounds
from medusa_cluster.policy.state import Decision, Deployment, FreeDevice, Instance, Node, StartInstance, StopInstance

GB = 10**9
SIZES = (16, 24, 80)
RETURNS_S = 0.5  # until a GPU's memory is seen to be free


@dataclass
class Gpu:
    """A GPU as its node knows it."""

    size: int
    holder: str | None = None
    returned_at: float | None = None  # its memory is not seen to be free yet
    used: int = 0  # by another program


class Machines(ClusterModel):
    """A cluster whose nodes lend their GPUs, and take a while to say that one is free again."""

    def __init__(self, made: list[Node], gpus: dict[str, list[Gpu]], deployments: list[Deployment]) -> None:
        bounds = Bounds(keep_alive_s=1.0)
        super().__init__(made, deployments, Options(bounds, pool=False))
        self.gpus = gpus
        self._say()

    def _do(self, decision: Decision) -> None:
        super()._do(decision)
        if isinstance(decision, StartInstance):
            self._lend(decision)
        elif isinstance(decision, StopInstance):
            self.end(decision.id)

    def _lend(self, start: StartInstance) -> None:
        deployment = self.deployments[start.model]
        assert start.device_bytes == needed_bytes(deployment)
        gpus = self.gpus[start.node]
        if not gpus or deployment.device == "cpu":
            return
        free = [gpu for gpu in gpus if gpu.holder is None and gpu.returned_at is None]
        assert len(free) >= deployment.devices, "an instance was started where no GPU is free"
        positions = given_devices([room(gpu) for gpu in free], deployment.devices, start.device_bytes)
        for position in positions:
            fits = room(free[position]).free_bytes >= start.device_bytes
            assert fits or self.is_too_large(deployment), "it has no room where another GPU could have it"
            free[position].holder = start.id

    def is_too_large(self, deployment: Deployment) -> bool:
        return not any(
            sum(gpu.size >= needed_bytes(deployment) for gpu in self.gpus[name]) >= deployment.devices
            for name in self.gpus
            if deployment.device_kind in ("", self.nodes[name].device_kind)
        )

    def end(self, instance: str) -> None:
        for gpus in self.gpus.values():
            for gpu in gpus:
                if gpu.holder == instance:
                    gpu.holder, gpu.returned_at = None, self.now_s

    def tick(self, tick_s: float = 0.1) -> list[Decision]:
        decisions = super().tick(tick_s)
        self._say()
        return decisions

    def _say(self) -> None:
        """Have the nodes report their GPUs."""
        for name, gpus in self.gpus.items():
            for gpu in gpus:
                if gpu.returned_at is not None and self.now_s - gpu.returned_at >= RETURNS_S:
                    gpu.returned_at = None
            free = sorted((room(g) for g in gpus if g.holder is None and g.returned_at is None), reverse=True)
            self.nodes[name] = replace(
                self.nodes[name],
                device_free_bytes=tuple(one.free_bytes for one in free),
                device_free_sizes=tuple(one.size_bytes for one in free),
            )


def room(gpu: Gpu) -> FreeDevice:
    return FreeDevice(gpu.size - gpu.used, gpu.size)


@st.composite
def machines(draw: st.DrawFn, *, processors: bool = True, used: bool = True, kinds: bool = False) -> Machines:
    """Draw nodes with GPUs of several sizes, or without any, and models of several needs.

    With ``kinds``, nodes are of two kinds, and models may need one, have larger shares, or always have an instance.
    """
    nodes, gpus = [], {}
    for number in range(draw(st.integers(1, 5))):
        sizes = draw(st.lists(st.sampled_from(SIZES), min_size=0 if processors else 1, max_size=4))
        sizes = sizes if draw(st.booleans()) else sizes[:1] * len(sizes)
        ordered = sorted((size * GB for size in sizes), reverse=True)
        found = {"devices": len(sizes), "device_bytes": min(ordered, default=0), "device_sizes": tuple(ordered)}
        found["device_kind"] = draw(st.sampled_from(["", "", "x"])) if kinds else ""
        name = f"n{number}"
        nodes.append(Node(name, link_bytes_per_s=100 * GB, memory_bytes=1000 * GB, **found))  # type: ignore[arg-type]
        taken = st.sampled_from([0, 0, 0, 10 * GB]) if used else st.just(0)
        gpus[name] = [Gpu(size, used=draw(taken)) for size in ordered]
    deployments = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        wanted: dict[str, Any] = {"devices": draw(st.sampled_from([1, 1, 1, 2, 4]))}
        wanted["device"] = draw(st.sampled_from(["auto", "auto", "cuda", "cpu"] if processors else ["auto", "cuda"]))
        if wanted["device"] == "cpu":
            wanted["devices"] = 1
        if kinds:
            wanted["device_kind"] = draw(st.sampled_from(["", "", "x"]))
            wanted["weight"], wanted["min"] = draw(st.sampled_from([1.0, 4.0])), draw(st.sampled_from([0, 0, 1]))
        deployments.append(model(name, draw(st.sampled_from([2, 10, 20, 60])) * GB, max=3, **wanted))
    return Machines(nodes, gpus, deployments)


def check(cluster: Machines) -> None:
    """Check what holds at every moment."""
    for name, node in cluster.nodes.items():
        ids = [instance.id for instance in node.instances]
        holders = [gpu.holder for gpu in cluster.gpus[name] if gpu.holder is not None]
        assert set(holders) <= set(ids)
        for instance in node.instances:
            on_gpu = node.computes_on_device(instance.device)
            assert holders.count(instance.id) == (instance.slots if on_gpu else 0)
        assert node.free_slots() >= 0
        assert node.free_slots("cpu") >= 0


@settings(deadline=None, max_examples=40)
@given(machines(), st.data())
def test_no_gpu_has_two_instances_or_too_little_memory_whatever_happens(cluster: Machines, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(cluster.deployments))
    for _ in range(data.draw(st.integers(1, 20))):
        event = data.draw(st.sampled_from(["load", "load", "quiet", "kill", "run"]))
        name = data.draw(names)
        if event == "load":
            cluster.load(name, waiting=data.draw(st.sampled_from([1, 8, 24])))
        elif event == "quiet":
            cluster.load(name)
        elif event == "kill":
            for instance in cluster.instances(name)[:1]:
                node = cluster.nodes[instance.node]
                left = tuple(one for one in node.instances if one is not instance)
                cluster.nodes[node.name] = replace(node, instances=left)
                cluster.end(instance.id)
                cluster._say()
        for _ in range(data.draw(st.sampled_from([1, 3, 10]))):
            cluster.tick()
            check(cluster)
        silent = {name for name, load in cluster.loads.items() if load.waiting}
        for _ in range(2):  # one may take an instance from a model, and the next one sees that
            cluster.tick()
            silent -= {one.model for node in cluster.nodes.values() for one in node.instances}
            silent -= cluster.memory.waiting.keys()
        assert not silent, "they wait, and nothing says for what"


@settings(deadline=None, max_examples=40)
@given(machines(kinds=True), st.data())
def test_a_demand_that_has_a_place_gets_it_and_all_settle(cluster: Machines, data: st.DataObject) -> None:
    """One request for each model, in any order, with any time between them."""
    for name in data.draw(st.permutations(sorted(cluster.deployments))):
        cluster.load(name, waiting=1)
        cluster.run(data.draw(st.sampled_from([0.1, 2.0])))
    for name in cluster.deployments:
        cluster.load(name, running=1)
    for name in cluster.deployments:
        if not cluster.instances(name):
            cluster.load(name, waiting=1)
    cluster.run(12.0, 0.3)
    log = cluster.run(6.0, 0.3)
    assert of(StartInstance, log) == of(StopInstance, log) == [], "instances come and go"
    for name, deployment in cluster.deployments.items():
        if not cluster.instances(name):
            assert name in cluster.memory.waiting
            assert not has_place(cluster, deployment), f"{name} waits beside a place: {cluster.memory.waiting[name]}"


def test_a_share_is_no_use_to_a_model_whose_places_are_taken() -> None:
    """One model runs on the only GPU, one waits for it, and the processor beside it is free for two others."""
    nodes = [
        Node("n0", link_bytes_per_s=100 * GB, memory_bytes=1000 * GB),
        Node(
            "n1", link_bytes_per_s=100 * GB, memory_bytes=1000 * GB,
            devices=1, device_bytes=16 * GB, device_sizes=(16 * GB,),
        ),
    ]  # fmt: skip
    wanted = {"a": "cuda", "b": "auto", "c": "auto", "d": "auto"}
    deployments = [model(name, 2 * GB, max=3, device=device) for name, device in wanted.items()]
    cluster = Machines(nodes, {"n0": [], "n1": [Gpu(16 * GB)]}, deployments)
    for name in "bacd":
        cluster.load(name, waiting=1)
        cluster.run(0.1)
    cluster.load("b", running=1)
    cluster.run(12.0, 0.3)
    assert cluster.instances("c") or cluster.instances("d")


def test_of_a_model_that_loses_an_instance_the_one_ends_whose_place_another_needs() -> None:
    """One that ends elsewhere is of no use: the place that it leaves was free for ever, or taken again and again."""
    nodes = [Node(f"n{number}", link_bytes_per_s=100 * GB, memory_bytes=1000 * GB) for number in range(3)]
    nodes[0] = replace(nodes[0], devices=1, device_bytes=16 * GB, device_sizes=(16 * GB,))
    deployments = [model("a", 2 * GB, max=3), model("b", 2 * GB, device="cuda")]
    cluster = Machines(nodes, {"n0": [Gpu(16 * GB)], "n1": [], "n2": []}, deployments)
    cluster.load("a", waiting=24)
    cluster.run(3.0)
    cluster.load("a", running=24)
    cluster.load("b", waiting=1)
    cluster.run(6.0)
    assert [one.node for one in cluster.instances("b")] == ["n0"]
    assert {one.node for one in cluster.instances("a")} == {"n1", "n2"}
    log = cluster.run(6.0, 0.3)
    assert of(StartInstance, log) == of(StopInstance, log) == []


def test_a_model_for_which_a_processor_will_do_leaves_the_only_gpu_to_one_that_needs_it() -> None:
    nodes = [Node(f"n{number}", link_bytes_per_s=100 * GB, memory_bytes=1000 * GB) for number in range(2)]
    nodes[0] = replace(nodes[0], devices=1, device_bytes=16 * GB, device_sizes=(16 * GB,))
    deployments = [model("either", 2 * GB), model("gpu", 2 * GB, device="cuda")]
    cluster = Machines(nodes, {"n0": [Gpu(16 * GB)], "n1": []}, deployments)
    for name in cluster.deployments:
        cluster.load(name, waiting=1)
    cluster.run(2.0)
    assert [one.node for one in cluster.instances("either") + cluster.instances("gpu")] == ["n1", "n0"]


def has_place(cluster: Machines, deployment: Deployment) -> bool:
    """Return whether a free place would do for a whole instance."""
    for name, node in cluster.nodes.items():
        if deployment.device_kind not in ("", node.device_kind):
            continue
        free = [room(gpu) for gpu in cluster.gpus[name] if gpu.holder is None]
        if node.computes_on_device(deployment.device):
            if sum(one.free_bytes >= needed_bytes(deployment) for one in free) >= deployment.devices:
                return True
        elif deployment.device != "cuda" and deployment.devices == 1 and node.free_slots(deployment.device) > 0:
            return True
    return False


@settings(deadline=None, max_examples=40)
@given(machines(processors=False, used=False), st.data())
def test_idle_instances_make_room_until_all_have_a_place_if_there_is_one_for_each(
    cluster: Machines, data: st.DataObject
) -> None:
    """Idle instances of small models are everywhere; then larger ones are asked for that could all have a place."""
    one_each = {name: replace(found, devices=1, device="auto", min=1) for name, found in cluster.deployments.items()}
    gpus = sorted(gpu.size for found in cluster.gpus.values() for gpu in found)
    needs = sorted((needed_bytes(found), name) for name, found in one_each.items())
    while needs and not fits(gpus, [need for need, _ in needs]):
        needs.pop()
    cluster.deployments = {}
    for name in data.draw(st.permutations([name for _, name in needs])):
        cluster.deployments[name] = one_each[name]
        cluster.run(data.draw(st.sampled_from([0.1, 2.0])))
    cluster.run(15.0, 0.3)
    assert all(cluster.instances(name) for name in cluster.deployments), cluster.memory.waiting
    assert cluster.memory.waiting == {}
    log = cluster.run(6.0, 0.3)
    assert of(StartInstance, log) == of(StopInstance, log) == []


def fits(gpus: list[int], needs: list[int]) -> bool:
    """Return whether each need has a GPU of its own. Both are sorted."""
    left = list(gpus)
    for need in needs:
        found = next((size for size in left if size >= need), None)
        if found is None:
            return False
        left.remove(found)
    return True


def test_what_becomes_free_for_a_waiting_model_is_not_taken_by_the_one_that_made_room() -> None:
    """One that is too large for every GPU moved away from a node, and back again, for ever."""
    nodes = [
        Node(f"n{number}", memory_bytes=1000 * GB, devices=4, device_bytes=24 * GB, link_bytes_per_s=100 * GB)
        for number in range(2)
    ]
    gpus = {node.name: [Gpu(24 * GB) for _ in range(4)] for node in nodes}
    gpus["n0"][1].used = 10 * GB
    needs = {"a": (60, 1), "b": (60, 4), "d": (2, 4)}
    cluster = Machines(nodes, gpus, [model(name, size * GB, devices=n, max=3) for name, (size, n) in needs.items()])
    for name in "dab":
        cluster.load(name, waiting=1)
        cluster.tick()
    for name in needs:
        cluster.load(name, waiting=0 if cluster.instances(name) else 1)
    cluster.run(12.0, 0.3)
    log = cluster.run(6.0, 0.3)
    assert of(StartInstance, log) == of(StopInstance, log) == []


def test_the_machines_of_these_tests_notice_a_gpu_that_is_lent_twice() -> None:
    cluster = Machines([Node("n", devices=1)], {"n": [Gpu(24 * GB)]}, [model("a", GB)])
    cluster.gpus["n"][0].holder = "i"
    cluster.nodes["n"] = replace(cluster.nodes["n"], instances=(Instance("j", "a", "n", "ready"),))
    try:
        check(cluster)
    except AssertionError:
        return
    raise AssertionError("it was not noticed")


def test_what_another_program_has_of_a_gpu_is_remembered_while_an_instance_has_it() -> None:
    """Otherwise a model that does not fit beside it would end another one again and again."""
    size = 24 * GB
    node = Node(
        "n", link_bytes_per_s=100 * GB, memory_bytes=1000 * GB, devices=4, device_bytes=size, device_sizes=(size,) * 4
    )
    gpus = [*(Gpu(size) for _ in range(3)), Gpu(size, used=10 * GB)]
    made = Machines([node], {"n": gpus}, [model("large", 60 * GB, devices=4), model("small", 2 * GB, devices=4)])
    made.load("large", waiting=1)
    made.load("small", waiting=1)
    log = made.run(20.0, 0.3)
    assert len(of(StartInstance, log)) <= 2
    assert made.instances("small")
    assert "large" in made.memory.waiting


def test_instances_that_make_room_in_vain_are_left_alone() -> None:
    """Other programs fill a GPU whose instance moves, and the model that waits cannot use it: it came back for ever."""
    spec = {"n0": [(24, 0), (16, 0), (16, 10), (16, 10)], "n1": [(16, 0), (16, 10)]}
    nodes, gpus = [], {}
    for name, found in spec.items():
        sizes = tuple(size * GB for size, _ in found)
        nodes.append(
            Node(
                name, link_bytes_per_s=100 * GB, memory_bytes=1000 * GB,
                devices=len(sizes), device_bytes=min(sizes), device_sizes=sizes,
            )
        )  # fmt: skip
        gpus[name] = [Gpu(size * GB, used=used * GB) for size, used in found]
    small = [model(name, 2 * GB, max=3, devices=1, device="auto") for name in "abc"]
    cluster = Machines(nodes, gpus, [*small, model("d", 10 * GB, max=3, devices=2, device="auto")])
    for name in "abcd":
        cluster.load(name, waiting=1)
        cluster.run(0.1)
    for name in "abc":
        cluster.load(name, running=1)
    assert len(of(StopInstance, cluster.run(6.0, 0.3))) <= 4
    assert of(StopInstance, cluster.run(60.0, 0.3)) == []
    assert "2 GPUs of one node with 7.1 GB free" in cluster.memory.waiting["d"].needs
    for gpu in gpus["n0"]:
        gpu.used = 0  # the other programs end
    cluster.run(3.0, 0.3)
    assert cluster.instances("d")
