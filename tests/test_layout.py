"""Rules that a linter does not know: what importing brings along, what is public, how long a file is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [
    ROOT / "runtime/medusa_snapshot",
    ROOT / "runtime/medusa_runtime",
    ROOT / "runtime/medusa_vllm",
    ROOT / "handler/medusa_handler",
    ROOT / "adapters/medusa_adapters",
]
MAX_LINES = 500
# What costs tenths of a second to import, and whose import is meant to bring it: modules, or packages with all in them.
MEANT = {
    "torch": (
        "medusa_runtime.engine.",
        "medusa_runtime.kernels",
        "medusa_runtime.models",
        "medusa_runtime.state.",
        "medusa_runtime.load.",
        "medusa_vllm.",
    ),
    "flask": ("medusa_handler.http.", "medusa_handler.openai."),
    "gunicorn": ("medusa_handler.server.", "medusa_handler.http.", "medusa_handler.openai."),
    "transformers": (),
    "vllm": (),
    "boto3": (),
    "fsspec": (),
    "pydantic": (),
}
# These belong to the processes that never import torch, though others of their package do.
WITHOUT_TORCH = (
    "medusa_runtime.engine.base",
    "medusa_runtime.engine.client",
    "medusa_runtime.engine.frames",
    "medusa_runtime.state.bundle.reader",
    "medusa_runtime.state.key",
    "medusa_runtime.state.bundle.manifest",
    "medusa_runtime.state.restore",
    "medusa_runtime.state.weight_index",
    "medusa_runtime.checkpoint.header",
    "medusa_runtime.checkpoint.index",
    "medusa_runtime.checkpoint.order",
    "medusa_runtime.fetch.prefetcher",
    "medusa_runtime.region.reader",
)
# These subclass what vLLM documents for it, and only vLLM imports them.
INSIDE_VLLM = tuple(
    f"medusa_vllm.{name}"
    for name in (
        *("executor", "weights.loader", "weights.uploading", "cpu.linear", "cpu.ranks", "cpu.worker", "serving.core"),
        "compatible.loader",
    )
)
# What only a GPU's machine has: triton, and vLLM's classes for a GPU.
ON_A_GPU = (
    "medusa_vllm.gpu.graph_state",
    "medusa_vllm.gpu.graphs",
    "medusa_vllm.gpu.piecewise",
    "medusa_vllm.gpu.recording",
    "medusa_vllm.gpu.worker",
    "medusa_runtime.kernels.paged_triton",
)
# Imports one module after the other and stops at the first that brings what it is not meant to, or does not import.
IMPORT_ALL = """
import importlib, json, sys
for name, unwanted in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"{name} does not import: {error!r}")
    brought = [package for package in unwanted if package in sys.modules]
    if brought:
        sys.exit(f"{name} brings {', '.join(brought)}")
"""
PUBLIC = """
import importlib, json, sys
from medusa_runtime.imports.lazy_torch import import_torch
import_torch()  # a second less than plainly
for name in json.load(sys.stdin):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    missing = [each for each in names if not hasattr(module, each)]
    if missing or len(set(names)) != len(names):
        sys.exit(f"{name}.__all__: missing {missing}, twice {sorted({n for n in names if names.count(n) > 1})}")
"""


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in package.rglob("*.py"))


def modules() -> list[str]:
    """Every module of the packages that we import; scripts that are run by their path lie outside packages."""
    return [name for name in all_modules() if name not in INSIDE_VLLM + ON_A_GPU]


def all_modules() -> list[str]:
    names = []
    for path in sources():
        if (path.parent / "__init__.py").exists() and path.stem != "__main__":
            (top,) = (package for package in PACKAGES if path.is_relative_to(package))
            parts = path.relative_to(top.parent).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def meant(name: str, heavy: str) -> bool:
    if heavy == "torch" and name in WITHOUT_TORCH:
        return False
    return any(name.startswith(prefix) for prefix in MEANT[heavy])


def run(script: str, question: object) -> str:
    """Return what the script had to complain about; warnings are errors there, too."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stderr.strip() if ran.returncode else ""


def unwanted_by_module() -> list[tuple[str, list[str]]]:
    """The lightest first, so that what one is meant to bring is not blamed on the next."""
    asked = [(name, [heavy for heavy in MEANT if not meant(name, heavy)]) for name in modules()]
    return sorted(asked, key=lambda pair: -len(pair[1]))


@pytest.mark.parametrize("family", ["light", "flask", "torch"])
def test_importing_brings_only_what_it_is_meant_to(family: str) -> None:
    asked = unwanted_by_module()
    chosen = {
        "light": [pair for pair in asked if len(pair[1]) == len(MEANT)],
        "flask": [pair for pair in asked if "flask" not in pair[1]],
        "torch": [pair for pair in asked if "torch" not in pair[1]],
    }[family]
    assert chosen
    assert run(IMPORT_ALL, chosen) == ""


def test_the_check_sees_what_is_brought() -> None:
    assert run(IMPORT_ALL, [("medusa_runtime.errors", ["flask"]), ("medusa_handler.http.app", ["flask"])]).endswith(
        "medusa_handler.http.app brings flask"
    )
    assert "does not import" in run(IMPORT_ALL, [("medusa_runtime.no_such_module", [])])


def test_modules_named_here_exist() -> None:
    """A rule for a module that was renamed would hold nothing."""
    assert set(WITHOUT_TORCH) <= set(modules())
    assert set(INSIDE_VLLM + ON_A_GPU) <= set(all_modules())


def test_public_names_exist() -> None:
    assert run(PUBLIC, modules()) == ""


def test_packages_are_typed() -> None:
    assert all((package / "py.typed").exists() for package in PACKAGES)


@pytest.mark.parametrize("folder", ["runtime", "handler", "adapters", "tests", "benchmarks", "examples"])
def test_no_file_is_too_long(folder: str) -> None:
    lengths = {str(path): path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py")}
    lengths |= {str(path): path.read_text().count("\n") for path in (ROOT / folder).rglob("*.[ch]")}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}
