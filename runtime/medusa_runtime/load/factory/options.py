"""The options of ``build``, which say how a module that a user's factory makes is filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from medusa_runtime.load.plan import Rename


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of ``build``; ``context.weights.build`` takes them as keyword arguments.

    prefix: cut off the names in the checkpoint. Tensors without it do not belong to this module.
    rename: maps a name in the checkpoint (without the prefix) to one in the module, or to None to leave the tensor out.
        Without it the module's own ``rename`` is used if it has one.
    dtype: converts floating point parameters and the checkpoint's buffers. Without it each keeps the dtype that the
        module gave it, as with ``load_state_dict``.
    device, memory_format: convert each tensor to these.
    strict: False allows tensors to be missing, which then keep their initial values, and ignores tensors that the
        module does not have.
    copy: make no parameter a view of the region.
    exact: copy a tensor if its address as a view would change the last bits of a result.
    release: drop the region's bytes of each copied tensor, so that no process can load them a second time.
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
