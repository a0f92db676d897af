"""A FUSE file system that answers until it is told to hang or to be slow. It speaks the kernel's protocol, as root."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

# fuse(4) and <linux/fuse.h>.
_IN, _OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
LOOKUP, FLUSH = 1, 25
_GETATTR, _OPEN, _READ, _RELEASE, _INIT, _OPENDIR, _RELEASEDIR = 3, 14, 15, 18, 26, 27, 29
_FORGET, _INTERRUPT, _BATCH_FORGET, _ACCESS = 2, 36, 42, 34
_MNT_FORCE, _MNT_DETACH = 1, 2


class HangingFiles:
    """A folder with these files. From ``hang`` on nothing is answered; the end lets everybody go on."""

    def __init__(self, place: Path, files: Mapping[str, bytes] = {"file": bytes(5)}, *, for_all: bool = True) -> None:
        self.place = place
        self.files = dict(files)
        self.slow_s = 0.0  # how long a LOOKUP takes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0{',allow_other' if for_all else ''}"
        if self._libc.mount(b"hang", bytes(place), b"fuse", 0, options.encode()):
            os.close(self._device)
            raise OSError(ctypes.get_errno(), "mount")
        self._hang_in: tuple[int, ...] = ()
        self._hangs = False
        self.asked: list[int] = []  # what was not answered
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._libc.umount2(bytes(self.place), _MNT_FORCE)  # ends all that waits
        self._libc.umount2(bytes(self.place), _MNT_DETACH)
        self._thread.join()
        os.close(self._device)

    def hang(self, *opcodes: int) -> None:
        """Answer none of these requests any more, or none at all."""
        self._hang_in = opcodes
        self._hangs = True

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError:
                return  # it was aborted
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            if self._hangs and (opcode in self._hang_in or not self._hang_in):
                self.asked.append(opcode)
                continue
            if opcode == LOOKUP:
                time.sleep(self.slow_s)
            found = self._answer(opcode, node, request[_IN.size :])
            data = b"" if isinstance(found, int) else found
            failed = found if isinstance(found, int) else 0
            with suppress(OSError):  # the process that asked has been killed
                os.write(self._device, _OUT.pack(_OUT.size + len(data), -failed, unique) + data)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        names = list(self.files)
        if opcode == _INIT:
            return _INIT_OUT.pack(7, 31, 1 << 16, 0, 8, 6, 1 << 16, 1, 0, 0, 0)
        if opcode == LOOKUP:
            if (name := body.rstrip(b"\0").decode()) not in names:
                return errno.ENOENT
            found = names.index(name) + 2
            return struct.pack("<QQQQII", found, 0, 0, 0, 0, 0) + self._attributes(found)
        if opcode == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self._attributes(node)
        if opcode == _READ:
            _, start, size = struct.unpack_from("<QQI", body)
            return self.files[names[node - 2]][start : start + size]
        if opcode in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 1, 0, 0)
        return 0 if opcode in (_RELEASE, _RELEASEDIR, FLUSH, _ACCESS) else errno.ENOSYS

    def _attributes(self, node: int) -> bytes:
        mode = 0o40755 if node == 1 else 0o100644
        size = 0 if node == 1 else len(list(self.files.values())[node - 2])
        return _ATTR.pack(node, size, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
