"""Decoder layers of transformers that run as one compiled call, once the calls of their kernels have been recorded."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from medusa_runtime.kernels import native
from medusa_runtime.kernels.compiled import native_kernels

from ..layers.linear import Linear
from .attention import Step

if TYPE_CHECKING:
    from medusa_runtime.kernels.recording import Program

PROGRAMS = "medusa_programs"  # the attribute of a layer of transformers that holds its model's ``Programs``
_MOST_ROWS = 32  # tokens of a step; with more of them, the interpreter's share of the time is small
# A layer is recorded after so many steps with the same number of tokens, because recording takes longer than running.
_STEPS = 8
_ARENA_BYTES = 1 << 20  # the first size of the memory for a layer's intermediate results


class Programs:
    """The recorded layers of one model. Each layer is recorded separately for each number of tokens of a step.

    ``_found`` has, for a layer and a number of tokens, how often they have run without a recording, the recording, or
    None if the layer cannot be recorded.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._cache: Any = None
        self._found: dict[tuple[nn.Module, int], _Recorded | int | None] = {}
        self._arena: Tensor | None = None
        self._attention: Any = None
        self._inputs: Any = None

    def run(self, layer: nn.Module, hidden: Tensor, more: dict[str, Any]) -> Tensor | None:
        """Return the result of ``layer`` for ``hidden`` [1, tokens, size]; None if the caller must run the layer.

        ``more`` are the other arguments of the layer's forward.
        """
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
        """Return the addresses that a program takes as inputs, as an array of C pointers."""
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
        """Run the layer and record it, and return its result; None if it cannot be recorded now."""
        # Imported here because no start needs it: a model has been running for a while before a layer is recorded.
        from medusa_runtime.kernels.recording import Recorder

        kernels = native_kernels()
        if any(part._forward_pre_hooks for part in layer.modules()):
            return None  # a gate is still waiting for weights
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
            self._arena = torch.empty(2 * self._arena.nbytes, dtype=torch.uint8)  # earlier programs keep theirs
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
        """Return whether a call is like the recorded one, and no adapter takes part."""
        return (
            hidden.is_contiguous()
            and _options(more) == self._options
            and all(part.adapted is None or not part.adapted.step.groups for part in self._linears)
        )


def _options(more: dict[str, Any]) -> list[Any]:
    """Return the arguments of a layer, with None in place of tensors and tuples."""
    return [None if isinstance(value, (Tensor, tuple)) else value for value in more.values()]


def _plain(hidden: Tensor, more: dict[str, Any]) -> bool:
    rotation = more.get("position_embeddings")
    return hidden.is_contiguous() and (rotation is None or (isinstance(rotation, tuple) and len(rotation) == 2))


def use_programs(module: nn.Module, step: Step) -> None:
    """Let the layers of a module be recorded, if we know the formula of their attention."""
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
