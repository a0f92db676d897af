"""How a module that a user's factory makes is filled: the options of ``build``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from medusa_runtime.load.plan import Rename


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of ``build``; ``context.weights.build`` takes them as keyword arguments.

    prefix: is cut off the names in the checkpoint; tensors without it do not belong to this module.
    rename: maps a name in the checkpoint (without the prefix) to one in the module, or to None to leave the tensor out;
        without it the module's own ``rename`` is used if it has one.
    dtype: converts floating point parameters and the checkpoint's buffers; without it each keeps the type that the
        module gave it, as with ``load_state_dict``.
    device, memory_format: what each tensor is converted to.
    strict: false lets tensors be missing, which then have their initial values, and ignores further ones.
    copy: no parameter is a view of the region.
    exact: copy where a view's address would change the last bits of a result.
    release: drop the region's bytes of each tensor that was copied; nobody can load them a second time.
    """

    prefix: str = ""
    rename: Rename | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    memory_format: torch.memory_format | None = None
    strict: bool = True
    copy: bool = False
    exact: bool = True
    release: bool = False
