"""Serves on a GPU by the command line: to the first answer, with hardly any memory left, and after a crash (run 7).

python -m benchmarks.gpu.serving {served,resumed,full,released} OUT --model FOLDER --engine ENGINE [--bundle FOLDER]
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_adapters.bench.coldstart.resumed import continues
from medusa_adapters.bench.served_instance import ServedInstance, medusa_command, serve_command
from medusa_runtime.config import Settings
from medusa_runtime.device.driver import Driver
from medusa_runtime.errors import MedusaError

from benchmarks.gpu.part_process import part_parser, prepare
from benchmarks.origin import Origin, Variant

# What a bundle's key depends on, or the GPU's memory.
_FLAGS = (
    "engine", "device", "max_concurrency", "max_model_len", "max_batched_tokens", "kv_cache_mb", "compile", "threads",
    "vllm_args",
)  # fmt: skip
_LEFT_MB = (256, 1024, 2048, 3072, 4096)  # of the GPU's memory: for less than a context, and up to nearly enough
_LEAST_SHARE = 0.01  # of the GPU's memory: a start does not end for the reason alone that vLLM wants more to be free
_BODY = {"prompt": "def sum(", "max_tokens": 8, "temperature": 0}
_LONGEST_S = 60.0  # from the command to an answer, or to the process's end
_ENDS_S = 15.0  # of a process whose request has failed


def main(arguments: list[str] | None = None) -> int:
    parser = part_parser(__doc__, PARTS)
    parser.add_argument("--engine", default="torch", choices=("torch", "vllm"))
    parser.add_argument("--bundle", type=Path, help="a state bundle; it is materialized if it is not there")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, whose memory is not filled")
    options = parser.parse_args(arguments)
    prepare()
    found = PARTS[options.name](settings_of(options), options)
    options.out.write_text(json.dumps(found | {"engine": options.engine, "device": "" if options.dry_run else "cuda"}))
    return 0


def settings_of(options: Any) -> Settings:
    if options.engine == "vllm":
        from benchmarks.gpu.vllm_check.starts import settings_for  # so that a bundle of run 5 fits

        share = {"share": _LEAST_SHARE} if options.name == "full" else {}
        return settings_for(options.model, "never", dry_run=options.dry_run, **share)
    small = Settings(model=options.model, max_concurrency=8, max_model_len=64, kv_cache_mb=4, threads=1, device="cpu")
    large = Settings(model=options.model, max_concurrency=64, max_model_len=2048, kv_cache_mb=2048, device="cuda")
    return small if options.dry_run else large


def flags(settings: Settings) -> list[str]:
    """Return the flags of ``medusa`` for those of these settings that differ from the defaults."""
    usual = Settings()
    given = {name: getattr(settings, name) for name in _FLAGS if getattr(settings, name) != getattr(usual, name)}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


def materialize(settings: Settings, bundle: Path) -> float:
    """Make a state bundle as a user does, and return the seconds. The log has what the command says."""
    began = time.monotonic()
    command = [*medusa_command(), "materialize", "--model", str(settings.model), "--starts=0", f"--out={bundle}"]
    subprocess.run([*command, *flags(settings)], check=True)
    return time.monotonic() - began


def served(settings: Settings, options: Any) -> dict[str, Any]:
    """Return the seconds from the command to the first answer over HTTP, and of the stages."""
    made = {}
    if not (options.bundle / "manifest.json").exists():
        made["materialized_s"] = materialize(settings, options.bundle)
    return made | _first_answer(settings, options.bundle, "--snapshots=none")


def resumed(settings: Settings, options: Any) -> dict[str, Any]:
    """Do the same twice from a snapshot, which is made first. The part ``served`` has made the state bundle."""
    with tempfile.TemporaryDirectory() as snapshots:
        subprocess.run([*medusa_command(), "snapshot", f"--out={snapshots}"], check=True)
        saved_bytes = sum(path.stat().st_size for path in Path(snapshots).glob("*/*"))
        starts = [_first_answer(settings, options.bundle, f"--snapshots={snapshots}") for _ in range(2)]
    return {"saved_bytes": saved_bytes, "starts": starts}


def _first_answer(settings: Settings, bundle: Path, *more: str) -> dict[str, Any]:
    with _serving(settings, f"--state={bundle}", "--graphs=restore", *more) as instance:
        first = instance.completion(_BODY)
        began = time.monotonic_ns()
        later = instance.completion(_BODY)
        stages = [(s.process, s.name, (s.end_ns - s.start_ns) / 1e9) for s in instance.stages()]
        return {
            "first_token_s": (first.first_token_ns - instance.started_ns) / 1e9,
            "first_answer_s": (first.end_ns - instance.started_ns) / 1e9,
            "later_answer_s": (later.end_ns - began) / 1e9,
            "text": first.text,
            "same_text": first.text == later.text,
            "continued": continues(instance.pid),
            "stages": stages,
        }


def full(settings: Settings, options: Any) -> dict[str, Any]:
    """Start on a GPU with so little memory left, and return what became of each start."""
    found = {}
    settings = settings if options.dry_run else replace(settings, kv_cache_mb=1024)
    for left_mb in _LEFT_MB[-1:] if options.dry_run else _LEFT_MB:
        with ExitStack() as stack:
            if not options.dry_run:
                stack.enter_context(filled_gpu(Driver(), left_mb << 20))
            instance = stack.enter_context(_serving(settings, "--state=none"))
            found[str(left_mb)] = outcome(instance)
            print(f"with {left_mb} MB left: {found[str(left_mb)]}", flush=True)
    return {"starts": found}


def released(settings: Settings, options: Any) -> dict[str, Any]:
    """Kill the engine after the first answer, when its weights are neither in the host's memory nor on a disk."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        Origin(Path(options.model), Path(scratch), Variant("plain")) as origin,
    ):
        away = replace(settings, model=origin.url)
        with _serving(away, "--state=none", "--host-weights=release") as instance:
            first = instance.completion(_BODY)
            killed = [pid for pid in instance.tree() if _name(pid) == "engine"]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            after = outcome(instance)
            return {"first": first.text, "killed": len(killed), "after_s": time.monotonic() - began, "after": after}


def outcome(instance: ServedInstance) -> dict[str, Any]:
    """Ask for an answer, and return it, or what the server said instead; and whether that is as it should be."""
    found: dict[str, Any] = {}
    try:
        response = instance.exchange(
            "POST", "/v1/completions", json.dumps(_BODY), {"Content-Type": "application/json"}, timeout_s=_LONGEST_S
        )
        found = {"status": response.status, "said": response.text[:400]}
    except TimeoutError:
        found = {"said": f"no answer within {_LONGEST_S:.0f} s"}
    except (OSError, http.client.HTTPException, MedusaError) as error:
        found = {"said": str(error)[-400:]}
    if found.get("status") != 200:
        with suppress(subprocess.TimeoutExpired):
            found["exit"] = instance.process.wait(_ENDS_S)
    output = instance.output()
    found["last_line"] = (output.strip().splitlines() or [""])[-1][:400]
    found["graphs"] = [line[:200] for line in output.splitlines() if "graph" in line.lower()][-3:]
    # Clear: an answer, or a refusal and an end that the server itself has chosen, without a traceback.
    ended = found.get("exit", -1) > 0 and "Traceback" not in output
    return found | {"clear": found.get("status") == 200 or ended}


@contextmanager
def _serving(settings: Settings, *more: str) -> Iterator[ServedInstance]:
    """Serve, and print the server's log at the end."""
    command = serve_command("--model", str(settings.model), *flags(settings), *more, "--node-socket=none")
    with ServedInstance(command, start_timeout_s=_LONGEST_S) as instance:
        try:
            yield instance
        finally:
            print(" ".join(map(str, command)), instance.output(), sep="\n", flush=True)


@contextmanager
def filled_gpu(driver: Driver, left_bytes: int) -> Iterator[None]:
    """Take the GPU's memory in this context, all but ``left_bytes``."""
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver.call("cuInit", 0)
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    driver.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(max(free.value - left_bytes, 1)))
    try:
        yield
    finally:
        driver.call("cuMemFree_v2", memory)


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


PARTS: dict[str, Callable[[Settings, Any], dict[str, Any]]] = {
    "served": served, "resumed": resumed, "full": full, "released": released
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
