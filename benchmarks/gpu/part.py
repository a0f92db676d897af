"""Runs one part of the check in this process, and writes its result as JSON.

python -m benchmarks.gpu.part NAME OUT [options]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_runtime.device.context import DeviceContext
from medusa_runtime.timeline import Timeline

from benchmarks.gpu.part_process import part_parser, prepare

if TYPE_CHECKING:  # torch is imported in main, beside the context
    from medusa_runtime.engine.gpu.decode_graphs import Restorer

    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.started import Started

_BUILDERS = (1, 2, 3, 4)


def main(arguments: list[str] | None = None) -> int:
    parser = part_parser(__doc__, PARTS)
    parser.add_argument("--bundle", type=Path, help="the graphs' blueprints: written by materialize, read by others")
    parser.add_argument("--strategy", default="", help="of the part phase")
    parser.add_argument("--bytes", type=int, default=4 << 30, help="of the part transfer")
    parser.add_argument("--dry-run", action="store_true", help="host memory in place of a GPU")
    options = parser.parse_args(arguments)
    prepare()
    began = time.monotonic_ns()
    timeline = Timeline.create("engine")
    context = None if options.dry_run else DeviceContext(timeline=timeline)  # during the imports, as in the engine
    with timeline.stage("import"):
        with suppress(ImportError):  # what needs no model is measured without it
            import tokenizers  # noqa: F401  imported, as in the zygote
        from medusa_runtime.imports.lazy_torch import import_torch, is_lean

        import_torch(numpy=False)  # as an engine that imports leanly

        from benchmarks.gpu.machine import machine
    info = context.wait() if context is not None else None
    found = PARTS[options.name](machine(dry_run=options.dry_run), options)
    start = {stage.name: [(stage.start_ns - began) / 1e9, (stage.end_ns - began) / 1e9] for stage in timeline.stages()}
    found["torch_import"] = "lean" if is_lean() else "plain"  # plain, too, if a part has touched what was put off
    found |= {"start": start, "process_s": (time.monotonic_ns() - began) / 1e9, "device": info.name if info else ""}
    options.out.write_text(json.dumps(found))
    return 0


def _settings(options: Any) -> Any:
    from benchmarks.gpu.started import settings_for

    return settings_for(options.model, dry_run=options.dry_run)


def environment(machine: Machine, options: Any) -> dict[str, Any]:
    from benchmarks.gpu.environment import environment

    return environment(machine)


def transfer(machine: Machine, options: Any) -> dict[str, Any]:
    from benchmarks.gpu.transfer import transfer

    return transfer(machine, total_bytes=(192 << 20) if options.dry_run else options.bytes)


def loading(machine: Machine, options: Any) -> dict[str, Any]:
    from benchmarks.gpu.transfer import loading

    return loading(machine, _settings(options))


def materialize(machine: Machine, options: Any) -> dict[str, Any]:
    """Run the offline phase (figure 9)."""
    began = time.perf_counter()
    made = machine.materialize(_settings(options), options.bundle.parent)
    seconds = time.perf_counter() - began
    if made is None:
        raise RuntimeError("nothing was materialized")
    made.rename(options.bundle)
    data = options.bundle.read_bytes()
    return {"seconds": seconds, "bytes": len(data), **machine.summary(data)}


def captured(machine: Machine, options: Any) -> dict[str, Any]:
    """Warm up and capture, and report what the graphs compute (figures 2 and 3)."""
    from benchmarks.gpu.decoding import against_eager, capture_all, hashes, steps
    from benchmarks.gpu.started import started

    with started(machine, _settings(options)) as one:
        capture = capture_all(one)
        if not one.graphs.graphs:
            raise RuntimeError("no graph was captured; the log says why")
        found = {"capture": capture, "eager": against_eager(machine, one), "hashes": hashes(machine, one)}
        return {**found, "steps": steps(machine, one)}


def restored(machine: Machine, options: Any) -> dict[str, Any]:
    """Report the same of restored graphs, in this process, which captures nothing."""
    from benchmarks.gpu.decoding import hashes, steps
    from benchmarks.gpu.started import started

    data = options.bundle.read_bytes()
    with started(machine, _settings(options)) as one:
        restore, restorer = _restore(machine, one, data)
        if not one.graphs.graphs:
            raise RuntimeError("no graph was restored; the log says why")
        found = {"restore": restore, "hashes": hashes(machine, one), "steps": steps(machine, one)}
        restorer.close()
        began = time.perf_counter()
        machine.summary(data)
        restore["decode_s"] = time.perf_counter() - began
        return {**found, "builders": _by_builders(machine, one, data)}


def triggered(machine: Machine, options: Any) -> dict[str, Any]:
    """Restore without a saved image: all kernels come from a captured first layer (MEDUSA §5.2)."""
    from benchmarks.gpu.decoding import hashes
    from benchmarks.gpu.started import started

    with started(machine, _settings(options)) as one:
        restore, _ = _restore(machine, one, machine.without_images(options.bundle.read_bytes()))
        return {"restore": restore, "hashes": hashes(machine, one)}


def _restore(machine: Machine, one: Started, data: bytes) -> tuple[dict[str, Any], Restorer]:
    """Restore all graphs. The restorer owns them.

    Returns the seconds of it all, of each step (the first needs no weights), of the driver's functions, and of each
    thread in the driver.
    """
    timed = machine.timed(one.gpu)
    began = time.perf_counter()
    restorer = one.gpu.restorer(one.runner.model, one.graphs)
    restorer.begin(data)
    mapped = time.perf_counter()
    one.graphs.adopt(restorer.restore_sizes(one.graphs.sizes, validate="ends"))
    machine.synchronize()
    end = time.perf_counter()
    steps: dict[str, Any] = {"begin_s": mapped - began, "build_s": end - mapped}
    if timed is not None:
        steps |= {"calls": timed.times(), "threads": timed.threads()}
    missing = list(one.graphs.pending)
    return {"seconds": end - began, **steps, "graphs": len(one.graphs.graphs), "missing": missing}, restorer


def _by_builders(machine: Machine, one: Started, data: bytes) -> dict[str, Any]:
    """Return the seconds of a restore by the number of threads that build graphs. These graphs are not used."""
    from medusa_runtime.state.graphs import GraphRestorer

    usual, found = GraphRestorer.builders, dict[str, Any]()
    try:
        for builders in _BUILDERS * 2:
            GraphRestorer.builders = builders
            restorer = one.gpu.restorer(one.runner.model, one.graphs)
            machine.synchronize()
            began = time.perf_counter()
            restorer.begin(data)
            restored = restorer.restore_sizes(one.graphs.sizes, validate="ends")
            machine.synchronize()
            seconds = time.perf_counter() - began
            found.setdefault(str(builders), []).append({"seconds": seconds, "graphs": len(restored)})
            restorer.close()
    except Exception as error:  # noqa: BLE001  what has been measured before counts
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        GraphRestorer.builders = usual
    return found


def phase(machine: Machine, options: Any) -> dict[str, Any]:
    from benchmarks.gpu.phases import phase

    return phase(machine, _settings(options), options.strategy, options.bundle)


PARTS: dict[str, Callable[[Machine, Any], dict[str, Any]]] = {
    "environment": environment,
    "transfer": transfer,
    "loading": loading,
    "materialize": materialize,
    "captured": captured,
    "restored": restored,
    "triggered": triggered,
    "phase": phase,
}

if __name__ == "__main__":
    sys.exit(main())
