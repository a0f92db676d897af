"""A warm-up before the real model arrives: a whole start and two tokens, with a tiny model whose weights are zeros.

Everything that a process does only once is then done: it has opened libraries, executed deferred modules, built kernels
and started threads.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any

from ..checkpoint.index import Shard, TensorEntry, WeightIndex
from ..config import Settings
from ..region.reader import Region
from ..timeline import Timeline
from .base import Delta, Engine, GenerateRequest, SamplingParams

_HIDDEN, _HEADS, _HEAD, _INNER, _VOCAB, _LAYERS = 64, 2, 32, 128, 256, 2  # vLLM has no smaller heads on a CPU
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEAD,
    "vocab_size": _VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")},
        "merges": [],
    },
}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
_ITEM_BYTES = {"BF16": 2, "F32": 4}


def warm_up(open_engine: Callable[[Region, Settings, Timeline], Engine], settings: Settings) -> None:
    """Open an engine for each dtype in turn, and generate two tokens. Raises what such an engine raises."""
    for dtype in _ITEM_BYTES:
        region = _region(dtype)
        timeline = Timeline.create("warm-up")
        try:
            engine = open_engine(
                region, Settings(engine=settings.engine, device=settings.device, kv_cache_mb=16), timeline
            )
            try:
                _generate(engine)
            finally:
                engine.close()
        finally:
            region.close()
            timeline.close()


def _generate(engine: Engine) -> None:
    stop, first, ends = threading.Event(), queue.SimpleQueue[Delta](), list[Delta]()

    def ask(name: str, on_end: Callable[[Delta], None]) -> None:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(name, "abc" * 8, params)
        engine.add(request, lambda delta: on_end(delta) if delta.finish_reason is not None else None)

    def end(delta: Delta) -> None:
        ends.append(delta)
        stop.set()  # in the engine's thread: set by another one, it would be seen only at the end of an idle wait

    def ask_server() -> None:
        ends.append(first.get())
        try:
            engine.warm_up_server()  # type: ignore[attr-defined]
        finally:
            ask("last", end)

    if hasattr(engine, "warm_up_server"):
        asking = threading.Thread(target=ask_server, name="warm-up")
        asking.start()
        ask("first", first.put)
        engine.run(stop)
        asking.join()
    else:
        ask("last", end)
        engine.run(stop)
    assert all(delta.finish_reason == "length" for delta in ends), ends


def _region(dtype: str) -> Region:
    """Make a complete region with the checkpoint of a small decoder, whose weights are zeros."""
    shapes = _shapes()
    entries, at = {}, 0
    for name, shape in shapes.items():
        size = _ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        entries[name] = TensorEntry(0, at, at + size, dtype, shape)
        at += size
    index = WeightIndex([Shard("model.safetensors", at + 64, 64, "warm-up", None, 0)], entries)
    region = Region.create()
    writer = region.writer()
    names = {"BF16": "bfloat16", "F32": "float32"}
    files: dict[str, Any] = {
        "config.json": {**_CONFIG, "dtype": names[dtype]},
        "tokenizer.json": _TOKENIZER,
        "tokenizer_config.json": _TOKENIZER_CONFIG,
    }
    writer.lay_out(index, {name: json.dumps(body).encode() for name, body in files.items()})
    for chunk in writer.pending():
        writer.publish(chunk)  # a new memfd contains zeros already
    writer.finish()
    return region


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCAB, _HIDDEN)}
    width = _HEADS * _HEAD
    for layer in range(_LAYERS):
        stem = f"model.layers.{layer}."
        shapes |= {stem + f"self_attn.{part}_proj.weight": (width, _HIDDEN) for part in "qkv"}
        shapes |= {
            stem + "self_attn.o_proj.weight": (_HIDDEN, width),
            stem + "mlp.gate_proj.weight": (_INNER, _HIDDEN),
            stem + "mlp.up_proj.weight": (_INNER, _HIDDEN),
            stem + "mlp.down_proj.weight": (_HIDDEN, _INNER),
            stem + "input_layernorm.weight": (_HIDDEN,),
            stem + "post_attention_layernorm.weight": (_HIDDEN,),
        }
    return {**shapes, "model.norm.weight": (_HIDDEN,), "lm_head.weight": (_VOCAB, _HIDDEN)}
