"""Print the installed Python and Debian packages as JSON. An image's own Python runs this, from its standard input."""

import importlib.metadata
import json
import platform
from pathlib import Path

python = [
    {"name": found.metadata["Name"], "version": found.version, "license": found.metadata.json.get("license_expression")}
    for found in importlib.metadata.distributions()
]
debian: list[dict[str, str]] = []
fields: dict[str, str] = {}
for line in [*Path("/var/lib/dpkg/status").read_text().splitlines(), ""]:
    if not line:
        if fields.get("Status", "").endswith(" installed"):
            debian.append({"name": fields["Package"], "version": fields["Version"], "arch": fields["Architecture"]})
        fields = {}
    elif line[0] != " ":
        key, _, value = line.partition(": ")
        fields[key] = value
release = platform.freedesktop_os_release()
print(json.dumps({"python": python, "debian": debian, "release": [release["ID"], release["VERSION_CODENAME"]]}))
