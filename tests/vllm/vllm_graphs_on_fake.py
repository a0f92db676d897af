"""vLLM's own graph manager, inputs and capture on the fake driver: ``materialize|restore`` (JSON in and out).

With ``check``, it is the process that checks materialized graphs: ``check OPTIONS -m MODULE OUT UNCHECKED check``.

The manager, its warm-ups and captures, the input buffers and the layout of dummy batches are vLLM's. The model consists
of the toy's kernels, and reads what vLLM gives it.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import logging
import os
import random
import struct
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support/models"))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime/engine/gpu"))
from answering_engine import AnsweringEngine
from fake_torch_cuda import HOST, FakeCuda, FakeMemPool
from medusa_runtime.engine.gpu.graph_pool import OTHER_POOL_BASE, POOL_BASE
from medusa_runtime.engine.gpu.placed_memory import tensor_at
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import GRAPH_POOL
from medusa_runtime.state.graphs.materialization.images import ImageStore
from medusa_vllm import engine
from medusa_vllm.gpu import graph_capture, worker
from medusa_vllm.gpu.graph_state import VllmGraphState, begin_loading
from medusa_vllm.gpu.graphs import GraphManager, NoTimeline
from medusa_vllm.gpu.recording import Recording, RecordingManager
from torch import Tensor, nn
from toy import MAGIC
from vllm.compilation import cuda_graph
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBuffers

WIDTH, LAYERS, VOCAB, SIZES, BLOCK, BLOCKS = 16, 3, 64, (4, 2, 1), 4, 40
ROW = WIDTH * 4
OURS = ("medusa_runtime", "medusa_vllm")


def p(value: int) -> bytes:
    return struct.pack("<Q", value)


def i(value: int) -> bytes:
    return struct.pack("<i", value)


class Model(nn.Module):
    """Embeds, scales through a layer, and adds what a workspace allows.

    ``unnamed``: it reads memory that no attribute leads to. ``product``: it reads cuBLAS' workspace. ``old``: the
    offset of an old address in the graphs' pool, which is in its parameters and nothing reads. ``astray``: how many
    bytes before its weights a step of two rows begins to read. ``table``: its first forward of two rows writes there
    what those need, so that they are wrong in a process that has not run it.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        weights: Tensor,
        unnamed: bool,
        *,
        product: bool = False,
        old: int = 0,
        astray: int = 0,
        table: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights, requires_grad=False)
        self._cuda, self._unnamed, self._product = [cuda], unnamed, product
        self._old, self._astray = old, astray
        self.start_layer, self.end_layer = 0, LAYERS  # as vLLM's models have them
        self.forwards = self.layers = 0
        self.table = None if table is None else nn.Parameter(table, requires_grad=False)

    def forward(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
        self.forwards += 1
        (cuda,) = self._cuda
        rows, weights = len(input_ids), self.weights.data_ptr()
        matrix = weights + VOCAB * ROW - (self._astray if rows == 2 else 0)
        self.layers += self.end_layer - self.start_layer
        hidden, out = cuda.empty(rows, WIDTH), cuda.empty(rows, WIDTH)
        for row in range(rows):
            x, y = hidden.data_ptr() + row * ROW, out.data_ptr() + row * ROW
            cuda.kernels.launch("embed", [p(weights), p(input_ids.data_ptr() + 4 * row), p(x), i(WIDTH)])
            for layer in range(self.start_layer, self.end_layer):
                x, y = (x, y) if layer == self.start_layer else (y, x)
                cuda.driver.call("cuMemsetD32Async", y, 0, WIDTH, cuda.current.cuda_stream)
                cuda.kernels.launch(
                    "gemv",
                    [struct.pack("<QQQii4Q", matrix, x, y, WIDTH, WIDTH, *self._garbage())],
                )
            if self._unnamed:
                cuda.kernels.launch("add_checked", [p(x), p(y), p(cuda.at["workspace"] + 64), i(WIDTH)])
            if self._product:
                cuda.kernels.launch("add_checked", [p(x), p(y), p(cuda.workspace), i(WIDTH)])
            self._look_up(rows, x, y)
        cuda.free(hidden)
        cuda.free(out)
        return out

    def _garbage(self) -> list[int]:
        (cuda,) = self._cuda
        segments = cuda.kernels.pool.segments if self._old and isinstance(cuda.kernels.pool, FakeMemPool) else [0]
        return [segments[0] + self._old, 0, 0, 0]

    def _look_up(self, rows: int, x: int, y: int) -> None:
        if self.table is not None and rows == 2:
            (cuda,) = self._cuda
            if not self.table.any():
                cuda.driver.write(self.table.data_ptr(), MAGIC)
            cuda.kernels.launch("add_checked", [p(x), p(y), p(self.table.data_ptr()), i(WIDTH)])


class Piece:
    """A compiled function, with the attributes that vLLM's wrapper reads."""

    def __init__(self, index: int, run: Any) -> None:
        self.vllm_backend = SimpleNamespace(prefix="backbone")
        self.piecewise_compile_index, self.is_last_graph = index, index == 1
        self._run, self.calls = run, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._run(*arguments)


class PiecewiseModel(Model):
    """Two compiled functions, with a launch between them that is in no graph."""

    def __init__(self, cuda: FakeCuda, weights: Tensor, config: VllmConfig, **options: Any) -> None:
        super().__init__(cuda, weights, False, **options)
        self._config = config
        self.pieces: list[Piece] = []
        self._wrapped: list[Any] = []

    def forward(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
        if not self.pieces:  # compiled by the first forward
            self.pieces = [Piece(0, self._first), Piece(1, self._second)]
            self._wrapped = [
                cuda_graph.CUDAGraphWrapper(piece, self._config, CUDAGraphMode.PIECEWISE) for piece in self.pieces
            ]
        hidden, (room, _) = self._wrapped[0](input_ids)
        (cuda,) = self._cuda
        target, source, stream = room.data_ptr(), hidden.data_ptr(), cuda.current.cuda_stream
        cuda.driver.call("cuMemcpyDtoDAsync_v2", target, source, room.nbytes, stream)
        cuda.kernels.launch("scale", [p(target), i(room.numel()), struct.pack("<f", 0.25)])
        found: Tensor = self._wrapped[1](hidden, room)
        return found

    def _first(self, input_ids: Tensor) -> Any:
        (cuda,) = self._cuda
        hidden, room = cuda.empty(len(input_ids), WIDTH), cuda.empty(len(input_ids), WIDTH)
        for row in range(len(input_ids)):
            at = [self.weights.data_ptr(), input_ids.data_ptr() + 4 * row, hidden.data_ptr() + row * ROW]
            cuda.kernels.launch("embed", [*map(p, at), i(WIDTH)])
        return hidden, [room, len(input_ids)]

    def _second(self, hidden: Tensor, room: Tensor) -> Tensor:
        (cuda,) = self._cuda
        out = cuda.empty(len(hidden), WIDTH)
        for row in range(len(hidden)):
            x, y = (tensor.data_ptr() + row * ROW for tensor in (room, out))
            cuda.driver.call("cuMemsetD32Async", y, 0, WIDTH, cuda.current.cuda_stream)
            weight = self.weights.data_ptr() + VOCAB * ROW
            cuda.kernels.launch("gemv", [struct.pack("<QQQii4Q", weight, x, y, WIDTH, WIDTH, *self._garbage())])
            self._look_up(len(hidden), x, y)
        return out


class Placed:
    """Puts tensors into device memory one by one, as vLLM does."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __call__(self, tensor: Tensor) -> Tensor:
        address = self._cuda.driver.handle("cuMemAlloc_v2", tensor.nbytes)
        placed = tensor_at(address, tensor.nbytes, HOST).view(tensor.dtype).view(tensor.shape)
        placed.copy_(tensor)
        return placed


def runner_of(cuda: FakeCuda, config: VllmConfig, options: dict[str, Any]) -> Any:
    unnamed, kv_blocks = options.get("unnamed", False), options.get("kv_blocks", BLOCKS)
    words = {}
    if "opaque" in options:
        words["old"] = 4096 if options.get("pool_first") else 72
    if "astray" in options:
        words["astray"] = ROW if options.get("pool_first") else 0
    place, numbers = Placed(cuda), random.Random(5)
    weights = place(torch.tensor([numbers.uniform(-1, 1) for _ in range((VOCAB + WIDTH) * WIDTH)]))
    table = place(torch.zeros(2, dtype=torch.int32)) if "table" in options else None
    buffers = InputBuffers(8, 16, HOST)
    for name, tensor in list(vars(buffers).items()):
        if isinstance(tensor, Tensor):
            setattr(buffers, name, place(tensor))
    slots = place(torch.zeros(1, 16, dtype=torch.int64))
    listed = [place(torch.zeros(8, 4, dtype=torch.int32))]
    tables = SimpleNamespace(input_block_tables=listed, slot_mappings=slots, block_sizes=[BLOCK], cp_size=1)
    tables.get_dummy_block_tables = lambda rows: tuple(table[:rows].zero_() for table in tables.input_block_tables)
    tables.get_dummy_slot_mappings = lambda tokens: tables.slot_mappings[:, :tokens].fill_(-1)
    state = SimpleNamespace(prepare_attn=lambda *_, **__: {}, prepare_dummy_inputs=lambda *_: {})
    return SimpleNamespace(
        model=PiecewiseModel(cuda, weights, config, table=table, **words) if "pieces" in options
        else Model(cuda, weights, unnamed, product="product" in options, table=table, **words),
        kv_caches=[place(torch.zeros(kv_blocks, BLOCK, WIDTH))],
        input_buffers=buffers, block_tables=tables, model_state=state, device=HOST, lora_config=None,
        kv_cache_config=SimpleNamespace(num_blocks=kv_blocks, kv_cache_groups=[]),
        model_config=SimpleNamespace(dtype=torch.float32, hf_config={"layers": 1}, get_vocab_size=lambda: VOCAB),
    )  # fmt: skip


def graph_pool() -> Any:
    return type(current_platform)._global_graph_pool or (0, 1)


def manager_of(config: VllmConfig) -> Any:
    """vLLM's manager, made without the distributed state that its constructor asks for."""
    made = ModelCudaGraphManager.__new__(ModelCudaGraphManager)
    full = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=size, num_reqs=size, uniform_token_count=1)
        for size in SIZES
    ]
    made.__dict__.update(
        vllm_config=config, device=HOST, max_num_reqs=8, compilation_config=config.compilation_config,
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1, ubatch_runner=None, tp_size=1,
        is_first_pp_rank=True, is_last_pp_rank=True, graphs={}, pool=graph_pool(), _graphs_captured=False,
        _max_full_descs_to_capture=None, _capture_mem_samples=None, _capture_descs={CUDAGraphMode.FULL: full},
        _candidates={(size, 0): [one] for size, one in zip(SIZES, full, strict=True)}, _lora_dispatch_map={},
        _max_lora_case=0, use_breakable_cg=False, breakable_cg_runner=None, hidden_states=None, aux_hidden_states=[],
        use_aux_hidden_state_outputs=False, intermediate_tensors=None,
    )  # fmt: skip
    return made


@contextmanager
def captured(cuda: FakeCuda, graph: Any, pool: Any, stream: Any) -> Any:
    """A stand-in for torch.cuda.graph."""
    with cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            yield
        finally:
            graph.capture_end()


def capture(manager: Any, runner: Any) -> None:
    manager.capture(
        runner.model, runner.model_state, runner.input_buffers, None, runner.block_tables, [], runner.kv_cache_config
    )


def digest(hidden: Tensor) -> str:
    torch.cuda.synchronize()
    return hashlib.sha256(bytes(hidden.reshape(-1).view(torch.uint8))).hexdigest()[:16]


@torch.inference_mode()
def answers(manager: Any, runner: Any) -> dict[str, list[str]]:
    """The digests of hidden states, through vLLM's own dispatch and replay."""
    found: dict[str, list[str]] = {}
    for size in SIZES:
        for ids in ([1, 2, 3, 4], [31, 0, 7, 7], [5, 5, 60, 12]):
            manager.hidden_states.fill_(0)
            runner.input_buffers.input_ids[:size] = torch.tensor(ids[:size], dtype=torch.int32)
            one = manager.dispatch(num_reqs=size, num_tokens=size, uniform_token_count=1, num_active_loras=0)
            found.setdefault(str(size), []).append(digest(manager.run_fullgraph(one)))
    return found


@torch.inference_mode()
def piecewise(config: VllmConfig, runner: Any) -> dict[str, list[str]]:
    """The same for piecewise graphs, as vLLM's runner steps through a batch with a prefill."""
    found: dict[str, list[str]] = {}
    for size in SIZES:
        for ids in ([1, 2, 3, 4], [31, 0, 7, 7]):
            buffers = runner.input_buffers
            buffers.input_ids[:size] = torch.tensor(ids[:size], dtype=torch.int32)
            mode, batch = CUDAGraphMode.PIECEWISE, BatchDescriptor(num_tokens=size)
            with set_forward_context({}, config, num_tokens=size, cudagraph_runtime_mode=mode, batch_descriptor=batch):
                hidden = runner.model(buffers.input_ids[:size], buffers.positions[:size])
            found.setdefault(str(size), []).append(digest(hidden))
    return found


def fakes(cuda: FakeCuda) -> list[Any]:
    """Patches for the parts of vLLM and torch that need a device."""
    return [
        patch.object(cudagraph_utils, "graph_capture", lambda device: nullcontext()),
        patch.object(cudagraph_utils, "current_stream", lambda: cuda.current),
        patch.object(cudagraph_utils, "capture_pool", lambda pool, config: nullcontext(pool)),
        patch.object(cudagraph_utils, "has_compiled_submodule", lambda model: True),
        patch.object(cuda_graph, "current_stream", lambda: cuda.current),
        patch.object(cuda_graph, "capture_pool", lambda pool, config: nullcontext(pool)),
        patch.object(cuda_graph, "weak_ref_tensors", lambda tensors: tensors),
        patch.object(cuda_graph, "current_platform", SimpleNamespace(get_global_graph_pool=graph_pool)),
        patch.object(cudagraph_utils, "tqdm", lambda listed, **_: listed),
        patch.object(torch.cuda, "graph", lambda graph, pool, stream: captured(cuda, graph, pool, stream)),
        patch.object(torch, "empty_like", lambda other: Placed(cuda)(torch.zeros(other.shape, dtype=other.dtype))),
        patch.object(torch, "empty", made_on(cuda, torch.empty)),
        patch.object(torch, "mm", lambda one, other: cuda.workspace),
    ]


def start(cuda: FakeCuda, config: VllmConfig, options: dict[str, Any]) -> tuple[Any, Any]:
    """A runner and its manager, in memory that nothing else has used."""
    cuda.renew(pool_first=options.get("pool_first", False))
    cuda.driver.write(cuda.at["workspace"] + 64, struct.pack("<II", 0x4D454455, 0))
    gc.collect()  # wrappers of the start before
    manager = manager_of(config)
    if options.get("pieces"):
        listed = [BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, num_tokens=size, num_reqs=None) for size in SIZES]
        manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
        manager._capture_descs = {CUDAGraphMode.PIECEWISE: listed, **manager._capture_descs}
    return runner_of(cuda, config, options), manager


def record(cuda: FakeCuda, config: VllmConfig, options: dict[str, Any]) -> tuple[Any, Any, Recording]:
    def state_of(runner: Any, manager: Any) -> VllmGraphState:
        runner.cudagraph_manager = manager
        return VllmGraphState(cuda.driver, runner, manager, device="cpu", pool=recording.pool)

    base = OTHER_POOL_BASE if options.get("pool_first") else POOL_BASE
    recording = Recording(base + (len(cuda.mem_pools) << 40))  # another one for each start of this process
    recording.open_pool(cuda.driver)
    runner, manager = start(cuda, config, options)
    recording.runner = runner
    recording.attach(state_of)
    made = RecordingManager.of(manager, recording)
    capture(made, runner)
    return runner, made, recording


def offline(cuda: FakeCuda, config: VllmConfig, options: dict[str, Any]) -> dict[str, Any]:
    other = record(cuda, config, {**options, "pool_first": True})
    second = other[2].state.dump(ImageStore(cuda.kernels.images))
    del other
    runner, manager, recording = record(cuda, config, options)
    made = recording.state.materialize(recording, ImageStore(cuda.kernels.images), second, stream=cuda.current)
    save_blueprints(made, Path(options["out"]))
    names = {made.ranges[r.memory_range].name for graph in made.graphs for r in graph.relocations}
    inputs = {made.ranges[piece.memory_range].name for graph in made.graphs for piece in graph.inputs}
    pinned = [graph.key for graph in made.graphs if graph.pinned]
    found = {"refused": made.refused, "names": sorted(names), "inputs": sorted(inputs), "pinned": pinned}
    if options.get("pieces"):
        found["piecewise"] = piecewise(config, runner)
    return {**found, "answers": answers(manager, runner)}


def online(cuda: FakeCuda, config: VllmConfig, options: dict[str, Any]) -> dict[str, Any]:
    blueprints = decode_blueprints(Path(options["bundle"]).read_bytes())
    if options.get("other_gpu"):
        blueprints = replace(blueprints, fingerprint={**blueprints.fingerprint, "gpu": "Fake B200"})
    if options.get("without_images"):
        blueprints = replace(blueprints, images={})
    if "only" in options:
        key = f"tokens={options['only']} "
        blueprints = replace(blueprints, graphs=tuple(graph for graph in blueprints.graphs if key in graph.key))
    if options.get("take"):
        (pool,) = [one for one in blueprints.ranges if one.name == GRAPH_POOL]
        cuda.driver.handle("cuMemAddressReserve", 1 << 30, 0, pool.address, 0)
    runner, manager = start(cuda, config, options)
    if options.get("wrong_weights"):
        runner.model.weights.data.mul_(1.5)
    kept: list[Any] = []

    def restored(manager: Any) -> Any:
        kept.append(VllmGraphState(cuda.driver, runner, manager, device="cpu"))
        return kept[-1].restore(blueprints, trigger=manager.first_layer, finder=finder, validate="all")

    if options.get("wrong_pieces"):
        blueprints = replace(blueprints, graphs=tuple(map(other_outputs, blueprints.graphs)))
    if without := options.get("without"):
        blueprints = replace(blueprints, graphs=tuple(graph for graph in blueprints.graphs if without not in graph.key))
    if options.get("wrong_results"):
        blueprints = replace(blueprints, results={key: ["tuple", 1] for key in blueprints.results})
    made = GraphManager.of(manager, restored, NoTimeline(), lambda create: kept[-1].restore_pieces(create))
    runner.cudagraph_manager = made
    with patch.object(cuda.driver, "result", side_effect=cuda.driver.result) as called:
        finder = begin_loading(cuda.driver, runner, blueprints)
        capture(made, runner)
    driver = Counter(one.args[0] for one in called.call_args_list)
    kinds = {str(one.num_tokens): type(graph).__name__ for one, graph in made.graphs.items()}
    untouched = bool((runner.input_buffers.input_ids == 0).all())
    found = {"kinds": kinds, "forwards": runner.model.forwards, "layers": runner.model.layers, "untouched": untouched}
    if options.get("pieces"):
        found["calls"] = [piece.calls for piece in runner.model.pieces]
        found["piecewise"] = piecewise(config, runner)
        found["entries"] = [
            {str(one.num_tokens): type(entry.cudagraph).__name__ for one, entry in sorted_entries(wrapper)}
            for wrapper in runner.model._wrapped
        ]
    return {**found, "driver": driver, "answers": answers(made, runner)}


def check(cuda: FakeCuda, config: VllmConfig, options: dict[str, Any], arguments: list[str]) -> None:
    """Run the process that checks graphs, in which a start of vLLM is one of our worker's graphs alone."""

    class Start(AnsweringEngine):
        def __init__(self, *_: Any, **__: Any) -> None:
            step = partial(fault_in_a_step, self) if "breaks" in options else None
            super().__init__(lambda: capture(self._manager, self._runner), step=step)
            self.config = config  # as the engine has it
            self._runner, manager = start(cuda, config, options)
            made = worker.GpuWorker.__new__(worker.GpuWorker)
            made.load_config, made.model_runner = SimpleNamespace(model_loader_extra_config={}), self._runner
            self._manager = GraphManager.of(manager, made.restore_graphs, NoTimeline(), made.restore_pieces)
            self._runner.cudagraph_manager = self._manager

        def close(self) -> None:
            print("the engine is closed", file=sys.stderr)

    with (
        patch.object(graph_capture, "fetch_and_import", lambda settings: (None, None)),
        patch.object(engine, "VllmEngine", Start),
        patch.object(worker, "CudaDriver", lambda: cuda.driver),
        patch.object(worker, "VllmGraphState", partial(VllmGraphState, device="cpu")),
    ):
        graph_capture.main(arguments)


def fault_in_a_step(engine: Any) -> None:
    """Let restored graphs fault from now on, and replay all."""
    os.environ["FAKE_CUDA_FAULT"] = "embed"
    answers(engine._manager, engine._runner)


def other_outputs(graph: Any) -> Any:
    """Change the stored outputs of piecewise graphs."""
    other = tuple(piece._replace(data=bytes(len(piece.data))) for piece in graph.outputs)
    return replace(graph, outputs=other) if "PIECEWISE" in graph.key else graph


def sorted_entries(wrapper: Any) -> Any:
    return sorted(wrapper.concrete_cudagraph_entries.items(), key=lambda item: item[0].num_tokens)


def install() -> tuple[FakeCuda, VllmConfig]:
    config, cuda = VllmConfig(), FakeCuda()
    cuda.install()
    for fake in fakes(cuda):
        fake.start()
    return cuda, config


def main(phase: str, starts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run each start by its name, and return its answer with what it logged as ``log``."""
    (cuda, config), found = install(), {}
    for name, options in starts.items():
        said = io.StringIO()
        handler = logging.StreamHandler(said)
        for ours in OURS:
            logging.getLogger(ours).addHandler(handler)
        found[name] = {**(offline if phase == "materialize" else online)(cuda, config, options), "log": said.getvalue()}
        for ours in OURS:
            logging.getLogger(ours).removeHandler(handler)
    return found


def made_on(cuda: FakeCuda, original: Any) -> Any:
    """Allocate device memory where the call names the device, as a restore does for the hidden states."""

    def empty(*sizes: Any, **options: Any) -> Tensor:
        if options.get("device") is HOST and sizes != (0,):
            return Placed(cuda)(torch.zeros(*sizes, dtype=options["dtype"]))
        found: Tensor = original(*sizes, **options)
        return found

    return empty


if __name__ == "__main__" and sys.argv[1] == "check":
    check(*install(), json.loads(sys.argv[2]), sys.argv[5:])
elif __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    print("\n" + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
