"""`medusa build`: a function's folder → an image, by whichever of podman, docker and buildah is there."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from medusa_runtime.errors import ConfigError, DeployError

TOOLS = ("podman", "docker", "buildah")
_BASE = "medusa-runtime"
_MAKE_BASE = "`make image` in a clone of medusa-runtime builds the base image"
_TAG = re.compile(r"[a-z0-9][a-z0-9._:/@-]{0,254}")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")
_QUOTED = re.compile(r'["\\$`]')  # characters with a meaning between quotes: $ begins a variable of the build
_ENTRIES = ("handler.py", "function.py", "main.py")
_IGNORED = (".git", ".venv", "__pycache__", "*.pyc", ".pytest_cache", ".env")
_SHOWN = 3  # files in a warning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Build an image of a function. A Dockerfile in the folder is used as it is."
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="the function's folder; default: this one"
    )
    parser.add_argument("--tag", metavar="NAME", help="the image's name; default: the folder's")
    parser.add_argument("--base", default=_BASE, metavar="IMAGE", help=f"the image to build on; default: {_BASE}")
    parser.add_argument("--handler", metavar="SPEC", help="file.py:name; default: handler.py")
    parser.add_argument("--model", metavar="URL", help="where the model is; it can be set later, too (MEDUSA_MODEL)")
    parser.add_argument("--tool", choices=TOOLS, help="what builds it; default: the first of these that is installed")
    parser.add_argument("--push", action="store_true", help="push it to its registry, too")
    parser.add_argument("--show", action="store_true", help="print the Dockerfile, and build nothing")


def run(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise ConfigError(f"expected a folder, found no {folder}")
    tag = arguments.tag or re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-._")
    if not _TAG.fullmatch(tag):
        raise ConfigError(f"--tag: expected an image's name in lower case such as registry.example/fn:1, found {tag!r}")
    own = folder / "Dockerfile"
    if own.is_symlink() and not own.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"expected {own} inside of the folder, found a link to {own.resolve()}")
    if own.is_file() and (arguments.handler is not None or arguments.model is not None):
        raise ConfigError(f"{own} says what is in the image; expected neither --handler nor --model with it")
    text = own.read_text() if own.is_file() else dockerfile(folder, arguments.base, arguments.handler, arguments.model)
    if arguments.show:
        print(text, end="")
        return 0
    tool = arguments.tool or next((name for name in TOOLS if shutil.which(name)), None)
    if tool is None or shutil.which(tool) is None:
        raise ConfigError(
            f"expected {tool or 'podman, docker or buildah'} on the PATH, found none; --show prints the Dockerfile"
        )
    _warn_of_private(folder)
    with tempfile.TemporaryDirectory(prefix="medusa-build-") as scratch:
        file = own if own.is_file() else _write(Path(scratch), folder, text)
        base = f"BASE_IMAGE={arguments.base}"
        hint = "" if "/" in arguments.base else f"; does this machine have {arguments.base}? {_MAKE_BASE}"
        _call(tool, "build", "--tag", tag, "--file", str(file), "--build-arg", base, str(folder.absolute()), hint=hint)
    if arguments.push:
        _call(tool, "push", tag)
    print(f"built {tag}; run it with: {'podman' if tool == 'buildah' else tool} run --rm -p 8080:8080 {tag}")
    return 0


def dockerfile(folder: Path, base: str, handler: str | None, model: str | None) -> str:
    """Return a Dockerfile for a folder that has none. Raises ConfigError if the folder has nothing to serve."""
    if handler is None:
        handler = next((name for name in _ENTRIES if (folder / name).is_file()), None)
        if handler is None and model is None:
            raise ConfigError(f"expected {_ENTRIES[0]} in {folder}, --handler or --model; found none of them")
    elif (file := handler.partition(":")[0]).endswith(".py") and not (folder / file).is_file():
        raise ConfigError(f"--handler={handler}: expected the file in {folder}, found none")
    for flag, value in (("--base", base), ("--handler", handler), ("--model", model)):
        if value is not None and not (value.isprintable() and value.strip()):
            raise ConfigError(f"{flag}: expected text of one line, found {value!r}")
    if not _IMAGE.fullmatch(base):
        raise ConfigError(f"--base: expected an image's name such as registry.example/base:1, found {base!r}")
    lines = [f"FROM {base}"]
    if (folder / "requirements.txt").is_file():
        lines += ["COPY requirements.txt ./", "RUN medusa-install"]
    lines.append("RUN medusa snapshot --if-possible")
    lines.append("COPY . ./")
    for name, value in (("MEDUSA_HANDLER", handler), ("MEDUSA_MODEL", model)):
        if value is not None:
            lines.append(f'ENV {name}="{_QUOTED.sub(_escaped, value)}"')
    return "\n".join(lines) + "\n"


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"


def _write(scratch: Path, folder: Path, text: str) -> Path:
    """Write the Dockerfile outside of the folder, with a list of files not to copy unless the folder has its own."""
    file = scratch / "Dockerfile"
    file.write_text(text)
    if not any((folder / name).is_file() for name in (".dockerignore", ".containerignore")):
        (scratch / "Dockerfile.dockerignore").write_text("\n".join(_IGNORED) + "\n")
    return file


def _warn_of_private(folder: Path) -> None:
    """Name files that the image's user could not read, such as weights that safetensors' ``save_file`` wrote."""
    private = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _IGNORED]
        paths = (Path(place, name) for name in files if not any(fnmatch(name, pattern) for pattern in _IGNORED))
        private += [path for path in paths if stat.S_ISREG(mode := path.lstat().st_mode) and not mode & stat.S_IROTH]
    if private:
        shown, more = shlex.join(map(str, private[:_SHOWN])), len(private) - _SHOWN
        print(
            f"medusa: {shown}{f' and {more} more' if more > 0 else ''} can be read by the owner alone, and an image "
            f"may run as any user: chmod a+r {shown}{' …' if more > 0 else ''}",
            file=sys.stderr,
        )


def _call(tool: str, *arguments: str, hint: str = "") -> None:
    status = subprocess.run([tool, *arguments], check=False).returncode
    if status:
        raise DeployError(f"`{tool} {arguments[0]}` ended with status {status}; what it printed says why{hint}")
