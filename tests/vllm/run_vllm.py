"""Run by tests with an interpreter that has vLLM: the same prompt through our engine and through vLLM's own.

python run_vllm.py CHECKPOINT KERNELS [URL LIBRARY] → one JSON line on standard output

With the LIBRARY of a fake driver, ours takes its weights from the URL by a link to that driver's device, as on a GPU,
and releases the host's.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import medusa_vllm  # noqa: F401  makes --engine vllm known
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

PROMPT = [3, 14, 15, 9, 26, 5]
TOKENS = 12


def ours(checkpoint: str, kernels: str, *, host_weights: str = "keep") -> dict[str, Any]:
    settings = Settings(
        model=checkpoint,
        engine="vllm",
        kv_cache_mb=64,
        max_concurrency=4,
        threads=2,
        kernels=kernels,
        host_weights=host_weights,
        max_batched_tokens=2 * len(PROMPT),
    )
    region, timeline = Region.create(), Timeline.create("engine")
    prefetch(region, checkpoint, settings=settings, timeline=timeline)
    from medusa_runtime.zygote import load_engine_class

    engine = load_engine_class(settings)(region, settings, timeline)
    stop, deltas = threading.Event(), list[Delta]()

    def sink(delta: Delta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:  # the first step does not count in prefill_tokens_per_s
            engine.add(GenerateRequest("two", tuple(PROMPT), SamplingParams(max_tokens=1)), lambda delta: stop.set())

    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    engine.add(GenerateRequest("one", tuple(PROMPT), params), sink)
    engine.run(stop)
    shared = shared_bytes(engine, region)
    engine.close()
    return {
        "tokens": [token for delta in deltas for token in delta.token_ids],
        "logprobs": [logprob.logprob for delta in deltas for logprob in delta.logprobs],
        "reason": deltas[-1].finish_reason,
        "stored": next(stage.detail.get("stored") for stage in timeline.stages() if stage.name == "apply"),
        "stages": sorted({stage.name for stage in timeline.stages()}),
        "shared_parameter_bytes": shared,
        "compilations": engine.stats().get("compilations_total"),
        "prefill_tokens_per_s": engine.stats()["prefill_tokens_per_s"],
        "held_bytes": os.fstat(region.fd).st_blocks * 512,
    }


def shared_bytes(engine: Any, region: Region) -> int:
    """Return how many bytes of the weights that products use lie in the checkpoint's mapped files."""
    worker = engine._core.model_executor.driver_worker.worker
    total = 0
    with open("/proc/self/maps") as maps:
        spans = [tuple(int(edge, 16) for edge in line.split()[0].split("-")) for line in maps if ".safetensors" in line]
    model = worker.get_model()
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    stored = [weight for method in methods for weight in getattr(method, "weights", ())]
    for weight in (*model.parameters(), *stored):
        if any(start <= weight.data_ptr() < stop for start, stop in spans):
            total += weight.numel() * weight.element_size()
    return total


@contextmanager
def linked(library: Path) -> Iterator[list[Any]]:
    """Yield the tensors that a link to the fake device hands over."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "support" / folder) for folder in ("gpus", "processes")]
    from fake_copies import Fake
    from medusa_runtime.load.upload.cuda_link import CudaLink
    from medusa_vllm.weights import uploading

    handed: list[Any] = []
    with (
        Fake(library).link() as link,
        patch.object(uploading, "link_to", lambda model, config: nullcontext(link)),
        patch.object(CudaLink, "hand_over", lambda self, room: handed.append(room)),
    ):
        yield handed


def theirs(checkpoint: str) -> list[int]:
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    llm = LLM(
        model=checkpoint,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=4,
        disable_log_stats=True,
        load_format="safetensors",
    )
    params = VllmParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is not the answer
    checkpoint, kernels, *link = sys.argv[1:]
    if link:
        with linked(Path(link[1])) as handed:
            answer = ours(link[0], kernels, host_weights="release")
        answer["handed"] = len(handed)
    else:
        answer = ours(checkpoint, kernels)
    answer["theirs"] = theirs(checkpoint)
    os.write(out, json.dumps(answer).encode() + b"\n")
    os._exit(0)
