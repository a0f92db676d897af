"""Building any PyTorch module from a region: constructed without weights, callable at once (Cicada §3.1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from medusa_runtime.load.factory.applier import FactoryApplier
from medusa_runtime.load.factory.construct import construct
from medusa_runtime.load.factory.gc_freeze import freeze, thaw
from medusa_runtime.load.factory.load_hooks import check_extra_state, has_post_hooks, run_post_hooks
from medusa_runtime.load.factory.options import BuildOptions
from medusa_runtime.load.loader import Loader
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

M = TypeVar("M", bound=nn.Module)

_DEFAULTS = BuildOptions()


def build(
    region: Region,
    factory: Callable[[], M],
    options: BuildOptions = _DEFAULTS,
    *,
    timeline: Timeline | None = None,
    on_error: Callable[[BaseException], None] = lambda _: None,
    make_applier: Callable[[nn.Module, Callable[[], nn.Module], BuildOptions], FactoryApplier] = FactoryApplier,
) -> tuple[M, Loader]:
    """Return the module that ``factory`` makes, which may be called at once, and the loader that fills it.

    Each part of a forward waits for its own weights. Raises what the factory raises. An error in the checkpoint is
    raised by the first forward and by ``Loader.wait``. If neither waits, ``on_error`` is called with it, in another
    thread. If the factory keeps views of weights, or the module has hooks that run after ``load_state_dict``, this
    function waits for all weights.
    """

    def end(error: BaseException | None) -> None:
        thaw()
        if error is not None:
            on_error(error)

    freeze()
    try:
        with timeline.stage("construct") if timeline is not None else nullcontext():
            module = construct(factory)
            if options.strict:
                check_extra_state(module)
            if options.device is not None or options.dtype is not None:
                _convert_computed(module, options)
            applier = make_applier(module, factory, options)
            loader = Loader(region, applier, timeline=timeline, release=options.release, on_end=end)
    except BaseException:
        thaw()
        raise
    if applier.has_shared or has_post_hooks(module):  # something looks at weights past all gates
        try:
            loader.wait()
            run_post_hooks(module)
        except BaseException:
            loader.close()
            raise
    return module, loader


def _convert_computed(module: nn.Module, options: BuildOptions) -> None:
    """Convert buffers that were computed, as ``module.to(device, dtype)`` does."""
    device = None if options.device is None else torch.device(options.device)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                part._buffers[name] = buffer.to(device, options.dtype if buffer.is_floating_point() else None)
