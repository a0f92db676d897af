"""Which tensor of a checkpoint belongs where in a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.errors import MismatchError

Rename = Callable[[str], str | None]

_INTEGERS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})  # quantized, or packed
_NAMED = 8  # how many names of each kind an error lists


class Place(NamedTuple):
    """One parameter or persistent buffer of a module. Tied parameters are one place with several owners.

    ``name`` is its first qualified name. ``owners`` are the modules that hold it, each with the attribute's name.
    """

    name: str
    owners: tuple[tuple[nn.Module, str], ...]
    tensor: Tensor
    is_buffer: bool


def places(module: nn.Module) -> dict[str, Place]:
    """Return the parameters and persistent buffers of a module, by each of their qualified names."""
    names: dict[int, list[str]] = {}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    found: dict[int, tuple[Tensor, bool]] = {}
    for name, owner, attribute, tensor, is_buffer in _tensors(module):
        names.setdefault(id(tensor), []).append(name)
        if (owner, attribute) not in owners.setdefault(id(tensor), []):
            owners[id(tensor)].append((owner, attribute))
        found[id(tensor)] = tensor, is_buffer
    result: dict[str, Place] = {}
    for key, (tensor, is_buffer) in found.items():
        place = Place(names[key][0], tuple(owners[key]), tensor, is_buffer)
        result.update(dict.fromkeys(names[key], place))
    return result


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor, bool]]:
    for prefix, owner in module.named_modules(remove_duplicate=False):  # as in a state dict
        dot = f"{prefix}." if prefix else ""
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield dot + attribute, owner, attribute, parameter, False
        for attribute, buffer in owner._buffers.items():
            if buffer is not None and attribute not in owner._non_persistent_buffers_set:
                yield dot + attribute, owner, attribute, buffer, True


def is_batch_counter(name: str) -> bool:
    """Return whether a tensor counts the batches of a batch norm. Files of old PyTorch have none."""
    return name.rpartition(".")[2] == "num_batches_tracked"


def model_hint(absent: list[str], index: WeightIndex) -> str:
    """Return what to do about the ``absent`` tensors of a model that a config.json describes."""
    return "Does its config.json belong to it?"


class Plan(NamedTuple):
    """Where each needed tensor goes, in execution order, and the places that the checkpoint has no tensor for."""

    todo: dict[str, Place]
    missing: list[Place]


def plan(
    index: WeightIndex,
    expected: dict[str, Place],
    rename: Rename,
    *,
    strict: bool = True,
    last_wins: bool = False,
    hint: Callable[[list[str], WeightIndex], str] = model_hint,
    may_lack: Callable[[str], bool] = is_batch_counter,
) -> Plan:
    """Return the place in a module for each tensor of the checkpoint that it needs. ``expected`` are its ``places``.

    ``rename`` maps a checkpoint's name to the module's, or to None for a tensor that is not needed. Raises
    MismatchError, which lists the tensors that are missing or not expected (both only if ``strict``), have another
    shape, or are quantized where the parameter is floating point: integers, or floats of 8 bits with scales. ``hint``
    returns, from the names of those that are missing, what the error advises.

    Where a parameter is tied and the checkpoint has a tensor for several of its names, the first of the module's names
    wins, as in transformers, or with ``last_wins`` the last one, as in ``load_state_dict``, which copies one after the
    other. A lazy module's parameter takes the checkpoint's shape. ``may_lack`` says which of the module's tensors may
    be missing: the counters of batch norms, as for ``load_state_dict``.
    """
    sources, unexpected = _choose(index, expected, rename, last_wins=last_wins)
    filled = {place.name for place in sources.values()}
    missing = [place for name, place in expected.items() if name == place.name and name not in filled]
    absent = [place.name for place in missing if not may_lack(place.name)]
    problems = {
        "missing": absent if strict else [],
        "not expected": unexpected if strict else [],
        "of another shape": _misshaped(index, sources),
        "quantized, where floats were expected": _quantized(index, sources),
    }
    if any(problems.values()):
        listed = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names)
        advice = hint(absent, index)
        raise MismatchError(f"the checkpoint's tensors are not those of the model: {listed}. {advice}")
    return Plan({name: sources[name] for name in index.order if name in sources}, missing)


def _choose(
    index: WeightIndex, expected: dict[str, Place], rename: Rename, *, last_wins: bool
) -> tuple[dict[str, Place], list[str]]:
    """Return the place for each tensor of the checkpoint that fills one, and the tensors that there is no place for.

    Of several tensors for one place, that of the first of the module's names fills it, or the last (``last_wins``).
    """
    ranks = {target: -rank if last_wins else rank for rank, target in enumerate(expected)}
    chosen: dict[str, tuple[int, str]] = {}  # the place's name → the rank and the name of the checkpoint's tensor
    unexpected: list[str] = []
    for name in index.order:
        target = rename(name)
        if target is None:
            continue
        place = expected.get(target)
        if place is None:
            unexpected.append(name)
        elif place.name not in chosen or ranks[target] <= chosen[place.name][0]:
            chosen[place.name] = ranks[target], name
    return {source: expected[target] for target, (_, source) in chosen.items()}, unexpected


def _misshaped(index: WeightIndex, sources: dict[str, Place]) -> list[str]:
    """Return the tensors that have another shape than their place."""
    return [
        f"{source} (expected {list(place.tensor.shape)}, found {list(index.tensors[source].shape)})"
        for source, place in sources.items()
        if not is_lazy(place.tensor) and tuple(place.tensor.shape) != tuple(index.tensors[source].shape)
    ]


def _quantized(index: WeightIndex, sources: dict[str, Place]) -> list[str]:
    """Return the quantized tensors whose place is a parameter of floats."""
    return [
        f"{source} ({index.tensors[source].dtype})"
        for source, place in sources.items()
        if not place.is_buffer and place.tensor.is_floating_point() and _is_quantized(source, place.tensor.dtype, index)
    ]


def _is_quantized(name: str, wanted: torch.dtype, index: WeightIndex) -> bool:
    dtype = index.tensors[name].dtype
    if not dtype.startswith("F8_") or wanted.itemsize == 1:
        return dtype in _INTEGERS or dtype in BLOCKS
    return any(f"{name}_{suffix}" in index.tensors for suffix in ("scale", "scale_inv"))


def factory_hint(absent: list[str], index: WeightIndex) -> str:
    """Return what the author of a factory can do about the ``absent`` tensors."""
    for name in index.order if absent else ():
        prefix = name.removesuffix(absent[0])
        if prefix != name and all(prefix + other in index.tensors for other in absent):
            return f"Expected prefix={prefix!r} of build?"
    return "Is it a state dict of this very module? build takes prefix, rename and strict=False for others"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
