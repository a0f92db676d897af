"""Whether vLLM is installed."""

from __future__ import annotations

from importlib.util import find_spec


def vllm_is_installed() -> bool:
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None  # else it is the folder of this name beside this file
