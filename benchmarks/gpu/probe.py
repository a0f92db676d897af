"""The first two minutes on a GPU: ``python -m benchmarks.gpu.probe --out DIR``.

Small graphs (products of 1 and 64 rows, norms, triton's variants, a programmatic pair, two layers …) go through every
step of materializing and restoring. They are captured in two processes, built again in the first one by handle and by
saved image, and restored in two fresh ones, at the same and at other addresses.
Beside them: memory at chosen addresses, how fast weights are copied, and compute-sanitizer where it is there.

What each step saw, for each node, is in ``DIR/probe``, and all of it in ``DIR/probe.tar.gz``, with the dumps and the
kernel images. No step can fail another. ``--dry-run`` runs the same steps on the tests' fake driver.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.kernels import build_kernels

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
MOST_BYTES = 64 << 20
ROOTS = [str(ROOT / name) for name in ("runtime", "handler", "adapters")]
_FAKE_DRIVER = ROOT / "tests/runtime/state/graphs/fakecuda"
_UPLOAD_BYTES = 1 << 30
_KILL_S = 10.0
_SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"
_GROUPS = (("first", "second"), ("restore", "restore-elsewhere"), ("upload",), ("environment",), ("memcheck",))
_LIMITS = {"first": 75.0, "second": 60.0, "restore": 30.0, "restore-elsewhere": 30.0, "memcheck": 40.0}
_STEPS = ("first", "second", "restore", "restore-elsewhere")  # benchmarks.gpu.probing.steps
_TRIES = 4  # of a step: each try leaves out the cases that ended the ones before
_OF_THE_MACHINE = ("memory at chosen addresses", "upload, 85 % of pinned", "compute-sanitizer")
POOL_BASE = 0x6800_0000_0000  # engine/gpu/graph_pool.py, which would import torch
_PROMISED = {
    "same process by handle": ("first", "same process by handle: "),
    "same process by saved image": ("first", "same process by image: "),
    "fresh process, same addresses": ("restore", "restored: "),
    "fresh process, other addresses": ("restore-elsewhere", "restored: "),
}


class Probe:
    """Runs the steps as processes, in groups that run at the same time."""

    def __init__(self, out: Path, *, library: str | None, seconds: float) -> None:
        self._folder = out / "probe"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._library = library
        self._end = time.monotonic() + seconds
        self.results: dict[str, dict[str, Any]] = {}
        self._failed: dict[str, int] = {}

    def run(self, names: Sequence[str]) -> None:
        """Run these steps at the same time, each to its end or its limit."""
        began = time.monotonic()
        processes = {}
        for name in names:
            command = self._command(name)
            if command is None or self._end - began < 3:
                why = "it is not here" if command is None else "the two minutes were used up"
                self.results[name] = {"not measured": why}
                continue
            with (self._folder / f"{name}.log").open("ab") as log:  # a step that goes on adds to what it has said
                processes[name] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=self._environ(name),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        for name, process in processes.items():
            limit = min(began + _LIMITS.get(name, 30.0), self._end) - time.monotonic()
            status = ended(process, max(limit, 0.1))
            self.results[name] = {**self._facts(name), "status": status, "seconds": round(time.monotonic() - began, 1)}

    def run_all(self, names: Sequence[str]) -> None:
        """Run steps, and those again that a case of theirs has ended: they go on behind it."""
        self.run(names)
        for _ in range(_TRIES - 1):
            unfinished = [name for name in names if self._may_go_on(name)]
            if not unfinished:
                return
            self.run(unfinished)

    def _may_go_on(self, name: str) -> bool:
        """Return whether a step is unfinished, and another try of it would get further than the last one."""
        found = self.results[name]
        if name not in _STEPS or "done" in found:
            return False
        before, now = self._failed.get(name, 0), _failures(found) + ("running" in found)
        self._failed[name] = now
        return now > before

    def _command(self, name: str) -> list[str] | None:
        fake = ["--library", self._library] if self._library else []
        python = [sys.executable, "-m"]
        if name == "memcheck":
            sanitizer = shutil.which("compute-sanitizer") or shutil.which(_SANITIZER)
            if sanitizer is None or not (self._folder / "bundle").exists():
                return None
            checked = self._folder / "memcheck"
            checked.mkdir(exist_ok=True)
            shutil.copy(self._folder / "bundle", checked / "bundle")
            options = ["--tool", "memcheck", "--error-exitcode", "77"]
            return [sanitizer, *options, *python, "benchmarks.gpu.probing.steps", "restore-elsewhere", str(checked)]
        if name in ("upload", "environment"):
            part = {"upload": "transfer"}.get(name, name)
            size = ["--bytes", str(_UPLOAD_BYTES)] if name == "upload" and not fake else []
            dry = ["--dry-run"] if fake else []
            return [*python, "benchmarks.gpu.part", part, str(self._folder / f"{name}.json"), *size, *dry]
        return [*python, "benchmarks.gpu.probing.steps", name, str(self._folder), *fake]

    def _environ(self, name: str) -> dict[str, str]:
        # Only the fake driver reads these: each process has its own memory and handles, as on a GPU.
        fake = {
            "FAKE_CUDA_BASE": hex(0x5100_0000_0000 + (len(name) << 40)),
            "FAKE_CUDA_HANDLES": f"0x55{len(name):x}000000000",
        }
        slow = {"PROBE_CASE_S": str(_LIMITS[name])} if name == "memcheck" else {}  # the sanitizer takes its time
        return {**environ(), **slow, **(fake if self._library else {})}

    def _facts(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._folder / f"{name}.json").read_text())
        except (OSError, ValueError):
            log = self._folder / f"{name}.log"
            end = log.read_text(errors="replace").strip()[-600:] if log.exists() else ""
            return {"failed": end}
        return found


def environ(*first: str) -> dict[str, str]:
    """Return the environment of processes that are measured. They search the folders ``first`` before all others.

    They find the packages by their source roots, since nothing of ours is installed on a machine that is lent. They
    keep bytecode, as images do: torch without it takes twice as long to import.
    """
    paths = os.pathsep.join([*first, *ROOTS, str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": paths}


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | str:
    """Wait for a process, and return its exit status, or "timeout". Then nothing that it has started is left.

    A process that takes too long writes its traceback to its log first, if it can.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGUSR1)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)  # a kernel that never ends may keep the driver busy for longer
        return "timeout"


def _failures(facts: dict[str, Any]) -> int:
    return sum(isinstance(fact, dict) and "failed" in fact for fact in facts.values())


def rows(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Each promised row: its name, ``ok``, ``MISS`` or ``----`` (not measured), and the details."""
    captured = {key.removeprefix("graph ") for key in results.get("first", {}) if key.startswith("graph ")}
    for name, (step, prefix) in _PROMISED.items():
        found = {
            key.removeprefix(prefix): fact for key, fact in results.get(step, {}).items() if key.startswith(prefix)
        }
        bad = {key: fact for key, fact in found.items() if not fact.get("equal")}
        odd = {key: fact["read back"] for key, fact in found.items() if fact.get("read back")}
        if not found:
            yield name, "----", "not measured"
        else:
            wrong = [f"{key} ({fact.get('failed', 'other bits')})" for key, fact in bad.items()]
            wrong += [f"{key} reads back otherwise" for key in odd]
            wrong += [f"{key} was not reached" for key in sorted(captured - found.keys())]
            reached = len(found) - len(bad)
            yield name, "MISS" if wrong else "ok", "; ".join([f"{reached} of {len(captured)} graphs", *wrong])
    first = results.get("first", {})
    kernels = [
        node for key, fact in first.items() if key.startswith("graph ") and "nodes" in fact
        for node in fact["nodes"] if "image" in node
    ]  # fmt: skip
    if kernels:
        without = sorted({node["name"] for node in kernels if not node["image"]["by handle"]})
        yield "an image for each kernel", "MISS" if without else "ok", ", ".join(without) or f"{len(kernels)} nodes"
    else:
        yield "an image for each kernel", "----", "not measured"
    yield from _other_rows(results)


def _other_rows(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    made = results.get("first", {}).get("materialize")
    if made is None or "graphs" not in made:
        yield "two captures", "----" if made is None else "MISS", str((made or {}).get("failed", "not measured"))
    else:
        odd = {**made["refused"], **dict.fromkeys(made["pinned"], "pinned")}
        yield "two captures", "MISS" if odd else "ok", str(odd) if odd else f"{len(made['graphs'])} graphs, none pinned"
    yield _pool_row(results)
    pair = results.get("first", {}).get("graph programmatic pair", {}).get("edges")
    if pair is None:
        yield "programmatic edges", "----", "not measured"
    else:
        programmatic = [edge for edge in pair if edge[2] != "0" * 16]
        yield "programmatic edges", "ok" if programmatic else "MISS", f"edges {pair}"
    placed = results.get("environment", {}).get("placement")
    if not isinstance(placed, dict):
        yield "memory at chosen addresses", "----", str(placed or "not measured")
    else:
        granted = all(one["granted"] and one["writes"] for one in placed.values())
        yield "memory at chosen addresses", "ok" if granted else "MISS", str(placed)
    upload = results.get("upload", {})
    rate, limit = upload.get("link", {}).get("first_gb_s"), upload.get("pinned_gb_s")
    if limit and rate:
        verdict = "ok" if rate >= 0.85 * limit else "MISS"
        yield "upload, 85 % of pinned", verdict, f"{rate:.1f} of {limit:.1f} GB/s"
    else:
        yield "upload, 85 % of pinned", "----", "not measured"
    check = results.get("memcheck", {})
    if "status" not in check:
        yield "compute-sanitizer", "----", str(check.get("not measured", "not measured"))
    else:
        yield "compute-sanitizer", "ok" if check["status"] == 0 else "MISS", f"status {check['status']}"


def _pool_row(results: dict[str, dict[str, Any]]) -> tuple[str, str, str]:
    """Judge where the graphs' pool was: at the address that we chose, both when captured and when restored."""
    name, pool = "pool at its address", results.get("first", {}).get("pool")
    moved = results.get("restore", {}).get("moved")
    if pool is None or moved is None:
        return name, "----", "not measured"
    if not isinstance(pool, dict):
        return name, "MISS", f"captured in {pool}; see first.log"
    wrong = [f"captured at {pool['at']}"] if int(pool["at"], 16) != POOL_BASE else []
    wrong += [f"restored elsewhere: {one}" for one in moved]
    return name, "MISS" if wrong else "ok", "; ".join(wrong) or f"{pool['bytes'] >> 20} MiB at {pool['at']}"


def pack(out: Path, name: str, *, folder: str = ".", beside: Iterable[Path] = (), most_bytes: int = MOST_BYTES) -> Path:
    """Put a folder of ``out``, and files ``beside`` it, into a tar: small ones first, none that makes it too large."""
    target, left = out / name, most_bytes
    found = [path for path in (out / folder).rglob("*") if path.is_file() and ".tar" not in path.suffixes]
    names = {path: str(path.relative_to(out)) for path in found} | {path: path.name for path in beside}
    left_out = []
    with tarfile.open(target, "w:gz", compresslevel=3) as tar:
        for path in sorted(names, key=lambda path: path.stat().st_size):
            size = path.stat().st_size
            if size > left:
                left_out.append(f"{names[path]} ({size} bytes)")
                continue
            left -= size
            tar.add(path, names[path])
    if left_out:
        print(f"          too large for {name}: {', '.join(left_out)}", flush=True)
    return target


def fake_driver(folder: Path) -> str:
    """Compile the tests' fake driver, for a dry run."""
    library = folder / "libcuda-fake.so.1"
    sources = sorted(map(str, _FAKE_DRIVER.glob("*.c")))
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), *sources, "-lm"], check=True, timeout=100)
    return str(library)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="what does not fit is left out")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    library = fake_driver(options.out) if options.dry_run else None
    build_kernels()
    probe = Probe(options.out, library=library, seconds=options.seconds)
    for group in _GROUPS:
        probe.run_all(group)
        for name in group:
            found = probe.results[name]
            print(
                f"{found.get('seconds', 0.0):6.1f} s  {name}: {found.get('status', found.get('not measured'))}",
                flush=True,
            )
    lines = list(rows(probe.results))
    if options.dry_run:  # host memory has no speed and no addresses to promise
        lines = [(name, "----" if name in _OF_THE_MACHINE else judged, found) for name, judged, found in lines]
        print("A DRY RUN, WITHOUT A GPU: this shows only that the probe works.")
    for name, judged, details in lines:
        print(f"{judged:4}  {name}: {details}"[:300])
    report = {"rows": lines, "dry run": options.dry_run, "results": probe.results}
    (options.out / "probe/probe.json").write_text(json.dumps(report, indent=1))
    print(f"          {pack(options.out, 'probe.tar.gz', folder='probe')}")
    return int(any(judged == "MISS" for _, judged, _ in lines))


if __name__ == "__main__":
    sys.exit(main())
