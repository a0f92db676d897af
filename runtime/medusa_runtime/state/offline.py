"""Run offline work in a process of its own, so that an engine that was started for it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ..config import Settings
from ..errors import StateError

_TIMEOUT_S = 3600.0


def run_module(
    name: str, arguments: Sequence[str], settings: Settings, failure: str, env: Mapping[str, str] | None = None
) -> None:
    """Run a module as a program, with the settings as JSON on its standard input, and ``env`` added to the environment.

    If it fails or takes more than an hour, raise StateError with the text ``failure`` and the last line that it wrote.
    """
    try:
        subprocess.run(
            [sys.executable, "-m", name, *arguments],
            input=json.dumps(asdict(settings)),
            env={**os.environ, **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        raise StateError(f"{failure}: {said[-1][-500:]}") from None
    except subprocess.TimeoutExpired:
        raise StateError(f"{failure} within {_TIMEOUT_S / 60:.0f} minutes") from None


__all__ = ["run_module"]
