"""A user's traceback, without the frames of ours that led to it or that lie in between."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

import medusa_runtime
from medusa_runtime.errors import MedusaError

logger = logging.getLogger(__name__)

_OUR_FOLDERS = (Path(__file__).parents[1], Path(medusa_runtime.__file__).parent)
_STANDARD_LIBRARY = f"{os.path.dirname(os.__file__)}{os.sep}"
_OURS = (*(f"{folder}{os.sep}" for folder in _OUR_FOLDERS), "<frozen importlib.", importlib.__file__)


# Those of ``context.model``, whose import would take long.
MODEL_METHODS = ("generate", "stream", "chat", "stream_chat", "embed", "tokenize", "detokenize")


def is_ours(filename: str) -> bool:
    """Return whether a traceback's file is one of ours, or of Python's import system."""
    return filename.startswith(_OURS)


def user_traceback(error: BaseException, folder: Path | None = None) -> str:
    """Return the traceback from the first frame in ``folder`` on, without our frames.

    If no frame is in ``folder``, the one of a result that cannot be sent for example, the traceback begins where ours
    begin: the server's frames before them explain nothing. Without a ``folder`` it is whole.
    """
    found = traceback.TracebackException(type(error), error, _first_in(folder, error.__traceback__))
    found.stack[:] = [frame for frame in found.stack if not is_ours(frame.filename)]
    text = "".join(found.format()).rstrip()
    if isinstance(error, AttributeError) and error.obj is None and error.name in MODEL_METHODS:
        text += "\ncontext.model is None without a model: expected --model URL"
    return text


def place_in_user_code(thread: int, ours: str) -> str | None:
    """Return the line of user code that a thread has come to, from the code in our file ``ours``; None if unknown."""
    found, frame = None, sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename != ours:
        if not is_ours(frame.f_code.co_filename):
            found = frame
        frame = frame.f_back
    if frame is None or found is None or found.f_code.co_filename.startswith(_STANDARD_LIBRARY):
        return None
    return f"{found.f_code.co_filename}, line {found.f_lineno}"


def log_cause(error: MedusaError, folder: Path | None) -> None:
    """Log the user's own error behind one of ours, if there is one."""
    if error.__cause__ is not None:
        logger.error("%s\n%s", error.code, user_traceback(error.__cause__, folder))


def _first_in(folder: Path | None, frames: TracebackType | None) -> TracebackType | None:
    first, ours = frames, None
    while folder is not None and frames is not None:
        filename = frames.tb_frame.f_code.co_filename
        if filename.startswith(f"{folder}{os.sep}"):
            return frames
        if ours is None and is_ours(filename):
            ours = frames
        frames = frames.tb_next
    return ours or first
