"""Builds the images with podman, on a bare machine too: `python images/build.py slim cpu` (what `make image` runs).

Where no public registry can be reached the base is made with debootstrap. This machine's settings for packages (pip's
configuration, apt's sources, certificates) go into the build as mounts of single steps, never into a layer.
"""

from __future__ import annotations

import argparse
import configparser
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
PUBLIC_BASE = "docker.io/library/python:3.11-slim-bookworm"
OWN_BASE = "localhost/medusa-debian:bookworm"
NAME = "localhost/medusa-runtime"
# In containers without CAP_SYS_RESOURCE podman's own limits cannot be set; crun needs a pure cgroup v1 or v2.
CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=20000:20000","nproc=4096:4096"]
[engine]
runtime = "runc"
"""
DEBIAN_PACKAGES = "python3,python3-venv,ca-certificates"
# In the manner of Debian's own slim images.
DEBIAN_LEFT_OUT = (
    *("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "usr/share/doc", "usr/share/man"),
    *("usr/share/locale", "usr/share/info", "usr/share/lintian", "usr/share/bash-completion", "usr/share/perl"),
)


def main() -> int:
    variants = sorted(set(tomllib.loads((ROOT / "images/variants.toml").read_text())) - {"common"})
    parser = argparse.ArgumentParser(description="Build the base images of functions.")
    parser.add_argument("variants", nargs="*", default=["slim"], metavar="VARIANT", help=f"of {', '.join(variants)}")
    parser.add_argument("--base", help=f"base image; default {PUBLIC_BASE}, or one made with debootstrap")
    arguments = parser.parse_args()
    for name in arguments.variants:
        if name not in variants:
            parser.error(f"{name!r} is no variant: expected {', '.join(variants)}")
    if shutil.which("podman") is None:
        parser.error(
            "podman is not installed; apt-get install podman buildah runc, or: docker build -t medusa-runtime ."
        )
    with tempfile.TemporaryDirectory(prefix="medusa-image-") as scratch:
        os.environ.update(environment(Path(scratch)))
        base = arguments.base or find_base(Path(scratch))
        for name in arguments.variants:
            build(name, base, Path(scratch))
    return 0


def environment(scratch: Path) -> dict[str, str]:
    """What podman needs beside its own defaults; a configuration that is set already is kept."""
    if "CONTAINERS_CONF" in os.environ or shutil.which("runc") is None:
        return {}
    configuration = scratch / "containers.conf"
    configuration.write_text(CONTAINERS_CONF)
    return {"CONTAINERS_CONF": str(configuration)}


def find_base(scratch: Path) -> str:
    """The public base where it can be pulled, else our own, which is made once."""
    for image in (PUBLIC_BASE, OWN_BASE):
        if succeeds("podman", "image", "exists", image):
            return image
    if succeeds("podman", "pull", "--quiet", PUBLIC_BASE):
        return PUBLIC_BASE
    print(f"{PUBLIC_BASE} cannot be pulled; making {OWN_BASE} with debootstrap", flush=True)
    make_base(scratch / "debian")
    return OWN_BASE


def make_base(folder: Path) -> None:
    if shutil.which("debootstrap") is None:
        sys.exit("no registry can be reached and debootstrap is not installed: apt-get install debootstrap, or --base")
    run("debootstrap", "--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", str(folder))
    for name in DEBIAN_LEFT_OUT:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    (folder / "var/cache/apt/archives/partial").mkdir(parents=True)
    (folder / "var/lib/apt/lists/partial").mkdir(parents=True)
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["podman", "import", "--quiet", "-", OWN_BASE], stdin=tar.stdout, check=True)
    shutil.rmtree(folder)


def build(variant: str, base: str, scratch: Path) -> None:
    command = ["podman", "build", "--network", "host", "--layers", "--build-arg", f"VARIANT={variant}"]
    command += ["--build-arg", f"BASE_IMAGE={base}", "--tag", f"{NAME}:{variant}"]
    command += ["--tag", f"{NAME}:latest"] if variant == "slim" else []
    run(*command, *host_settings(scratch), str(ROOT))


def host_settings(scratch: Path) -> list[str]:
    """Flags that lend this machine's package settings to a build: certificates, pip's configuration, its folders."""
    flags = []
    for name, path in host_files(scratch).items():
        flags += ["--secret", f"id={name},src={path}"]
    for folder in pip_folders(pip_settings()):
        flags += ["--volume", f"{folder}:{folder}:ro"]
    return flags


def user_build_flags(scratch: Path) -> list[str]:
    """The same for a build of a user's Dockerfile, which mounts no secrets: the files appear where pip looks."""
    places = {"ca": "/etc/ssl/certs/ca-certificates.crt", "pip": "/etc/pip.conf"}
    mounts = [f"{path}:{places[name]}:ro" for name, path in host_files(scratch).items()]
    mounts += [f"{folder}:{folder}:ro" for folder in pip_folders(pip_settings())]
    return [flag for mount in mounts for flag in ("--volume", mount)]


def host_files(scratch: Path) -> dict[str, Path]:
    """This machine's certificates, and pip's configuration as one file."""
    files = {}
    certificates = Path(os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt")
    if certificates.is_file():
        files["ca"] = certificates
    settings = pip_settings()
    if settings:
        parser = configparser.RawConfigParser()
        parser.read_dict({"global": settings})
        files["pip"] = scratch / "pip.conf"
        with files["pip"].open("w") as file:
            parser.write(file)
    return files


def pip_settings() -> dict[str, str]:
    """pip's configuration on this machine: files and environment, all as options of every command."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings = {}
    # Lines like global.find-links='/wheels' and :env:.timeout='180'; the environment comes first and wins.
    for line in shown.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if key.startswith((":env:", "global.")) and name not in ("cert", "config-file"):
            settings.setdefault(name, value.strip("'\"").replace("\\n", "\n"))
    return settings


def pip_folders(settings: dict[str, str]) -> list[str]:
    """Folders of this machine that pip reads: they must be in the build under the same path."""
    places = [
        place for key in ("find-links", "index-url", "extra-index-url") for place in settings.get(key, "").split()
    ]
    paths = {
        Path(urlsplit(place).path if place.startswith("file:") else place)
        for place in places
        if "://" not in place or place.startswith("file:")
    }
    folders = {path.parent if path.name == "simple" else path for path in paths if path.is_dir()}
    return sorted(str(folder) for folder in folders)


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run(*command: str) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
