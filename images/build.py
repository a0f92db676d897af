"""Build the images with podman, also on a bare machine: `python images/build.py slim cpu` (`make image` runs this).

If no public registry can be reached, the base is made with debootstrap. This machine's settings for packages (pip's
configuration, apt's sources, certificates) are mounted in single steps of the build, and are never in a layer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import host
import podman

ROOT = Path(__file__).resolve().parent.parent
PUBLIC_BASE = re.findall(r"(?m)^ARG BASE_IMAGE=(.*)$", (ROOT / "Dockerfile").read_text())[0]
OWN_BASE = "localhost/medusa-debian:bookworm"
ARCHITECTURES = ("amd64", "arm64")  # as Debian and registries call them
NAME = "localhost/medusa-runtime"
_UNREACHABLE = "pinging container registry"  # podman's words in an error when its first request fails
STAGES = ("packages", "runtime")
DEBIAN_PACKAGES = "python3,python3-venv,ca-certificates"
# Like Debian's own slim images.
DEBIAN_LEFT_OUT = (
    *("var/lib/apt/lists", "var/cache/apt", "var/cache/debconf", "var/log", "usr/share/doc", "usr/share/man"),
    *("usr/share/locale", "usr/share/info", "usr/share/lintian", "usr/share/bash-completion", "usr/share/perl"),
)


def main() -> int:
    variants = sorted(set(tomllib.loads((ROOT / "images/variants.toml").read_text())) - {"common"})
    parser = argparse.ArgumentParser(description="Build the base images of functions.")
    parser.add_argument("variants", nargs="*", default=["slim"], metavar="VARIANT", help=f"of {', '.join(variants)}")
    parser.add_argument("--base", help=f"base image; default {PUBLIC_BASE}, or one made with debootstrap")
    parser.add_argument("--gpu", help="leave out the code for other GPUs in cuda: 9.0, or 8.0,9.0; default all GPUs")
    parser.add_argument("--arch", choices=ARCHITECTURES, help="for such machines; default: those like this one")
    arguments = parser.parse_args()
    for name in arguments.variants:
        if name not in variants:
            parser.error(f"{name!r} is no variant: expected {', '.join(variants)}")
    if shutil.which("podman") is None:
        parser.error(
            "podman is not installed; apt-get install podman buildah runc, or: docker build -t medusa-runtime ."
        )
    with tempfile.TemporaryDirectory(prefix="medusa-image-") as scratch:
        os.environ.update(podman.environment(Path(scratch)))
        base = arguments.base or find_base(Path(scratch), arguments.arch)
        lent = host.build_flags(Path(scratch))
        for name in arguments.variants:
            build(name, base, lent, Path(scratch), arguments.gpu, arguments.arch)
    return 0


def find_base(scratch: Path, architecture: str | None = None) -> str:
    """Return the public base or, if its registry cannot be reached, our own base, which is made once.

    If the registry answers but pulling the image fails, the build ends.
    """
    own = OWN_BASE + suffix(architecture)
    # An image that is there may be for other machines than are asked for.
    for image in (own,) if architecture else (PUBLIC_BASE, own):
        if succeeds("podman", "image", "exists", image):
            return image
    pull = ["podman", "pull", "--quiet", *arch_flags(architecture), PUBLIC_BASE]
    pulled = subprocess.run(pull, capture_output=True, text=True, check=False)
    if not pulled.returncode:
        return PUBLIC_BASE
    if _UNREACHABLE not in pulled.stderr:
        sys.exit(
            f"expected {PUBLIC_BASE} of its registry, podman says: {pulled.stderr.strip()}; "
            "change ARG BASE_IMAGE in the Dockerfile, or name a base that you trust with --base"
        )
    print(f"{PUBLIC_BASE} cannot be reached; making {own} with debootstrap", flush=True)
    make_base(scratch / "debian", own, architecture)
    return own


def make_base(folder: Path, name: str, architecture: str | None) -> None:
    if shutil.which("debootstrap") is None:
        sys.exit("no registry can be reached and debootstrap is not installed: apt-get install debootstrap, or --base")
    flags = arch_flags(architecture)
    run("debootstrap", *flags, "--variant=minbase", f"--include={DEBIAN_PACKAGES}", "bookworm", str(folder))
    for left_out in DEBIAN_LEFT_OUT:
        shutil.rmtree(folder / left_out, ignore_errors=True)
        (folder / left_out).mkdir(parents=True)
    (folder / "var/cache/apt/archives/partial").mkdir(parents=True)
    (folder / "var/lib/apt/lists/partial").mkdir(parents=True)
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["podman", "import", "--quiet", *flags, "-", name], stdin=tar.stdout, check=True)
    shutil.rmtree(folder)


def build(
    variant: str, base: str, lent: list[str], scratch: Path, gpus: str | None = None, architecture: str | None = None
) -> None:
    """Build one variant, with one call of podman per stage. At its end, each frees its extra space (docs/images.md).

    ``lent`` are podman's flags for what the host lends to a build. An ``architecture`` is in the image's tag.
    """
    flags = ["--network", "host", "--layers", "--build-arg", f"VARIANT={variant}", "--build-arg", f"BASE_IMAGE={base}"]
    flags += ["--build-arg", f"GPU={gpus}"] if gpus else []
    flags += [*arch_flags(architecture), *lent]
    for stage in STAGES:
        podman_build(scratch, "--target", stage, *flags)
    tags = [f"{NAME}:{variant}{suffix(architecture)}"]
    tags += [f"{NAME}:latest"] if variant == "slim" and architecture is None else []
    made = podman_build(scratch, *(flag for tag in tags for flag in ("--tag", tag)), *flags)
    for tag in tags:
        found = ["podman", "image", "inspect", "--format", "{{.Id}}", tag]
        if subprocess.run(found, capture_output=True, text=True, check=False).stdout.strip() != made:
            sys.exit(
                f"{tag} was not built: expected it to name the new image {made[:12]}, but found another; build again"
            )


def podman_build(scratch: Path, *flags: str) -> str:
    """Build an image and return its id. podman's exit status cannot be trusted: after SIGTERM it is 0 (4.3)."""
    made = scratch / "id"
    made.unlink(missing_ok=True)
    command = ["podman", "build", "--iidfile", str(made), *flags, str(ROOT)]
    print("$", *command, flush=True)
    status = subprocess.run(command, check=False).returncode
    if status or not made.exists():
        sys.exit(f"nothing was built: expected an image of podman build, it ended with status {status} and left none")
    return made.read_text().strip().removeprefix("sha256:")


def suffix(architecture: str | None) -> str:
    return f"-{architecture}" if architecture else ""


def arch_flags(architecture: str | None) -> list[str]:
    """Return the flags for podman and debootstrap."""
    return [f"--arch={architecture}"] if architecture else []


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def run(*command: str) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
