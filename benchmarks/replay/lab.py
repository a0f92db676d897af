"""The same replay on a cluster in a laboratory, with a real Ray, controller, gateway, nodes and links."""

from __future__ import annotations

import http.client
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from medusa_adapters.bench.openai_client import Completion, stream
from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import SWITCH, Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_cluster.policy.decide import Options
from medusa_cluster.simulation.fleet import Machine, Model
from medusa_cluster.simulation.profiles import Profile
from medusa_cluster.simulation.result import Outcome
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import Strategy
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import MedusaError

from benchmarks.replay.calibration import PROMPT, Calibration, Samples, probe
from benchmarks.replay.machine import Answer, Replayed
from benchmarks.replay.systems import body
from benchmarks.waiting import until

CONCURRENCY = 16
_NAME, _PORT = "model", 8080
_BYTES_PER_S = 50e6
_TICK_S = 0.2  # how often the controller decides
_POLL_S = 0.1
_WITHIN_S = 180.0
_STARTS = 3  # in a sample; starts in one laboratory vary by a fifth, and the slowest first tokens are those of starts


class LabSystem:
    """A cluster with one deployed model, and a gateway in the network of the switch."""

    name = "cluster"

    def __init__(self, cluster: LabCluster) -> None:
        self._cluster = cluster
        self._answers: list[Answer] = []

    def settle(self) -> None:
        """Deploy the model again, so that it has a copy but no instance."""
        if self._cluster.status()["models"]:
            self._cluster.call("remove", name=_NAME)
        until(lambda: not self._instances(), _WITHIN_S, "no instance")
        nodes = len(self._cluster.lab.nodes)
        self._cluster.deploy(_NAME, min=0, max=nodes, settings={"max_concurrency": str(CONCURRENCY)})
        until(self._is_copied, _WITHIN_S, "a copy of the model")

    def sample(self, context: int, found: Samples) -> None:
        """Time starts through the gateway, then requests to a warm instance."""
        for _ in range(_STARTS):
            self.settle()
            began = time.monotonic_ns()
            first = self._ask(Request(0.0, 0, PROMPT, 2))
            found.start.append(((first.first_token_ns - began) / 1e9, ()))
        probe(self._ask, context, CONCURRENCY, found)
        found.end.append(0.0)

    def replay(self, requests: Sequence[Request]) -> Replayed:
        """Send all requests at their times, and return when no instance is left."""
        found, waiting = Replayed(), deque(requests)
        threads: list[threading.Thread] = []
        began_s = looked_s = time.monotonic()
        seen: set[str] = set()
        while waiting or seen or any(thread.is_alive() for thread in threads) or not found.node_s:
            now_s = time.monotonic()
            while waiting and waiting[0].at_s <= now_s - began_s:
                answer = Answer(waiting.popleft())
                found.answers.append(answer)
                threads.append(threading.Thread(target=self._answer, args=(answer, began_s), daemon=True))
                threads[-1].start()
            if now_s >= looked_s + _POLL_S:
                last, seen = seen, self._instances()
                found.starts += len(seen - last)
                found.node_s += len(seen) * (now_s - looked_s)
                looked_s = now_s
            until = min(looked_s + _POLL_S, began_s + waiting[0].at_s if waiting else looked_s + _POLL_S)
            time.sleep(max(until - time.monotonic(), 0.0))
        return found

    def _answer(self, answer: Answer, began_s: float) -> None:
        try:
            found = self._ask(answer.request)
            answer.first_s, answer.done_s = found.first_token_ns / 1e9 - began_s, found.end_ns / 1e9 - began_s
        except (MedusaError, OSError, http.client.HTTPException, ValueError) as error:
            answer.error = str(error)

    def _ask(self, request: Request) -> Completion:
        lab = self._cluster.lab
        with closing(http.client.HTTPConnection(lab.address(SWITCH), _PORT, timeout=_WITHIN_S)) as connection:
            with lab.network(SWITCH):
                connection.connect()
            return stream(connection, body(request, _NAME))

    def _instances(self) -> set[str]:
        return {instance["id"] for node in self._cluster.status()["nodes"] for instance in node["instances"]}

    def _is_copied(self) -> bool:
        models = [model for node in self._cluster.status()["nodes"] for model in node["models"]]
        return any(model["state"] == "done" for model in models)


@contextmanager
def cluster_of(folder: Path, nodes: int) -> Iterator[LabSystem]:
    """Start a laboratory with a cluster, and stop it at the end of the context. Needs root. Raises LabError."""
    with Laboratory(nodes, LinkSpeed(_BYTES_PER_S), origin={_NAME: folder}) as lab:
        cluster = LabCluster(lab)
        try:
            cluster.start()
            cluster.start_gateway(_PORT)
            yield LabSystem(cluster)
        finally:
            cluster.stop()


def simulate(calibration: Calibration, requests: Sequence[Request], folder: Path, nodes: int, seed: int = 1) -> Outcome:
    """Simulate the laboratory's nodes and links with the controller's own policy."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    profile = Profile(size, 1, calibration.stages, calibration.speed)
    model = Model(_NAME, profile, max=nodes, concurrency=CONCURRENCY, batch_tokens=2048)
    machine = Machine("n", nodes, _BYTES_PER_S, memory_bytes=10**10)
    strategy = Strategy("replay", cache="lru", policy=Options())
    fleet = calibration.fleet("laboratory", machine, model)
    return Simulation(fleet, strategy, requests, tick_s=_TICK_S, quiet_s=_TICK_S, seed=seed).run()
