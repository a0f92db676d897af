"""The platforms' own commands (kubectl, faas-cli, helm, gcloud), run for `medusa deploy --apply`."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from medusa_runtime.errors import DeployError

_INSTALL = {
    "kubectl": "https://kubernetes.io/docs/tasks/tools",
    "faas-cli": "https://docs.openfaas.com/cli/install",
    "helm": "https://helm.sh/docs/intro/install",
    "gcloud": "https://cloud.google.com/sdk/docs/install",
}
_KUBECTL_TIMEOUT_S = 120


def kubectl(*command: str, stdin: str | None = None) -> str:
    """Run `kubectl` and return what it printed. Raises DeployError as ``run_client`` does."""
    return run_client(["kubectl", *command], timeout_s=_KUBECTL_TIMEOUT_S, stdin=stdin)


def run_client(
    command: Sequence[str], *, timeout_s: float, stdin: str | None = None, folder: Path | None = None
) -> str:
    """Run a command and return what it printed.

    Raises DeployError if it is not installed, fails (with its stderr), or takes longer than ``timeout_s``.
    """
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, input=stdin, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise DeployError(
            f"--apply needs {command[0]}, which is not in PATH: install it ({_INSTALL[command[0]]}), or leave --apply "
            "out and apply what is printed"
        ) from None
    except subprocess.TimeoutExpired:
        raise DeployError(f"`{shown}` did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise DeployError(f"`{shown}` cannot be run: {error.strerror}") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise DeployError(f"`{shown}` failed: {said}")
    return done.stdout
