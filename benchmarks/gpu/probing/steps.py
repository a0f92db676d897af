"""The steps of the probe that touch the device, each run as a process: ``python -m benchmarks.gpu.probing.steps``."""

# ruff: noqa: E402
from __future__ import annotations

from medusa_runtime.imports.lazy_torch import import_torch

import_torch(numpy=False)  # leanly: each step starts a second earlier

import argparse
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from medusa_runtime.engine.gpu.placed_memory import BASE, OTHER_BASE
from medusa_runtime.state.graphs import (
    Blueprints,
    Capture,
    CudaDriver,
    GraphMismatch,
    ImageStore,
    Piece,
    RangeKind,
    dump_graphs,
    fingerprint,
    materialize_graphs,
    place,
    restore_graphs,
)
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import GraphBlueprint
from medusa_runtime.state.graphs.compiled import used_ranges
from medusa_runtime.state.graphs.driver import STICKY, CudaError
from medusa_runtime.state.graphs.materialization.dump import kernel_of, node_kind, nodes_of
from medusa_runtime.state.graphs.restoration.build import GraphBuilder
from medusa_runtime.state.graphs.restoration.kernels import KernelFinder, KernelHandle, set_function_attributes
from medusa_runtime.state.graphs.structs import InstantiateParams

from benchmarks.gpu.probing import evidence
from benchmarks.gpu.probing.ground import CHECKED_BYTES, INPUTS, OUTPUTS, Captured, Facts, Ground

# Away from the bases of both captures.
_ELSEWHERE = 0x4800_0000_0000
_PATIENCE_S = 40.0  # for the other process's capture, from this one's start
_CASE_S = 20.0  # the most that one case may take; kernels are compiled in it
RUNNING, DONE = "running", "done"  # the case that the process is in; whether the step has come to its end
_UPLOAD = 2


class Step:
    """Collects one step's facts in a file, written before and after each case: a fault costs the case that it is in.

    A case that takes too long ends the process, with a traceback in its log, and one that breaks the context ends it as
    well. The probe then starts the step again, which leaves out what has failed before.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._case_s = float(os.environ.get("PROBE_CASE_S", _CASE_S))  # tests have less patience
        self._began = time.monotonic()
        self.broken: Callable[[], bool] = lambda: False  # whether the device's context is
        self.facts: Facts = json.loads(out.read_text()) if out.exists() else {}
        running = self.facts.pop(RUNNING, None)
        if running is not None:
            self.note(running, {"failed": "the process ended in it; the log says where"})

    def note(self, key: str, fact: Any) -> None:
        self.facts[key] = fact
        self.facts["seconds"] = round(self.seconds, 2)
        written = self._out.with_suffix(".part")
        written.write_text(json.dumps(self.facts, indent=1))
        written.replace(self._out)  # a process that is killed leaves the facts before

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def attempt(self, key: str, work: Callable[[], Any], *, again: bool = False) -> Any:
        """Note what ``work`` returns, or how it failed; None if it failed, now or in an earlier process.

        What an earlier process has done is not done a second time, unless ``again`` says that this process needs it.
        Raises what ``work`` has raised if that broke the context.
        """
        found = self.facts.get(key)
        if found is not None and (not again or (isinstance(found, dict) and "failed" in found)):
            return None
        self.note(RUNNING, key)
        faulthandler.dump_traceback_later(self._case_s, exit=True)
        failed: Exception | None = None
        try:
            found = work()
        except (CudaError, GraphMismatch) as error:
            found, failed = {"failed": str(error)}, error
        except Exception as error:  # noqa: BLE001 - whatever it is, it is evidence
            end = traceback.format_exc().strip().splitlines()[-4:]
            found, failed = {"failed": f"{type(error).__name__}: {error}", "where": end}, error
        finally:
            faulthandler.cancel_dump_traceback_later()
        del self.facts[RUNNING]
        self.note(key, found)
        if failed is not None and self.broken():
            raise failed  # or every later case would fail as well
        return None if failed is not None else found


def capture(ground: Ground, step: Step, folder: Path, *, first: bool) -> None:
    """Capture every case and dump it; in the first process also build it again, twice, and compare the replays."""
    ground.prepare()
    captured: dict[str, Captured] = {}
    for key in ground.cases:

        def one(key: str = key) -> float:
            began = time.perf_counter()
            captured[key] = ground.capture(key)
            return round(time.perf_counter() - began, 2)

        step.attempt(f"capture {key}", one, again=True)  # one kernel that cannot be captured is a fact
    images = ground.images()
    step.note("images", {digest: len(data) for digest, data in images.data.items()})
    step.note("handles", len(images.handles))
    pool = ground.pool.memory_range if ground.pool is not None else None
    step.note("pool", {"at": hex(pool.address), "bytes": pool.size} if pool is not None else "torch's own")
    handles = {key: graph.handle for key, graph in captured.items()}
    dump = dump_graphs(ground.driver, handles, ground.ranges(), images=images)
    step.note("refused", dump.refused)
    save_blueprints(dump, folder / ("first.dump" if first else "second.dump"))
    for graph in dump.graphs:

        def facts(graph: GraphBlueprint = graph) -> Facts:
            return {
                "nodes": evidence.nodes(ground.driver, handles[graph.key], images),
                "edges": evidence.edges(ground.driver, handles[graph.key]),
                "parameters": evidence.parameters(graph),
            }

        step.attempt(f"graph {graph.key}", facts)
    if first:
        _save_images(dump, images, folder / "images")
        _materialize(ground, step, dump, captured, images, folder)  # first, since other processes need what it writes
        _in_this_process(ground, step, dump, captured, images)


def _save_images(dump: Blueprints, images: ImageStore, folder: Path) -> None:
    """Keep each image that defines a captured kernel, also where it is not known which of several is the one."""
    folder.mkdir(exist_ok=True)
    names = {kernel.name for kernel in dump.kernels}
    for digest, data in images.data.items():
        if names & images.cubin(digest).kernels.keys():
            (folder / f"{digest}.cubin").write_bytes(data)


def _in_this_process(
    ground: Ground, step: Step, dump: Blueprints, captured: dict[str, Captured], images: ImageStore
) -> None:
    """Build each graph from its dump, with the captured handles and with the saved images, and compare replays."""
    used = {kernel.image: images.data[kernel.image] for kernel in dump.kernels if kernel.image}
    with_images = replace(dump, images=used)
    for graph in dump.graphs:
        replay = Replay(ground, graph.key, dump)
        wanted = step.attempt(f"replay {graph.key}", partial(replay.hash_of, captured[graph.key].launch), again=True)
        if wanted is None:
            continue

        def by_handle(graph: GraphBlueprint = graph, replay: Replay = replay, wanted: Any = wanted) -> Facts:
            return replay.of_made(
                dump,
                graph,
                _handles(ground.driver, captured[graph.key].handle, dump, graph),
                wanted,
                images,
                captured[graph.key].handle,
            )

        def by_image(graph: GraphBlueprint = graph, replay: Replay = replay, wanted: Any = wanted) -> Facts:
            finder = KernelFinder(ground.driver, with_images)  # stays open: the graph may run until the end
            numbers = {node.kernel for node in graph.nodes if node.kernel >= 0}
            kernels = {number: finder.handle(number, graph.key) for number in numbers}
            for piece in dump.contents:
                at = finder.variable(dump.ranges[piece.memory_range].name)
                if at is not None:
                    ground.driver.write(at + piece.offset, piece.data)
            return replay.of_made(dump, graph, kernels, wanted, images, captured[graph.key].handle)

        step.attempt(f"same process by handle: {graph.key}", by_handle)
        step.attempt(f"same process by image: {graph.key}", by_image)


def _handles(driver: CudaDriver, captured: int, dump: Blueprints, graph: GraphBlueprint) -> dict[int, KernelHandle]:
    kernels = {}
    for node, handle in zip(graph.nodes, nodes_of(driver, captured), strict=True):
        if node_kind(driver, handle) == 0:
            params, _, _ = kernel_of(driver, handle)
            kernels[node.kernel] = KernelHandle(params.func or 0, 0 if params.func else params.kern or 0)
            set_function_attributes(driver, kernels[node.kernel], dump.kernels[node.kernel])
    return kernels


class Replay:
    """Launches a graph, from given inputs, and reads what it has written."""

    def __init__(self, ground: Ground, key: str, dump: Blueprints) -> None:
        self._ground, self._driver = ground, ground.driver
        self._outputs = ground.memory.ranges[OUTPUTS]

    def outputs(self, launch: Callable[[], None]) -> bytes:
        size = min(self._outputs.size, CHECKED_BYTES)
        self._driver.fill(self._outputs.address, 0xEE, size)
        launch()
        self._driver.call("cuStreamSynchronize", self._ground.stream)
        return self._driver.read(self._outputs.address, size)

    def hash_of(self, launch: Callable[[], None]) -> str:
        import hashlib

        first, second = (hashlib.sha256(self.outputs(launch)).hexdigest()[:16] for _ in range(2))
        if first != second:
            raise ValueError("two replays of the captured graph differ")
        return first

    def of_made(
        self,
        dump: Blueprints,
        graph: GraphBlueprint,
        kernels: Mapping[int, KernelHandle],
        wanted: str,
        images: ImageStore,
        captured: int,
    ) -> Facts:
        """Build, read back, instantiate and replay. Returns whether the bits are those of the captured graph."""
        made = GraphBuilder(self._driver, dump).construct(graph, kernels=kernels, addresses={})
        different = evidence.differences(self._driver, captured, made, images)
        params = InstantiateParams(flags=_UPLOAD, upload_stream=self._ground.stream)
        execution = self._driver.handle("cuGraphInstantiateWithParams", made, byref(params))
        found = self.hash_of(lambda: self._driver.call("cuGraphLaunch", execution, self._ground.stream))
        return {"equal": found == wanted, "hash": found, "read back": different}


def _materialize(
    ground: Ground, step: Step, dump: Blueprints, captured: dict[str, Captured], images: ImageStore, folder: Path
) -> None:
    """Compare with the other process's capture, which may still be under way, and write the bundle."""
    while not (folder / "second.dump").exists() and step.seconds < _PATIENCE_S:
        time.sleep(0.2)
    second = decode_blueprints((folder / "second.dump").read_bytes()) if (folder / "second.dump").exists() else None
    step.note("second capture", second is not None)
    numbers = {memory_range.name: number for number, memory_range in enumerate(dump.ranges)}
    size = min(ground.memory.ranges[OUTPUTS].size, CHECKED_BYTES)
    inputs_at = ground.memory.ranges[INPUTS]
    blank = Piece(numbers[OUTPUTS], 0, b"\xee" * size)
    given = Piece(numbers[INPUTS], 0, ground.driver.read(inputs_at.address, min(inputs_at.size, CHECKED_BYTES)))
    keys = [graph.key for graph in dump.graphs]
    work = Capture(
        {key: captured[key].launch for key in keys},
        dict.fromkeys(keys, (given, blank)),
        {key: (Piece(numbers[OUTPUTS], 0, bytes(size)),) for key in keys},
        ground.stream,
        images,
        fingerprint=fingerprint(ground.driver),
        reads_host=False,
    )

    def made(work: Capture = work) -> Facts:
        bundle = materialize_graphs(ground.driver, dump, work, second=second)
        save_blueprints(bundle, folder / "bundle")
        return {
            "graphs": [graph.key for graph in bundle.graphs],
            "refused": bundle.refused,
            "pinned": [graph.key for graph in bundle.graphs if graph.pinned],
            "pointers": {graph.key: len(graph.relocations) for graph in bundle.graphs},
            "contents": [[bundle.ranges[r].name, offset, len(data)] for r, offset, data in bundle.contents],
            "images": len(bundle.images),
        }

    step.attempt("materialize", made)
    if not (folder / "bundle").exists():
        # A kernel that waits for a flag in overwritten memory may wait for ever. The other steps need some bundle.
        step.attempt("materialize, no memory overwritten", partial(made, replace(work, finds_contents=False)))


def restore(ground: Ground, step: Step, folder: Path, *, at_recorded: bool) -> None:
    """Restore each graph of the bundle in this process, which captures nothing, and compare its outputs.

    ``at_recorded``: whether the graphs' pool lies where it was captured.
    """
    ground.prepare()
    bundle = decode_blueprints((folder / "bundle").read_bytes())
    named = {name: one.address for name, one in ground.memory.ranges.items()}
    used = used_ranges(bundle)
    ours = [
        one for n, one in enumerate(bundle.ranges) if n in used and one.kind in (RangeKind.SLAB, RangeKind.WORKSPACE)
    ]
    placement = place(ground.driver, ours, placed=named, at_recorded=at_recorded)
    step.note(
        "moved",
        sorted(one.name for one in bundle.ranges if placement.addresses.get(one.name, one.address) != one.address),
    )
    facts, kept = fingerprint(ground.driver), []
    for graph in bundle.graphs:

        def one(key: str = graph.key) -> Facts:
            began = time.perf_counter()
            restored = restore_graphs(
                ground.driver, bundle, placement, keys=[key], stream=ground.stream, fingerprint=facts, validate="all"
            )
            kept.append(restored)
            if key in restored.reasons:
                raise restored.reasons[key]
            return {"equal": True, "ms": round((time.perf_counter() - began) * 1e3, 2)}

        step.attempt(f"restored: {graph.key}", one)


def open_ground(base: int, *, recording: bool, library: str | None) -> Ground:
    """The device, with memory placed from ``base``. ``library``: a fake driver's path, for a dry run."""
    if library is not None:
        from benchmarks.gpu.probing.fake import FakeGround

        return FakeGround(library, base, recording=recording)
    from benchmarks.gpu.probing.device import DeviceGround

    return DeviceGround(base, recording=recording)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("first", "second", "restore", "restore-elsewhere"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--library", dest="driver", help="a fake driver, for a dry run")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the probe sends it to a step that takes too long
    step = Step(options.folder / f"{options.name}.json")
    base = {"second": OTHER_BASE, "restore-elsewhere": _ELSEWHERE}.get(options.name, BASE)
    recording = options.name in ("first", "second")
    ground = open_ground(base, recording=recording, library=options.driver)
    step.broken = lambda: ground.driver.result("cuCtxSynchronize") in STICKY
    if recording:
        capture(ground, step, options.folder, first=options.name == "first")
    else:
        restore(ground, step, options.folder, at_recorded=options.name == "restore")
    step.note(DONE, True)
    ground.close()
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 - a broken context may also hang where it is torn down
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    raise SystemExit(status)
