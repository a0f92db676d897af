"""A function as a Helm chart: the manifests of `medusa deploy kubernetes`, with values for what releases change.

The manifests are those of deployment.py. Names become the release's, and what a release may want otherwise is moved to
values.yaml, so that a chart whose values are left alone renders exactly these manifests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import document
from ..function import Function
from . import deployment
from .pod import Placement

# These names stand for the release in the manifests. Any text may precede or follow them.
RELEASE, NAMESPACE = "medusa-release-name", "medusa-release-namespace"
_FILES = {
    "Deployment": "deployment.yaml",
    "Service": "service.yaml",
    "HorizontalPodAutoscaler": "autoscaler.yaml",
    "ScaledObject": "autoscaler.yaml",
    "HTTPScaledObject": "autoscaler.yaml",
}
# Fields of the pod that have the same name in values.yaml.
_OF_POD = ("nodeSelector", "tolerations", "imagePullSecrets")
_LIMITS = {
    "HorizontalPodAutoscaler": (("minReplicas",), ("maxReplicas",)),
    "ScaledObject": (("minReplicaCount",), ("maxReplicaCount",)),
    "HTTPScaledObject": (("replicas", "min"), ("replicas", "max")),
}


def chart(
    name: str, function: Function, placement: Placement, scaling: deployment.Scaling, comments: list[str]
) -> dict[str, str]:
    """Return the chart's files. ``function`` and ``placement`` have the names RELEASE and NAMESPACE."""
    values: dict[str, Any] = {}
    files = {}
    for manifest in deployment.manifests(function, placement, scaling):
        kind = manifest["kind"]
        extractor = _ValuesExtractor(values)
        if kind == "Deployment":
            _extract_deployment(extractor, manifest)
        elif kind in _LIMITS:
            for field, path in zip(("min", "max"), _LIMITS[kind], strict=True):
                extractor.move(manifest["spec"], path, ("autoscaling", field))
        elif kind == "Service":
            extractor.move(manifest["spec"], ("type",), ("service", "type"))
        files[f"templates/{_FILES[kind]}"] = extractor.text(manifest)
    described = {
        "apiVersion": "v2",
        "name": name,
        "description": f"{name}, a function on medusa-runtime",
        "type": "application",
        "version": "0.1.0",
        "appVersion": function.image.rpartition("@")[0] or function.image,
    }
    head = {
        "Chart.yaml": document.text([described]),
        "values.yaml": document.text(
            [values], ["What a release may set otherwise: helm install --set env.MEDUSA_MODEL=…"]
        ),
    }
    return head | {path: "".join(f"# {line}\n" for line in comments) + text for path, text in files.items()}


def _extract_deployment(extractor: _ValuesExtractor, manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    extractor.move(container, ("image",), ("image",))
    for entry in container["env"]:
        if "value" in entry:
            extractor.move(entry, ("value",), ("env", entry["name"]), text=True)
    container.setdefault("envFrom", [])
    for field in ("envFrom", "resources"):
        extractor.move(container, (field,), (field,))
    for field in _OF_POD:
        spec.setdefault(field, {} if field == "nodeSelector" else [])
        extractor.move(spec, (field,), (field,))
    if "replicas" in manifest["spec"]:
        extractor.move(manifest["spec"], ("replicas",), ("replicas",))
    manifest["spec"]["template"]["metadata"].setdefault("annotations", {})
    extractor.move(manifest["spec"]["template"]["metadata"], ("annotations",), ("podAnnotations",))


class _ValuesExtractor:
    """A manifest some of whose values have been moved to values.yaml."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._expressions: dict[str, str] = {}

    def move(
        self, manifest: Mapping[str, Any], path: tuple[str, ...], to: tuple[str, ...], *, text: bool = False
    ) -> None:
        """Move a value to values.yaml. ``text`` says that it must be text, even if a user sets a number."""
        target: Any = manifest
        for part in path[:-1]:
            target = target[part]
        place: Any = self._values
        for part in to[:-1]:
            place = place.setdefault(part, {})
        place[to[-1]] = target[path[-1]]
        reference = ".".join(("", "Values", *to))
        mark = f"medusa-value-{len(self._expressions)}-"
        self._expressions[mark] = f"{{{{ toJson {f'(toString {reference})' if text else reference} }}}}"
        target[path[-1]] = mark

    def text(self, manifest: Mapping[str, Any]) -> str:
        """Return the manifest as a template. Its expressions give JSON, which is YAML."""
        found = document.text([manifest])
        for mark, expression in self._expressions.items():
            found = found.replace(mark, expression)
        return found.replace(NAMESPACE, "{{ .Release.Namespace }}").replace(RELEASE, "{{ .Release.Name }}")
