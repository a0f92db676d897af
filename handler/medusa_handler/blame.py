"""A user's traceback, without the frames of ours that led to it."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parent)


def user_traceback(error: BaseException, folder: Path | None = None) -> str:
    """The traceback from the first frame in ``folder`` on; without one, from the first frame that is not ours."""
    start = None if folder is None else _first(error.__traceback__, str(folder), inside=True)
    start = start or _first(error.__traceback__, _OURS, inside=False) or error.__traceback__
    return "".join(traceback.TracebackException(type(error), error, start).format()).rstrip()


def _first(frames: TracebackType | None, folder: str, *, inside: bool) -> TracebackType | None:
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if not name.startswith("<frozen") and name.startswith(folder) is inside:
            return frames
        frames = frames.tb_next
    return None
