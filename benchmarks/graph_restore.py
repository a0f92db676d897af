"""Measure how long it takes to read graphs and to build them from blueprints, without the time of a real driver.

    python -m benchmarks.graph_restore --library libcuda.so.1 [--graphs 35] [--nodes 400] [--images 0]

``--library`` is the fake driver of tests/runtime/state/graphs/fakecuda, compiled with cc -O2 -shared -fPIC … -lm.
``--images`` are kernel images of 420 kB each, besides the one that is used.

``load_s`` is for reading, ``build_s`` for building with the fake driver's share, and ``own_s`` without it: with a
driver that does nothing. A real driver's time for the same calls comes on top; benchmarks/gpu measures the sum on a
GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from medusa_runtime.state.graphs import Blueprints, CudaDriver, MemoryRange, RangeKind, place, restore_graphs
from medusa_runtime.state.graphs.blob_format import decode_blueprints, encode_blueprints
from medusa_runtime.state.graphs.blueprint import Edge, GraphBlueprint, KernelRecord, Node, Relocation
from medusa_runtime.state.graphs.compiled import CALLS, CompiledBundle, DriverCalls
from medusa_runtime.state.graphs.materialization.images import ImageStore

CUBIN = Path("tests/runtime/state/graphs/cubins/toy_a.cubin")
BASE = 0x6000_0000_0000
IMAGE_BYTES = 420_000


def blueprints(graphs: int, nodes: int, images_besides: int) -> Blueprints:
    """Return graphs that are chains of two kernels in turn: one with 4 parameters, one with a structure of 64 bytes."""
    cubin_bytes = CUBIN.read_bytes()
    images = ImageStore([cubin_bytes])
    digest = next(iter(images.data))
    for number in range(images_besides):
        images.add((cubin_bytes + struct.pack("<I", number)).ljust(IMAGE_BYTES, b"\0"))
    cubin = images.cubin(digest)
    kernels = tuple(KernelRecord(name, digest, cubin.kernels[name].parameters, ()) for name in ("add_checked", "gemv"))
    ranges = (
        MemoryRange("weights", RangeKind.NAMED, BASE, 4 << 20),
        MemoryRange("pool", RangeKind.SLAB, BASE + (1 << 30), 4 << 20),
    )
    made = []
    for graph in range(graphs):
        blob, relocations, listed = bytearray(), [], []
        for number in range(nodes):
            start, kernel = len(blob), number % 2
            blob += (
                struct.pack("<3Q2i4Q", 0, 0, 0, 16, 16, 0, 0, 0, graph) if kernel else bytes(24) + struct.pack("<Q", 16)
            )
            relocations += [
                Relocation(start + 8 * word, word % 2, 512 * (number % 1000) + word * 64) for word in range(3)
            ]
            listed.append(Node(0, 0, kernel, (16, 1, 1), (128, 1, 1), 0, start, len(blob) - start - 4 * (1 - kernel)))
        edges = tuple(Edge(number, number + 1, bytes(8)) for number in range(nodes - 1))
        made.append(GraphBlueprint(f"decode-{graph}", tuple(listed), edges, bytes(blob), tuple(relocations)))
    return Blueprints(ranges=ranges, kernels=kernels, graphs=tuple(made), images=dict(images.data))


def calls_of_nothing(folder: Path) -> DriverCalls:
    """Compile a function that does nothing, and return it for each of the driver's."""
    library = folder / "nothing.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, input=b"int nothing(void) { return 0; }", check=True)
    nothing = ctypes.cast(ctypes.CDLL(str(library)).nothing, ctypes.c_void_p)
    return DriverCalls(*[nothing] * len(CALLS))


def build_with(calls: DriverCalls, loaded: Blueprints) -> None:
    bundle = CompiledBundle(loaded)
    for graph in loaded.graphs:
        used = bundle.check(graph)
        bundle.find(dict.fromkeys(used.kernels, (1, 0)))
        bundle.place({number: loaded.ranges[number].address for number in used.ranges})
        bundle.build(graph, calls, context=1, made=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", dest="driver", required=True)
    parser.add_argument("--graphs", type=int, default=35)
    parser.add_argument("--nodes", type=int, default=400)
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    driver = CudaDriver(options.driver)
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", 0))
    stream = driver.handle("cuStreamCreate", 0)
    data = encode_blueprints(blueprints(options.graphs, options.nodes, options.images))
    with tempfile.TemporaryDirectory() as folder:  # it stays loaded
        nothing = calls_of_nothing(Path(folder))
    rows = []
    for _ in range(options.runs):
        start = time.perf_counter()
        loaded = decode_blueprints(data)
        read = time.perf_counter()
        with place(driver, loaded.ranges) as placement:
            keys = [graph.key for graph in loaded.graphs]
            built = time.perf_counter()
            with restore_graphs(
                driver, loaded, placement, keys=keys, stream=stream, fingerprint={}, validate="none"
            ) as restored:
                rows.append({"load_s": read - start, "build_s": time.perf_counter() - built})
                assert len(restored.graphs) == options.graphs, restored.reasons
        start = time.perf_counter()
        build_with(nothing, loaded)
        rows[-1]["own_s"] = time.perf_counter() - start
    best = {name: min(row[name] for row in rows) for name in rows[0]}
    result = {"graphs": options.graphs, "nodes": options.graphs * options.nodes, "bundle_bytes": len(data), **best}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
