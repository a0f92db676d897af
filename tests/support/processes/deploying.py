"""`medusa deploy` as a user runs it, and what its manifests are held against."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from medusa_command import medusa

AWS_KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}

CRD = Path(__file__).parents[2] / "adapters" / "deploy" / "schemas" / "knative_service_crd.yaml"


def deploy(platform: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return medusa("deploy", platform, *arguments, environ=environ)


def rendered(platform: str, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    done = deploy(platform, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def refused(platform: str, *arguments: str, **environ: str) -> str:
    done = deploy(platform, *arguments, **environ)
    assert done.returncode in (1, 2), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("medusa: ")
    assert not done.stdout
    return line


def strict(schema: Any) -> Any:
    """The CRD's schema with unknown fields refused (a cluster drops them) and Kubernetes' own keywords read."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not open_ended:
        found["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    return found


@functools.cache
def knative_service() -> jsonschema.Draft202012Validator:
    """Knative's own schema of a Service, strict."""
    (version,) = yaml.load(CRD.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    # The API server itself knows these; the CRD leaves them out.
    schema["properties"] |= {key: {"type": "string"} for key in ("apiVersion", "kind")}
    texts = {"type": "object", "additionalProperties": {"type": "string"}}
    metadata = {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": texts, "annotations": texts}
    schema["properties"]["metadata"] = {"type": "object", "properties": metadata}
    schema = strict(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
