"""The flags of ``vllm serve`` that a user gives (``--vllm-args``). Reading them here imports nothing of vLLM."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable

from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError

# Flags that change how fast vLLM computes, but not what it answers. With these, our own routes may still answer.
_WITHOUT_EFFECT_ON_ANSWERS = frozenset(
    (
        "max-num-seqs", "max-num-batched-tokens", "max-model-len", "dtype", "seed", "enforce-eager", "block-size",
        "gpu-memory-utilization", "enable-prefix-caching", "enable-chunked-prefill",
        "async-scheduling", "disable-log-stats", "enable-log-requests", "quantization", "swap-space",
        "trust-remote-code", "uvicorn-log-level",
        "disable-uvicorn-access-log", "disable-fastapi-docs", "enable-log-outputs", "max-log-len",
        "optimization-level", "compilation-config", "attention-backend", "kv-cache-dtype", "hf-overrides",
        "enable-request-id-headers", "allowed-media-domains",
        "enable-scale-out", "enable-tokenizer-info-endpoint", "enable-server-load-tracking", "sse-keep-alive-interval",
    )
)  # fmt: skip
# Flags for a server or processes that medusa provides itself: flag → what to use instead.
_REFUSED = {
    "help": "run `vllm serve --help`",
    "headless": "leave it out; medusa starts vLLM's core itself",
    "api-server-count": "leave it out; vLLM's server runs in the engine's process",
    "grpc": "leave it out; requests come over HTTP",
    "grpc-port": "leave it out; requests come over HTTP",
    "pipeline-parallel-size": "run the model in one stage, with --tensor-parallel",
    "tensor-parallel-size": "use medusa's --tensor-parallel",
    "nnodes": "use medusa cluster",
    "node-rank": "use medusa cluster",
    "host": "use medusa's --host",
    "port": "use medusa's --port",
    "uds": "use medusa's --host and --port",
    "enable-ssl-refresh": "terminate TLS in a proxy in front of medusa",
    "allowed-origins": "use medusa's --cors-origins",
    "allowed-methods": "leave it out; pages of medusa's --cors-origins may use all methods",
    "allowed-headers": "leave it out; pages of medusa's --cors-origins may send all headers",
    "allow-credentials": "leave it out; pages of medusa's --cors-origins send a token instead",
    "load-format": "leave it out; weights come from medusa's region",
    "model": "use medusa's --model",
    "revision": "use medusa's --model hf://org/name@REVISION",
    "tokenizer-revision": "use medusa's --model hf://org/name@REVISION",
    "code-revision": "leave it out; code that a checkpoint brings is not run",
    "hf-token": "set HF_TOKEN",
    "download-dir": "leave it out; the checkpoint is fetched into memory",
    "log-config-file": "use medusa's --log-level, --log-format and --access-log",
    "tokenizer": "put the tokenizer's files beside the weights",
    "worker-cls": "leave it out; medusa has a worker of its own",
    "kv-cache-memory-bytes": "use medusa's --kv-cache-mb",
    "distributed-executor-backend": "leave it out; medusa has an executor of its own",
}  # fmt: skip
_REFUSED_FAMILIES = {  # all flags that begin with one of these
    "data-parallel-": "run one instance a replica",
    "dp-supervisor-": "run one instance a replica",
    "master-": "use medusa cluster",
    "ssl-": "terminate TLS in a proxy in front of medusa",
}
# A request's images, sounds and videos must be in the request itself. vLLM would fetch them from any host, even one
# that only this machine can reach. vLLM shows this text in its refusal.
MEDIA_DOMAINS = ["none; the operator names hosts with --allowed-media-domains"]
# A host that the operator allows must not redirect to others.
MEDIA_ENVIRONMENT = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-n": "nnodes",
    "-r": "node-rank",
    "-asc": "api-server-count",
    "-h": "help",
    "-q": "quantization",
    "-cc": "compilation-config",
    "-ac": "attention-config",
}


def flag_words(settings: Settings) -> list[str]:
    """Return the flags as words. Raises ConfigError for flags that belong to medusa."""
    try:
        found = shlex.split(settings.vllm_args or "")
    except ValueError as error:
        raise ConfigError(
            f"MEDUSA_VLLM_ARGS cannot be used: expected flags of vllm serve, quoted as in a shell, found another text: "
            f"{error}"  # not the text itself, which may have --api-key
        ) from None
    refuse_medusas_own(_names(found))
    return found


def refuse_medusas_own(names: Iterable[str]) -> None:
    """Raise ConfigError if one of these flags, named without dashes in front, belongs to medusa."""
    for name in names:
        families = (why for prefix, why in _REFUSED_FAMILIES.items() if name.startswith(prefix))
        if (instead := _REFUSED.get(name) or next(families, None)) is not None:
            raise ConfigError(f"--{name} of vllm serve cannot be used here: {instead}")


def names_media_domains(found: list[str]) -> bool:
    """Return whether the flags say which hosts media may be read from."""
    return "allowed-media-domains" in _names(found)


def adapters(settings: Settings) -> dict[str, str]:
    """Return the paths of ``--lora-modules`` by name. They are NAME=PATH or JSON objects, as in vLLM.

    Raises ConfigError.
    """
    found: dict[str, str] = {}
    within = False
    for word in flag_words(settings):
        if word.startswith("--"):
            name, _, word = word.partition("=")
            within = _names([name]) == ["lora-modules"]
        if within and word:
            found |= _adapter(word)
    return found


def light_routes_suffice(settings: Settings) -> bool:
    """Return whether our own routes may answer what they support: no flag makes vLLM answer differently.

    Nor may vLLM's variables ask for a key or for stored responses, of which our own routes would not know.
    """
    known = set(_names(flag_words(settings))) <= _WITHOUT_EFFECT_ON_ANSWERS
    return known and not any(map(os.environ.get, ("VLLM_API_KEY", "VLLM_ENABLE_RESPONSES_API_STORE")))


def _adapter(word: str) -> dict[str, str]:
    """Return an adapter's path by its name; nothing for a word that vLLM will refuse."""
    name, _, path = word.partition("=")
    if word.startswith("{"):
        try:
            given = json.loads(word)
        except (ValueError, RecursionError):
            return {}
        name, path = str(given.get("name", "")), str(given.get("path", ""))
    return {name: path} if name and path else {}


def _names(found: list[str]) -> list[str]:
    """Return the names of the flags, without leading dashes, ``no-``, values and inner keys."""
    names = []
    for word in found:
        if word.startswith("--"):
            names.append(word[2:].partition("=")[0].partition(".")[0].replace("_", "-").removeprefix("no-"))
        elif word.startswith("-") and word[1:2].isalpha():
            short = word.partition("=")[0].partition(".")[0]
            names.append(_SHORT.get(short, "optimization-level" if word.startswith("-O") else word))
    return names


__all__ = [
    "MEDIA_DOMAINS",
    "MEDIA_ENVIRONMENT",
    "adapters",
    "flag_words",
    "light_routes_suffice",
    "names_media_domains",
    "refuse_medusas_own",
]  # fmt: skip
