"""Children that user code forks. They end where the user's code ends, and do not go on as copies of the server."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def ending_forked_children() -> Iterator[None]:
    """Run user code. A child that it forks ends with the block, so that a parent that waits for it goes on.

    ``sys.exit`` ends the child with its status, another error with its traceback and status 1.
    """
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != pid:
            _end(error)
        raise
    if os.getpid() != pid:
        _end(None)


def _end(error: BaseException | None) -> NoReturn:
    status = 0
    if error is not None and isinstance(error.__cause__, SystemExit):  # as loading user code reports it
        error = error.__cause__
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
