"""The rows that `medusa bench coldstart --rows` can show, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from medusa_runtime.errors import ConfigError, MissingPackageError

from .compiled import Compiled
from .contestants import Contestant, Medusa, Script, Transformers
from .prewarmed import Prewarmed
from .vllm_baselines import STARTS, VllmBaseline, has_module

_EAGER = ("--compile", "never")
_IMPORT = (
    "import vllm; vllm.LLM; print(vllm.__version__, flush=True)"  # vllm itself imports its parts when they are used
)

# Name → what makes the contestant, of the interpreter that has vLLM.
_MAKERS: dict[str, Callable[[str], Contestant]] = {
    "torch": lambda _: Medusa(),
    "torch-prewarmed": lambda _: Prewarmed("torch", name="torch-prewarmed", python=sys.executable),
    "vllm-cold": lambda python: Medusa("vllm", name="vllm-cold", python=python, flags=_EAGER),
    "vllm-prewarmed": lambda python: Prewarmed("vllm", name="vllm-prewarmed", python=python, flags=_EAGER),
    "vllm-compiled": lambda python: Compiled(name="vllm-compiled", python=python),
    "vllm-import": lambda python: Script("vllm-import", lambda _: ["-c", _IMPORT], python=python),
    "transformers": lambda _: Transformers(),
}
_MAKERS |= {name: lambda python, name=name: VllmBaseline(name, python) for name in STARTS}  # type: ignore[misc]
ROWS = tuple(_MAKERS)

# Greedy decoding gives these the same tokens, as they run the same code on the same weights.
SAME_TOKENS = (
    frozenset({"vllm-compiled", "vllm-default-baseline", "vllm-warm-cache-baseline", "vllm-best-baseline"}),
    frozenset({"vllm-cold", "vllm-prewarmed", "vllm-eager-baseline"}),
)


def contestants(names: list[str], vllm_python: str) -> list[Contestant]:
    """In the order of ``names``. Raises ConfigError for an unknown name, MissingPackageError without vLLM."""
    for name in names:
        if name not in _MAKERS:
            raise ConfigError(f"--rows: expected names of {', '.join(ROWS)}, found {name!r}")
    if any(name.startswith("vllm") for name in names) and not has_vllm(vllm_python):
        raise MissingPackageError(
            f"{vllm_python} has no vllm; pip install vllm there, or name another interpreter that has it and "
            "medusa-runtime with --vllm-python"
        )
    return [_MAKERS[name](vllm_python) for name in names]


def has_vllm(python: str) -> bool:
    return has_module(python, "vllm")


__all__ = ["ROWS", "SAME_TOKENS", "contestants", "has_vllm"]
