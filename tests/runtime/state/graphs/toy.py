"""A decode step on the fake driver, in a new process: ``toy.py dump|materialize|restore`` (JSON in and out).

It has everything that a real one has: weights, KV cache, static inputs and outputs, a pool whose addresses are used
again, a workspace with earlier contents, structures with garbage in them, a module's variable, clusters, shared memory
over 48 KiB, programmatic edges, two streams, memsets and copies, and two kernels of one name.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from medusa_runtime.device.cupti import ModuleRecorder
from medusa_runtime.errors import DeviceError
from medusa_runtime.state.graphs import (
    Capture,
    CudaDriver,
    GraphMismatch,
    ImageStore,
    MemoryRange,
    Piece,
    RangeKind,
    dump_graphs,
    fingerprint,
    materialize_graphs,
    place,
    restore_graphs,
)
from medusa_runtime.state.graphs import driver as bindings
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints

sys.path.insert(0, str(Path(__file__).parents[3] / "support/gpus"))

from allocation_trace import AllocationTrace, by_allocation, replay
from changed_bundles import CHANGES, with_damaged_image

NON_BLOCKING = 1  # as torch makes its streams
bindings.SIGNATURES.update(
    {
        "cuMemAlloc_v2": "pz",
        "cuMemAllocHost_v2": "pz",
        "cuTensorMapReplaceAddress": "qq",
        "cuMemFree_v2": "q",
        "cuModuleLoadData": "pp",
        "cuModuleGetFunction": "pps",
        "cuStreamBeginCapture_v2": "pi",
        "cuStreamEndCapture": "pp",
        "cuLaunchKernelEx": "pppp",
        "cuMemsetD32Async": "quzp",
        "cuMemcpyDtoDAsync_v2": "qqzp",
        "cuEventCreate": "pu",
        "cuEventRecord": "pp",
        "cuStreamWaitEvent": "ppu",
        "cuLaunchHostFunc": "ppp",
        "cuGraphAddNode_v2": "ppppzp",
    }
)
WIDTH, LAYERS, VOCAB, MAX_BATCH = 16, 2, 32, 4
ROW = WIDTH * 4
NAMED, SLAB, WORKSPACE = RangeKind.NAMED, RangeKind.SLAB, RangeKind.WORKSPACE
SIZES = {
    "weights": (NAMED, (VOCAB + LAYERS * (WIDTH + 1) + VOCAB) * ROW),
    "kv cache": (NAMED, LAYERS * MAX_BATCH * ROW),
    "graph inputs": (NAMED, MAX_BATCH * 4),
    "graph outputs": (NAMED, MAX_BATCH * (VOCAB * 4 + 4)),
    "pool": (SLAB, 64 << 10),
    "workspace": (WORKSPACE, 4096),
}
RMS_NORM = "_Z8rms_normILi4EEvPKfS1_Pfif"
MAGIC = struct.pack("<II", 0x4D454455, 0)


def open_driver() -> tuple[CudaDriver, int]:
    driver = CudaDriver(os.environ["FAKE_CUDA_LIBRARY"])
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", 0))
    return driver, driver.handle("cuStreamCreate", NON_BLOCKING)


def twin(image: bytes) -> bytes:
    """A cubin whose kernel ``scale`` has other instructions, and is otherwise like the original."""
    (table,), (_, count, names) = struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + 64 * number) for number in range(count)]
    start = next(h[4] for h in headers if image.startswith(b".text.scale\0", headers[names][4] + h[0]))
    return image[: start + 16] + bytes([image[start + 16] ^ 1]) + image[start + 17 :]


class Pool:
    """A caching allocator, which returns what was freed last, or (``patient``) only every second time."""

    def __init__(self, address: int, *, patient: bool = False) -> None:
        self._next = address
        self._sizes: dict[int, int] = {}
        self._free: list[int] = []
        self._patient = patient
        self._calls = 0

    def malloc(self, size: int) -> int:
        self._calls += 1
        fitting = [address for address in self._free if self._sizes[address] == size]
        if fitting and (self._calls % 2 or not self._patient):
            self._free.remove(fitting[-1])
            return fitting[-1]
        address, self._next = self._next, self._next + -(-size // 512) * 512
        self._sizes[address] = size
        return address

    def free(self, address: int) -> None:
        self._free.append(address)


class Toy:
    """The step's kernels, and where its memory is."""

    def __init__(self, driver: CudaDriver, stream: int, at: dict[str, int]) -> None:
        self.driver, self.stream, self.at = driver, stream, at
        self.side = driver.handle("cuStreamCreate", NON_BLOCKING)
        self.event = driver.handle("cuEventCreate", 0)
        self.trace = AllocationTrace()
        self.pool = Pool(at["pool"])
        self.key = ""
        self.options: dict[str, Any] = {}
        cubins = Path(os.environ["TOY_CUBINS"])
        self.tiled = 0
        self.images = [(cubins / f"toy_{name}.cubin").read_bytes() for name in "ab"]
        # One as a library, one as a module: both kinds of handles are in the graphs.
        self.library = driver.handle("cuLibraryLoadData", self.images[0], None, None, 0, None, None, 0)
        self.module = driver.handle("cuModuleLoadData", self.images[1])

    def write_weights(self) -> None:
        numbers = random.Random(7)
        count = SIZES["weights"][1] // 4
        self.driver.write(
            self.at["weights"], struct.pack(f"<{count}f", *[numbers.uniform(-1, 1) for _ in range(count)])
        )
        self.driver.write(self.at["kv cache"], bytes(SIZES["kv cache"][1]))

    def malloc(self, size: int) -> int:
        address = self.pool.malloc(size)
        self.trace.malloc(address, size)
        return address

    def free(self, address: int) -> None:
        self.pool.free(address)
        self.trace.free(address)

    def launch(
        self, name: str, values: Iterable[bytes], *, other: bool = False, shared: int = 0, stream: int = 0,
        attributes: dict[int, bytes] | None = None, tiled: bool = False, function: int = 0, blocks: int = 2,
    ) -> None:  # fmt: skip
        if function:
            pass
        elif tiled:
            function = self.driver.handle("cuLibraryGetKernel", self.tiled, name.encode())
        elif other:
            function = self.driver.handle("cuModuleGetFunction", self.module, name.encode())
        else:
            function = self.driver.handle("cuLibraryGetKernel", self.library, name.encode())
            if shared:
                self.driver.call("cuKernelSetAttribute", 8, shared, function, 0)
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_uint64 * len(buffers))(*map(ctypes.addressof, buffers))
        listed = b"".join(struct.pack("<i4x64s", n, value) for n, value in (attributes or {}).items())
        held = ctypes.create_string_buffer(listed, max(len(listed), 1))
        config = struct.pack(
            "<7I4xQQI4x",
            blocks,
            1,
            1,
            32,
            1,
            1,
            shared,
            stream or self.stream,
            ctypes.addressof(held),
            len(attributes or {}),
        )
        self.driver.call("cuLaunchKernelEx", config, function, pointers, None)
        self.trace.launch(self.key)

    def more_modules(self, *, filled: bool) -> None:
        """Load two modules with a kernel of one name and the same parameters; ``filled``: as a library's start does."""
        cubins = Path(os.environ["TOY_CUBINS"])
        images = [(cubins / f"toy_{name}.cubin").read_bytes() for name in "ef"]
        self.more = [self.driver.handle("cuModuleLoadData", image) for image in images]
        if filled:  # cudaMemcpyToSymbol
            gains = ctypes.c_uint64()
            self.driver.call("cuModuleGetGlobal_v2", ctypes.byref(gains), None, self.more[0], b"gains")
            self.driver.write(gains.value, struct.pack("<4f", 2.0, 0.5, 4.0, 0.25))

    def launch_more(self, x: int) -> None:
        for number, name in ((0, "attend"), (1, "attend"), (0, "gain"), (0, "attend")):
            function = self.driver.handle("cuModuleGetFunction", self.more[number], name.encode())
            self.launch(name, [struct.pack("<Q", x), struct.pack("<i", WIDTH)], function=function)

    def launch_wide_cluster(self, x: int) -> None:
        """A cluster of more blocks than are portable, which is allowed on the function of this context alone."""
        kernel = self.driver.handle("cuLibraryGetKernel", self.library, b"cluster_scale")
        function = self.driver.handle("cuKernelGetFunction", kernel)
        self.driver.call("cuFuncSetAttribute", function, 14, 1)
        cluster = {4: struct.pack("<III", 16, 1, 1)}
        values = [struct.pack("<Q", x), struct.pack("<i", WIDTH)]
        self.launch("cluster_scale", values, attributes=cluster, blocks=16)

    def tensor_map(self, address: int) -> bytes:
        """A map of this address, as the driver encodes it: by value, as launches take it."""
        room = ctypes.create_string_buffer(192)
        at = -(-ctypes.addressof(room) // 64) * 64
        ctypes.memmove(at, struct.pack("<32I", 0x50414D54, 0, 0x77, 0xABCD0000, *range(28)), 128)
        self.driver.call("cuTensorMapReplaceAddress", at, address)
        return ctypes.string_at(at, 128)

    def gemv(self, weight: int, x: int, y: int, rows: int) -> None:
        self.driver.call("cuMemsetD32Async", y, 0, rows, self.stream)
        self.trace.launch(self.key)
        # The structure's padding: a stale pointer to the host, a stale constant, and whatever else.
        stale = self.options.get("pinned") or ctypes.addressof(ctypes.create_string_buffer(1 << 20))
        garbage = [stale, 3, self.options.get("opaque", 0), 0]
        self.launch("gemv", [struct.pack("<QQQii4Q", weight, x, y, rows, WIDTH, *garbage)])

    def step(self, row: int) -> None:
        p, i, f = (lambda value: struct.pack("<Q", value)), (lambda value: struct.pack("<i", value)), (
            lambda value: struct.pack("<f", value))  # fmt: skip
        weights, x = self.at["weights"], self.malloc(ROW)
        on_host = self.options.get("on_host", {})  # where a copy of the weights is
        self.launch("embed", [p(on_host.get("embed", weights)), p(self.at["graph inputs"] + 4 * row), p(x), i(WIDTH)])
        for layer in range(LAYERS):
            matrix = weights + (VOCAB + layer * (WIDTH + 1)) * ROW
            normed = self.malloc(ROW)
            self.launch(RMS_NORM, [p(x), p(matrix + WIDTH * ROW), p(normed), i(WIDTH), f(1e-5)])
            hidden = self.malloc(ROW)
            self.gemv(on_host.get("gemv", weights) + matrix - weights, normed, hidden, WIDTH)
            self.free(normed)
            again = self.malloc(ROW)  # at the address of what was freed: the paper's figure 6
            self.driver.call("cuMemcpyDtoDAsync_v2", again, hidden, ROW, self.stream)
            self.trace.launch(self.key)
            extra = self.malloc(ROW)
            self.driver.call("cuMemcpyDtoDAsync_v2", extra, x, ROW, self.stream)
            self.trace.launch(self.key)
            self.launch("scale", [p(again), i(WIDTH), f(0.5)], attributes={6: struct.pack("<i", 1)})
            if self.options.get("maps"):
                self.launch("tiled_scale", [self.tensor_map(again), i(WIDTH), f(1.5)], tiled=True)
            self.launch("cluster_scale", [p(again), i(WIDTH)], attributes={4: struct.pack("<III", 2, 1, 1), 6: b"\1"})
            bias = ctypes.c_uint64()
            self.driver.call("cuLibraryGetGlobal", ctypes.byref(bias), None, self.library, b"bias_table")
            self.launch("add_bias", [p(bias.value), p(again), i(WIDTH)])
            kept = self.at["kv cache"] + (layer * MAX_BATCH + row) * ROW
            self.driver.call("cuEventRecord", self.event, self.stream)
            self.driver.call("cuStreamWaitEvent", self.side, self.event, 0)
            self.driver.call("cuMemcpyDtoDAsync_v2", kept, again, ROW, self.side)
            self.trace.launch(self.key)
            self.launch("wide", [p(again), i(WIDTH)], shared=64 << 10, attributes={8: struct.pack("<i", -2)})
            self.driver.call("cuEventRecord", self.event, self.side)
            self.driver.call("cuStreamWaitEvent", self.stream, self.event, 0)
            if self.options.get("more"):
                self.launch_more(again)
            if self.options.get("wide_cluster"):
                self.launch_wide_cluster(again)
            self.launch("add_checked", [p(again), p(extra), p(self.at["workspace"] + 512), i(WIDTH)])
            self.driver.call("cuMemcpyDtoDAsync_v2", x, extra, ROW, self.stream)
            self.trace.launch(self.key)
            for address in (hidden, again, extra):
                self.free(address)
        logits = self.at["graph outputs"] + row * VOCAB * 4
        self.gemv(weights + (VOCAB + LAYERS * (WIDTH + 1)) * ROW, x, logits, VOCAB)
        self.launch("scale", [p(logits), i(VOCAB), f(2.0)], other=True)
        self.launch(
            "argmax", [p(logits), p(self.at["graph outputs"] + MAX_BATCH * VOCAB * 4 + 4 * row), i(VOCAB)], other=True
        )
        self.free(x)

    def capture_last(self) -> int:
        """Capture the step's last kernel alone, whose module has no other kernel of it but one."""
        self.driver.call("cuStreamBeginCapture_v2", self.stream, 0)
        pointers = (self.at["graph outputs"], self.at["pool"])
        values = [*(struct.pack("<Q", pointer) for pointer in pointers), struct.pack("<i", VOCAB)]
        self.launch("argmax", values, other=True)
        made = ctypes.c_uint64()
        self.driver.call("cuStreamEndCapture", self.stream, ctypes.byref(made))
        return made.value

    def capture(self, batch: int) -> int:
        self.key = f"decode-{batch}"
        twins = 0
        if self.options.get("twins"):  # a second loaded module with a kernel of this name
            twins = self.driver.handle("cuModuleLoadData", twin(self.images[1]))
        self.driver.call("cuStreamBeginCapture_v2", self.stream, 0)
        for row in range(batch):
            self.step(row)
        if self.options.get("short"):
            self.driver.call("cuMemsetD32Async", self.at["graph outputs"], 0, 1, self.stream)
        if twins:
            self.module = twins
            self.launch("scale", [bytes(8), bytes(4), bytes(4)], other=True)
        if self.options.get("host") == batch:
            self.driver.call("cuLaunchHostFunc", self.stream, 1, None)
        made = ctypes.c_uint64()
        self.driver.call("cuStreamEndCapture", self.stream, ctypes.byref(made))
        graph = made.value
        if kind := self.options.get("kind") if batch == 2 else None:
            added = ctypes.c_uint64()
            self.driver.call("cuGraphAddNode_v2", ctypes.byref(added), graph, None, None, 0, struct.pack("<i", kind))
        return graph


def answers(driver: CudaDriver, at: dict[str, int], stream: int, launches: dict[str, Any]) -> dict[str, list[str]]:
    """Outputs of each graph for three inputs, twice each."""
    found: dict[str, list[str]] = {}
    for key, launch in launches.items():
        batch = int(key.partition("-")[2])
        for ids in ([1, 2, 3, 4], [31, 0, 7, 7], [5, 5, 30, 12]) * 2:
            driver.fill(at["graph outputs"], 0, SIZES["graph outputs"][1])
            driver.write(at["graph inputs"], struct.pack("<4i", *ids))
            launch()
            driver.call("cuStreamSynchronize", stream)
            found.setdefault(key, []).append(
                driver.read(at["graph outputs"], batch * VOCAB * 4).hex()
                + driver.read(at["graph outputs"] + MAX_BATCH * VOCAB * 4, 4 * batch).hex()
            )
    return found


def offline(options: dict[str, Any]) -> dict[str, Any]:
    driver, stream = open_driver()
    order = list(SIZES)
    random.Random(options.get("order", 0)).shuffle(order)  # other distances between the ranges
    at = {name: driver.handle("cuMemAlloc_v2", SIZES[name][1]) for name in order}
    recorder = ModuleRecorder(os.environ["FAKE_CUDA_LIBRARY"])
    toy = Toy(driver, stream, at)
    if options.get("pinned"):
        options["pinned"] = driver.handle("cuMemAllocHost_v2", 1 << 20) + 4096
    toy.options = options
    if options.get("maps"):
        toy.images.append((Path(os.environ["TOY_CUBINS"]) / "toy_d.cubin").read_bytes())
        toy.tiled = driver.handle("cuLibraryLoadData", toy.images[2], None, None, 0, None, None, 0)
    if options.get("more"):
        toy.more_modules(filled=True)
    recorder.close()
    toy.write_weights()
    if reader := options.get("on_host"):
        copy, size = driver.handle("cuMemAllocHost_v2", 1 << 20), SIZES["weights"][1]
        ctypes.memmove(copy, driver.read(at["weights"], size), size)
        options["on_host"] = {reader: copy}
    driver.write(at["workspace"] + 512, MAGIC)
    graphs = {f"decode-{batch}": toy.capture(batch) for batch in options.get("batches", [1, 2, 4])}
    ranges = [
        MemoryRange(name, kind, at[name], size)
        for name, (kind, size) in SIZES.items()
        if name not in options.get("unnamed", [])
    ]
    images = ImageStore(recorder.images, {} if options.get("ambiguous") else recorder.handles)
    if options.get("ambiguous"):
        images.add(twin(toy.images[1]))
    dump = dump_graphs(driver, graphs, ranges, images=images)
    if "dump" in options:
        save_blueprints(dump, Path(options["dump"]))
        return {"refused": dump.refused}
    launches = {}
    for key, graph in graphs.items():
        if key in dump.refused:
            continue
        params = bindings.byref(ctypes.create_string_buffer(32))
        execution = driver.handle("cuGraphInstantiateWithParams", graph, params)
        launches[key] = lambda execution=execution: driver.call("cuGraphLaunch", execution, stream)
    number = {memory_range.name: n for n, memory_range in enumerate(dump.ranges)}
    inputs, outputs = {}, {}
    for key in launches:
        batch = int(key.partition("-")[2])
        inputs[key] = (Piece(number["graph inputs"], 0, struct.pack("<4i", 9, 8, 7, 6)),)
        outputs[key] = (
            Piece(number["graph outputs"], 0, bytes(batch * VOCAB * 4)),
            Piece(number["graph outputs"], MAX_BATCH * VOCAB * 4, bytes(4 * batch)),
        )
    facts = fingerprint(driver, {"torch": "2.13"})
    reads_host = options.get("reads_host", True)
    capture = Capture(launches, inputs, outputs, stream, images, fingerprint=facts, reads_host=reads_host)
    second = decode_blueprints(Path(options["second"]).read_bytes()) if "second" in options else None
    blueprints = materialize_graphs(driver, dump, capture, second=second)
    save_blueprints(blueprints, Path(options["out"]))
    toy.trace.save(Path(options["out"] + ".trace"))
    return {
        "refused": blueprints.refused,
        "answers": answers(driver, at, stream, launches),
        "pinned": sorted({blueprints.ranges[n].name for graph in blueprints.graphs for n in graph.pinned}),
        "contents": [[blueprints.ranges[r].name, offset, len(data)] for r, offset, data in blueprints.contents],
        "at": at,
    }


def online(options: dict[str, Any]) -> dict[str, Any]:
    driver, stream = open_driver()
    data = Path(options["bundle"]).read_bytes()
    keys = options.get("keys", ["decode-1", "decode-2", "decode-4"])
    facts = fingerprint(driver, {"torch": options.get("torch", "2.13")})
    try:
        blueprints = decode_blueprints(data)
        if "damage" in options:
            blueprints = with_damaged_image(data, options["damage"], keys[-1])
        if options.get("change"):
            blueprints = CHANGES[options["change"]](blueprints)
        for address in options.get("take", []):
            driver.handle("cuMemAddressReserve", 1 << 30, 0, address, 0)
        wanted = [memory_range for memory_range in blueprints.ranges if memory_range.kind != RangeKind.MODULE]
        if options.get("mode") == "replay":
            placement = place(driver, [one for one in wanted if one.kind != SLAB], at_recorded=False)
            trace = AllocationTrace.load(Path(options["bundle"] + ".trace"))
            blueprints = by_allocation(blueprints, trace, first_match=options.get("first_match", False))
            pool = Pool(driver.handle("cuMemAlloc_v2", 256 << 10), patient=True)
            placement.addresses.update(replay(trace.events, pool.malloc, pool.free))
        else:
            placement = place(driver, wanted, at_recorded=options.get("mode") != "relocate")
    except GraphMismatch as mismatch:
        return {"placement": str(mismatch)}
    except Exception as error:  # noqa: BLE001 - a damaged bundle: restore_graphs says so
        with restore_graphs(driver, data, place(driver, []), keys=keys, stream=stream, fingerprint=facts) as restored:
            return {
                "restored": list(restored.graphs),
                "reasons": {k: str(m) for k, m in restored.reasons.items()},
                "error": str(error),
            }
    at = dict(placement.addresses)
    placement.addresses.update(options.get("misplace", {}))
    for name in options.get("forget", []):
        del placement.addresses[name]
    trigger = None
    if options.get("trigger"):
        toy = Toy(driver, stream, {**at, "pool": at.get("pool", 0)})
        toy.options = {"twins": options["trigger"] == "twins"}
        if options["trigger"] == "fails":
            trigger = lambda key: 1 // 0  # noqa: E731
        elif options["trigger"] == "late":  # the first batch size loads one of the two modules
            trigger = lambda key: toy.capture_last() if key == keys[0] else toy.capture(1)  # noqa: E731
        else:
            trigger = lambda key: toy.capture(1)  # noqa: E731
    else:
        toy = Toy.__new__(Toy)
        toy.driver, toy.at = driver, at
    toy.write_weights()
    if options.get("wrong_weights"):
        driver.fill(at["weights"], 0x11, 10 * ROW)
    try:
        restored = restore_graphs(
            driver, blueprints, placement, keys=keys, stream=stream, fingerprint=facts, trigger=trigger,
            validate=options.get("validate", "ends"),
        )  # fmt: skip
    except DeviceError as error:
        return {"lost": str(error)}
    with restored:
        result = {
            "restored": sorted(restored.graphs),
            "reasons": {key: str(mismatch) for key, mismatch in restored.reasons.items()},
            "answers": answers(driver, at, stream, {key: graph.replay for key, graph in restored.graphs.items()}),
            "at": at,
            "through": sorted(
                {blueprints.ranges[r.memory_range].name for g in blueprints.graphs for r in g.relocations}
            ),
        }
    placement.close()
    return result


def command(arguments: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    phase, options = arguments[0], json.loads(arguments[1])
    print(json.dumps(online(options) if phase == "restore" else offline(options)))


if __name__ == "__main__":
    command(sys.argv[1:])
