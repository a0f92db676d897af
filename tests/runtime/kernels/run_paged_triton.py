"""Run by test_paged_triton.py: ``interpret`` compares with torch, ``compile`` makes a cubin for sm_90 without a GPU.

``variants`` counts how often triton would compile each kernel for the steps of one model.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def interpret(shape: dict[str, Any]) -> dict[str, Any]:
    import torch
    from medusa_runtime.kernels import paged, paged_triton

    torch.manual_seed(0)
    dtype = getattr(torch, shape.get("dtype", "float32"))
    contexts = torch.tensor([1, 16, 63, 64, 65, 200, 333])
    blocks, width, size = 180, 24, shape["head_dim"]
    pools = [torch.randn(blocks, 16, shape["kv_heads"], size, dtype=dtype) for _ in range(2)]
    tables = torch.randperm(blocks)[: len(contexts) * width].view(len(contexts), width).to(torch.int32)
    for pool in pools:  # what no token sees must not be read
        for row, context in enumerate(contexts.tolist()):
            for block in tables[row, -(-context // 16) :].tolist():
                pool[block] = float("nan")
    q = torch.randn(len(contexts), shape["heads"], size, dtype=dtype)
    options = {"scale": size**-0.5, "window": shape.get("window")}
    rows = torch.arange(len(contexts), dtype=torch.int32)
    expected = paged.attention(q, *pools, tables, rows, contexts.to(torch.int32), **options).float()
    worst = 0.0
    for splits in (1, 4, 16):
        paged_triton.splits_for = lambda programs, processors, splits=splits: splits
        found = paged_triton.decode(q, *pools, tables, contexts, **options).float()
        worst = max(worst, float((found - expected).norm() / expected.norm()))
        if found.isnan().any():
            return {"nan": True, "error": worst}
    return {"nan": False, "error": worst, "written": written(pools, len(contexts))}


def written(pools: list[Any], tokens: int) -> bool:
    """Keys and values of a fused product, each at its slot and nowhere else."""
    import torch
    from medusa_runtime.kernels import paged_triton

    keys, values = (pool.flatten(0, 1) for pool in pools)
    fused = torch.randn(tokens, 3 * keys[0].numel(), dtype=keys.dtype)
    k, v = (part.view(tokens, *keys.shape[1:]) for part in fused.chunk(3, dim=1)[1:])
    slots = torch.randperm(len(keys))[:tokens]
    wanted = [part.clone().index_copy_(0, slots, new) for part, new in ((keys, k), (values, v))]
    paged_triton.write(keys, values, slots, k, v)
    paged_triton.write(keys, values, slots[:0], k[:0], v[:0])
    pairs = zip((keys, values), wanted, strict=True)
    return all(torch.equal(one.nan_to_num(7), other.nan_to_num(7)) for one, other in pairs)


def compile_it(shape: dict[str, Any]) -> dict[str, Any]:
    import triton
    from medusa_runtime.kernels import paged_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    group, size = shape["heads"] // shape["kv_heads"], shape["head_dim"]
    rows, dims = max(triton.next_power_of_2(group), 16), triton.next_power_of_2(size)
    constants = {"WINDOW": shape.get("window", 0), "GROUP": group, "HEAD_DIM": size, "BLOCK_SIZE": 16}
    constants |= {"KV_HEADS": shape["kv_heads"], "ROWS": rows, "DIMS": dims, "TILE": 64, "SPLITS": 4}
    kinds = {"q": "*bf16", "keys": "*bf16", "values": "*bf16", "tables": "*i32", "contexts": "*i64", "scale": "fp32"}
    kinds |= {"out": "*fp32", "sums": "*fp32", "maxima": "*fp32"}
    target = GPUTarget("cuda", 90, 32)
    total = shared = 0
    names = set()
    for kernel, known in (
        (paged_triton._attend, kinds),
        (paged_triton._combine, {"parts": "*fp32", "sums": "*fp32", "maxima": "*fp32", "out": "*bf16"}),
        (paged_triton._write, {"k": "*bf16", "v": "*bf16", "keys": "*bf16", "values": "*bf16", "slots": "*i64"}),
    ):
        inputs = kernel.arg_names
        signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in inputs}
        for splits in (1, 4) if "SPLITS" in inputs else (4,):
            values = constants | {"SPLITS": splits}
            used = {(inputs.index(name),): value for name, value in values.items() if name in inputs}
            options = {"num_warps": 8 if rows > 64 else 4, "num_stages": 2}
            compiled = triton.compile(ASTSource(kernel, signature, used), target=target, options=options)
            total += len(compiled.asm["cubin"])
            shared = max(shared, compiled.metadata.shared)
            assert ".target sm_90" in compiled.asm["ptx"]
            assert f".entry {compiled.metadata.name}(" in compiled.asm["ptx"]
            names.add(compiled.metadata.name)
    return {"target": "sm_90", "cubin_bytes": total, "shared_bytes": shared, "names": sorted(names)}


def variants(shape: dict[str, Any]) -> dict[str, Any]:
    """Steps of 1 to 3 sequences, with block tables of several widths, each in the places that ``GpuAttention`` has.

    Before them, what ``DecodeKernels`` launches.
    """
    from types import SimpleNamespace

    import torch
    import triton
    from medusa_runtime.engine.gpu.decode_kernels import DecodeKernels
    from medusa_runtime.kernels import paged_triton
    from medusa_runtime.timeline import Timeline
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    compiled: dict[str, set[str]] = {"_attend": set(), "_write": set()}
    for name, seen in compiled.items():
        kernel = getattr(paged_triton, name)
        bind = kernel.create_binder()[-1]

        def run(*args: Any, seen: Any = seen, bind: Any = bind, grid: Any, warmup: Any, **kwargs: Any) -> None:
            seen.add(repr(bind(*args, debug=False, **kwargs)[1:]))

        kernel.run = run
    paged_triton._combine.run = lambda *args, **kwargs: None
    paged_triton.splits_for = lambda programs, processors: 4
    config: Any = SimpleNamespace(
        num_heads=shape["heads"], num_kv_heads=shape["kv_heads"], head_dim=shape["head_dim"], windows=(None,) * 4
    )
    DecodeKernels(config, torch.bfloat16, torch.device("cpu"), Timeline.create("variants"))._launch()
    assert {name: len(seen) for name, seen in compiled.items()} == {"_attend": 1, "_write": 1}
    pools = [torch.empty(64, 16, shape["kv_heads"], shape["head_dim"], dtype=torch.bfloat16) for _ in range(2)]
    for count in (1, 2, 3):
        slots, lengths = torch.ones((2, count + 5), dtype=torch.long)
        q = torch.empty(count, shape["heads"], shape["head_dim"], dtype=torch.bfloat16)
        k, v = (q.new_empty(count, shape["kv_heads"], shape["head_dim"]) for _ in range(2))
        paged_triton.write(pools[0].flatten(0, 1), pools[1].flatten(0, 1), slots[:count], k, v)
        for width in (1, 9, 16, 32):
            tables = torch.zeros((count, width), dtype=torch.int32)
            paged_triton.decode(q, *pools, tables, lengths[:count], scale=0.1, window=None)
    return {name: len(seen) for name, seen in compiled.items()}


MODES = {"interpret": interpret, "compile": compile_it, "variants": variants}

if __name__ == "__main__":
    print(json.dumps(MODES[sys.argv[1]](json.loads(sys.argv[2]))))
