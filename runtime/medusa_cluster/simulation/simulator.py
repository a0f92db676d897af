"""The simulated cluster. It carries out the policy's decisions, and shows the policy the state that results."""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from medusa_runtime.errors import MissingPackageError

from ..policy.decide import Memory, decide
from ..policy.index import Index
from ..policy.pool import spread
from ..policy.state import ClusterState, Copy, Deployment, Load, Node, Role, StartInstance
from .execution import SimExecution
from .fleet import Fleet, Model
from .network import Link, Network, call_after
from .node import SimCopy, SimNode
from .result import Outcome
from .serving import ServedRequest, Server
from .strategy import Strategy
from .trace import Request

_PATIENCE_S = 900.0  # after the last request, or the last answer
_WINDOW_S = 1.0  # over which the tokens that arrive are counted


class SimModel:
    """A model's queue, its instances and its load."""

    def __init__(self, number: int, model: Model) -> None:
        self.number, self.model = number, model
        self.queue: deque[ServedRequest] = deque()
        self.ready: dict[str, Server] = {}  # that take requests; with separate roles only those that prefill
        self.decoders: dict[str, Server] = {}
        self.held: deque[tuple[Server, ServedRequest]] = deque()  # prefilled, waiting for room in a decode instance
        self.window: deque[tuple[float, int]] = deque()
        self.window_tokens = 0
        self.queued_tokens = 0
        self.unanswered_tokens = 0  # of prompts whose first token has not come
        self.prefilled: deque[tuple[float, int]] = deque()  # as the window, of requests whose first token has come
        self.prefilled_tokens = 0
        self.last_request_s = -math.inf
        self.running = 0


class Simulation:
    """One run of one strategy. ``progress`` is called with the simulated time, about once in a simulated minute.

    Ticks come ``tick_s`` after one another while something happens, and ``quiet_s`` while instances only wait.
    ``paid_until_s``: until when device time counts, for example the end of the trace.
    ``details``: also record which tokens were served when, and the host memory that holds weights.
    ``seed``: of how much starts differ.
    """

    def __init__(
        self,
        fleet: Fleet,
        strategy: Strategy,
        requests: Iterable[Request],
        *,
        tick_s: float = 0.1,
        quiet_s: float = 1.0,
        progress: Callable[[float], None] | None = None,
        paid_until_s: float = math.inf,
        details: bool = False,
        seed: int = 1,
    ) -> None:
        try:
            import simpy
        except ModuleNotFoundError:
            raise MissingPackageError('the simulator needs simpy: pip install "medusa-runtime[cluster]"') from None
        self.env: Any = simpy.Environment()
        self.fleet, self.strategy = fleet, strategy
        self.network = Network(self.env)
        self.store = Link(fleet.store_bytes_per_s)
        self.outcome = Outcome(strategy.name)
        self.models = [SimModel(number, model) for number, model in enumerate(fleet.models)]
        self.numbers = {model.name: number for number, model in enumerate(fleet.models)}
        self.deployments = {model.name: self._deployment(model) for model in fleet.models}
        self.nodes = {node.name: node for node in self._make_nodes()}
        self.changed: dict[SimNode, None] = dict.fromkeys(self.nodes.values())  # a set in order
        self._seen: dict[str, Node] = {}
        self._loads: dict[str, Load] = {}
        self._active: set[int] = set()  # models whose load may have changed
        self._memory = Memory()
        self._execution = SimExecution(self, seed)
        self._requests = iter(requests)
        self._tick_s, self._tick_at, self._ticked_at = tick_s, math.inf, -math.inf
        self._quiet_s = max(quiet_s, tick_s)
        self._next_request_s: float | None = 0.0
        self._progress, self._progress_at = progress, 0.0
        self._details, self._paid_until_s = details, paid_until_s
        self._unanswered: set[ServedRequest] = set()
        self._answered_s = 0.0  # when the last request came or was answered

    def run(self) -> Outcome:
        """Run to the last answer, or until nothing can be answered any more."""
        if self.strategy.provisioned is not None:
            _provision(self, self._execution, self.strategy.provisioned)
        else:
            if self.strategy.policy.pool:
                _fill_pool(self, self._execution)
            _begin_minimum(self, self._execution)
        self._arrive_next()
        self.wake()
        with _rare_collections():
            self.env.run()
        self._execution.close()
        outcome = self.outcome
        for request in self._unanswered:
            outcome.ttft_s[request.number] = request.ttft_s
        outcome.moved_bytes, outcome.store_bytes = self.network.moved_bytes, self.store.moved_bytes
        outcome.seconds = self.env.now
        return outcome

    # Requests.

    def _arrive_next(self) -> None:
        request = next(self._requests, None)
        self._next_request_s = None if request is None else request.at_s
        if request is not None:
            call_after(self.env, max(request.at_s - self.env.now, 0.0), lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        now = self.env.now
        outcome = self.outcome
        served = ServedRequest(now, request.model, request.prompt_tokens, request.output_tokens, outcome.requests)
        self._unanswered.add(served)
        self._answered_s = now
        outcome.add(now, request.model)
        model = self.models[request.model]
        model.last_request_s = now
        model.window.append((now, request.prompt_tokens))
        model.window_tokens += request.prompt_tokens
        model.queue.append(served)
        model.queued_tokens += request.prompt_tokens
        model.unanswered_tokens += request.prompt_tokens
        self._active.add(request.model)
        self.dispatch(model)
        if model.queue:
            outcome.largest_backlog = max(outcome.largest_backlog, len(model.queue))
        self.wake()
        self._arrive_next()

    def dispatch(self, model: SimModel) -> None:
        """Give waiting requests to the instance with the least work; with a shared queue, to those that are idle."""
        if model.model.shared_queue:
            for server in tuple(model.ready.values()):
                if not model.queue:
                    return
                server.take()
            return
        while model.queue and model.ready:
            server = min(model.ready.values(), key=_work)
            if server.free <= 0:
                return
            server.admit(self._pop(model))

    def pull(self, model: SimModel, tokens: int) -> list[ServedRequest]:
        """Take prompts with so many tokens from a shared queue, and at least one."""
        found: list[ServedRequest] = []
        while model.queue and (not found or model.queue[0].prompt_tokens <= tokens):
            found.append(self._pop(model))
            tokens -= found[-1].prompt_tokens
        return found

    def _pop(self, model: SimModel) -> ServedRequest:
        request = model.queue.popleft()
        model.queued_tokens -= request.prompt_tokens
        model.running += 1
        request.taken_s = self.env.now
        return request

    def first_token(self, request: ServedRequest) -> None:
        model = self.models[request.model]
        model.prefilled.append((self.env.now, request.prompt_tokens))
        model.prefilled_tokens += request.prompt_tokens
        model.unanswered_tokens -= request.prompt_tokens
        self._active.add(request.model)

    def ended(self, server: Server, request: ServedRequest | None) -> None:
        """Note that a request has ended, or with None that one has gone to a decoder. Its place is free."""
        if request is not None:
            self._unanswered.discard(request)
            self._answered_s = self.env.now
            self.outcome.end(request.number, request.ttft_s, request.tpot_s)
            self.outcome.queued_s += request.taken_s - request.at_s
            self.outcome.prefill_s += request.first_s - request.begun_s
            model = self.models[request.model]
            model.running -= 1
            self._active.add(request.model)
            if self._details:
                self.outcome.served.append((request.first_s, request.prompt_tokens))
            self.dispatch(model)
        self._execution.on_place_free(server)

    # The controller's ticks.

    def wake(self) -> None:
        """Make the next tick come soon."""
        at = max(self._ticked_at + self._tick_s, self.env.now)
        if at < self._tick_at and self.strategy.provisioned is None:
            self._tick_at = at
            call_after(self.env, at - self.env.now, lambda: self._tick(at))

    def _tick(self, at: float) -> None:
        if at != self._tick_at:
            return
        now = self.env.now
        if self._details and math.isfinite(self._ticked_at):
            self.outcome.held_byte_s += self._execution.cached_bytes() * (now - self._ticked_at)
        self._tick_at, self._ticked_at = math.inf, now
        names = [node.name for node in self.changed]
        for node in self.changed:
            self._seen[node.name] = node.to_policy()
        self.changed = {node: None for node in self.changed if node.dirty}
        self._take_loads()
        state = ClusterState(self._seen, self.deployments, self._loads, names)
        begun = time.thread_time()
        decisions, self._memory = decide(state, now, self._memory, self.strategy.policy)
        self.outcome.decide_s += time.thread_time() - begun
        self.outcome.ticks += 1
        self.outcome.decisions += len(decisions)
        for decision in decisions:
            self._execution.do(decision)
        if self._progress is not None and now >= self._progress_at:
            self._progress_at = now + 60.0
            self._progress(now)
        self._go_on(bool(decisions))

    def _go_on(self, decided: bool) -> None:
        """Look again: soon after a change, each second while anything is there that may have to end.

        No more when nothing has been asked or answered for a long time: what waits then waits for ever.
        """
        if self._next_request_s is None and self.env.now >= self._answered_s + _PATIENCE_S:
            return
        if decided or self._active:
            self.wake()
        elif self._execution.instances or any(node.dirty for node in self.changed):
            at = self.env.now + self._quiet_s
            self._tick_at = at
            call_after(self.env, at - self.env.now, lambda: self._tick(at))

    def paid_s(self, since_s: float) -> float:
        """Return how much of the time since then counts as device time."""
        now: float = self.env.now
        return max(min(now, self._paid_until_s) - since_s, 0.0)

    def _take_loads(self) -> None:
        now = self.env.now
        for number in list(self._active):
            model = self.models[number]
            window = model.window
            while window and window[0][0] <= now - _WINDOW_S:
                model.window_tokens -= window.popleft()[1]
            prefilled = model.prefilled
            while prefilled and prefilled[0][0] <= now - _WINDOW_S:
                model.prefilled_tokens -= prefilled.popleft()[1]
            name = model.model.name
            waiting = len(model.queue)
            self._loads[name] = Load(
                waiting=waiting,
                running=model.running,
                tokens_per_s=model.window_tokens / _WINDOW_S,
                unanswered_tokens=model.unanswered_tokens,
                waiting_tokens=model.queued_tokens,
                prefilled_per_s=model.prefilled_tokens / _WINDOW_S,
                kv_use=_used(model.decoders.values()),
                longest_wait_s=now - model.queue[0].at_s if model.queue else 0.0,
                last_request_s=model.last_request_s,
            )
            if not window and not prefilled and not model.queue:
                self._active.discard(number)
        idle = self.strategy.policy.bounds.keep_alive_s
        for name in [name for name, load in self._loads.items() if now - load.last_request_s > idle + 1.0]:
            model = self.models[self.numbers[name]]
            if not (model.queue or model.running or name in self._execution.counts):
                del self._loads[name]

    # What there is.

    def _deployment(self, model: Model) -> Deployment:
        profile = model.profile
        return Deployment(
            model.name,
            f"m://{model.name}",
            size_bytes=profile.size_bytes,
            version="1",
            layers=profile.layers,
            min=model.min,
            max=min(model.max, self.fleet.devices),
            ttft_slo_s=model.ttft_slo_s,
            tpot_slo_s=model.tpot_slo_s,
            times=replace(self.strategy.times(profile, model.prompt_tokens)),
            tokens_per_s=model.tokens_per_s,
            concurrency=model.concurrency,
            device_kind=model.device,
            disaggregated=model.disaggregated,
        )

    def _make_nodes(self) -> Iterator[SimNode]:
        always: tuple[Copy, ...] = ()
        if self.strategy.cache == "all":
            always = tuple(
                Copy(f"m://{model.name}", model.profile.size_bytes, model.profile.size_bytes, "1", pinned=True)
                for model in self.fleet.models
            )
        for machine in self.fleet.machines:
            for number in range(machine.count):
                size = machine.fast_domain_size
                domain = f"{machine.name} {number // size}" if size > 1 else ""
                yield SimNode(f"{machine.name}-{number:05}", machine, domain, always)


def _provision(sim: Simulation, execution: SimExecution, part: float) -> None:
    """Let instances serve from the beginning, on this part (0 to 1) of the devices, divided among the models."""
    models = sim.models
    places = [node for node in sim.nodes.values() for _ in range(node.machine.devices)]
    for number, node in enumerate(places[: max(round(part * len(places)), 1)]):
        model = models[number % len(models)]
        turn = number // len(models)
        role: Role = "both" if not model.model.disaggregated else "decode" if turn % 2 else "prefill"
        execution.begin(execution.make(StartInstance(f"p{number}", model.model.name, node.name, role)))


def _begin_minimum(sim: Simulation, execution: SimExecution) -> None:
    """Let each model's minimum of instances serve from the beginning, if possible where its weights are."""
    for model in sim.models:
        roles: tuple[Role, ...] = ("prefill", "decode") if model.model.disaggregated else ("both",)
        url, size = f"m://{model.model.name}", model.model.profile.size_bytes
        for number in range(model.model.min * len(roles)):
            nodes = (node for node in sim.nodes.values() if node.can_run(model.model))
            node = min(nodes, key=lambda node: url not in node.copies, default=None)
            if node is None:
                return
            node.copies.setdefault(url, SimCopy(url, size, base=size, complete=True))
            start = StartInstance(f"{url}{number}", model.model.name, node.name, roles[number % len(roles)])
            execution.begin(execution.make(start))


def _fill_pool(sim: Simulation, execution: SimExecution) -> None:
    """Fill the parameter pool at the beginning, like that of a cluster which has been running for a while."""
    index, nodes = Index(), {name: node.to_policy() for name, node in sim.nodes.items()}
    index.update(nodes)
    for url, name in spread(index, nodes, sim.deployments.values()).items():
        size = sim.fleet.models[sim.numbers[url.removeprefix("m://")]].profile.size_bytes
        sim.nodes[name].copies[url] = SimCopy(url, size, pinned=True, base=size, complete=True)
        execution.touch(sim.nodes[name])


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have Python look for cycles of garbage less often: a run makes millions of events, and hardly any cycle."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 100_000) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _used(servers: Collection[Server]) -> float:
    """Return the part of these instances' places that is taken, from 0 to 1."""
    return sum(server.running for server in servers) / sum(server.places for server in servers) if servers else 0.0


def _work(server: Server) -> tuple[bool, float]:
    """Return a sort key: instances with room first, then those with the least work."""
    return server.free <= 0, server.work
