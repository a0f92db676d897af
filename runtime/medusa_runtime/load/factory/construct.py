"""Running a user's factory, so that the module's parameters take no memory wherever that goes unnoticed."""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from medusa_runtime.errors import WeightsError
from medusa_runtime.load.skeleton import skeleton

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def construct(factory: Callable[[], M]) -> M:
    """Return the factory's module as a skeleton. If the factory needs initial values, keep them and log a warning.

    Raises what the factory raises, and WeightsError for a module that cannot be filled.
    """
    random_state = torch.get_rng_state()
    try:
        with skeleton() as mode:
            module = factory()
        problem = next(_on_meta(module), None)
        if problem is None and mode.keeps_views:
            problem = "something is kept that was computed from one"
        if problem is None and mode.drew_others:
            problem = next(_not_stored(module), None)
    except Exception as error:  # noqa: BLE001  the factory's own errors are raised again below
        problem = _user_line(error)
    if problem is not None:
        # Construct it again with initial values, as it would be without this runtime.
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
    """Return the last line in the traceback that is neither our code nor PyTorch's."""
    ours = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else str(error)


def _on_meta(module: nn.Module, *, stored: bool = True) -> Iterator[str]:
    """Yield the buffers and plain attributes that were computed from a parameter, and so have no value.

    Without ``stored``, leave out buffers that a checkpoint stores.
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
    """Yield the buffers and plain attributes that are in no checkpoint, and so keep perhaps random values."""
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
