"""Compiles our modules to bytecode, as an installation does, and as is done for the tools that we compare with.

An editable install has no bytecode if PYTHONDONTWRITEBYTECODE is set. Then each process of each start compiles what it
imports: a tenth of a second of CPU time in all, most of it before the first token.
"""

from __future__ import annotations

import subprocess

_COMPILE = """
import compileall, importlib.util
for name in ("medusa_runtime", "medusa_vllm", "medusa_cluster", "medusa_handler", "medusa_adapters"):
    spec = importlib.util.find_spec(name)
    for folder in spec.submodule_search_locations if spec else ():
        compileall.compile_dir(folder, quiet=2)
"""


def compile_packages(python: str) -> None:
    """Compile the modules of ours that this interpreter has, if their folders are writable."""
    subprocess.run([python, "-c", _COMPILE], check=False, stdout=subprocess.DEVNULL)
