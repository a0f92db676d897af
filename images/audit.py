"""Look up known vulnerabilities of an image's Python packages: `python images/audit.py REQUIREMENTS`. Needs pip-audit.

`images/sbom.py --requirements` makes the list. Without a source of advisories the command fails, because "nothing was
looked up" does not mean "nothing was found".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request

OSV = "https://api.osv.dev/v1/query"
NO_SOURCE = 3
# A version that has advisories. A source that does not know any of them is of no use.
KNOWN_BAD = {"package": {"name": "pip", "ecosystem": "PyPI"}, "version": "9.0.0"}
_TIMEOUT_S = 20


def main() -> int:
    parser = argparse.ArgumentParser(description="Look for known vulnerabilities in a list of pinned packages.")
    parser.add_argument("requirements")
    parser.add_argument("--osv-url", default=OSV, help=f"source of advisories in OSV's form; default {OSV}")
    arguments = parser.parse_args()
    why = unusable(arguments.osv_url)
    if why:
        print(
            f"audit: nothing was looked up: {arguments.osv_url} {why}; expected a source of advisories in OSV's form, "
            f"run this where one can be reached or name a mirror with --osv-url (make audit OSV=URL)",
            file=sys.stderr,
        )
        return NO_SOURCE
    command = [sys.executable, "-m", "pip_audit", "--strict", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    command += ["--vulnerability-service", "osv", "--osv-url", arguments.osv_url, "-r", arguments.requirements]
    return subprocess.run(command, check=False).returncode


def unusable(url: str) -> str:
    """Return why the URL is not a source of advisories, or an empty string if it is one."""
    request = urllib.request.Request(url, json.dumps(KNOWN_BAD).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer = json.load(response)
    except (OSError, ValueError) as error:
        return f"cannot be asked ({error})"
    if not isinstance(answer, dict) or not answer.get("vulns"):
        return "knows no advisory of pip 9.0.0, which has several"
    return ""


if __name__ == "__main__":
    sys.exit(main())
