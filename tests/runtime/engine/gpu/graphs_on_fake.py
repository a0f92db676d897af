"""The torch engine's graphs on the fake driver: ``graphs_on_fake.py dump|materialize|restore`` (JSON in and out)."""

# ruff: noqa: E402
from __future__ import annotations

from medusa_runtime.imports.lazy_torch import import_torch

import_torch()  # as engines do: each of these processes is seconds shorter

import ctypes
import hashlib
import json
import logging
import os
import random
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fake_torch_cuda import HOST, FakeCuda
from medusa_runtime.engine.gpu.attempts import Attempts
from medusa_runtime.engine.gpu.capture import CudaCapturer
from medusa_runtime.engine.gpu.decode_graphs import DecodeGraphs
from medusa_runtime.engine.gpu.graph_pool import OTHER_POOL_BASE, POOL_BASE, open_pool
from medusa_runtime.engine.gpu.graph_state import GraphState
from medusa_runtime.engine.gpu.placed_memory import BASE, OTHER_BASE, PlacedMemory
from medusa_runtime.engine.torch.kv_cache import KvCache, KvShape
from medusa_runtime.errors import DeviceError
from medusa_runtime.state.graphs.blob_format import decode_blueprints, encode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import Piece
from medusa_runtime.state.graphs.materialization.images import ImageStore
from torch import Tensor

WIDTH, LAYERS, VOCAB, SIZES = 16, 3, 32, (1, 2, 4)
ROW = WIDTH * 4


def p(value: int) -> bytes:
    return struct.pack("<Q", value)


def i(value: int) -> bytes:
    return struct.pack("<i", value)


class Model:
    """Embedding, layers and head made of the toy's kernels.

    ``odd``: the last layer has a kernel that the others do not have. ``slots``: how many the KV cache has, which some
    kernels get as a parameter. ``stale``: an address that the stack still has in structures passed by value.
    """

    def __init__(self, cuda: FakeCuda, weights: Tensor, odd: bool = False, stale: int = 0) -> None:
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self._cuda, self._at, self._odd = cuda, weights.data_ptr(), odd
        self.slots, self._stale = 0, stale or cuda.at["given back"] + 64
        self.layers_run: list[int] = []

    def _gemv(self, weight: int, x: int, y: int, rows: int) -> None:
        cuda = self._cuda
        cuda.driver.call("cuMemsetD32Async", y, 0, rows, cuda.current.cuda_stream)
        garbage = (self._stale, self.slots, 0, 0)
        cuda.kernels.launch("gemv", [struct.pack("<QQQii4Q", weight, x, y, rows, WIDTH, *garbage)])

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        out = self._cuda.empty(len(token_ids), WIDTH)
        for row in range(len(token_ids)):
            at = token_ids.data_ptr() + row * 8
            self._cuda.kernels.launch("embed", [p(self._at), p(at), p(out.data_ptr() + row * ROW), i(WIDTH)])
        return out

    def run_layers(
        self, hidden: Tensor, positions: Tensor, attention: Any, start: int = 0, stop: int | None = None
    ) -> Tensor:
        stop = LAYERS if stop is None else stop
        self.layers_run.append(stop - start)
        for layer in range(start, stop):
            out = self._cuda.empty(*hidden.shape)
            for row in range(len(hidden)):
                x, y = hidden.data_ptr() + row * ROW, out.data_ptr() + row * ROW
                self._gemv(self._at + (VOCAB + layer * WIDTH) * ROW, x, y, WIDTH)
                self._cuda.kernels.launch("scale", [p(y), i(WIDTH), struct.pack("<f", 0.5)])
                if self._odd and layer == LAYERS - 1:
                    self._cuda.kernels.launch("scale", [p(y), i(WIDTH), struct.pack("<f", 3.0)], other=True)
            keys, values = attention._cache.layers[layer]
            for part in (keys, values):  # into the cache and out of it
                row = part.view(-1, WIDTH)[: len(out)]
                row.copy_(out)
                out.copy_(row)
            self._cuda.free(hidden)
            hidden = out
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        out = self._cuda.empty(len(hidden), VOCAB)
        head = self._at + (VOCAB + LAYERS * WIDTH) * ROW
        for row in range(len(hidden)):
            x = hidden.data_ptr() + row * ROW
            self._cuda.kernels.launch("add_checked", [p(x), p(x), p(self._cuda.workspace), i(WIDTH)])
            self._gemv(head, x, out.data_ptr() + row * VOCAB * 4, VOCAB)
        self._cuda.free(out)  # the next one's address; what reads it was launched before
        return out


def answers(cuda: FakeCuda, graphs: DecodeGraphs) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for size, graph in sorted(graphs.graphs.items()):
        for ids in ([1, 2, 3, 4], [31, 0, 7, 7]):
            graphs.inputs.logits.fill_(0)
            graphs.inputs.token_ids[:size] = torch.tensor(ids[:size])
            graph.replay()
            torch.cuda.synchronize()
            bits = graphs.inputs.logits[:size].reshape(-1).view(torch.uint8)
            found.setdefault(str(size), []).append(hashlib.sha256(bytes(bits)).hexdigest()[:16])
    return found


def _other(outputs: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(piece._replace(data=bytes(len(piece.data))) for piece in outputs)


def full(cuda: FakeCuda, bundle: Path) -> list[dict[str, Any]]:
    """Start with the first allocation refused, with the second, and so on. Return how each start ended.

    ``left`` says how many allocations, images and graphs it has left behind.
    """
    library, found = ctypes.CDLL(cuda.driver.file), list[dict[str, Any]]()
    while not found or found[-1]["refused"]:
        alive, state, end = library.fake_alive(), None, dict[str, Any]()
        library.fake_full(len(found) + 1)
        memory: PlacedMemory | None = None
        try:
            memory = PlacedMemory(cuda.driver, HOST, BASE)
            model = model_in(cuda, memory)
            cache = KvCache(KvShape(LAYERS, 1, WIDTH, torch.float32), 5, memory)
            graphs = DecodeGraphs(model, cache, CudaCapturer(HOST), sizes=SIZES, max_model_len=64, memory=memory)  # type: ignore[arg-type]
            state = GraphState(model, graphs, memory)  # type: ignore[arg-type]
            restored = state.restore(decode_blueprints(bundle.read_bytes()), validate="all")
            graphs.adopt(restored)
            reasons = state.restored.reasons.values() if state.restored is not None else ()
            end = {"answers": answers(cuda, graphs), "reasons": sorted({str(mismatch) for mismatch in reasons})}
            graphs.graphs.clear()
        except DeviceError as error:
            end = {"error": str(error)}
        if state is not None:
            state.close()
        for name in list(memory.ranges if memory is not None else ()):
            memory.free(name)  # type: ignore[union-attr]
        found.append({**end, "refused": not library.fake_left(), "left": library.fake_alive() - alive})
    library.fake_full(0)
    return found


def model_in(cuda: FakeCuda, memory: PlacedMemory, **options: Any) -> Model:
    """Return a model whose weights are in this memory, the same each time."""
    numbers = random.Random(3)
    count = (2 * VOCAB + LAYERS * WIDTH) * WIDTH
    weights = memory("weights", count * 4)
    weights.view(torch.float32)[:] = torch.tensor([numbers.uniform(-1, 1) for _ in range(count)])
    return Model(cuda, weights, **options)


def main(phase: str, options: dict[str, Any]) -> dict[str, Any]:
    cuda = FakeCuda()
    cuda.install()
    if phase == "full":
        return {"starts": full(cuda, Path(options["bundle"]))}
    memory = PlacedMemory(cuda.driver, HOST, OTHER_BASE if phase == "dump" else options.get("base", BASE))
    recording = phase in ("dump", "materialize")
    pool = open_pool(cuda.driver, OTHER_POOL_BASE if phase == "dump" else POOL_BASE) if recording else None
    for address in options.get("take", []):
        cuda.driver.handle("cuMemAddressReserve", 1 << 30, 0, address, 0)
    stale = 0
    if pool is not None and "stale" in options:
        stale = pool.memory_range.address + options["stale"]
    model = model_in(cuda, memory, odd=options.get("odd", False), stale=stale)
    cache = KvCache(KvShape(LAYERS, 1, WIDTH, torch.float32), options.get("blocks", 5), memory)
    if "told" in options:
        model.slots = len(cache.slots[0][0])
    capturer = CudaCapturer(HOST, memory=pool, keep_graph=recording)
    graphs = DecodeGraphs(model, cache, capturer, sizes=SIZES, max_model_len=64, memory=memory)  # type: ignore[arg-type]
    state = GraphState(model, graphs, memory)  # type: ignore[arg-type]
    if phase == "check":  # what a third process does, offline
        blueprints = decode_blueprints(Path(options["bundle"]).read_bytes())
        if broken := options.get("broken"):
            graphs_ = [
                replace(one, outputs=_other(one.outputs)) if one.key == broken else one for one in blueprints.graphs
            ]
            blueprints = replace(blueprints, graphs=tuple(graphs_))
        if gpu := options.get("gpu"):
            blueprints = replace(blueprints, fingerprint={**blueprints.fingerprint, "gpu": gpu})
        if options.get("full"):
            os.environ["FAKE_CUDA_MEMORY"] = "0"
        attempts = Attempts(Path(options.get("attempts", os.devnull)))
        checked = state.check(decode_blueprints(encode_blueprints(blueprints)), attempts)
        if "second" in options:
            save_blueprints(checked, Path(options["out"]))
            checked = state.unpin(checked, decode_blueprints(Path(options["second"]).read_bytes()), attempts)
            save_blueprints(checked, Path(options["out"]))
        return {"kept": [graph.key for graph in checked.graphs], "refused": checked.refused}
    if phase == "restore":
        blueprints = decode_blueprints(Path(options["bundle"]).read_bytes())
        if options.get("without_images"):
            blueprints = replace(blueprints, images={})
        model.layers_run.clear()
        if options.get("begun"):  # as the engine begins, before it knows the weights
            named = {one.name for one in state._named()}
            sizes = sorted(state.begin(blueprints))
            assert state._restorer is not None
            assert state._placement is not None
            mapped = sorted(state._placement.addresses.keys() - named)
            return {"sizes": sizes, "images": len(state._restorer._finder._libraries), "mapped": mapped}
        try:
            graphs.adopt(state.restore(blueprints, validate="all"))
        except DeviceError as error:
            return {"lost": str(error)}
        assert state.restored is not None
        reasons = {key: str(mismatch) for key, mismatch in state.restored.reasons.items()}
        return {"answers": answers(cuda, graphs), "reasons": reasons, "layers": model.layers_run}
    while graphs.pending:
        graphs.capture_next()
    if phase == "dump":
        save_blueprints(state.dump(capturer, ImageStore(cuda.kernels.images)), Path(options["out"]))
        return {}
    second = decode_blueprints(Path(options["second"]).read_bytes()) if "second" in options else None
    made = state.materialize(capturer, ImageStore(cuda.kernels.images), second)
    save_blueprints(made, Path(options["out"]))
    names = sorted({made.ranges[one.memory_range].name for graph in made.graphs for one in graph.relocations})
    pinned = sorted({made.ranges[number].name for graph in made.graphs for number in graph.pinned})
    contents = [[made.ranges[one.memory_range].name, len(one.data)] for one in made.contents]
    found = {"answers": answers(cuda, graphs), "refused": made.refused, "names": names, "pinned": pinned}
    return {**found, "contents": contents}


def command(arguments: list[str]) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    phase, options = arguments
    print(json.dumps(main(phase, json.loads(options))))


if __name__ == "__main__":
    command(sys.argv[1:])
