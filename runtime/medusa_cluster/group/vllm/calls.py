"""Serialization of the calls from the leader's scheduler to its workers, and of their results.

vLLM's own processes pickle these objects. Here, only data classes of a few of its modules are read back, and what numpy
and torch need for arrays, so nothing in a message can run code. Other classes of vLLM do run code when they are made:
its ``ModelConfig`` loads a checkpoint's code.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from typing import Any

from medusa_runtime.errors import EngineError

_BUILTINS = frozenset(("set", "frozenset", "bytearray", "complex", "slice", "range"))
_OTHERS = frozenset(
    (
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        ("collections", "deque"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy._core.numeric", "_frombuffer"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy.core.numeric", "_frombuffer"),
        ("_codecs", "encode"),
    )
)
_VLLM_MODULES = frozenset(
    (
        "vllm.lora.request",
        "vllm.multimodal.inputs",
        "vllm.pooling_params",
        "vllm.sampling_params",
        "vllm.v1.core.sched.output",
        "vllm.v1.kv_cache_interface",
        "vllm.v1.outputs",
    )
)
_VLLM_OTHERS = frozenset((("vllm.v1.worker.worker_base", "CompilationTimes"),))


def serialize(value: Any) -> bytes:
    """Return an object of vLLM as bytes."""
    return pickle.dumps(value, protocol=5)


def deserialize(data: Any) -> Any:
    """Return the object that ``serialize`` was given. Raises EngineError for anything but data."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"a message of the group could not be read: {type(error).__name__}: {error}") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module == "builtins" and name in _BUILTINS) or (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module == "torch" and name.isidentifier():
            found = super().find_class(module, name)
            if type(found).__name__ == "dtype":
                return found
        if module in _VLLM_MODULES or (module, name) in _VLLM_OTHERS:
            found = super().find_class(module, name)
            # A module also has the names that it imported from others.
            if isinstance(found, type) and found.__module__ == module and _holds_data(found):
                return found
        raise EngineError(f"a message of the group names {module}.{name}; expected only data")


def _holds_data(kind: type) -> bool:
    if dataclasses.is_dataclass(kind) or issubclass(kind, enum.Enum | tuple):
        return True
    return any(base.__module__.startswith("msgspec") for base in kind.__mro__)


__all__ = ["deserialize", "serialize"]
