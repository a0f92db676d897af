"""Two workers that share a model, and the one GPU, beside a single engine: the same tokens? (ParaServe §5, §6)

python -m benchmarks.gpu.groups groups OUT --model FOLDER

While a long answer is written, the group becomes one instance. With ``--pair`` one instance also prefills for another
(BlitzScale §5.4). A dry run's workers compute on CPUs.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medusa_cluster.group.ranges import ModelBytes, layer_settings, split
from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.timeline import Stage

from benchmarks.gpu.gaps import longest, median_ms
from benchmarks.gpu.part_process import part_parser, prepare
from benchmarks.gpu.probe import environ
from benchmarks.ports import free_port
from benchmarks.worker_processes import WorkerProcesses

SIZE = 2
_PROMPT = tuple(range(3, 131))
_TOKENS, _AFTER = 384, 48  # of the long answer, and of a sampled one behind it
_SWITCH_AT = 32  # when the long answer has so many tokens, the group may become one instance
_STAGES = (
    "context", "import", "device", "load", "kv_plan", "decode_kernels", "form", "first_forward", "full", "capture",
)  # fmt: skip
_START_S = 60.0
_POLL_S = 0.005
# One sequence at a time, so that all compute products of the same number of rows: an instance's graph for 8 sequences
# rounds differently on a GPU than the group's eager step, and with random weights two tokens are often equally likely.
_SETTINGS = {"STATE": "none", "MAX_MODEL_LEN": "1024", "MAX_CONCURRENCY": "1", "KV_CACHE_MB": "1024"}


def main(arguments: list[str] | None = None) -> int:
    parser = part_parser(__doc__, ["groups"])
    parser.add_argument("--pair", action="store_true", help="also a pair of instances, of which one prefills")
    parser.add_argument("--dry-run", action="store_true", help="on CPUs")
    options = parser.parse_args(arguments)
    prepare()
    found = groups(Path(options.model), pair=options.pair, dry_run=options.dry_run)
    options.out.write_text(json.dumps(found))
    return 0


def groups(model: Path, *, pair: bool, dry_run: bool) -> dict[str, Any]:
    """Start a single engine, a group and a pair, and return what they did, and which answers are not the engine's."""
    device = "cpu" if dry_run else "cuda"
    with Workers(model, device, [None]) as single:
        expected = single.answers()
    with Workers(model, device, layers_of(model)) as group:
        found = group.answers(group.consolidate)
    alone, together = single.facts(0), group.facts(0)
    apart, times = group.moment("consolidated"), found["times"]
    gaps = {"group_gap_ms": median_ms(times, until=apart), "instance_gap_ms": median_ms(times, since=apart)}
    first = next((n for n, (a, b) in enumerate(zip(found["all"], expected["all"], strict=True)) if a != b), None)
    gather = together.pop("gather", None)
    return {
        "alone": _times(single, expected) | alone,
        "group": _times(group, found) | gaps | together,
        "wrong_answers": _wrong(found, expected),
        "first_difference": first,
        "gather": gather,
        "pair": _pair(model, device, expected) if pair else None,
        "device": alone["device"],
    }


def _times(workers: Workers, found: dict[str, Any]) -> dict[str, Any]:
    """Return the times of an answer's tokens. Call it after the workers have ended."""
    return {
        "ttft_s": found["times"][0] - workers.began,
        "gap_ms": median_ms(found["times"]),
        "longest_gaps": longest(found["times"], workers.all_stages()),
    }


def _pair(model: Path, device: str, expected: dict[str, Any]) -> dict[str, Any]:
    with Workers(model, device, [None] * SIZE, mode="disaggregated") as pair:
        pair.wait_for("paired", 1, absent=0)  # while the engine is not up
        found = pair.answers()
        return {"wrong_answers": _wrong(found, expected), "layers_helped": pair.stats()["layers_helped"]}


def _wrong(found: dict[str, Any], expected: dict[str, Any]) -> int:
    return sum(one != other for one, other in zip(found["tokens"], expected["tokens"], strict=True))


def layers_of(model: Path) -> list[str | None]:
    checkpoint = open_checkpoint(str(model))
    with contextlib.closing(checkpoint.store):
        return list(layer_settings(split(ModelBytes.of(checkpoint.index), SIZE)))


class Workers(WorkerProcesses):
    """Worker processes that start together; a context manager. ``layers`` has each one's range, or None for all.

    A single one is no group, but an engine like any other.
    """

    def __init__(self, model: Path, device: str, layers: Sequence[str | None], mode: str = "pipeline") -> None:
        super().__init__()
        self._plan: dict[str, Any] = {
            "group": secrets.token_hex(4), "token": secrets.token_hex(16), "size": len(layers), "then": "stay",
            "leader": f"127.0.0.1:{free_port()}", "form_s": _START_S, "exit": True, "mode": mode,
        }  # fmt: skip
        settings = {f"MEDUSA_{name}": value for name, value in {**_SETTINGS, "DEVICE": device}.items()}
        if device == "cpu":
            settings |= {"MEDUSA_THREADS": "1", "MEDUSA_KV_CACHE_MB": "16"}
        self.began = time.monotonic()
        try:
            for rank, part in enumerate(layers):
                plan = {**self._plan, "rank": rank} if len(layers) > 1 else None
                self.start(str(model), layers=part, plan=plan, environment={**environ(), **settings})
            self._client = self.connect(0)
        except BaseException:
            self.close()
            raise

    def consolidate(self) -> None:
        """Let the first worker go on alone as soon as it has all layers."""
        self.write_plan(0, {**self._plan, "rank": 0, "then": "down"})

    def answers(self, meanwhile: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Get a long answer, and then, after the switch, a sampled one. ``meanwhile`` is called during the first."""
        times: list[float] = []
        long: list[int] = []
        for delta in self._client.generate(_request(_TOKENS, temperature=0.0)):
            times += [time.monotonic()] * len(delta.token_ids)
            before, long = len(long), [*long, *delta.token_ids]
            if before < _SWITCH_AT <= len(long):
                meanwhile()
        self.wait_for("workers", 1, absent=1)  # in a single engine
        sampled = _request(_AFTER, temperature=0.8, seed=11)
        short = [token for delta in self._client.generate(sampled) for token in delta.token_ids]
        return {"times": times, "tokens": [long, short], "all": [*long, *short]}

    def stats(self) -> dict[str, Any]:
        return self._client.stats()

    def wait_for(self, name: str, value: int, *, absent: int) -> None:
        """Wait until a number of the first worker's ``stats``, if missing ``absent``, has this value."""
        deadline = time.monotonic() + _START_S
        while (found := self.stats().get(name, absent)) != value:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} was {found} for {_START_S:.0f} s, not {value}")
            time.sleep(_POLL_S)

    def facts(self, rank: int) -> dict[str, Any]:
        """Return a worker's stages, from its timeline. Call it after the workers have ended."""
        stages = self.timelines[rank]
        begin = next(stage.start_ns for stage in stages if stage.name == "exec")
        found: dict[str, Any] = {"stages": {}, "device": ""}
        for stage in stages:
            if stage.name in _STAGES:
                times = [(stage.start_ns - begin) / 1e9, (stage.end_ns - begin) / 1e9]
                found["stages"].setdefault(f"{stage.process} {stage.name}", times)
            if stage.name == "context":
                found["device"] = (stage.detail or {}).get("device", "")
            if stage.name == "gather":
                found["gather"] = stage.detail
            if stage.name == "alone":
                found["alone"] = (stage.detail or {}).get("reason", "")
        return found

    def moment(self, name: str) -> float:
        """Return when the first worker's first stage of this name ended, in monotonic seconds; infinity if it has not.

        Call it after the workers have ended.
        """
        return min((stage.end_ns / 1e9 for stage in self.timelines[0] if stage.name == name), default=float("inf"))

    def all_stages(self) -> list[Stage]:
        """Return the stages of all workers, each with its rank. Call it after the workers have ended."""
        return [
            stage._replace(process=f"worker {rank} {stage.process}")
            for rank, stages in enumerate(self.timelines)
            for stage in stages
            if not stage.process.startswith("worker ") and stage.name != "exec"  # what the leader was told of others
        ]


def _request(count: int, **params: Any) -> GenerateRequest:
    given = SamplingParams(max_tokens=count, ignore_eos=True, **params)
    return GenerateRequest(secrets.token_hex(8), _PROMPT, given)


if __name__ == "__main__":
    sys.exit(main())
