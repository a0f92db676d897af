"""Takes vLLM's compiled model out of one process and puts it into another, without vLLM's own cache.

vLLM's cache depends on the checkpoint's path, among other things. And if vLLM compiles with plain Inductor, as on a
CPU, it cannot load its own cache: it calls ``finalize_loading`` on a function that has none, and compiles again. But a
decorated module runs whatever its ``aot_compiled_fn`` is, so a worker may set it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_runtime.errors import StateError

from .kernels import CompiledKernels

INDEX = "index.json"
_KERNELS = "kernels"


class CompiledModel:
    """A folder with a model's compiled functions and their kernels.

    ``record`` surrounds the first forward, which compiles, and keeps the result. ``attach`` gives the same functions to
    a model of another process before its first forward: nothing is traced and nothing compiled.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels = CompiledKernels(folder / _KERNELS)

    @contextmanager
    def record(self, model: Any, key: str) -> Iterator[None]:
        """Serialize the functions of ``model`` (a loaded vLLM module) that are compiled in this context.

        ``key`` is the ``config_key`` of the configuration before the model was loaded. Raises StateError at the
        context's end when nothing was compiled.
        """
        with self.kernels.recording():
            yield
        names = []
        for number, (name, module) in enumerate(_compiled_modules(model)):
            module.aot_compiled_fn.save_compiled_function(str(self.folder / f"{number}.aot"))
            names.append(name)
        if not names:
            raise StateError(
                "nothing was compiled: expected a model that vLLM compiles (no --enforce-eager, no LoRA, a supported "
                "architecture), found no compiled function in it"
            )
        (self.folder / INDEX).write_text(json.dumps({"modules": names, "config": key}))

    def attach(self, model: Any, config: Any) -> int:
        """Load the functions into the modules that they were made from, and return how many there are.

        ``check_index`` must have accepted the configuration. Raises StateError when the functions were made from
        another source or cannot be read. The model is then as before, and compiles at its first forward.
        """
        try:
            names = _parse((self.folder / INDEX).read_bytes())[0]
        except OSError as error:
            raise StateError(f"the compile cache has no index ({error.strerror}); materialize it again") from None
        modules = dict(model.named_modules())
        if missing := [name for name in names if name not in modules]:
            raise StateError(f"the compile cache holds functions of {missing}, which this model does not have")
        try:
            with self.kernels.serving():
                functions = [
                    _load(modules[name], config, self.folder / f"{number}.aot") for number, name in enumerate(names)
                ]
        except StateError:
            raise
        except Exception as error:  # unpickling and torch's checks may raise anything
            raise StateError(f"the compile cache cannot be loaded ({type(error).__name__}: {error})") from error
        for name, function in zip(names, functions, strict=True):
            modules[name].aot_compiled_fn = function
            modules[name].was_aot_compile_fn_loaded_from_disk = True
        return len(functions)


def check_index(index: bytes, config: Any) -> None:
    """Raise StateError when these functions were made for another configuration than this VllmConfig."""
    key, found = _parse(index)[1], config_key(config)
    if found != key:
        raise StateError(
            f"it was made for the configuration {key[:12]}, this is {found[:12]}; materialize with serve's flags"
        )


def config_key(config: Any) -> str:
    """Return vLLM's own hash of what determines a graph (versions, configuration, environment).

    It leaves out the model's path, and the settings of a compiler that does not run again.
    """
    from vllm import envs
    from vllm.config.utils import hash_factors

    placeless = copy.copy(config)
    placeless.model_config = copy.copy(config.model_config)
    for field in ("model", "model_weights"):
        setattr(placeless.model_config, field, "")
    for field in ("hf_config", "hf_text_config", "hf_image_processor_config"):
        if (value := getattr(config.model_config, field, None)) is not None:
            nameless = copy.copy(value)
            for name in ("_name_or_path", "name_or_path"):
                if hasattr(nameless, name):
                    setattr(nameless, name, "")
            setattr(placeless.model_config, field, nameless)
    factors = (hash_factors(envs.compile_factors()), placeless.compute_hash())
    return hashlib.sha256(str(factors).encode()).hexdigest()


def _parse(index: bytes) -> tuple[list[str], str]:
    """Return the names of the compiled modules, and the configuration's key."""
    try:
        found = json.loads(index)
        return [str(name) for name in found["modules"]], str(found["config"])
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"the compile cache has no index that can be read ({error}); materialize it again") from None


def _compiled_modules(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if getattr(module, "aot_compiled_fn", None) is not None:
            yield name, module


def _load(module: Any, config: Any, path: Path) -> Any:
    """Load a function as vLLM loads its own: check that the traced source is unchanged, and drop the guards."""
    import torch
    from vllm.compilation.decorators import _verify_source_unchanged
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config), path.open("rb") as file:
        function: Any = torch.compiler.load_compiled_function(file, f_globals=module.forward.__globals__)
    _verify_source_unchanged(function.source_info(), config)
    if not config.compilation_config.dynamic_shapes_config.evaluate_guards:
        function.disable_guard_check()
    finish = getattr(function._artifacts.compiled_fn, "finalize_loading", None)
    if finish is not None:  # only functions of vLLM's own backend (on a GPU) have this second step
        finish(config)
    return function
