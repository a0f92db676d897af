"""A running request as a value: header and tensors, to go on with in another engine (BlitzScale, ParaServe §6.2)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import RequestError
from ..base import GenerateRequest, SamplingParams, StructuredOutputs
from ..serving.sequence import Dice, Sequence
from .kv_cache import KvCache, KvShape

_VERSION = 1


class ExportedRequest(NamedTuple):
    """``header`` is JSON-serializable; ``tensors`` is empty or one [layers, 2, tokens, kv_heads, head_dim]."""

    header: dict[str, Any]
    tensors: tuple[Tensor, ...]


def export(sequence: Sequence, cache: KvCache) -> ExportedRequest:
    """Everything the sequence needs to continue as if nothing had happened. RequestError with an adapter."""
    request = sequence.request
    if request.adapter is not None:
        raise RequestError("export: expected a request of the base model, found one of an adapter")
    header = {
        "version": _VERSION,
        "kv": _geometry(cache.shape),
        "id": request.id,
        "params": asdict(request.params),
        "tokens": list(sequence.tokens),
        "prompt_length": sequence.prompt_length,
        "computed": sequence.computed,
        "seed": sequence.dice.seed,
        "draws": sequence.dice.draws,
        "transcript": sequence.transcript.state(),
    }
    tensors = (cache.read_out(sequence.blocks, sequence.computed),) if sequence.computed else ()
    return ExportedRequest(header, tensors)


def request_of(exported: ExportedRequest, shape: KvShape) -> GenerateRequest:
    """The request as it was first made, its prompt as token ids. RequestError when it cannot continue here."""
    header, tensors = exported
    if header.get("version") != _VERSION:
        raise RequestError(
            f"import: expected version {_VERSION} of an exported request, found {header.get('version')!r}"
        )
    if header["kv"] != _geometry(shape):
        raise RequestError(
            f"import: expected a KV cache of {_geometry(shape)}, found {header['kv']}; both engines must run one model"
        )
    expected = (shape.layers, 2, header["computed"], shape.kv_heads, shape.head_dim)
    if header["computed"] and (len(tensors) != 1 or tensors[0].shape != expected or tensors[0].dtype != shape.dtype):
        found = [tuple(tensor.shape) for tensor in tensors]
        raise RequestError(f"import: expected one {shape.dtype} tensor of {expected}, found {found}")
    if not 0 <= header["computed"] <= len(header["tokens"]):
        raise RequestError(f"import: {header['computed']} tokens cannot be computed of {len(header['tokens'])}")
    params = dict(header["params"])
    for name in ("stop", "stop_token_ids"):
        params[name] = tuple(params[name])
    if params["logit_bias"]:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    if params.get("structured_outputs"):
        params["structured_outputs"] = StructuredOutputs(*params["structured_outputs"])
    prompt = tuple(header["tokens"][: header["prompt_length"]])
    return GenerateRequest(header["id"], prompt, SamplingParams(**params))


def resume(sequence: Sequence, exported: ExportedRequest, cache: KvCache, blocks: list[int] | None) -> None:
    """Bring a new sequence to where the exported one was; without ``blocks`` its keys and values are recomputed."""
    header, tensors = exported
    sequence.tokens = list(header["tokens"])
    sequence.dice = Dice(header["seed"], header["draws"])
    sequence.transcript.resume(header["transcript"])
    if blocks and tensors:
        cache.read_in(blocks, tensors[0])
        sequence.blocks = blocks
        sequence.computed = header["computed"]


def _geometry(shape: KvShape) -> list[Any]:
    return [shape.layers, shape.kv_heads, shape.head_dim, str(shape.dtype)]
