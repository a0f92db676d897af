"""Decoder layers of transformers' modules that run as one compiled call, once their kernels' calls are recorded."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from medusa_runtime.kernels import native
from medusa_runtime.kernels.compiled import compiled

from ..layers.linear import Linear
from .attention import Step

if TYPE_CHECKING:
    from medusa_runtime.kernels.recording import Program

PROGRAMS = "medusa_programs"  # the attribute of a layer of transformers that holds its model's ``Programs``
_MOST_ROWS = 32  # tokens of a step; with more, the interpreter's share is small
_STEPS = 8  # with so many tokens before a layer is recorded, which takes longer than to run it
_ARENA_BYTES = 1 << 20  # for what a layer makes, at first


class Programs:
    """The recorded layers of one model, each for the numbers of tokens that steps have had."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._cache: Any = None
        self._found: dict[tuple[nn.Module, int], _Recorded | int | None] = {}
        self._arena: Tensor | None = None
        self._attention: Any = None
        self._inputs: Any = None

    def run(self, layer: nn.Module, hidden: Tensor, more: dict[str, Any]) -> Tensor | None:
        """What ``layer`` makes of ``hidden`` [1, tokens, size]; None where it has to run itself."""
        attention: Any = self._step.attention
        if hidden.dim() != 3 or hidden.shape[1] > _MOST_ROWS or not hasattr(attention, "contexts"):
            return None
        key = layer, hidden.shape[1]
        found = self._found.get(key, 0)
        if found is None:
            return None
        if attention.cache is not self._cache:
            self._found, self._cache = {}, attention.cache
            return None
        if isinstance(found, int):
            self._found[key] = found + 1
            return self._record(layer, hidden, more) if found >= _STEPS else None
        if not found.fits(hidden, more):
            return None
        return found.program(self._given(hidden, more))

    def _given(self, hidden: Tensor, more: dict[str, Any]) -> Any:
        """The inputs of a program."""
        attention: Any = self._step.attention
        if attention is not self._attention:  # once a step
            self._attention = attention
            places = [x.data_ptr() for x in (attention.slots, attention.tables, attention.rows, attention.contexts)]
            self._inputs = (ctypes.c_void_p * native.INPUTS)(None, attention.tables.stride(0), None, *places)
        inputs = self._inputs
        inputs[2] = hidden.data_ptr()
        rotation = more.get("position_embeddings")
        if rotation is not None:
            cos, sin = self._step.rotation(*rotation)
            inputs[7], inputs[8] = cos.data_ptr(), sin.data_ptr()
        return inputs

    def _record(self, layer: nn.Module, hidden: Tensor, more: dict[str, Any]) -> Tensor | None:
        """Run the layer, and record it if it can be."""
        # Not needed before a model has answered for a while.
        from medusa_runtime.kernels.recording import Recorder

        kernels = compiled()
        if any(part._forward_pre_hooks for part in layer.modules()):
            return None  # weights are still on their way
        key = layer, hidden.shape[1]
        if not isinstance(kernels, native.NativeKernels) or not _plain(hidden, more):
            self._found[key] = None
            return None
        if self._arena is None:
            self._arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8)
        inputs = [address for address in self._given(hidden, more)[2:9] if address]
        recorder = Recorder(kernels, self._arena, inputs, (self._cache.pool, *layer.parameters(), *layer.buffers()))
        with recorder:
            result = cast(Any, type(layer)).plainly(layer, hidden, **more)
        if recorder.is_short:
            self._arena = torch.empty(2 * self._arena.nbytes, dtype=torch.uint8)  # programs keep the one that they have
            return cast(Tensor, result)
        program = recorder.program(result)
        self._found[key] = None if program is None else _Recorded(program, layer, more)
        return result.clone() if isinstance(result, Tensor) else result


class _Recorded:
    def __init__(self, program: Program, layer: nn.Module, more: dict[str, Any]) -> None:
        self.program = program
        self._linears = [part for part in layer.modules() if isinstance(part, Linear)]
        self._options = _options(more)

    def fits(self, hidden: Tensor, more: dict[str, Any]) -> bool:
        """Return whether a call is like the one that was recorded, and no adapter takes part."""
        return (
            hidden.is_contiguous()
            and _options(more) == self._options
            and all(part.adapted is None or not part.adapted.step.groups for part in self._linears)
        )


def _options(more: dict[str, Any]) -> list[Any]:
    """The arguments of a layer that are no tensors."""
    return [None if isinstance(value, (Tensor, tuple)) else value for value in more.values()]


def _plain(hidden: Tensor, more: dict[str, Any]) -> bool:
    rotation = more.get("position_embeddings")
    return hidden.is_contiguous() and (rotation is None or (isinstance(rotation, tuple) and len(rotation) == 2))


def use_programs(module: nn.Module, step: Step) -> None:
    """Have the layers inside whose attention is known be recorded."""
    programs = Programs(step)
    for part in list(module.modules()):
        if any(hasattr(child, "medusa_formula") for child in part.children()):
            setattr(part, PROGRAMS, programs)
            part.__class__ = _recorded(cast(Any, type(part)))


@functools.cache
def _recorded(kind: Any) -> type:
    def forward(self: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Any:
        found = None if others else getattr(self, PROGRAMS).run(self, hidden_states, more)
        return kind.forward(self, hidden_states, *others, **more) if found is None else found

    return type(kind.__name__, (kind,), {"forward": forward, "plainly": kind.forward})


__all__ = ["use_programs"]
