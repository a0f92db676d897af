"""Gates in front of the parts of a module: a part's forward waits until its own weights are applied, and no longer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from medusa_runtime.errors import WeightsError
from medusa_runtime.load.pending import can_be_pending, refuse_tracing, too_early
from medusa_runtime.timeline import Timeline

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)


_thread = threading.local()


@contextmanager
def bypass_gates() -> Iterator[None]:
    """Let this thread's calls pass closed gates: capturing a graph needs the weights' addresses, not their values."""
    _thread.bypasses = True
    try:
        yield
    finally:
        _thread.bypasses = False


class Gate:
    """A hook in front of a module's forward that waits while the gate is closed.

    A gate is closed at first. When a forward passes it, it removes its hook, so that it costs nothing afterwards. A
    forward that comes too early waits, and raises ``error`` if the gate is opened with one. When a forward begins to
    wait, ``demand`` is called with the gate, so that the weights it needs are fetched first. A gate that is not
    ``hooked`` is waited at only by the pending tensors that it guards.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        owners: list[nn.Module],
        timeline: Timeline | None,
        *,
        hooked: bool = True,
    ) -> None:
        self.name = name
        self.owners = owners  # the modules whose own tensors it waits for
        self.remaining = 0
        self.begin_ns = 0  # when applying its first tensor began
        self.error: BaseException | None = None
        self.demand: Callable[[Gate], None] | None = None
        self._timeline = timeline
        self._opened = threading.Event()
        self._pid = os.getpid()
        self._module = module
        # torch copies the list of hooks before it calls them, so this one may be removed while another thread is in a
        # forward. It goes in front of all other hooks, because those of a lazy module look at its parameters.
        if hooked:
            module.register_forward_pre_hook(self, prepend=True)

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self, error: BaseException | None = None) -> None:
        """Let everything that waits go on, or raise ``error``."""
        self.error = error
        if error is None:
            self._remove(self._module)  # before the event: a thread that waits to copy the module must copy no hook
        self._opened.set()

    def _remove(self, module: nn.Module) -> None:
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in list(hooks.items()) if hook is self]:
            hooks.pop(key, None)

    def wait(self) -> None:
        """Wait until the gate is open. Raises the error with which it was opened.

        Raises WeightsError in a process forked while the weights were loaded, where no loader would ever open it.
        """
        if not self._opened.is_set():
            if os.getpid() != self._pid:
                raise WeightsError(
                    "this process was forked while weights were loaded by a thread, which is not in it; "
                    "expected a fork after context.weights.wait()"
                )
            start = time.monotonic_ns()
            if self.demand is not None:
                self.demand(self)
            self._opened.wait()
            if self._timeline is not None and self.begin_ns:  # else it guards no tensor, and waited for the index only
                self._timeline.record("wait", start, time.monotonic_ns(), unit=self.name)
        if self.error is not None:
            raise self.error

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        self.wait()
        return _opened_gate(self.name)

    def __reduce__(self) -> Any:
        self.wait()
        return _opened_gate, (self.name,)

    @property
    def __name__(self) -> str:  # read only by torch.jit.script, which would compile this hook
        raise too_early("torch.jit.script")

    def __call__(self, module: nn.Module, args: Any) -> None:
        if getattr(_thread, "bypasses", False):
            return
        refuse_tracing()
        self.wait()
        self._remove(module)


def _opened_gate(name: str) -> Gate:
    """Return an open gate for a copied module, which drops it at its first call.

    A module can be copied between a tensor's arrival and the gate's opening. This gate keeps no module alive.
    """
    gate = Gate(name, nn.Module(), [], None, hooked=False)
    gate.open()
    return gate


def unit_gates(
    module: nn.Module, timeline: Timeline | None, gated: Callable[[str], bool] = lambda _: True
) -> list[Gate]:
    """Return gates for the units of a model of ours: the modules that it calls one by one in a forward.

    Only units that are ``gated``, by their names, get one.

    A module with a list of modules somewhere inside is taken apart. One without such a list is a unit, for example a
    decoder layer. A unit may use the tensors of its own submodules in any way, but those of another unit only by
    calling it.
    """
    return [Gate(name, unit, owners, timeline) for name, unit, owners in _units("", module, True) if gated(name)]


def _units(name: str, module: nn.Module, apart: bool) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    inside = list(module.modules())
    if not apart and not any(isinstance(part, _LISTS) for part in inside):
        yield name, module, inside
        return
    # A list of parameters is never called: it belongs to the module that holds it.
    yield name, module, [module, *(child for child in module.children() if isinstance(child, _PARAMETER_LISTS))]
    for child_name, child in module.named_children():
        if not isinstance(child, _PARAMETER_LISTS):
            yield from _units(f"{name}.{child_name}" if name else child_name, child, False)


def owner_gates(module: nn.Module, timeline: Timeline | None) -> list[Gate]:
    """Return gates for every module that owns tensors, in a module of which nothing else is known.

    A module with children whose own tensors are all parameters gets no hook: its forward goes on until it uses one of
    them (``PendingParameter``). A module with buffers waits when it is called, because a buffer has a value already. So
    does PyTorch's own attention, for the weights of its parts: while one of them is not a plain parameter, it computes
    in another way, whose last bits differ.
    """
    found: list[Gate] = []
    for name, owner in module.named_modules():
        lists = [child for child in owner.children() if isinstance(child, _PARAMETER_LISTS)]
        owns = [part for part in (owner, *lists, *_read_by(owner)) if part._parameters or part._buffers]
        if owns and not isinstance(owner, _PARAMETER_LISTS):
            parts = len(owns) > 1 + len(lists) or len(lists) == len(list(owner.children()))
            never_pending = [
                tensor for tensor in owner._parameters.values() if tensor is not None and not can_be_pending(tensor)
            ]
            found.append(Gate(name, owner, owns, timeline, hooked=bool(owner._buffers or never_pending) or parts))
    return found


def _read_by(owner: nn.Module) -> list[nn.Module]:
    """Return the submodules whose weights decide which way ``owner``'s forward computes."""
    if isinstance(owner, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return list(owner.modules())[1:]
    if isinstance(owner, nn.TransformerEncoder) and len(owner.layers):
        return list(owner.layers[0].modules())
    return []
