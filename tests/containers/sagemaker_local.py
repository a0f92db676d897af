"""SageMaker's own SDK in local mode, run by an interpreter that has it: `sagemaker_local.py IMAGE CHECKPOINT`.

Deploys the image with the checkpoint as model.tar.gz, asks it twice (whole and as a stream), prints the answers as one
line of JSON, and deletes the endpoint. The SDK calls `docker` and `docker-compose`: podman and podman-compose here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BODY = {"prompt": "This function returns", "max_tokens": 8, "temperature": 0}


def main() -> None:
    image, checkpoint = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="medusa-sagemaker-") as scratch:
        folder = Path(scratch)
        prepare(folder)
        with tarfile.open(folder / "model.tar.gz", "w:gz") as archive:
            for path in Path(checkpoint).iterdir():
                archive.add(path, path.name)
        print("\n" + json.dumps(deploy_and_ask(image, folder)))  # the SDK prints dots


def prepare(folder: Path) -> None:
    """Commands by the names that the SDK uses, and credentials that are none: local mode calls no AWS."""
    compose = Path(sys.executable).with_name("podman-compose")
    docker = 'case "$1" in context|compose) echo "podman has none" >&2; exit 1;; esac\nexec podman "$@"'
    commands = {"docker": docker, "docker-compose": f'exec {compose} "$@"'}
    for name, command in commands.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    os.environ["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_DEFAULT_REGION="eu-west-1")


def deploy_and_ask(image: str, folder: Path) -> list[str]:
    from sagemaker.deserializers import BytesDeserializer, JSONDeserializer
    from sagemaker.local import LocalSession
    from sagemaker.model import Model
    from sagemaker.predictor import Predictor
    from sagemaker.serializers import JSONSerializer

    quiet = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
    session = LocalSession(sagemaker_config=quiet)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    session.config = {"local": {"local_code": True, "serving_port": port, "container_root": str(folder)}}
    model = Model(
        image_uri=image,
        model_data=f"file://{folder}/model.tar.gz",
        role="arn:aws:iam::111111111111:role/medusa",
        env={"SAGEMAKER_REGION": "eu-west-1"},
        predictor_cls=Predictor,
        sagemaker_session=session,
    )
    predictor = model.deploy(1, "local", serializer=JSONSerializer(), deserializer=JSONDeserializer())
    try:
        whole = predictor.predict(BODY)["choices"][0]["text"]
        predictor.deserializer = BytesDeserializer()
        return [whole, predictor.predict(BODY | {"stream": True}).decode()]
    finally:
        (compose,) = folder.glob("*/docker-compose.yaml")
        subprocess.run(["docker-compose", "-f", compose, "down"], check=False, stdout=subprocess.DEVNULL)
        predictor.delete_endpoint()


if __name__ == "__main__":
    main()
