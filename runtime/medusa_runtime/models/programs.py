"""Decoder layers that run as one compiled call, once the calls of their kernels have been recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa_runtime.kernels import native
from medusa_runtime.kernels.compiled import native_kernels
from medusa_runtime.models.layers.linear import Linear

if TYPE_CHECKING:
    from medusa_runtime.kernels.recording import Program
    from medusa_runtime.models.layers.rope import Rotation

_MOST_ROWS = 32  # tokens of a step; with more of them, the interpreter's share of the time is small
# A layer is recorded after so many steps with the same number of tokens, because recording takes longer than running.
_STEPS = 8
_ARENA_BYTES = 1 << 20  # the first size of the memory for a layer's intermediate results


class Programs:
    """The recorded layers of one model. Each layer is recorded separately for each number of tokens of a step.

    ``_found`` has, for a layer and a number of tokens, how often they have run without a recording, the recording, or
    None if the layer cannot be recorded.
    """

    def __init__(self) -> None:
        self._cache: Any = None
        self._found: dict[tuple[nn.Module, int], _Recorded | int | None] = {}
        self._arena: Tensor | None = None
        self._attention: Any = None
        self._inputs: Any = None

    def run(
        self,
        layer: nn.Module,
        hidden: Tensor,
        attention: Any,
        rotation: Rotation | None,
        plainly: Callable[[], Any],
        options: tuple[Any, ...] = (),
    ) -> Any:
        """Return the layer's result for ``hidden`` [..., tokens, size]: by its recording, or else from ``plainly``.

        A recording is used for calls with the same ``options`` only.
        """
        tokens = hidden.shape[-2]
        if tokens > _MOST_ROWS or not hasattr(attention, "contexts") or not hidden.is_cpu:
            return plainly()
        key = layer, tokens
        found = self._found.get(key, 0)
        if found is None:
            return plainly()
        if attention.cache is not self._cache:
            self._found, self._cache = {}, attention.cache
            return plainly()
        if isinstance(found, int):
            self._found[key] = found + 1
            if found < _STEPS or any(part._forward_pre_hooks for part in layer.modules()):
                return plainly()  # or a gate is still waiting for weights
            return self._record(key, hidden, attention, rotation, plainly, options)
        if not hidden.is_contiguous() or not found.fits(options):
            return plainly()
        return found.program(self._given(hidden, attention, rotation))

    def _given(self, hidden: Tensor, attention: Any, rotation: Rotation | None) -> Any:
        """Return the addresses that a program takes as inputs, as an array of C pointers."""
        if attention is not self._attention:  # once a step
            self._attention = attention
            places = [x.data_ptr() for x in (attention.slots, attention.tables, attention.rows, attention.contexts)]
            self._inputs = (ctypes.c_void_p * native.INPUTS)(None, attention.tables.stride(0), None, *places)
        inputs = self._inputs
        inputs[2] = hidden.data_ptr()
        if rotation is not None:
            inputs[7], inputs[8] = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        return inputs

    def _record(
        self,
        key: tuple[nn.Module, int],
        hidden: Tensor,
        attention: Any,
        rotation: Rotation | None,
        plainly: Callable[[], Any],
        options: tuple[Any, ...],
    ) -> Any:
        """Run the layer and record it, and return its result."""
        # Imported here because no start needs it: a model has been running for a while before a layer is recorded.
        from medusa_runtime.kernels.recording import Recorder

        kernels, layer = native_kernels(), key[0]
        if not isinstance(kernels, native.NativeKernels) or not hidden.is_contiguous():
            self._found[key] = None
            return plainly()
        if self._arena is None:
            self._arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8)
        inputs = [address for address in self._given(hidden, attention, rotation)[2:9] if address]
        recorder = Recorder(kernels, self._arena, inputs, (self._cache.pool, *layer.parameters(), *layer.buffers()))
        with recorder:
            result = plainly()
        if recorder.is_short:
            self._arena = torch.empty(2 * self._arena.nbytes, dtype=torch.uint8)  # earlier programs keep theirs
            return result
        program = recorder.program(result)
        linears = [part for part in layer.modules() if isinstance(part, Linear)]
        self._found[key] = None if program is None else _Recorded(program, linears, options)
        return result.clone() if isinstance(result, Tensor) else result


class _Recorded(NamedTuple):
    program: Program
    linears: list[Linear]
    options: tuple[Any, ...]

    def fits(self, options: tuple[Any, ...]) -> bool:
        """Return whether a call is like the recorded one, and no adapter takes part."""
        return options == self.options and all(
            part.adapted is None or not part.adapted.step.groups for part in self.linears
        )


__all__ = ["Programs"]
