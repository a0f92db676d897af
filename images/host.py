"""This machine's settings for packages, lent to a build: certificates, apt's mirrors, where pip finds packages.

Of pip's configuration, only the settings are lent that say where packages come from and how they are verified. Other
settings may name files of this machine, which do not exist in the build. Files that the lent settings name are lent by
their content.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

PLACES = ("find-links", "index-url", "extra-index-url")
# pip's settings that are lent as they are, and those that name files.
VALUES = (*PLACES, "no-index", "trusted-host", "proxy")
FILES = ("cert", "constraint")
# The release that all variants stand on, and where its public base finds packages by itself.
RELEASE = "bookworm"
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PUBLIC_APT = ("deb.debian.org", "security.debian.org")
# In a build, /dev is in memory, so a mount there leaves no empty folder in the layer.
LENT = "/dev/lent"
# `pip config list` does not say which of several files wins. Newer versions keep each file's values by themselves.
READ_PIP_SETTINGS = """
import json
from pip._internal.configuration import Configuration
settings, read = {}, Configuration(isolated=False)
read.load()
for key, value in read.items():
    settings.update(value if isinstance(value, dict) else {key: value})
print(json.dumps(settings))
"""
INSIDE = {
    "ca": "/etc/ssl/certs/ca-certificates.crt",
    "apt": "/etc/apt/sources.list.d/build.sources",
    "pip": "/etc/pip.conf",
}


def build_flags(scratch: Path) -> list[str]:
    """Return podman's flags for our Dockerfile, whose steps mount secrets."""
    files, folders = lend(scratch)
    flags = [flag for name, path in files.items() for flag in ("--secret", f"id={name},src={path}")]
    return [*flags, *volumes(folders)]


def user_build_flags(scratch: Path) -> list[str]:
    """Return podman's flags for a user's Dockerfile, which mounts no secrets. Files appear where pip looks for them."""
    files, folders = lend(scratch)
    return [*volumes({str(path): INSIDE[name] for name, path in files.items()}), *volumes(folders)]


def volumes(mounts: dict[str, str]) -> list[str]:
    return [flag for source, target in mounts.items() for flag in ("--volume", f"{source}:{target}:ro")]


def lend(scratch: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the files to lend, by their kind, and the folders to lend, each with its path in the build.

    Files that have to be made are written into ``scratch``.
    """
    files: dict[str, Path] = {}
    folders: dict[str, str] = {}
    certificates = Path(os.environ.get("SSL_CERT_FILE") or INSIDE["ca"])
    if certificates.is_file():
        files["ca"] = certificates
    if mirrors := apt_mirrors():
        files["apt"] = scratch / "build.sources"
        files["apt"].write_text("\n\n".join(mirrors) + "\n")
    settings = pip_settings()
    lend_folders(settings, folders)
    lend_files(settings, scratch / "pip", folders)
    if settings:
        parser = configparser.RawConfigParser()
        parser.read_dict({"global": settings})
        files["pip"] = scratch / "pip.conf"
        with files["pip"].open("w") as file:
            parser.write(file)
    return files, folders


def lend_folders(settings: dict[str, str], folders: dict[str, str]) -> None:
    """Add the local folders in which pip looks for packages, and name them in ``settings`` as the build does."""
    for key in PLACES:
        for place in settings.get(key, "").split():
            local = local_path(place)
            if local is None or not local.is_dir():
                continue
            # The pages of an index point to files beside them.
            folder = local.parent if local.name == "simple" else local
            inside = folders.setdefault(str(folder), f"{LENT}/{len(folders)}")
            lent = place.replace(str(folder), inside)
            settings[key] = " ".join(lent if each == place else each for each in settings[key].split())


def lend_files(settings: dict[str, str], made: Path, folders: dict[str, str]) -> None:
    """Write the contents of the files that ``settings`` name into the folder ``made``, and name them there."""
    contents: dict[str, bytes] = {}
    if "cert" in settings:
        contents["cert.pem"] = certificates(Path(settings["cert"]))
        settings["cert"] = f"{LENT}/pip/cert.pem"
    places = []
    for place in settings.get("constraint", "").split():
        local = local_path(place)
        if local is not None:
            name = f"constraint-{len(contents)}.txt"
            contents[name] = "".join(f"{line}\n" for line in constraint_lines(local)).encode()
            place = f"{LENT}/pip/{name}"
        places.append(place)
    if places:
        settings["constraint"] = " ".join(places)
    if contents:
        made.mkdir()
        for name, content in contents.items():
            (made / name).write_bytes(content)
        folders[str(made)] = f"{LENT}/pip"


def local_path(place: str) -> Path | None:
    """Return the local path that a setting of pip names, or None for a place elsewhere."""
    url = urlsplit(place)
    if url.scheme in ("", "file"):
        return Path(unquote(url.path) if url.scheme else place)
    return None


def certificates(path: Path) -> bytes:
    """Return the certificates in a file, or in all files of a folder."""
    found = [file for file in sorted(path.iterdir()) if file.is_file()] if path.is_dir() else [path]
    return b"\n".join(read(file, "cert") for file in found)


def constraint_lines(path: Path, including: tuple[Path, ...] = ()) -> list[str]:
    """Return the lines of a constraint file, with included files in the place of the lines that include them."""
    path = path.resolve()
    if path in including:
        return []
    found = []
    for line in read(path, "constraint").decode().splitlines():
        included = re.match(r"\s*(?:-[cr]\s*|--(?:constraint|requirement)[ =]\s*)(\S+)", line)
        nested = local_path(included[1]) if included else None
        if nested is None:
            found.append(line)
        else:
            found += constraint_lines(path.parent / nested, (*including, path))
    return found


def read(path: Path, key: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        sys.exit(
            f"pip's setting {key} names {path}, which cannot be read ({error.strerror}); correct it: "
            "`pip config debug` shows where it is set"
        )


def apt_mirrors(root: Path = Path("/etc/apt")) -> list[str]:
    """Return this machine's apt sources (deb822 stanzas) for the base's release, except the public ones.

    Only sources with Debian's own keys, or without a key, are used. The base does not have the files of other keys.
    """
    found = []
    for path in sorted(root.glob("sources.list.d/*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            lines = [line for line in stanza.splitlines() if line.strip() and not line.startswith("#")]
            fields = dict(re.findall(r"(?m)^([\w-]+):[ \t]*(.*)$", "\n".join(lines)))
            hosts = {urlsplit(uri).hostname for uri in fields.get("URIs", "").split()}
            keys = fields.get("Signed-By", DEBIAN_KEYS)
            if RELEASE in fields.get("Suites", "") and hosts - set(PUBLIC_APT) and keys == DEBIAN_KEYS:
                found.append("\n".join(lines))
    return found


def pip_settings() -> dict[str, str]:
    """Return where pip finds packages on this machine, from its files and environment.

    The result is empty if this Python has no pip.
    """
    command = [sys.executable, "-c", READ_PIP_SETTINGS]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    found = dict(json.loads(shown.stdout or "{}"))
    # `pip install` has its own section, above the global one, and the environment stands above both.
    names = {name: (f":env:.{name}", f"install.{name}", f"global.{name}") for name in VALUES + FILES}
    settings = {name: next((found[key] for key in keys if key in found), "") for name, keys in names.items()}
    return {name: value for name, value in settings.items() if value.strip()}
