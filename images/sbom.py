"""The image's bill of materials: `python images/sbom.py IMAGE > sbom.json` (CycloneDX 1.5, Python and Debian packages).

`--requirements` prints the Python part as pins instead, for `pip-audit --no-deps --disable-pip -r`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from podman import environment

PACKAGES = Path(__file__).with_name("packages.py")
OWN = "medusa-runtime"


def main() -> int:
    parser = argparse.ArgumentParser(description="List what an image holds.")
    parser.add_argument("image")
    parser.add_argument("--requirements", action="store_true", help="the Python packages as name==version")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="medusa-podman-") as scratch:
        os.environ.update(environment(Path(scratch)))
        found = installed(arguments.image)
    if arguments.requirements:
        print("\n".join(requirements(found)))
    else:
        print(json.dumps(bill(arguments.image, found), indent=2))
    return 0


def installed(image: str) -> dict[str, Any]:
    command = ["podman", "run", "--rm", "--interactive", "--network", "none", "--entrypoint", "python", image, "-"]
    ran = subprocess.run(command, input=PACKAGES.read_text(), capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{image} could not be asked for its packages: {ran.stderr.strip()}")
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def requirements(found: dict[str, Any]) -> list[str]:
    """Return pins that an advisory database knows: without our own package, and versions without a build (+cpu)."""
    return sorted(f"{p['name']}=={p['version'].partition('+')[0]}" for p in found["python"] if p["name"] != OWN)


def bill(image: str, found: dict[str, Any]) -> dict[str, Any]:
    distribution, release = found["release"]
    components = []
    for package in sorted(found["python"], key=lambda each: str(each["name"]).lower()):
        name = str(package["name"]).lower().replace("_", "-").replace(".", "-")
        entry = component(package["name"], package["version"], f"pkg:pypi/{name}@{quote(package['version'])}")
        if package["license"]:
            entry["licenses"] = [{"expression": package["license"]}]
        components.append(entry)
    for package in sorted(found["debian"], key=lambda each: str(each["name"])):
        version, arch = quote(package["version"], safe=""), package["arch"]
        purl = f"pkg:deb/{distribution}/{quote(package['name'])}@{version}?arch={arch}&distro={release}"
        components.append(component(package["name"], package["version"], purl))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": image, "bom-ref": image}},
        "components": components,
    }


def component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


if __name__ == "__main__":
    sys.exit(main())
