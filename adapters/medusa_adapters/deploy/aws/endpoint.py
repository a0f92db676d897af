"""A SageMaker endpoint's life: created, updated without a gap, deleted with everything that belongs to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from medusa_runtime.errors import ConfigError, DeployError

from ..manifests import sagemaker
from .calls import Aws, Calls, Report

_AUTOSCALING = "application-autoscaling"
_STALE_POLLS = 3
_PATIENCE_S = 3600.0
_TRANSITIONAL = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")


class EndpointClient:
    """Calls SageMaker and reports each status once. AWS' errors become DeployError, in AWS' words."""

    def __init__(self, region: str | None, report: Report, *, poll_s: float = 10.0) -> None:
        self._aws = Aws(region)
        self._report = report
        self._poll_s = poll_s

    def call(self, operation: str, **parameters: Any) -> Any:
        """Call SageMaker. Raises DeployError, with its reason, if it refuses."""
        return self._aws.call("sagemaker", operation, parameters)

    def scale(self, calls: Calls) -> None:
        """Make the calls of Application Auto Scaling. The endpoint must be in service."""
        for operation, parameters in calls:
            self._aws.call(_AUTOSCALING, operation, parameters)
            self._report(f"{operation} {parameters['ResourceId']}")

    def tag(self, endpoint: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """Add tags to an endpoint that is there; UpdateEndpoint takes none."""
        if tags:
            self.call("AddTags", ResourceArn=endpoint["EndpointArn"], **sagemaker.tagged(tags))
            self._report(f"AddTags {endpoint['EndpointName']}")

    def _stop_scaling(self, name: str) -> None:
        """Deregister what scales an endpoint: Application Auto Scaling would keep it after the endpoint has gone."""
        resource = {"ServiceNamespace": "sagemaker", "ResourceIds": [f"endpoint/{name}/variant/{sagemaker.VARIANT}"]}
        try:
            found = self._aws.call(_AUTOSCALING, "DescribeScalableTargets", resource)
            for target in found["ScalableTargets"]:
                given = {key: target[key] for key in ("ServiceNamespace", "ResourceId", "ScalableDimension")}
                self._aws.call(_AUTOSCALING, "DeregisterScalableTarget", given)
                self._report(f"DeregisterScalableTarget {target['ResourceId']}")
        except DeployError as error:  # a role without the right to look has hardly set up any scaling
            self._report(str(error))

    def describe(self, name: str) -> dict[str, Any] | None:
        """Return SageMaker's description of an endpoint; None when there is none of this name."""
        try:
            return dict(self.call("DescribeEndpoint", EndpointName=name))
        except DeployError as error:
            if "Could not find" in str(error):
                return None
            raise

    def check_update(self, found: Mapping[str, Any], *, serverless: bool) -> None:
        """Raise ConfigError for an update that SageMaker would refuse: of a failed endpoint, or back to serverless."""
        name, status = found["EndpointName"], found["EndpointStatus"]
        if status == "Failed":
            reason = found.get("FailureReason", "no reason given")
            raise ConfigError(f"endpoint {name} is Failed ({reason}) and can only be deleted: --delete, then create it")
        config = self.call("DescribeEndpointConfig", EndpointConfigName=found["EndpointConfigName"])
        if serverless and not any("ServerlessConfig" in variant for variant in config["ProductionVariants"]):
            raise ConfigError(
                f"endpoint {name} is real-time, and SageMaker makes none of these serverless: give --instance-type, or "
                "--delete it and create it again"
            )

    def create(self, calls: Calls) -> None:
        """Make all of ``calls`` in order. If one fails, delete again what the earlier ones made."""
        made: Calls = []
        try:
            for operation, parameters in calls:
                self.call(operation, **parameters)
                made.append((operation, parameters))
                self._report(f"{operation} {next(iter(parameters.values()))}")
        except DeployError:
            for operation, parameters in reversed(made):
                kind = operation.removeprefix("Create")
                if kind != "Endpoint":
                    self._call_ignoring_errors("Delete" + kind, **{f"{kind}Name": parameters[f"{kind}Name"]})
            raise

    def wait(self, name: str, config: str) -> None:
        """Wait until the endpoint is in service with this configuration. Raises DeployError, with SageMaker's reason.

        If SageMaker rolls an update back, the new configuration is deleted, because nothing uses it.
        """
        status = self._wait_until_stable(name)
        for _ in range(_STALE_POLLS):
            # Just after UpdateEndpoint, the endpoint may still be reported as before.
            if status is None or status["EndpointStatus"] != "InService" or status["EndpointConfigName"] == config:
                break
            time.sleep(self._poll_s)
            status = self._wait_until_stable(name)
        if status is not None and status["EndpointStatus"] == "InService" and status["EndpointConfigName"] != config:
            reason = status.get("FailureReason", "no reason given")
            with contextlib.suppress(DeployError):
                self.delete_config(config)
            raise DeployError(f"endpoint {name} went back to {status['EndpointConfigName']}: {reason}")
        if status is None or status["EndpointStatus"] != "InService":
            found = "gone" if status is None else status["EndpointStatus"]
            reason = "" if status is None else f": {status.get('FailureReason', 'no reason given')}"
            where = f"; its log is in CloudWatch, /aws/sagemaker/Endpoints/{name}; --delete takes it away"
            raise DeployError(f"endpoint {name} is {found}{reason}{where if status is not None else ''}")

    def delete(self, name: str) -> None:
        """Delete the endpoint, its configuration and its models."""
        found = self.describe(name)
        if found is None:
            raise ConfigError(f"NAME={name!r}: there is no endpoint of this name in {self._aws.region}")
        self._stop_scaling(name)
        self.call("DeleteEndpoint", EndpointName=name)
        self._report(f"DeleteEndpoint {name}")
        self._wait_until_stable(name)
        self.delete_config(found["EndpointConfigName"])

    def delete_config(self, config: str) -> None:
        """Delete a configuration and the model that carries its name; models that others use too are kept."""
        described = self.call("DescribeEndpointConfig", EndpointConfigName=config)
        self.call("DeleteEndpointConfig", EndpointConfigName=config)
        self._report(f"DeleteEndpointConfig {config}")
        for variant in described["ProductionVariants"]:
            if variant["ModelName"] == config:
                self.call("DeleteModel", ModelName=config)
                self._report(f"DeleteModel {config}")

    def image_bytes(self, image: str) -> int | None:
        """Return an image's (compressed) size according to ECR; None if it is elsewhere, or ECR cannot be asked."""
        host, _, rest = image.partition("/")
        if ".dkr.ecr." not in host:
            return None
        repository, _, digest = rest.partition("@")
        repository, _, tag = repository.partition(":")
        which = {"imageDigest": digest} if digest else {"imageTag": tag or "latest"}
        try:
            ecr = self._aws.client("ecr")
            found = ecr.describe_images(registryId=host.partition(".")[0], repositoryName=repository, imageIds=[which])
            return int(found["imageDetails"][0].get("imageSizeInBytes", 0))
        except self._aws.failures as error:
            self._report(f"the image's size is unknown: {error}")
            return None

    def _wait_until_stable(self, name: str) -> dict[str, Any] | None:
        began, reported = time.monotonic(), ""
        while True:
            found = self.describe(name)
            status = "gone" if found is None else str(found["EndpointStatus"])
            if status != reported:
                self._report(f"{time.monotonic() - began:5.0f} s  {name}: {status}")
                reported = status
            if status not in _TRANSITIONAL:
                return found
            if time.monotonic() - began > _PATIENCE_S:
                raise DeployError(f"endpoint {name} was still {status} after {_PATIENCE_S:g} s; it goes on without us")
            time.sleep(self._poll_s)

    def _call_ignoring_errors(self, operation: str, **parameters: Any) -> None:
        try:
            self.call(operation, **parameters)
        except DeployError as error:
            self._report(str(error))


def creation(
    name: str,
    model: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    update: bool,
    tags: Mapping[str, str] | None = None,
) -> Calls:
    """Return the three calls for a new endpoint, or for another version of an existing one."""
    last = "UpdateEndpoint" if update else "CreateEndpoint"
    return [
        ("CreateModel", model),
        ("CreateEndpointConfig", config),
        (last, sagemaker.endpoint(name, config["EndpointConfigName"], None if update else tags)),
    ]
