"""A user's traceback, without the frames of ours that led to it or that lie in between."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from types import TracebackType

import medusa_runtime
from medusa_runtime.errors import MedusaError

logger = logging.getLogger(__name__)

_OURS = (str(Path(__file__).parents[1]), str(Path(medusa_runtime.__file__).parent), "<frozen importlib.")


def user_traceback(error: BaseException, folder: Path | None = None) -> str:
    """Return the traceback from the first frame in ``folder`` on, or whole if there is none, without our frames."""
    found = traceback.TracebackException(type(error), error, _first_in(folder, error.__traceback__))
    found.stack[:] = [frame for frame in found.stack if not frame.filename.startswith(_OURS)]
    return "".join(found.format()).rstrip()


def log_cause(error: MedusaError, folder: Path | None) -> None:
    """Log the user's own error behind one of ours, if there is one."""
    if error.__cause__ is not None:
        logger.error("%s\n%s", error.code, user_traceback(error.__cause__, folder))


def _first_in(folder: Path | None, frames: TracebackType | None) -> TracebackType | None:
    first = frames
    while folder is not None and frames is not None:
        if frames.tb_frame.f_code.co_filename.startswith(str(folder)):
            return frames
        frames = frames.tb_next
    return first
