"""Runs one part of run 5 in this process, and writes its result as JSON.

python -m benchmarks.gpu.vllm_check.part NAME OUT [options]
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.region.reader import Region
from medusa_vllm.compiled.cache import cache_folders

from benchmarks.gpu.part_process import part_parser, prepare
from benchmarks.gpu.vllm_check.starts import Start, import_vllm, our_start, replaced, settings_for, stock_start

# An eager start imports vLLM without these (see medusa_vllm.lean_imports), one that compiles does not.
_FOR_COMPILED = ("openai", "openai_harmony", "fastapi", "partial_json_parser")


def main(arguments: list[str] | None = None) -> int:
    parser = part_parser(__doc__, PARTS)
    parser.add_argument("--bundle", type=Path, help="the folder of a state bundle: written by materialize")
    parser.add_argument("--by-command", action="store_true", help="materialize by the command line")
    parser.add_argument("--caches", type=Path, default=Path("/tmp/medusa-vllm-caches"), help="of the part stock")
    parser.add_argument("--empty-caches", action="store_true", help="as in a new container")
    parser.add_argument("--compile", default="never", choices=("never", "always"), help="as medusa serve's")
    parser.add_argument("--dry-run", action="store_true", help="vLLM on the CPU, and graphs on the tests' fake driver")
    options = parser.parse_args(arguments)
    prepare("%(relativeCreated)6d ms  %(message)s")
    began = time.monotonic()
    import_vllm(Settings(engine="vllm", compile=options.compile), Region.create())
    imported_s = time.monotonic() - began
    settings = settings_for(options.model, options.compile, dry_run=options.dry_run)
    found = {"import_s": imported_s, "replaced": replaced(), "flags": settings.vllm_args or ""}
    found |= PARTS[options.name](settings, options)
    found |= {"process_s": time.monotonic() - began, "device": "" if options.dry_run else device_name()}
    options.out.write_text(json.dumps(found))
    return 0


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def imports(settings: Settings, options: Any) -> dict[str, Any]:
    """Report which vLLM is here."""
    import torch
    from medusa_vllm.version import installed_version, is_for_gpus, is_tested
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not options.dry_run and not current_platform.is_cuda():
        raise RuntimeError(f"vLLM finds no GPU that it can use: its platform is {current_platform.device_name}")
    return {
        "vllm": installed_version(),
        "torch": torch.__version__,
        "platform": type(current_platform).__name__,
        "for_gpus": is_for_gpus(),
        "tested": is_tested(),
        "triton": bool(HAS_TRITON),
        "compiled_needs": [
            *(name for name in _FOR_COMPILED if importlib.util.find_spec(name) is None),
            *(
                name for name in replaced() if name.endswith("_C_stable_libtorch")
            ),  # its compiler looks for many kernels
        ],
    }


def stock(settings: Settings, options: Any) -> dict[str, Any]:
    """Start vLLM's own worker and loader, with all of its caches in one folder: empty ones, or a start's before."""
    if options.empty_caches:
        shutil.rmtree(options.caches, ignore_errors=True)
    os.environ |= cache_folders(options.caches)
    with stock_start(settings) as start:
        return _measured(start, options)


def captured(settings: Settings, options: Any) -> dict[str, Any]:
    """Capture the graphs, with all else from the bundle: compiled code, and Triton's kernels."""
    state = "none" if options.dry_run else _bundle(options)
    with our_start(replace(settings, graphs="capture", state=state)) as start:
        return _measured(start, options)


def restored(settings: Settings, options: Any) -> dict[str, Any]:
    if options.dry_run:
        from benchmarks.gpu.vllm_check.fake_graphs import restored_on_fake

        return restored_on_fake(options.bundle)
    with our_start(replace(settings, graphs="restore", state=_bundle(options))) as start:
        return _measured(start, options)


def _bundle(options: Any) -> str:
    if not options.bundle.is_dir():
        raise RuntimeError("there is no bundle: nothing was materialized")
    return str(options.bundle)


def materialize(settings: Settings, options: Any) -> dict[str, Any]:
    if options.dry_run:
        from benchmarks.gpu.vllm_check.fake_graphs import materialized_on_fake

        return materialized_on_fake(options.bundle)
    from benchmarks.gpu.vllm_check.materialization import materialized, materialized_by_command

    return (materialized_by_command if options.by_command else materialized)(settings, options.bundle)


def _measured(start: Start, options: Any) -> dict[str, Any]:
    from benchmarks.gpu.machine import machine
    from benchmarks.gpu.vllm_check.decoding import attention, batches, counted

    began = time.monotonic()
    start.decode([[3, 4, 5]], 1)  # with all that the start has put off
    found: dict[str, Any] = {"loading_s": start.loading_s, "first_s": time.monotonic() - began}
    found |= {"stages": start.stages, "graphs": counted(start)}
    found["attention"] = attention(start.runner)
    print(json.dumps(found), flush=True)  # in the log, should decoding fail
    return found | batches(start, machine(dry_run=options.dry_run))


PARTS: dict[str, Callable[[Settings, Any], dict[str, Any]]] = {
    "imports": imports,
    "stock": stock,
    "captured": captured,
    "materialize": materialize,
    "restored": restored,
}

if __name__ == "__main__":
    sys.exit(main())
