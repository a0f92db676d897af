"""Any PyTorch module from a region: constructed without weights, callable at once (Cicada §3.1)."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from medusa_runtime.errors import WeightsError
from medusa_runtime.load.gc_freeze import freeze, thaw
from medusa_runtime.load.load_hooks import check_extra_state, has_post_hooks, run_post_hooks
from medusa_runtime.load.loader import Building, Loader
from medusa_runtime.load.plan import Rename
from medusa_runtime.load.skeleton import skeleton
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def build(
    region: Region,
    factory: Callable[[], M],
    prefix: str = "",
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    memory_format: torch.memory_format | None = None,
    strict: bool = True,
    copy: bool = False,
    exact: bool = True,
    release: bool = False,
    rename: Rename | None = None,
    timeline: Timeline | None = None,
    on_error: Callable[[BaseException], None] = lambda _: None,
) -> tuple[M, Loader]:
    """The factory's module, which may be called at once (each part waits for its own), and the loader that fills it.

    ``prefix`` is cut off the checkpoint's names; tensors without it are not this module's. ``dtype`` casts floating
    point parameters and buffers of the checkpoint, else each gets the module's own type, as with ``load_state_dict``.
    Without ``rename`` the module's own is asked, where it has one. See ``Building`` for ``strict``, ``copy``,
    ``exact`` and ``release``. Raises what the factory raises; what is wrong with the checkpoint is raised by the first
    forward and by ``Loader.wait``, and ``on_error`` is told of it, in another thread, where nobody has waited. Where
    the factory keeps views of weights, or has hooks that run after ``load_state_dict``, all is waited for here.
    """

    def end(error: BaseException | None) -> None:
        thaw()
        if error is not None:
            on_error(error)

    wanted = torch.device(device) if device is not None else None
    freeze()
    try:
        with timeline.stage("construct") if timeline is not None else nullcontext():
            module = _construct(factory)
            if strict:
                check_extra_state(module)
            if device is not None or dtype is not None:
                _convert_computed(module, wanted, dtype)
            loader = Loader(
                region,
                module,
                dtype=dtype,
                timeline=timeline,
                rename=_renaming(module, prefix, rename),
                device=wanted,
                building=Building(factory, strict, copy, exact, release, memory_format, end),
            )
    except BaseException:
        thaw()
        raise
    if loader.has_shared or has_post_hooks(module):  # something looks at weights past all gates
        try:
            loader.wait()
            run_post_hooks(module)
        except BaseException:
            loader.close()
            raise
    return module, loader


def _renaming(module: nn.Module, prefix: str, given: Rename | None) -> Rename:
    own: Rename | None = given or getattr(module, "rename", None)

    def rename(name: str) -> str | None:
        if not name.startswith(prefix):
            return None
        return own(name[len(prefix) :]) if own else name[len(prefix) :]

    return rename


def _construct(factory: Callable[[], M]) -> M:
    random_state = torch.get_rng_state()
    try:
        with skeleton() as phantoms:
            module = factory()
        problem = next(_on_meta(module), None)
        if problem is None and phantoms.keeps_views:
            problem = "something is kept that was computed from one"
        if problem is None and phantoms.drew_others:
            problem = next(_not_stored(module), None)
    except Exception as error:  # noqa: BLE001  one of the user's own is raised again below
        problem = _user_line(error)
    if problem is not None:
        # What it computed from a parameter is computed from initial values; so it would be without us.
        gc.collect()
        torch.set_rng_state(random_state)
        module = factory()
        logger.warning("the factory needs parameters' initial values (%s): constructed with them, slower", problem)
        lost = next(_on_meta(module, stored=False), None)
        if lost is not None:
            raise WeightsError(
                f"{lost} of the factory's module is on the meta device and has no value; expected a factory without "
                'to("meta") and to_empty: parameters take no memory here as it is'
            )
    if not isinstance(module, nn.Module):
        raise WeightsError(f"the factory returned a {type(module).__name__}; expected a torch.nn.Module")
    for name, part in module.named_modules():
        if any(kind.__module__.startswith("torch.jit.") for kind in type(part).__mro__):
            raise WeightsError(
                f"module {name!r} of the factory is compiled by torch.jit, which nothing can wait in front of; "
                "expected plain modules, and torch.jit after context.weights.wait()"
            )
    return module


def _user_line(error: BaseException) -> str:
    """The last line of code that is neither ours nor PyTorch's."""
    ours = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else str(error)


def _on_meta(module: nn.Module, *, stored: bool = True) -> Iterator[str]:
    """Buffers and plain attributes that were computed from a parameter, and so have no value.

    Without ``stored`` only those that no checkpoint brings.
    """
    if not isinstance(module, nn.Module):
        return
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name, buffer in part._buffers.items():
            lost = buffer is not None and buffer.is_meta and not is_lazy(buffer)
            if lost and (stored or name in part._non_persistent_buffers_set):
                yield f"buffer {dot}{name}"
        for name, value in vars(part).items():
            if type(value) is torch.Tensor and value.is_meta:
                yield f"attribute {dot}{name}"


def _not_stored(module: nn.Module) -> Iterator[str]:
    """What has a value that no checkpoint replaces, and that may be a random number."""
    if not isinstance(module, nn.Module):
        return
    for prefix, part in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for name in part._non_persistent_buffers_set & part._buffers.keys():
            if part._buffers[name] is not None:
                yield f"random numbers, perhaps of buffer {dot}{name}"
        for name, value in vars(part).items():
            if type(value) is torch.Tensor:
                yield f"random numbers, perhaps of attribute {dot}{name}"


def _convert_computed(module: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    """Buffers that were computed, as ``module.to(device, dtype)`` converts them."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                part._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
