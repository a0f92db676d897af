"""The folder in /tmp that torch's compiler has for each user. It uses the headers and the code that it finds there."""

from __future__ import annotations

import getpass
import grp
import os
import pwd
import re
import stat
import tempfile
from pathlib import Path

from medusa_runtime.errors import ConfigError


def claim_compiler_folder() -> None:
    """Make the folder, for this user alone, before torch does. Any user may have made it, since its name is known.

    Where its caches are elsewhere (TORCHINDUCTOR_CACHE_DIR), torch still has its headers there. Raises ConfigError.
    """
    folder = _folder()
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return  # torch cannot use it, either
    found = os.lstat(folder)
    others = 0o002 if _is_private(found.st_gid) else 0o022
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & others:
        raise ConfigError(
            f"{folder}: torch's compiler would run code from there; expected a folder of our own that nobody else can "
            f"write, found user {found.st_uid}'s with mode {stat.S_IMODE(found.st_mode):o}: remove it, or set TMPDIR "
            "to a folder of your own"
        )


def _is_private(gid: int) -> bool:
    """Return whether a group is this user's alone, with which folders may be writable (umask 002)."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _folder() -> Path:
    """Return the folder, named like torch's own ``default_cache_dir`` does."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


__all__ = ["claim_compiler_folder"]
