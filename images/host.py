"""This machine's settings for packages, lent to a build: certificates, apt's mirrors, pip's configuration."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

PLACES = ("find-links", "index-url", "extra-index-url")
# The release that all variants stand on, and where its public base finds packages by itself.
RELEASE = "bookworm"
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PUBLIC_APT = ("deb.debian.org", "security.debian.org")
# In a build /dev is in memory: a folder that is mounted there leaves no empty one in the layer.
LENT = "/dev/lent"
INSIDE = {
    "ca": "/etc/ssl/certs/ca-certificates.crt",
    "apt": "/etc/apt/sources.list.d/build.sources",
    "pip": "/etc/pip.conf",
}


def build_flags(scratch: Path) -> list[str]:
    """For our Dockerfile, whose steps mount secrets."""
    files, folders = lend(scratch)
    flags = [flag for name, path in files.items() for flag in ("--secret", f"id={name},src={path}")]
    return [*flags, *volumes(folders)]


def user_build_flags(scratch: Path) -> list[str]:
    """For a user's Dockerfile, which mounts none: the files appear where pip looks for them."""
    files, folders = lend(scratch)
    return [*volumes({str(path): INSIDE[name] for name, path in files.items()}), *volumes(folders)]


def volumes(mounts: dict[str, str]) -> list[str]:
    return [flag for source, target in mounts.items() for flag in ("--volume", f"{source}:{target}:ro")]


def lend(scratch: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Files by what they are (written into ``scratch`` where they must be made), and folders: here → in the build."""
    files: dict[str, Path] = {}
    folders: dict[str, str] = {}
    certificates = Path(os.environ.get("SSL_CERT_FILE") or INSIDE["ca"])
    if certificates.is_file():
        files["ca"] = certificates
    if mirrors := apt_mirrors():
        files["apt"] = scratch / "build.sources"
        files["apt"].write_text("\n\n".join(mirrors) + "\n")
    settings = pip_settings()
    for key in PLACES:
        for place in settings.get(key, "").split():
            local = place.removeprefix("file://") if urlsplit(place).scheme in ("", "file") else None
            if local is None or not Path(local).is_dir():
                continue
            # The pages of an index point to files beside them.
            folder = Path(local).parent if Path(local).name == "simple" else Path(local)
            inside = folders.setdefault(str(folder), f"{LENT}/{len(folders)}")
            lent = place.replace(str(folder), inside)
            settings[key] = " ".join(lent if each == place else each for each in settings[key].split())
    if settings:
        parser = configparser.RawConfigParser()
        parser.read_dict({"global": settings})
        files["pip"] = scratch / "pip.conf"
        with files["pip"].open("w") as file:
            parser.write(file)
    return files, folders


def apt_mirrors(root: Path = Path("/etc/apt")) -> list[str]:
    """This machine's apt sources (deb822 stanzas) of the base's release, beyond the public ones.

    Only those that name Debian's own keys, or none: others' are files that the base does not have.
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
    """pip's configuration on this machine, files and environment; none where this Python has no pip."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings: dict[str, str] = {}
    # Lines like global.find-links='/wheels' and :env:.timeout='180'; the environment comes first and wins.
    for line in shown.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if key.startswith((":env:", "global.")) and name not in ("cert", "config-file"):
            settings.setdefault(name, value.strip("'\"").replace("\\n", "\n"))
    return settings
