"""The rows that `medusa bench coldstart --rows` can show: the ways to start a model, by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from medusa_runtime.errors import ConfigError, MissingPackageError

from .contestants import Contestant, Medusa
from .prewarmed import PrewarmedMedusa
from .resumed import ResumedMedusa

EAGER = ("--compile", "never")
ContestantFactory = Callable[[str], Contestant]

# Name → a function from the interpreter that has vLLM to the contestant.
ROWS: dict[str, ContestantFactory] = {
    "torch": lambda _: Medusa(),
    "torch-snapshot": lambda _: ResumedMedusa("torch", name="torch-snapshot"),
    "torch-prewarmed": lambda _: PrewarmedMedusa("torch", name="torch-prewarmed", python=sys.executable),
    "vllm-cold": lambda python: Medusa("vllm", name="vllm-cold", python=python, flags=EAGER),
    "vllm-snapshot": lambda python: ResumedMedusa("vllm", name="vllm-snapshot", python=python, flags=EAGER),
    "vllm-prewarmed": lambda python: PrewarmedMedusa("vllm", name="vllm-prewarmed", python=python, flags=EAGER),
}


def make_contestants(
    names: Sequence[str], known: Mapping[str, ContestantFactory] = ROWS, python: str = sys.executable
) -> list[Contestant]:
    """Make the contestants of these names. Raises ConfigError for an unknown one, MissingPackageError without vLLM."""
    for name in names:
        if name not in known:
            raise ConfigError(f"--rows: expected names of {', '.join(known)}, found {name!r}")
    check_vllm(names, python)
    return [known[name](python) for name in names]


def check_vllm(names: Sequence[str], python: str) -> None:
    """Raise MissingPackageError if one of the names is about vLLM, and this interpreter has none or is not there."""
    if any(name.startswith("vllm") for name in names) and not has_module(python, "vllm"):
        raise MissingPackageError(
            f"{python} has no vllm: pip install 'medusa-runtime[vllm]' there, or run the command of an environment "
            "that has it"
        )


def has_module(python: str, name: str) -> bool:
    return succeeds(python, f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)")


def succeeds(python: str, program: str) -> bool:
    """Return whether this interpreter exists and runs the program to its end."""
    try:
        ran = subprocess.run([python, "-c", program], check=False, stderr=subprocess.DEVNULL, timeout=60)
    except OSError:
        return False
    return ran.returncode == 0
