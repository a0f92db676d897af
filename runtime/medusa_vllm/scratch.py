"""A temporary folder for when vLLM or torch wants paths. It is removed even if the process is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Goes on when the other end of its standard input is closed: this process has closed its guard, or has died.
# A group's shared memory is found by the inodes that its processes have mapped, because the process that makes a
# semaphore has mapped it under another name. Python's resource tracker would remove the names, too, but it is one of
# the group, and gets no CPU in time on a busy machine. Stopped processes make no further names.
_GUARD = """
collect() {
    for process in /proc/[0-9]*; do
        stat=
        read -r stat < "$process/stat"
        set -- ${stat##*) }
        [ "$3" = "$group" ] && inodes="$inodes $(sed -n 's|^.* \\([0-9][0-9]*\\)  */dev/shm/.*|\\1|p' "$process/maps")"
    done
}
read -r group && read -r _
if [ -n "$group" ]; then
    collect
    kill -s TERM -- "-$group"
    for _ in 1 2 3; do kill -s 0 -- "-$group" || break; sleep 1; done
    kill -s STOP -- "-$group"
    collect
    kill -s KILL -- "-$group"
    for inode in $(printf '%s\\n' $inodes | sort -u); do
        find /dev/shm -maxdepth 1 -inum "$inode" \\( -name 'psm_*' -o -name 'sem.mp-*' \\) -exec rm -f -- {} +
    done
fi 2>/dev/null
exec rm -rf -- "$0"
"""


class Guard:
    """A process that removes a folder when this process closes the guard or is killed."""

    def __init__(self, folder: Path) -> None:
        command = ("/bin/sh", "-c", _GUARD, os.fspath(folder))
        try:
            # In its own session, so that a signal to the process group does not end it.
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, stdin=subprocess.PIPE, start_new_session=True
            )
        except OSError:  # no shell, or no more processes: then only a killed engine leaves its folder behind
            self._process = None

    def end_group(self, leader: int) -> None:
        """Have what is left of a process group ended first: SIGTERM, and SIGKILL after three seconds.

        The names of its shared memory are removed, too.
        """
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # somebody has ended it
                self._process.stdin.write(b"%d\n" % leader)
                self._process.stdin.flush()

    def close(self) -> None:
        """Wait until all of it has ended. Can be called twice."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Make a private temporary folder for this context. Raises OSError if that fails."""
    path = Path(tempfile.gettempdir(), f"{name}-{secrets.token_hex(8)}")
    guard = Guard(path)  # started before there is anything to remove
    try:
        path.mkdir(mode=0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        guard.close()


__all__ = ["Guard", "scratch_folder"]
