"""The pickle inside a PyTorch checkpoint, read for what it says of tensors. Nothing in it can run.

Source: the names that ``torch/_weights_only_unpickler.py`` lets through; here they are replaced by inert ones.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import CorruptError

# torch's name of a dtype → (safetensors' name, bytes)
_DTYPES = {
    "float32": ("F32", 4), "float64": ("F64", 8), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int64": ("I64", 8),
    "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "uint16": ("U16", 2), "uint32": ("U32", 4), "uint64": ("U64", 8), "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "float8_e8m0fnu": ("F8_E8M0", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1), "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}  # fmt: skip
_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64", "UntypedStorage": "uint8",
}  # fmt: skip
_STATE_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights")


class Dtype(NamedTuple):
    name: str


class Storage(NamedTuple):
    """One record."""

    key: str
    dtype: str
    elements: int

    @property
    def item_bytes(self) -> int:
        return _DTYPES[self.dtype][1]


class Description(NamedTuple):
    """What the pickle says of a tensor; ``offset`` and ``strides`` are in elements."""

    storage: Storage
    torch_dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return _DTYPES[self.torch_dtype][0]

    @property
    def item_bytes(self) -> int:
        return _DTYPES[self.torch_dtype][1]

    @property
    def extent(self) -> int:
        """Elements from the first to the last one."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= size
        return True


class _ForbiddenError(Exception):
    """Something else than tensors and what holds them."""


class _UnknownError(Exception):
    """A tensor of a kind that is not read here."""


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> Description:
    return Description(storage, storage.dtype, offset, tuple(size), tuple(stride))


def _tensor_v3(storage: Any, offset: int, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any) -> Any:
    return Description(storage, dtype.name, offset, tuple(size), tuple(stride))


def _first(value: Any, *_: Any) -> Any:
    return value


def _ignored(*_: Any) -> None:
    return None


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda rebuild, _kind, arguments, _state: rebuild(*arguments),
    ("torch", "Size"): tuple,
    ("torch", "device"): _ignored,
    ("torch", "Tensor"): Dtype("Tensor"),
    ("torch.nn.parameter", "Parameter"): Dtype("Parameter"),
    **{("torch", name): Dtype(name) for name in _DTYPES},
    **{("torch", name): Dtype(dtype) for name, dtype in _STORAGES.items()},
    **{("torch.storage", name): Dtype(dtype) for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMES[module, name]
        except KeyError:
            unknown = module.startswith("torch") and (name.endswith("Storage") or name.startswith("_rebuild_"))
            raise (_UnknownError if unknown else _ForbiddenError)(f"{module}.{name}") from None

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _location, count = pid
        if kind != "storage" or not isinstance(dtype, Dtype) or dtype.name not in _DTYPES or not isinstance(count, int):
            raise pickle.UnpicklingError(f"unknown persistent id {str(pid)[:80]}")
        return Storage(str(key), dtype.name, count)


def read_pickle(name: str, text: bytes) -> dict[str, Description]:
    """The state dict's tensors by name. CorruptError for code in the pickle, and for a file without tensors."""
    try:
        found = _Unpickler(io.BytesIO(text)).load()
        tensors = _state_dict(found)
        for tensor in tensors.values():
            _check(tensor)
    except _ForbiddenError as error:
        raise CorruptError(
            f"{name}: holds {error}, which is code and is never run; "
            'expected tensors only: torch.save(model.state_dict(), "model.pt")'
        ) from None
    except _UnknownError as error:
        raise CorruptError(
            f"{name}: holds a tensor of {error}; expected dense ones of {', '.join(_DTYPES)}, not quantized, not sparse"
        ) from None
    except Exception as error:  # noqa: BLE001  a broken pickle may raise anything
        what = f"{type(error).__name__}: {error}"
        raise CorruptError(f"{name}: data.pkl cannot be read ({what}); save it again") from None
    if not tensors:
        keys = f" with {', '.join(map(str, list(found)[:5])) or 'nothing'}" if isinstance(found, Mapping) else ""
        raise CorruptError(f"{name}: expected a state dict of tensors, found {type(found).__name__}{keys}")
    return tensors


def _state_dict(found: Any) -> dict[str, Description]:
    """The mapping with tensors: the whole, or what training scripts put under ``state_dict``."""
    if not isinstance(found, Mapping):
        return {}
    tensors = {str(key): value for key, value in found.items() if isinstance(value, Description)}
    if tensors:
        return tensors
    return next((inner for key in _STATE_KEYS if (inner := _state_dict(found.get(key)))), {})


def _check(tensor: Description) -> None:
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    if not isinstance(tensor.storage, Storage) or not all(type(number) is int and number >= 0 for number in numbers):
        raise pickle.UnpicklingError(f"a tensor with sizes {str(numbers)[:80]}")
    if len(tensor.shape) != len(tensor.strides) or tensor.torch_dtype not in _DTYPES:
        raise pickle.UnpicklingError(f"a tensor of {tensor.torch_dtype} with shape {tensor.shape}")
