"""Keeps the machine code of C++ kernels that TorchInductor made for a CPU, by a digest of their source.

Inductor finds a kernel by the compiler's command line: it runs the compiler to learn its version, compiles a probe for
each vector instruction set, and uses the paths of torch and Python. A container without a compiler cannot use such a
cache. A digest of the kernel's own source names the same code everywhere, without a compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from medusa_runtime.errors import StateError

Kernel = Callable[..., Any]
_ENTRY = "kernel"  # the extension's init function is PyInit_kernel, and its one function has the same name


class CompiledKernels:
    """A folder of extension modules. ``recorded`` counts those that were added, ``loaded`` those that were found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recorded = 0
        self.loaded = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Copy each kernel that Inductor builds in this context, or finds in its own cache, to the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

        def substitute(original: Callable[..., Any]) -> Callable[..., Any]:
            def load(
                kind: Any, argtypes: Sequence[str], source: str, *args: Any, **kwargs: Any
            ) -> Callable[[], Kernel]:
                finish = original(argtypes, source, *args, **kwargs)

                def wait() -> Kernel:
                    kernel: Kernel = finish()
                    self._keep(digest(argtypes, source), kernel)
                    return kernel

                return wait

            return load

        with _patch_inductor(substitute):
            yield

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Load kernels from the folder in this context. A missing one raises StateError."""

        def substitute(_: Callable[..., Any]) -> Callable[..., Any]:
            def load(
                kind: Any, argtypes: Sequence[str], source: str, *args: Any, **kwargs: Any
            ) -> Callable[[], Kernel]:
                kernel = self._load(digest(argtypes, source))
                return lambda: kernel

            return load

        with _patch_inductor(substitute):
            yield

    def _keep(self, name: str, kernel: Kernel) -> None:
        # The __self__ of a builtin is the extension module that it comes from.
        library = getattr(getattr(kernel, "__self__", None), "__file__", None)
        if library is None:
            raise StateError(f"expected a compiled kernel from a library, found {kernel!r}; it cannot be stored")
        target = self.folder / f"{name}.so"
        if not target.exists():
            shutil.copyfile(library, target)
            self.recorded += 1

    def _load(self, name: str) -> Kernel:
        import torch

        path = self.folder / f"{name}.so"
        module_name = f"{name}.{_ENTRY}"
        module = sys.modules.get(module_name)
        if module is None:
            if not path.exists():
                raise StateError(f"the compile cache lacks the kernel {name}: it was made from another graph")
            # As in Inductor's own loader: the extension reads the address of this function when it is initialised.
            address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
            os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[module_name] = module
        self.loaded += 1
        kernel: Kernel = getattr(module, _ENTRY)
        return kernel


def digest(argtypes: Sequence[str], source: str) -> str:
    """Return the name of a kernel: a digest of its C++ source and its arguments' types."""
    return hashlib.sha256("\0".join([*argtypes, source]).encode()).hexdigest()[:32]


@contextmanager
def _patch_inductor(substitute: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    from unittest.mock import patch

    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    # Inductor compiles at once or in a pool of compilers. Both ways go through this class method.
    replacement = classmethod(substitute(Bindings.load_pybinding_async))
    with patch.object(Bindings, "load_pybinding_async", replacement):
        yield
