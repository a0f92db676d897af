"""The descriptions of tensors in a PyTorch checkpoint's pickle. Nothing in the pickle can run.

Source: the names that ``torch/_weights_only_unpickler.py`` allows. Here they are replaced by harmless functions, and
``pickle_reader.py`` reads the pickle itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import CorruptError
from .header import MOST_DIMENSIONS
from .pickle_reader import GlobalName, PickledDict, PickleError, PickleReader

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
_MOST_LEVELS = 4  # of nested mappings, the state dict among them
_STATE_KEYS = ("state_dict", "model_state_dict", "model", "module", "weights")


class PickledStorage(NamedTuple):
    """A storage, that is, one record of the archive, as the pickle describes it."""

    key: str
    dtype: str
    elements: int

    @property
    def item_bytes(self) -> int:
        return _DTYPES[self.dtype][1]


class PickledTensor(NamedTuple):
    """A tensor as the pickle describes it. ``offset`` and ``strides`` are in elements."""

    storage: PickledStorage
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
        """The number of elements that the tensor spans in memory, from its first to its last."""
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
    """The pickle names something that is neither a tensor nor a container for tensors."""


class _UnknownError(Exception):
    """The pickle names a kind of tensor that is not supported."""


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> PickledTensor:
    return _described(storage, storage.dtype if isinstance(storage, PickledStorage) else "", offset, size, stride)


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> PickledTensor:
    return _described(storage, dtype.target if isinstance(dtype, GlobalName) else "", offset, size, stride)


def _described(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> PickledTensor:
    """Check the pickle's description of a tensor. Errors do not quote its values, which may be of any type and size."""
    if not isinstance(storage, PickledStorage) or dtype not in _DTYPES:
        raise PickleError("a tensor without a storage, or of an unknown type")
    shape, strides = _sizes(size), _sizes(stride)
    if len(shape) != len(strides) or not _is_size(offset):
        raise PickleError("a tensor whose shape, strides and offset do not fit together")
    return PickledTensor(storage, dtype, offset, shape, strides)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MOST_DIMENSIONS or not all(map(_is_size, value)):
        raise PickleError(f"a tensor whose sizes are not up to {MOST_DIMENSIONS} numbers of 0 or more")
    return tuple(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _first(value: Any, *_: Any) -> Any:
    return value


def _ignored(*_: Any) -> None:
    return None


def _from_type(rebuild: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    """Rebuild a tensor of a subclass as the plain tensor that it holds."""
    function = rebuild.target if isinstance(rebuild, GlobalName) else None
    if function not in (_tensor, _tensor_v3, _first) or not isinstance(arguments, tuple):
        raise PickleError("a tensor of a class whose own tensor is missing")
    return function(*arguments)


_NAMES: dict[tuple[str, str], GlobalName] = {
    key: GlobalName(target)
    for key, target in {
        ("collections", "OrderedDict"): PickledDict,
        ("torch._utils", "_rebuild_tensor"): _tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
        ("torch._utils", "_rebuild_parameter"): _first,
        ("torch._utils", "_rebuild_parameter_with_state"): _first,
        ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
        ("torch", "Size"): _sizes,
        ("torch", "device"): _ignored,
        ("torch", "Tensor"): "Tensor",
        ("torch.nn.parameter", "Parameter"): "Parameter",
        **{("torch", name): name for name in _DTYPES},
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
        **{("torch.storage", name): dtype for name, dtype in _STORAGES.items()},
    }.items()
}


def _find(module: str, name: str) -> GlobalName:
    try:
        return _NAMES[module, name]
    except KeyError:
        unknown = module.startswith("torch") and (name.endswith("Storage") or name.startswith("_rebuild_"))
        raise (_UnknownError if unknown else _ForbiddenError)(f"{module}.{name}"[:200]) from None


def _storage(identity: Any) -> PickledStorage:
    """Return the storage that a persistent id of the pickle describes."""
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise PickleError("a reference to something else than a storage")
    _, dtype, key, _, elements = identity
    if not isinstance(dtype, GlobalName) or dtype.target not in _DTYPES or not _is_size(elements):
        raise PickleError("a storage of an unknown type or size")
    if not isinstance(key, str):
        raise PickleError("a storage whose key is not a text")
    return PickledStorage(key, dtype.target, elements)


def read_pickle(name: str, text: bytes) -> dict[str, PickledTensor]:
    """Return the state dict's tensors by name, given the text of the pickle.

    Raises CorruptError for code in the pickle, and for a file without tensors. It calls the file ``name``.
    """
    try:
        found = PickleReader(text, _find, _storage).read()
    except _ForbiddenError as error:
        raise CorruptError(
            f"{name}: holds {error}, which is code and is never run; "
            'expected tensors only: torch.save(model.state_dict(), "model.pt")'
        ) from None
    except _UnknownError as error:
        raise CorruptError(
            f"{name}: holds a tensor of {error}; expected dense ones of {', '.join(_DTYPES)}, not quantized, not sparse"
        ) from None
    except PickleError as error:
        raise CorruptError(f"{name}: data.pkl cannot be read ({error}); save it again") from None
    tensors = _state_dict(found, _MOST_LEVELS)
    if not tensors:
        keys = f" with {', '.join(key[:60] for key in list(found)[:5]) or 'nothing'}" if isinstance(found, dict) else ""
        kind = {PickledDict: "dict", PickledTensor: "one tensor"}.get(type(found), type(found).__name__)
        raise CorruptError(f"{name}: expected a state dict of tensors, found {kind}{keys}")
    return tensors


def _state_dict(found: Any, levels: int) -> dict[str, PickledTensor]:
    """Return the tensors of a mapping, or of one nested in it under a usual key such as ``state_dict``."""
    if not isinstance(found, dict) or not levels:
        return {}
    tensors = {key: value for key, value in found.items() if isinstance(value, PickledTensor)}
    if tensors:
        return tensors
    return next((inner for key in _STATE_KEYS if (inner := _state_dict(found.get(key), levels - 1))), {})
