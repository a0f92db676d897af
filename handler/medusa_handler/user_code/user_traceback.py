"""A user's traceback, without the frames of ours that led to it or that lie in between."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from types import TracebackType

import medusa_runtime
from medusa_runtime.errors import MedusaError

logger = logging.getLogger(__name__)

_OUR_FOLDERS = (Path(__file__).parents[1], Path(medusa_runtime.__file__).parent)
_OURS = (*(f"{folder}{os.sep}" for folder in _OUR_FOLDERS), "<frozen importlib.")


def is_ours(filename: str) -> bool:
    """Return whether a traceback's file is one of ours, or of Python's import system."""
    return filename.startswith(_OURS)


def user_traceback(error: BaseException, folder: Path | None = None) -> str:
    """Return the traceback from the first frame in ``folder`` on, or whole if there is none, without our frames."""
    found = traceback.TracebackException(type(error), error, _first_in(folder, error.__traceback__))
    found.stack[:] = [frame for frame in found.stack if not is_ours(frame.filename)]
    return "".join(found.format()).rstrip()


def log_cause(error: MedusaError, folder: Path | None) -> None:
    """Log the user's own error behind one of ours, if there is one."""
    if error.__cause__ is not None:
        logger.error("%s\n%s", error.code, user_traceback(error.__cause__, folder))


def _first_in(folder: Path | None, frames: TracebackType | None) -> TracebackType | None:
    first = frames
    while folder is not None and frames is not None:
        if frames.tb_frame.f_code.co_filename.startswith(f"{folder}{os.sep}"):
            return frames
        frames = frames.tb_next
    return first
