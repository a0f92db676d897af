"""`medusa inspect`: what a checkpoint and its state bundle contain, from headers and small files alone."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from math import prod
from typing import Any

from medusa_runtime.checkpoint.adapter import ADAPTER_CONFIG, AdapterConfig, check_matrices
from medusa_runtime.checkpoint.reader import Checkpoint, open_checkpoint
from medusa_runtime.config import OPTIONS, Settings, from_env
from medusa_runtime.errors import ConfigError, MedusaError, StateError, short_repr
from medusa_runtime.logs import for_terminal
from medusa_runtime.models.fields import read_object
from medusa_runtime.storage.base import redacted

from ..flags import add_model, model_argument
from ..progress import size
from . import bundle_summary
from .verdict import chose_engine, judge

_SHAPE_FIELDS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "KV heads",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "positions",
}
_MOST_NAMES, _MOST_SHOWN = 8, 100  # architectures, and characters of one

# These settings decide which artifacts are valid, as at a start.
_STATE_FLAGS = (
    "model",
    "state",
    "trust_state",
    "trust_key",
    "engine",
    "device",
    "dtype",
    "max_model_len",
    "max_batched_tokens",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "a folder, a safetensors file, or any URL that serve takes")
    parser.add_argument("--tensors", action="store_true", help="list the tensors in the order they are fetched")
    for option in OPTIONS:
        if option.field in _STATE_FLAGS and option.field != "model":
            parser.add_argument(option.flag, metavar=option.form, help=option.help)
    parser.add_argument("--verify", action="store_true", help="read all of the state bundle, also its large blobs")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    flags = {name: getattr(arguments, name) for name in _STATE_FLAGS} | {"model": model_argument(arguments)}
    settings = from_env(os.environ, **flags)
    if settings.model is None:
        raise ConfigError("expected a checkpoint: medusa inspect URL, or --model URL")
    checkpoint = open_checkpoint(settings.model)
    try:
        found = {"url": redacted(settings.model), **summarize(checkpoint)}
        found["backend"] = _backend(checkpoint, settings, chosen=chose_engine(arguments))
        found["state"] = _state(checkpoint, settings, arguments.verify)
    finally:
        checkpoint.store.close()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    lines = as_text(found)
    if arguments.tensors:
        width = max(map(len, found["tensors"]), default=0)
        for name, tensor in found["tensors"].items():
            shape = "×".join(map(str, tensor["shape"])) or "scalar"
            lines.append(
                f"{name:{width}}  {tensor['dtype']:5} {shape:>16} {size(tensor['bytes']):>10}  {tensor['shard']}"
            )
    for line in lines:
        print(for_terminal(line))
    return 0


def _state(checkpoint: Checkpoint, settings: Settings, verify: bool) -> dict[str, Any] | None:
    """Summarize the bundle. One that cannot be read is shown as such: a start would go on without it."""
    if settings.state == "none":
        return None
    try:
        return bundle_summary.summarize(checkpoint, settings, verify=verify)
    except StateError as error:
        return {
            "url": redacted(settings.state or checkpoint.store.url),
            "artifacts": [{"kind": "manifest.json", "problem": str(error)}],
        }


def _backend(checkpoint: Checkpoint, settings: Settings, *, chosen: bool) -> dict[str, str]:
    """Report what would serve the checkpoint, or why nothing would."""
    if ADAPTER_CONFIG in checkpoint.files:
        try:
            adapter = AdapterConfig.read(checkpoint.files[ADAPTER_CONFIG])
            if settings.engine != "vllm":  # which has adapters of more kinds
                check_matrices(adapter, checkpoint.index.tensors)
        except MedusaError as error:
            return {"problem": f"{error} [{error.code}]"}
        return {"kind": "adapter", "architecture": "", "text": "beside its base model: --lora-modules NAME=URL"}
    verdict = judge(checkpoint, settings, chosen=chosen)
    problem = {"problem": verdict.problem} if verdict.problem else {}
    found = verdict.backend
    if found is None:
        return problem
    return {"kind": found.kind, "architecture": found.architecture, "text": str(verdict), **problem}


def summarize(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything as plain values, tensors in execution order. Raises CorruptError for a bad config.json."""
    index = checkpoint.index
    parameters: Counter[str] = Counter()
    for entry in index.tensors.values():
        parameters[entry.dtype] += prod(entry.shape)
    return {
        "config": read_object(checkpoint.files.get, "config.json") or {},
        "adapter": _adapter(checkpoint),
        "bytes": index.total_bytes,
        "parameters": sum(parameters.values()),
        "parameters_by_dtype": dict(parameters.most_common()),
        "shards": [{"name": s.name, "bytes": s.size_bytes, "version": s.version} for s in index.shards],
        "files": {name: len(data) for name, data in checkpoint.files.items()},
        "tensors": {
            name: {
                "dtype": (entry := index.tensors[name]).dtype,
                "shape": list(entry.shape),
                "bytes": entry.stop - entry.start,
                "shard": index.shards[entry.shard].name,
            }
            for name in index.order
        },
    }


def as_text(found: dict[str, Any]) -> list[str]:
    config, count = found["config"], len(found["shards"])
    sizes = {text: config[name] for name, text in _SHAPE_FIELDS.items() if config.get(name) is not None}
    shape = ", ".join(f"{short_repr(value)} {text}" for text, value in sizes.items())
    dtypes = ", ".join(f"{dtype} {_millions(number)}" for dtype, number in found["parameters_by_dtype"].items())
    names = config.get("architectures")
    # "runs" says what is wrong with others.
    names = [str(name)[:_MOST_SHOWN] for name in names[:_MOST_NAMES]] if isinstance(names, list) else []
    unnamed = "no architecture in config.json" if "config.json" in found["files"] else "no config.json"
    rows = {
        "model": found["adapter"] or ", ".join(names or [unnamed]),
        "shape": shape,
        "weights": f"{size(found['bytes'])} in {count} shard{'s' * (count > 1)}, {len(found['tensors'])} tensors",
        "types": f"{dtypes} parameters",
        "files": ", ".join(found["files"]),
        "runs": found["backend"].get("text") or f"no: {found['backend']['problem']}",
    }
    lines = [f"  {name:8} {text}" for name, text in rows.items() if text]
    state = [] if found["adapter"] and found["state"] is None else bundle_summary.as_text(found["state"])
    return [found["url"], *lines, *state]


def _adapter(checkpoint: Checkpoint) -> str:
    """Say what kind of adapter this is; empty for a whole model."""
    if ADAPTER_CONFIG not in checkpoint.files:
        return ""
    try:
        config = AdapterConfig.read(checkpoint.files[ADAPTER_CONFIG])
    except MedusaError:
        return "an adapter"
    targets = f" for {', '.join(config.targets)}" if config.targets else ""
    return f"a LoRA adapter of rank {config.rank}{targets}" + (f", of {config.base}" if config.base else "")


def _millions(count: int) -> str:
    if count < 1e5:
        return f"{count:,}"
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
