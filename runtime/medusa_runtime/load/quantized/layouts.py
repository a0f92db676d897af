"""The ways in which checkpoints store a quantized weight [out, in]: the tensors it consists of, and their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.checkpoint.index import TensorEntry
from medusa_runtime.errors import MismatchError
from medusa_runtime.load.quantized import unpack
from medusa_runtime.load.quantized.block_codes import BlockCodes
from medusa_runtime.load.quantized.codes import NIBBLE_RUN, Codes
from medusa_runtime.load.quantized.scheme import Scheme

_FLOATS = frozenset({"F32", "F16", "BF16"})
_SCALES = _FLOATS | {"F8_E8M0"}
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_ALIASES = {"weight_scale_inv": "weight_scale"}  # the name in DeepSeek's checkpoints; it is not an inverse
# Tensors for quantizing activations, or a cache of 8 bits. Here both are floats, which is more exact.
_UNUSED = (
    "input_scale", "input_zero_point", "input_scale_ub", "output_scale", "output_zero_point", "q_scale", "k_scale",
    "v_scale", "kv_scale", "prob_output_scale", "k_zero_point", "v_zero_point",
)  # fmt: skip


class QuantizedWeight(NamedTuple):
    """A quantized weight of ``shape`` [out, in], and the names in the checkpoint of its ``parts``.

    ``dtype`` is that of its marker in the checkpoint.
    """

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    parts: dict[str, str]
    dtype: str = ""

    @property
    def can_stay(self) -> bool:
        """Whether kernels can multiply with this weight's codes. If they cannot, it becomes floats."""
        scheme = self.scheme
        if scheme.scattered or (LAYOUTS[scheme.layout].is_transposed and self.shape[1] % NIBBLE_RUN):
            return False
        return scheme.layout in ("direct", "ggml") or scheme.bits in (4, 8)

    def codes(self, tensors: Mapping[str, Tensor]) -> Codes | BlockCodes:
        """Return the integers (or 8-bit floats) and scales that ``tensors``, given by the parts' names, hold.

        Raises MismatchError for values that do not belong to this shape.
        """
        return LAYOUTS[self.scheme.layout].codes(self, tensors)


class Layout(NamedTuple):
    """A way of storing a quantized weight as several tensors, its parts.

    marker: the part whose presence shows that a weight is quantized in this layout.
    needed, optional: the names of the parts.
    shape: checks all parts, and returns [out, in].
    codes: turns the parts' tensors into ``Codes``.
    is_transposed: whether the values are stored as [in, out].
    """

    marker: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    shape: Callable[[_Parts, Scheme], tuple[int, int]]
    codes: Callable[[QuantizedWeight, Mapping[str, Tensor]], Codes | BlockCodes]
    is_transposed: bool = False


class _Parts:
    """The entries of a module's parts, checked one by one."""

    def __init__(self, names: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
        self.names, self.entries = names, entries

    def error(self, part: str, expected: str, found: object) -> MismatchError:
        return MismatchError(f"{self.names.get(part, part)}: expected {expected}, found {found}")

    def typed(self, part: str, dtypes: frozenset[str]) -> tuple[int, ...]:
        """Return the shape of a part, which must have one of these dtypes."""
        entry = self.entries[part]
        if entry.dtype not in dtypes:
            raise self.error(part, " or ".join(sorted(dtypes)), entry.dtype)
        return entry.shape

    def matrix(self, part: str, dtypes: frozenset[str]) -> tuple[int, int]:
        shape = self.typed(part, dtypes)
        if len(shape) != 2 or not all(shape):
            raise self.error(part, "rows and columns", list(shape))
        return shape[0], shape[1]

    def shaped(self, part: str, dtypes: frozenset[str], *accepted: tuple[int, ...]) -> None:
        shape = self.typed(part, dtypes)
        if shape not in accepted:
            raise self.error(part, " or ".join(str(list(one)) for one in accepted), list(shape))

    def has_zero_points(self, scheme: Scheme) -> bool:
        """Return whether zero points are stored. Raises MismatchError if config.json says so and there are none."""
        if "weight_zero_point" in self.entries:
            return True
        if not scheme.symmetric:
            said = "zero points, as config.json says symmetric: false"
            raise self.error("weight_zero_point", said, "no such tensor")
        return False

    def check_index(self, part: str, columns: int) -> None:
        """Check the part that holds the group of each column, if there is one."""
        if part in self.entries:
            self.shaped(part, frozenset({"I32", "I64"}), (columns,))

    def groups(self, part: str, inputs: int, group: int | None) -> int:
        """Return how many groups of ``group`` columns there are; one if ``group`` is None."""
        if group is None:
            return 1
        if inputs % group:
            raise self.error(part, f"columns in whole groups of {group}", f"{inputs} columns")
        return inputs // group


def find_quantized(
    scheme_of: Callable[[str], Scheme | None], entries: Mapping[str, TensorEntry]
) -> dict[str, QuantizedWeight]:
    """Return the quantized weights of a checkpoint, by the name that each would have unquantized.

    ``scheme_of`` returns the scheme of a module, or None if it is not quantized. Raises MismatchError for parts that
    are missing, or do not fit each other.
    """
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        module, dot, part = name.rpartition(".")
        if dot and part in _PARTS:
            modules.setdefault(module, {})[part] = entry
    found: dict[str, QuantizedWeight] = {}
    for module, parts in modules.items():
        scheme = scheme_of(module)
        marker = _marker(parts)
        if marker is None:
            continue
        layout = None if scheme is None else LAYOUTS[scheme.layout]
        if layout is None or marker != layout.marker:
            expected = "a weight that is not quantized" if layout is None else layout.marker
            raise MismatchError(f"{module}: expected {expected} by config.json, found {marker}")
        assert scheme is not None
        if marker != "weight" and "weight" in parts:
            raise MismatchError(f"{module}: expected {marker} or weight, found both")
        found[f"{module}.weight"] = _stored(module, scheme, layout, parts)
    return found


def is_unused(name: str) -> bool:
    """Return whether a tensor only says how to quantize activations or the cache, which is not done here."""
    return name.rpartition(".")[2] in _UNUSED


def _marker(parts: Mapping[str, TensorEntry]) -> str | None:
    """Return the part that shows that these are a quantized weight; None if they are not."""
    for marker in ("weight_packed", "qweight", "blocks"):
        if marker in parts:
            return marker
    weight = parts.get("weight")
    stored = weight is not None and (weight.dtype == "I8" or weight.dtype in _FP8 or weight.dtype in BLOCKS)
    return "weight" if stored or any(_ALIASES.get(part, part) == "weight_scale" for part in parts) else None


def _stored(module: str, scheme: Scheme, layout: Layout, parts: Mapping[str, TensorEntry]) -> QuantizedWeight:
    names = {_ALIASES.get(part, part): f"{module}.{part}" for part in parts}
    entries = {_ALIASES.get(part, part): entry for part, entry in parts.items()}
    taken = [part for part in entries if part in (*layout.needed, *layout.optional)]
    absent = [part for part in layout.needed if part not in taken]
    if absent:
        raise MismatchError(f"{module}: expected the tensors {', '.join(layout.needed)}, found no {', '.join(absent)}")
    names = {part: names[part] for part in taken}
    shape = layout.shape(_Parts({"weight_zero_point": f"{module}.weight_zero_point"} | names, entries), scheme)
    return QuantizedWeight(module, scheme, shape, names, entries[layout.marker].dtype)


def _direct_shape(parts: _Parts, scheme: Scheme) -> tuple[int, int]:
    rows, columns = parts.matrix("weight", _FP8 | {"I8"})
    if scheme.group is not None:
        scale: tuple[tuple[int, ...], ...] = ((rows, parts.groups("weight", columns, scheme.group)),)
    elif scheme.block is not None:
        if "weight_g_idx" in parts.entries:
            raise parts.error("weight_g_idx", "no such tensor beside scales of blocks", "one")
        scale = ((-(-rows // scheme.block[0]), -(-columns // scheme.block[1])),)
    else:
        scale = ((), (1,), (rows,), (rows, 1), (1, 1))
    parts.shaped("weight_scale", _SCALES, *scale)
    if parts.has_zero_points(scheme):
        parts.shaped("weight_zero_point", frozenset({"I8"}), parts.entries["weight_scale"].shape)
    parts.check_index("weight_g_idx", columns)
    return rows, columns


def _direct_codes(stored: QuantizedWeight, tensors: Mapping[str, Tensor]) -> Codes:
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
    if scale.dim() < 2:  # one for the tensor, or one for each row
        scale = scale.reshape(-1, 1)
        zero = None if zero is None else zero.reshape(-1, 1)
    group_of = _group_of(stored, tensors.get("weight_g_idx"), "weight_g_idx", scale.shape[1])
    block = stored.scheme.block
    if block is not None:  # a kernel computes with these numbers, and a block may be larger than the weight
        block = min(block[0], stored.shape[0]), min(block[1], stored.shape[1])
    return Codes(tensors["weight"], scale, zero, block=block, group_of=group_of)


def _pack_shape(parts: _Parts, scheme: Scheme) -> tuple[int, int]:
    per_word = 32 // scheme.bits
    rows, words = parts.matrix("weight_packed", frozenset({"I32"}))
    columns = words * per_word
    groups = parts.groups("weight_packed", columns, scheme.group)
    parts.shaped("weight_scale", _SCALES, *(((rows, groups),) if scheme.group else ((rows, 1), (rows,), (1,), ())))
    scale = parts.entries["weight_scale"].shape
    if parts.has_zero_points(scheme):
        if parts.entries["weight_zero_point"].dtype == "I8" or len(scale) < 2:
            parts.shaped("weight_zero_point", frozenset({"I8"}), scale)
        else:
            parts.shaped("weight_zero_point", frozenset({"I32"}), (-(-rows // per_word), scale[1]))
    if "weight_shape" in parts.entries:
        parts.shaped("weight_shape", frozenset({"I32", "I64"}), (2,))
    parts.check_index("weight_g_idx", columns)
    return rows, columns


def _pack_codes(stored: QuantizedWeight, tensors: Mapping[str, Tensor]) -> Codes:
    bits, scale, zero = stored.scheme.bits, tensors["weight_scale"], tensors.get("weight_zero_point")
    said = tensors.get("weight_shape")
    if said is not None and said.tolist() != list(stored.shape):
        raise MismatchError(f"{stored.module}.weight_shape: expected {list(stored.shape)}, found {said.tolist()}")
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    middle = 1 << (bits - 1)
    if zero is None:
        zero = scale.new_full((1, 1), middle)
    elif zero.element_size() == 1:
        zero = zero.float().reshape(scale.shape) + middle
    else:
        zero = unpack.down(zero, bits)[: scale.shape[0]]
    group_of = _group_of(stored, tensors.get("weight_g_idx"), "weight_g_idx", scale.shape[1])
    return Codes(tensors["weight_packed"], scale, zero, "across", bits, group_of=group_of)


def _gptq_shape(parts: _Parts, scheme: Scheme) -> tuple[int, int]:
    per_word = 32 // scheme.bits
    words, rows = parts.matrix("qweight", frozenset({"I32"}))
    columns = words * per_word
    return _transposed_shape(parts, scheme, rows, columns)


def _awq_shape(parts: _Parts, scheme: Scheme) -> tuple[int, int]:
    columns, words = parts.matrix("qweight", frozenset({"I32"}))
    return _transposed_shape(parts, scheme, words * (32 // scheme.bits), columns)


def _transposed_shape(parts: _Parts, scheme: Scheme, rows: int, columns: int) -> tuple[int, int]:
    if rows % (32 // scheme.bits):
        raise parts.error("qweight", f"a multiple of {32 // scheme.bits} rows of the weight", rows)
    groups = parts.groups("qweight", columns, scheme.group)
    parts.shaped("scales", _FLOATS, (groups, rows))
    parts.shaped("qzeros", frozenset({"I32"}), (groups, rows // (32 // scheme.bits)))
    parts.check_index("g_idx", columns)
    return rows, columns


def _gptq_codes(stored: QuantizedWeight, tensors: Mapping[str, Tensor]) -> Codes:
    bits, scales = stored.scheme.bits, tensors["scales"]
    zeros = unpack.across(tensors["qzeros"], bits)
    if stored.scheme.shifted:
        zeros = (zeros + 1) & ((1 << bits) - 1)  # a zero point of 0 is stored as -1, with all bits set
    group_of = _group_of(stored, tensors.get("g_idx"), "g_idx", scales.shape[0])
    return Codes(tensors["qweight"], scales, zeros, "down", bits, group_of=group_of, transposed=True)


def _awq_codes(stored: QuantizedWeight, tensors: Mapping[str, Tensor]) -> Codes:
    bits, zeros = stored.scheme.bits, unpack.interleaved(tensors["qzeros"], stored.scheme.bits)
    return Codes(tensors["qweight"], tensors["scales"], zeros, "interleaved", bits, transposed=True)


def _mxfp4_shape(parts: _Parts, scheme: Scheme) -> tuple[int, int]:
    octets = frozenset({"U8"})
    blocks = parts.typed("blocks", octets)
    if len(blocks) != 3 or not all(blocks) or scheme.group != 2 * blocks[2]:
        raise parts.error("blocks", "rows, blocks and 16 bytes", list(blocks))
    parts.shaped("scales", octets, blocks[:2])
    return blocks[0], blocks[1] * scheme.group


def _mxfp4_codes(stored: QuantizedWeight, tensors: Mapping[str, Tensor]) -> Codes:
    scales = tensors["scales"].view(torch.float8_e8m0fnu)
    return Codes(tensors["blocks"].flatten(1), scales, packing="e2m1", bits=stored.scheme.bits)


def _block_shape(parts: _Parts, scheme: Scheme) -> tuple[int, int]:
    return parts.matrix("weight", frozenset(BLOCKS))


def _block_codes(stored: QuantizedWeight, tensors: Mapping[str, Tensor]) -> BlockCodes:
    return BlockCodes(tensors["weight"], stored.dtype)


def _group_of(stored: QuantizedWeight, index: Tensor | None, part: str, groups: int) -> Tensor | None:
    """Return the group of each column, or None if the groups simply follow each other, which all -1 also means."""
    if index is None or bool((index == -1).all()):
        return None
    index = index.to(torch.int64, copy=True)  # the file may change after the check, and a kernel trusts these places
    if not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise MismatchError(
            f"{stored.module}.{part}: expected groups from 0 to {groups - 1}, "
            f"found {int(index.min())} to {int(index.max())}"
        )
    columns = stored.shape[1]
    usual = index.new_tensor(range(columns)) // (columns // groups)
    return None if bool((index == usual).all()) else index


LAYOUTS: dict[str, Layout] = {
    "direct": Layout(
        "weight",
        ("weight", "weight_scale"),
        ("weight_zero_point", "weight_g_idx"),
        _direct_shape,
        _direct_codes,
    ),
    "pack": Layout(
        "weight_packed",
        ("weight_packed", "weight_scale"),
        ("weight_zero_point", "weight_shape", "weight_g_idx"),
        _pack_shape,
        _pack_codes,
    ),
    "gptq": Layout("qweight", ("qweight", "qzeros", "scales"), ("g_idx",), _gptq_shape, _gptq_codes, True),
    "awq": Layout("qweight", ("qweight", "qzeros", "scales"), (), _awq_shape, _awq_codes, True),
    "mxfp4": Layout("blocks", ("blocks", "scales"), (), _mxfp4_shape, _mxfp4_codes),
    "ggml": Layout("weight", ("weight",), (), _block_shape, _block_codes),
}
_PARTS = frozenset(name for layout in LAYOUTS.values() for name in (*layout.needed, *layout.optional)) | {*_ALIASES}

__all__ = ["LAYOUTS", "QuantizedWeight", "find_quantized", "is_unused"]
