"""The folder in /tmp that torch's compiler has for each user. It uses the headers and the code that it finds there."""

from __future__ import annotations

import getpass
import os
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
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{folder}: torch's compiler would run code from there; expected a folder of our own that nobody else can "
            f"write, found user {found.st_uid}'s with mode {stat.S_IMODE(found.st_mode):o}: remove it, or set TMPDIR "
            "to a folder of your own"
        )


def _folder() -> Path:
    """Return the folder, named like torch's own ``default_cache_dir`` does."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


__all__ = ["claim_compiler_folder"]
