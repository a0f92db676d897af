"""The compile cache of a state bundle: compiled code as one file, for any process on a similar machine.

Offline, ``capture`` starts the engine once in a new process, with empty caches, and packs what was compiled; on a GPU,
the first process that captures graphs does so. Online, the engine's worker unpacks it and attaches it to its model. Its
key in the manifest says what it is valid for (engine, torch, Python, CPU, GPU, model). What only vLLM can decide is
checked before the code is used. On a CPU, the file contains no path, host name or user of the machine it was made on;
on a GPU, it names files of the compiler and of the sources.
"""

from __future__ import annotations

import os
from pathlib import Path

from medusa_runtime.config import Settings
from medusa_runtime.device.choice import choose
from medusa_runtime.state.offline import run_module

from ..archive import Archive

_CAPTURE = "medusa_vllm.compiled.capture"
ARCHIVE = Archive("the compile cache", "model-1")  # of a CompiledModel's folder


def capture(model: str, settings: Settings, folder: Path) -> Path | None:
    """Start the engine on ``model`` in a new process so that it compiles, and return the file, in ``folder``.

    None with ``--compile never``, and on a GPU, where it is made with the graphs. Raises StateError with the last line
    of the process's output when it fails or takes an hour.
    """
    if settings.compile == "never" or choose(settings.device, os.environ) == "cuda":
        return None
    made, blob = folder / "made", folder / "compile-cache"
    made.mkdir(parents=True)
    caches = cache_folders(folder / "caches")
    run_module(_CAPTURE, [model, str(made)], settings, "the model could not be compiled", caches)
    return ARCHIVE.pack(made, blob)


def cache_folders(folder: Path) -> dict[str, str]:
    """Return the environment variables that keep every cache of vLLM, Inductor and Triton in ``folder``."""
    return {
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
