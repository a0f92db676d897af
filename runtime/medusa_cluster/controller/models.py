"""Knowledge about the deployed models for predicting starts: their bytes by layer, and how long stages take."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from medusa_runtime.errors import MedusaError
from medusa_runtime.state.stage_times import StageTimes
from medusa_runtime.storage.retry import doubling_pause_s

from ..deployment import Deployment
from ..group.ranges import ModelBytes
from ..policy.state import Measured, Processor
from .nodes import KnownInstance, KnownNode, Nodes

logger = logging.getLogger(__name__)

_DESCRIBE_S = 30.0
_AGAIN_S, _LONGEST_AGAIN_S = 5.0, 300.0  # the pause after a failed description, which doubles each time
_MOST_DESCRIBING = 8
_FAILED_TRIES = 2  # after which a model counts as one that no node can describe
_LONGEST_REASON = 300
_KEPT_STARTS = 8
_NOTED = 1.1  # how many times larger than the known one a rate has to be, so that models seldom change
_AVOIDED_S = 60.0  # how long groups are avoided after one that could not be formed
# The assumed stages of a start with a warm engine process, until the first starts have been seen.
_BEGINS_S, _PREFILL_S, _DECODE_S = 0.5, 0.2, 0.05
_CONTEXT_S = 0.35  # of these, on a GPU: an H200's context


@dataclass
class KnownModel:
    """A model that a node has described.

    ``starts`` are the durations of its newest starts on each processor, as nodes reported them. ``last`` is the
    processor of the newest.
    """

    bytes: ModelBytes
    total_bytes: int
    times: StageTimes
    kv_bytes_per_token: int = 0
    generates: bool = True  # text with the torch engine; an encoder does not
    starts: defaultdict[Processor, deque[dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_KEPT_STARTS))
    )
    last: Processor = field(default_factory=Processor)
    prefill_tokens_per_s: dict[Processor, float] = field(default_factory=dict)  # of prompts, that an instance computes
    no_groups_until: float = 0.0

    def measured(self, processor: Processor) -> Measured:
        """Return the stage times on a processor, corrected by the newest starts there, and t_n."""
        starts = self.starts.get(processor)
        if not starts:
            assumed = processor.on_gpu and not self.times.starts
            return Measured(replace(self.times, device_s=_CONTEXT_S) if assumed else self.times)
        begins = median(start["begins_s"] for start in starts)
        prefill = median(start["prefill_s"] for start in starts)
        decode = _decode_s(starts) or self.times.decode_s
        times = replace(self.times, container_s=begins, device_s=0.0, import_s=0.0, prefill_s=prefill, decode_s=decode)
        return Measured(times, self._hop_s(starts))

    def _hop_s(self, starts: Collection[Mapping[str, float]]) -> float | None:
        """Return the seconds from one worker of a group to the next (t_n), or None if there is no group's start.

        It is the time by which a group's step was longer than an instance's, per worker. Each worker computes at full
        speed, so the computation itself takes as long as on one instance.
        """
        alone = _decode_s(starts) or (self.times.decode_s if self.times.starts else None)
        groups = [start for start in starts if start["workers"] > 1 and "decode_s" in start]
        if not groups or alone is None:
            return None
        return max(median((start["decode_s"] - alone) / start["workers"] for start in groups), 0.0)


def _decode_s(starts: Collection[Mapping[str, float]]) -> float | None:
    """Return the seconds of a decode step on one instance (t_d), by these starts. None if there is none."""
    alone = [start["decode_s"] for start in starts if start["workers"] == 1 and "decode_s" in start]
    return median(alone) if alone else None


class Models:
    """All deployed models, once a node has described them. Only deployments with a TTFT SLO start as groups."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._known: dict[str, KnownModel] = {}  # by URL
        self._attempts: dict[str, tuple[int, float]] = {}  # URL → how often it was asked for, and when to ask again
        self._failures: dict[str, tuple[int, str]] = {}  # URL → how often that failed, and how the last time
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, url: str) -> KnownModel | None:
        return self._known.get(url)

    def why_unknown(self, url: str) -> str | None:
        """Return why no node can describe a model. None if one has, or if that has not been tried often enough yet."""
        count, reason = self._failures.get(url, (0, ""))
        return reason if count >= _FAILED_TRIES and url not in self._known else None

    def size_bytes(self, url: str) -> int:
        return self._known[url].total_bytes if url in self._known else 0

    def kv_bytes_per_token(self, url: str) -> int:
        return self._known[url].kv_bytes_per_token if url in self._known else 0

    def times(self, url: str) -> StageTimes | None:
        """Return the stage times of starts on the processor of the newest one."""
        return self._known[url].measured(self._known[url].last).times if url in self._known else None

    def measured(self, url: str, processors: Collection[Processor]) -> dict[Processor, Measured]:
        """Return what is known of starts on each of these processors."""
        model = self._known.get(url)
        return {} if model is None else {processor: model.measured(processor) for processor in processors}

    def layers(self, deployment: Deployment, now: float) -> int:
        """Return how many layers a group may share. 0 if no group is possible, or the last one has just failed."""
        model = self._known.get(deployment.url)
        if model is None or deployment.ttft_slo_s is None or now < model.no_groups_until:
            return 0
        if not deployment.may_be_shared() or not self.generates(deployment):
            return 0
        return len(model.bytes.layers)

    def generates(self, deployment: Deployment) -> bool:
        """Return whether a deployment writes text. Others cannot share work: an encoder has no decode to leave others.

        True as long as no node has described the model.
        """
        model = self._known.get(deployment.url)
        return model is None or model.generates or deployment.engine != "torch"

    def is_apart(self, deployment: Deployment) -> bool:
        """Return whether prefill and decode are on instances of their own."""
        return deployment.disaggregated and self.generates(deployment)

    def scales_live(self, deployment: Deployment, now: float) -> bool:
        """Return whether a deployment's instances may help one another while they load."""
        return deployment.live_scaling and self.generates(deployment) and self.may_share(deployment, now)

    def may_share(self, deployment: Deployment, now: float) -> bool:
        """Return whether instances may share work. Not for a while after such a start failed."""
        model = self._known.get(deployment.url)
        return model is None or now >= model.no_groups_until

    def avoid_groups(self, url: str, now: float) -> None:
        """Start single instances instead of groups for a while."""
        if url in self._known:
            self._known[url].no_groups_until = now + _AVOIDED_S

    def update(self, deployments: Collection[Deployment], nodes: Mapping[str, KnownNode], now: float) -> None:
        """Have a node describe each model that is not known yet, a few at a time. Forgets all that are not deployed.

        A model that one node cannot describe is asked of the next one.
        """
        deployed = {item.url for item in deployments}
        for by_url in (self._known, self._attempts, self._failures):
            for url in by_url.keys() - deployed:
                del by_url[url]
        alive = sorted(name for name, node in nodes.items() if node.status and node.lost_at is None and not node.silent)
        attempts = {
            item.url: self._attempts.get(item.url, (0, 0.0)) for item in deployments if item.url not in self._known
        }
        due = [url for url, (_, again_at) in attempts.items() if again_at <= now] if alive else []
        for url in sorted(due, key=lambda url: (attempts[url], url))[: _MOST_DESCRIBING - len(self._tasks)]:
            count, _ = attempts[url]
            self._attempts[url] = count + 1, now + doubling_pause_s(count + 1, _AGAIN_S, _LONGEST_AGAIN_S)
            task = asyncio.create_task(self._describe(alive[count % len(alive)], url))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _describe(self, node: str, url: str) -> None:
        try:
            found = await self._nodes.call(node, {"op": "describe", "url": url}, _DESCRIBE_S)
            parts = ModelBytes(int(found["entry"]), tuple(map(int, found["layers"])), int(found["exit"]))
            total, token = int(found["total_bytes"]), int(found.get("kv_bytes_per_token", 0))
            times = None if found["times"] is None else StageTimes.from_bytes(found["times"].encode())
        except (MedusaError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            logger.warning("%s could not be described: %s", url, error)
            count, _ = self._failures.get(url, (0, ""))
            self._failures[url] = count + 1, f"{node}: {error}"[:_LONGEST_REASON]
            return
        if times is None:
            times = StageTimes(_BEGINS_S, 0.0, 0.0, _PREFILL_S, _DECODE_S, total, float("inf"), 0.0, 0)
        times, generates = replace(times, weights_bytes=total), bool(found.get("generates", True))
        self._known[url] = KnownModel(parts, total, times, max(token, 0), generates)

    def learn(
        self, node: KnownNode, instance: KnownInstance, deployment: Deployment, start: Mapping[str, float]
    ) -> bool:
        """Note how long a start took, once. Return whether that is new and a request waited for it."""
        model = self._known.get(deployment.url)
        if model is None:
            return False
        try:
            durations = {name: float(start[name]) for name in ("ttft_s", "begins_s", "prefill_s")}
            later = {name: float(start[name]) for name in ("decode_s",) if name in start}
        except (KeyError, TypeError, ValueError):
            return False
        if instance.id in node.starts:
            node.starts[instance.id].update(later)
            return False
        durations |= later | {"predicted_s": instance.predicted_s, "workers": instance.workers}
        node.starts[instance.id] = durations
        if durations["ttft_s"] > 0:
            model.last = node.processor(deployment.device)
            model.starts[model.last].append(durations)
        return durations["ttft_s"] > 0

    def learn_rate(self, url: str, processor: Processor, tokens_per_s: float) -> None:
        """Note how many tokens of prompts one instance was seen to compute in a second. The most counts."""
        model = self._known.get(url)
        if model is not None and tokens_per_s > _NOTED * model.prefill_tokens_per_s.get(processor, 0.0):
            model.prefill_tokens_per_s[processor] = tokens_per_s

    def prefill_tokens_per_s(self, url: str) -> float:
        """Return how many tokens of prompts an instance computes in a second where the newest start was.

        0 if that is not known.
        """
        model = self._known.get(url)
        return 0.0 if model is None else model.prefill_tokens_per_s.get(model.last, 0.0)

    def starts(self, url: str) -> list[dict[str, Any]]:
        """Return the newest cold starts for the status, with predicted and actual times."""
        found = self._known[url].starts.values() if url in self._known else ()
        shown = ("workers", "predicted_s", "ttft_s", "decode_s")
        return [{name: start[name] for name in shown if name in start} for starts in found for start in starts]

    def learned(self, url: str) -> dict[str, float]:
        """Return the times in seconds by which a start is predicted where the newest one was, under ParaServe's names.

        And the most tokens of prompts that an instance there has computed in a second, once that is known. Empty for an
        unknown model.
        """
        if url not in self._known:
            return {}
        measured = self._known[url].measured(self._known[url].last)
        times, hop_s = measured.times, measured.hop_s
        found = {"t_c": times.container_s + times.device_s, "t_p": times.prefill_s, "t_d": times.decode_s}
        rate = self.prefill_tokens_per_s(url)
        found |= {"prefill_tokens_per_s": rate} if rate else {}
        return found if hop_s is None else found | {"t_n": hop_s}
