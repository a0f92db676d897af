"""Chats whose turns go where their beginnings were computed, and chats whose turns go to two instances in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple

from medusa_cluster.lab.cluster import LabCluster
from medusa_cluster.lab.laboratory import Laboratory
from medusa_cluster.lab.link_speed import LinkSpeed
from medusa_runtime.errors import ConfigError

from benchmarks.cluster.asking import ask
from benchmarks.cluster.options import Options
from benchmarks.result_row import row
from benchmarks.waiting import until

_PORT = 8080
_WITHIN_S = 180.0
_SHARED, _APART = "shared", ("one", "other")  # a model with two instances, and two models with one each
_CHATS, _TURNS = 4, 4
_FIRST, _MORE = 40, 10  # sentences of a chat's first turn, and those that each further one adds


class _Turn(NamedTuple):
    """A further turn: the tokens of its prompt, those that were found, and the seconds to its first token."""

    tokens: int
    found: int
    seconds: float


def rows(options: Options) -> list[dict[str, Any]]:
    """Run the chats side by side, in each run other ones. Raises ConfigError for fewer nodes than instances."""
    if options.nodes < 4:
        raise ConfigError(f"turns: expected --nodes of 4 at least, found {options.nodes}")
    ways: dict[str, Callable[[int], str]] = {"": lambda _: _SHARED, "_in_turn": lambda turn: _APART[turn % 2]}
    found: dict[str, list[float]] = {}
    with Laboratory(
        options.nodes,
        LinkSpeed(options.link_bytes_per_s),
        cpus=options.cpus,
        origin=dict.fromkeys((_SHARED, *_APART), options.model),
    ) as lab:
        cluster = LabCluster(lab)
        cluster.start()
        cluster.start_gateway(_PORT)
        for name, count in ((_SHARED, 2), *((name, 1) for name in _APART)):
            cluster.deploy(name, min=count, max=count)
            until(lambda name=name, count=count: _ready(cluster, name) == count, _WITHIN_S, "instances")  # type: ignore[misc]
        for number in range(options.runs):
            for suffix, model_of in sorted(ways.items(), reverse=bool(number % 2)):
                with ThreadPoolExecutor(_CHATS) as pool:
                    subjects = [f"{number}{suffix} {chat}" for chat in range(_CHATS)]
                    chats = list(pool.map(lambda subject: _chat(cluster, subject, model_of), subjects))  # noqa: B023
                turns = [turn for chat in chats for turn in chat]
                share = sum(turn.found for turn in turns) / sum(turn.tokens for turn in turns)
                found.setdefault(f"found{suffix}", []).append(share)
                found.setdefault(f"next_turn_s{suffix}", []).append(median(turn.seconds for turn in turns))
        cluster.stop()
    return [row("turns", name, "s" if "_s" in name else "", values) for name, values in found.items()]


def _chat(cluster: LabCluster, subject: str, model_of: Callable[[int], str]) -> list[_Turn]:
    """Run the turns of a chat one after the other, and return all but the first."""
    turns = []
    for turn in range(_TURNS):
        sentences = (f"{subject} and sentence {number} of it." for number in range(_FIRST + turn * _MORE))
        body = {"model": model_of(turn), "prompt": " ".join(sentences), "max_tokens": 1, "temperature": 0}
        began = time.monotonic()
        usage = json.loads(ask(cluster, _PORT, body))["usage"]
        seconds = time.monotonic() - began
        turns.append(_Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], seconds))
    return turns[1:]


def _ready(cluster: LabCluster, model: str) -> int:
    return sum(
        item["model"] == model and item["state"] == "ready"
        for node in cluster.status()["nodes"]
        for item in node["instances"]
    )
