"""Layers of transformers that keep a state of each sequence, such as those of Mamba, beside the engine's attention.

Such a layer asks its cache for the state, and leaves the next one there. Here it gets a cache for one layer, with the
states of the sequences that it runs for: those in decode as one batch, prompts one by one. What a layer keeps, and of
which sizes, it shows in a trial with zeros.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from medusa_runtime.kernels import recurrence

from ...errors import ModelError
from ..base import StatefulAttention, StateShape
from .attention import STEP, Step
from .recurrent_functions import ShapesOfStates, running, with_our_functions

_NAMES = ("cache", "cache_params", "past_key_values")  # of the argument that is a cache; the first since 5.24
_USES = re.compile(rf"\b(?:{'|'.join(_NAMES)})\.(\w+)")
# What the layers here, attention, and the models around them use of it.
_KNOWN = frozenset(
    {
        "get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state", "has_previous_state",
        "is_recording_past", "update", "get_seq_length",
    }
)  # fmt: skip
_CONTINUES = re.compile(r"\binitial_states?=recurrent_state\b")
_TRIED = 2  # tokens of a trial
_CONV, _RECURRENT = "conv", "recurrent"
Key = tuple[str, int]  # which of a layer's states: its kind, and its number among these


class LayerCache:
    """The part of transformers' ``Cache`` that such a layer uses. ``states`` has what it leaves, [sequences, …].

    With ``states`` given, these are what earlier tokens left; without, there are no earlier tokens.
    """

    def __init__(self, states: dict[Key, Tensor] | None = None) -> None:
        self.states = {} if states is None else states
        self._is_fresh = states is None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self._is_fresh else self.states[_CONV, state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self._is_fresh else self.states[_RECURRENT, state_idx]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs [sequences, channels, taps]; return them and those before, [sequences, channels, …]."""
        key = _CONV, state_idx
        if self._is_fresh:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            full = nn.functional.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        else:
            width = self.states[key].shape[-1]
            full = torch.cat((self.states[key], conv_states), -1)
        self.states[key] = full[..., full.shape[-1] - width :]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.states[_RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._is_fresh

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class _NoCache(LayerCache):
    """A cache for a layer whose functions find the states of all sequences themselves."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        return recurrent_states


def keeps_states(kind: Any) -> bool:
    """Return whether a class of transformers is such a layer."""
    return bool({"get_conv_state", "get_recurrent_state"} & _calls(kind))


def attends(kind: Any) -> bool:
    """Return whether a class of transformers is an attention that keeps keys and values."""
    return "update" in _calls(kind)


@functools.cache
def _calls(kind: Any) -> frozenset[str]:
    """Return the names of what a class of transformers uses of a cache, also by inheritance."""
    theirs = [base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    return frozenset(name for base in theirs for name in _USES.findall(inspect.getsource(base)))


def use_states(module: nn.Module, layers: int, hidden: int, dtype: torch.dtype, step: Step) -> list[list[StateShape]]:
    """Let the layers of a module keep their states in the engine. Return what each of its ``layers`` keeps.

    The list is empty if no layer keeps any. Raises ModelError for a layer that does so in another way.
    """
    parts: list[Any] = [part for part in module.modules() if keeps_states(type(part))]
    if not parts:
        return []
    for part in module.modules():
        if others := _calls(cast(Any, type(part))) - _KNOWN:
            raise unknown_states(part, f"it uses {', '.join(sorted(others))} of its cache")
    shapes: list[list[StateShape]] = [[] for _ in range(layers)]
    for part in parts:
        if shapes[part.layer_idx]:
            raise unknown_states(part, "several parts of a layer do")
        x, kind = torch.zeros(1, _TRIED, hidden, dtype=dtype), cast(Any, type(part))
        together = _tried_together(part, x)
        if together is not None:
            shapes[part.layer_idx] = together
            part.__class__ = _together(kind)
        else:
            shapes[part.layer_idx] = _tried_apart(part, x)
            part.__class__ = _apart(kind)
        setattr(part, STEP, step)
    return shapes


def _tried_together(part: Any, x: Tensor) -> list[StateShape] | None:
    """Return what a layer keeps if it can run for all sequences at once, with our functions; else None."""
    kind = cast(Any, type(part))
    if _with_our_functions(kind) is None:
        return None
    noted = ShapesOfStates()
    try:
        with torch.inference_mode(), _with_zeros(part), running(noted, part.layer_idx):
            _call(_with_our_functions(kind), part, x, _NoCache())
    except Exception:  # noqa: BLE001 - whatever is in the way, the other way may go
        return None
    return noted.inputs + noted.matrices if len(noted.inputs) == 1 and len(noted.matrices) <= 1 else None


def _tried_apart(part: Any, x: Tensor) -> list[StateShape]:
    """Return what a layer keeps that runs for each sequence. Raises ModelError if it does not run so either."""
    tried = LayerCache()
    try:
        with torch.inference_mode(), _with_zeros(part):
            found = _call(type(part).forward, part, x, tried)
    except Exception as error:
        raise unknown_states(part, f"{type(error).__name__}: {error}") from error
    if not isinstance(found, Tensor) or found.shape != x.shape:
        raise unknown_states(part, "it returns something else than the hidden states")
    part.medusa_states = sorted(tried.states)
    return [
        StateShape(tuple(state.shape[1:]), None if state.dtype is x.dtype else state.dtype)
        for state in (tried.states[key] for key in part.medusa_states)
    ]


def unknown_states(part: nn.Module, why: str) -> ModelError:
    """Return the error for a module of transformers that keeps states in a way that is not supported, and why not."""
    return ModelError(
        f"{type(part).__name__} of transformers keeps a state of each sequence in a way that the torch engine does not "
        f"support ({why}); expected --engine vllm for this model"
    )


@contextmanager
def _with_zeros(part: nn.Module) -> Iterator[None]:
    """Give a module zeros as parameters and buffers. Memory that is only read, and never written, takes nearly none.

    Not placeholders of the meta device: the lean import of torch leaves out what some functions need there.
    """
    held = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in part.modules()]
    for owner, *_ in held:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
                owner._parameters[name] = nn.Parameter(zeros, requires_grad=False)
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else torch.zeros(buffer.shape, dtype=buffer.dtype)
    try:
        yield
    finally:
        for owner, parameters, buffers in held:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)


def _call(forward: Any, part: nn.Module, hidden: Tensor, cache: LayerCache, **more: Any) -> Any:
    return forward(part, hidden, **{_cache_of(forward): cache}, **more)


@functools.cache
def _cache_of(forward: Any) -> str:
    """Return the name of the argument of a layer's forward that is a cache."""
    accepted = inspect.signature(inspect.unwrap(forward)).parameters
    return next((one for one in _NAMES if one in accepted), _NAMES[0])


_with_our_functions = functools.cache(with_our_functions)


@functools.cache
def _together(kind: Any) -> Any:
    """Return a layer's class that runs for all sequences of a step at once."""
    ours = _with_our_functions(kind)

    def forward(self: Any, hidden_states: Tensor, *_: Any, **more: Any) -> Any:
        step: Step = getattr(self, STEP)
        with running(cast(StatefulAttention, step.attention), self.layer_idx):
            return _call(ours, self, hidden_states, _NoCache(), **_others(more))

    return type(kind.__name__, (kind,), {"forward": forward})


def _others(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a layer's forward without its cache, and without a mask: there is no padding."""
    return {name: value for name, value in options.items() if name not in (*_NAMES, "attention_mask")}


@functools.cache
def _apart(kind: Any) -> type:
    """Return a layer's class that runs for the sequences in decode together, and for each prompt by itself."""
    continues = _CONTINUES.search(inspect.getsource(kind)) is not None

    def forward(self: Any, hidden_states: Tensor, *_: Any, **more: Any) -> Any:
        step: Step = getattr(self, STEP)
        attention: Any = step.attention
        pools: list[Tensor] | None = None
        if hasattr(attention, "steps"):
            steps, pools = attention.steps, attention.cache.states.layers[self.layer_idx]
        else:
            steps = recurrence.steps_of(getattr(attention, "lengths", [hidden_states.shape[1]]))
        out = torch.empty_like(hidden_states)
        for rows, slots, is_fresh in _batches(steps):
            states = None
            if not is_fresh:
                assert pools is not None
                states = dict(zip(self.medusa_states, (pool[slots] for pool in pools), strict=True))
            cache = LayerCache(states)
            # Jamba's form for several tokens begins without a state, so each token that has one runs by itself.
            for part in [rows] if is_fresh or continues else torch.split(rows, 1, 1):
                out[0, part] = _call(kind.forward, self, hidden_states[0, part], cache, **_others(more))
            for key, pool in zip(self.medusa_states, pools or (), strict=False):
                pool[slots] = cache.states[key]
        return out

    return type(kind.__name__, (kind,), {"forward": forward})


def _batches(steps: recurrence.Steps) -> Iterable[tuple[Tensor, Tensor, bool]]:
    """Yield batches of sequences with the same number of tokens: their rows [sequences, tokens] and their slots.

    All of a batch have earlier tokens, or none has; that is the third value.
    """
    starts, begins = steps.starts.tolist(), steps.begins.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    decodes = [n for n, (begin, length) in enumerate(zip(begins, lengths, strict=True)) if begin and length == 1]
    batches = [[n] for n in range(len(lengths)) if n not in {*decodes}]
    for batch in ([decodes] if decodes else []) + batches:
        rows = torch.tensor([list(range(starts[n], starts[n] + lengths[n])) for n in batch])
        yield rows, steps.slots[batch], not begins[batch[0]]


__all__ = ["LayerCache", "attends", "unknown_states", "use_states"]
