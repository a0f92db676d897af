"""Split /opt/medusa into the image's layers, depending on the files that a cold start reads (``cold-start.txt``).

The layer *hot* has these files, *own* the runtime, and *cold* the rest. So a registry that unpacks or fetches lazily
finds what a start reads in one layer. ``split.py digest`` runs in the stage where everything is installed, and
``split.py copy LAYER STAGE`` in the final stage, which mounts that stage. Moving files into a folder for each layer
would write every byte once more. buildah's cache (1.28) keeps a step even if the stage that it mounts has changed, so a
digest is copied before the step.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from os import utime
from pathlib import Path

HOME = Path("/opt/medusa")
DIGESTS = Path("/layers")
OWN = re.compile(r"cold-start\.txt$|(bin|lib/python[^/]+/site-packages)/medusa")
EPOCH_S = 1_700_000_000


def main() -> None:
    if sys.argv[1] == "digest":
        write_digests(HOME, DIGESTS)
    else:
        copy(Path(sys.argv[3] + str(HOME)), sys.argv[2], HOME)


def layers_of(home: Path) -> dict[str, list[Path]]:
    """Return the files and links of each layer, relative to ``home``, in order."""
    hot = set((home / "cold-start.txt").read_text().splitlines())
    layers: dict[str, list[Path]] = {"cold": [], "hot": [], "own": []}
    for path in sorted(home.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            inside = path.relative_to(home)
            layers["own" if OWN.match(str(inside)) else "hot" if str(inside) in hot else "cold"].append(inside)
    return layers


def write_digests(home: Path, folder: Path) -> None:
    """Write a file with a digest for each layer. Two digests are equal if their layers would be equal."""
    folder.mkdir()
    for name, paths in layers_of(home).items():
        digest = hashlib.sha256()
        for path in paths:
            file = home / path
            content = str(file.readlink()) if file.is_symlink() else f"{mode(file):o} {sha256(file)}"
            digest.update(f"{path} {content}\n".encode())
        (folder / name).write_text(digest.hexdigest() + "\n")
        size_bytes = sum((home / path).lstat().st_size for path in paths)
        print(f"layer {name:4} {size_bytes / 1e6:7.1f} MB", flush=True)


def copy(source: Path, name: str, target: Path) -> None:
    """Copy a layer's files. All get the same time, so that equal content makes an equal layer."""
    folders = {target, target.parent}
    for path in layers_of(source)[name]:
        file = target / path
        if file.parent not in folders:
            file.parent.mkdir(parents=True, exist_ok=True)
            folders |= {each for each in file.parents if each.is_relative_to(target)}
        shutil.copyfile(source / path, file, follow_symlinks=False)
        if not file.is_symlink():
            file.chmod(mode(source / path))
        utime(file, (EPOCH_S, EPOCH_S), follow_symlinks=False)
    for folder in folders:
        folder.chmod(0o755)
        utime(folder, (EPOCH_S, EPOCH_S))


def mode(file: Path) -> int:
    return 0o755 if file.stat().st_mode & 0o111 else 0o644


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    main()
