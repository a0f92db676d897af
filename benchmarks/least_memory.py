"""Serve a model in containers of less and less memory: ``python -m benchmarks.least_memory --model out/llama-57m``.

Each instance is in a control group with a limit, in which the kernel really kills, and gets its model from a store on
loopback. It is asked for a prompt as long as its context or a step allows, for a chat, and for eight answers at once. A
row says whether all of them were answered ("serves"), or one error ended the start before that ("refused"), or neither
("ran out"); how many tokens a context may have; and what the processes took at most, without files.

The files of an installation that was used before are in memory already, and belong to no group. With ``--cold`` they
are dropped from memory before each start, as in a container's first start on a machine; this needs an installation that
nothing else uses at the time. Only root can make a control group.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from medusa_adapters.bench.result import Result
from medusa_adapters.bench.served_instance import ServedInstance, serve_command
from medusa_runtime.errors import MedusaError

from benchmarks.memory_group import MemoryGroup
from benchmarks.origin import Origin, Variant

_MB = 10**6
_WITHIN_S = 180.0
_LOOK_S = 0.01
_MOST_PROMPT, _ANSWER = 2048, 16  # tokens
_AT_ONCE = 8


class Try(NamedTuple):
    """The outcome of a start ("serves", "refused" or "ran out"), its context in tokens, and the memory taken."""

    outcome: str
    tokens: int
    used_bytes: int
    output: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument(
        "--limits", nargs="+", type=int, default=[4096, 512, 384, 320, 288, 256, 224, 192], metavar="MB"
    )
    parser.add_argument("--snapshots", default="none", help="as in medusa serve (none)")
    parser.add_argument(
        "--cold", action="store_true", help="drop the installation's files from memory before each start"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    files = [Path(sys.prefix), *([] if given.snapshots in ("none", "auto") else [Path(given.snapshots)])]
    try:
        tries = measure(given.model, given.limits, snapshots=given.snapshots, cold=files if given.cold else ())
    except OSError as error:
        raise SystemExit(f"no control group with a memory limit can be made here: {error}") from None
    result = Result()
    print("| container | | context | taken at most |\n|---|---|---|---|")
    for limit, found in tries.items():
        tokens = f"{found.tokens:,} tokens" if found.tokens else ""
        print(f"| {limit} MB | {found.outcome} | {tokens} | {found.used_bytes / _MB:.0f} MB |")
        result.add(f"{limit} MB", "context", "tokens", [found.tokens])
        result.add(f"{limit} MB", "taken", "MB", [found.used_bytes / _MB])
    if given.json:
        result.write(given.json)
    return 0


def measure(
    model: Path, limits_mb: Sequence[int], *, snapshots: str = "none", cold: Sequence[Path] = ()
) -> dict[int, Try]:
    """Serve the model within each limit. Files below the folders of ``cold`` are dropped from memory before that."""
    tries = {}
    with (
        tempfile.TemporaryDirectory(prefix="medusa-bench-") as scratch,
        Origin(model.parent, Path(scratch), Variant("store")) as origin,
    ):
        flags = ["--model", f"{origin.url}/{model.name}", "--snapshots", snapshots]
        for limit in limits_mb:
            drop_files(cold)
            tries[limit] = serve(flags, limit * _MB)
            print(f"{limit} MB: {tries[limit].outcome}", file=sys.stderr, flush=True)
    return tries


def serve(flags: Sequence[str], limit_bytes: int) -> Try:
    """Start an instance within a limit, and ask it. Raises OSError where no group can be made."""
    ended, used = threading.Event(), [0]
    with MemoryGroup(limit_bytes) as group:
        watcher = threading.Thread(target=_watch, args=(group, used, ended))
        watcher.start()
        command = [*group.inside, *serve_command("--device", "cpu", "--state", "none", *flags)]
        outcome, tokens = "ran out", 0
        try:
            with ServedInstance(command, {"MEDUSA_NODE_SOCKET": "none"}, start_timeout_s=_WITHIN_S) as served:
                try:
                    served.wait_ready()
                    tokens = _ask(served)
                    outcome = "serves"
                except MedusaError:
                    if "\nmedusa: " in served.output():
                        outcome = "refused"
                output = served.output()
        finally:
            ended.set()
            watcher.join()
        return Try("ran out" if group.kills() else outcome, tokens, used[0], output)


def _ask(served: ServedInstance) -> int:
    """Send the requests, and return how many tokens a context may have. Raises MedusaError without their answers."""
    tokens: int = served.exchange("GET", "/v1/models").json["data"][0]["max_model_len"]
    prompt = [3 + at % 300 for at in range(max(min(tokens, _MOST_PROMPT) - _ANSWER, 1))]
    chat = {"messages": [{"role": "user", "content": "Hello"}]}

    def post(path: str, body: dict[str, Any]) -> None:
        text = json.dumps({"ignore_eos": True, "max_tokens": _ANSWER, **body})
        with served.explained_failures():
            answer = served.exchange("POST", path, text, {"content-type": "application/json"}, timeout_s=_WITHIN_S)
        if answer.status != 200:
            raise MedusaError(f"{path}: {answer.status} {answer.text[:200]}")

    post("/v1/completions", {"prompt": prompt})
    post("/v1/chat/completions", chat)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda row: post("/v1/completions", {"prompt": [3 + row] * 8}), range(_AT_ONCE)))
    return tokens


def _watch(group: MemoryGroup, used: list[int], ended: threading.Event) -> None:
    while not ended.wait(_LOOK_S):
        used[0] = max(used[0], group.used_bytes())


def drop_files(folders: Sequence[Path]) -> None:
    """Drop the files below these folders from memory, except what a process maps."""
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    number = os.open(os.path.join(place, name), os.O_RDONLY)
                    try:
                        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(number)


if __name__ == "__main__":
    sys.exit(main())
