"""The engines that serve a checkpoint, or the reason why none does."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import NamedTuple

from medusa_runtime.checkpoint.reader import Checkpoint
from medusa_runtime.config import OPTIONS, Settings
from medusa_runtime.errors import MedusaError, MissingPackageError, ModelError
from medusa_runtime.models.backend import Backend, backend
from medusa_runtime.registry import NO_ENGINE, engine_kind, imported

_ENGINE = next(option for option in OPTIONS if option.field == "engine")


class Verdict(NamedTuple):
    """The result of a check of a checkpoint.

    ``backend`` serves it; None: nothing does. ``problem`` says why the engine in the settings does not. If there is a
    ``backend`` nevertheless, it is that of another engine, which may. ``unchecked`` says why only small files were
    checked; it is empty if all was.
    """

    backend: Backend | None
    problem: str = ""
    unchecked: str = ""

    def __str__(self) -> str:
        if self.backend is None:
            return f"no: {self.problem}"
        if self.problem:
            return f"{self.backend} (--engine {self.backend.kind}); not the torch engine: {self.problem}"
        return f"{self.backend}; {self.unchecked}" if self.unchecked else str(self.backend)


def chose_engine(arguments: argparse.Namespace) -> bool:
    """Return whether the user has chosen an engine, by flag or variable."""
    return arguments.engine is not None or bool(os.environ.get(_ENGINE.variable))


def judge(checkpoint: Checkpoint, settings: Settings, *, chosen: bool) -> Verdict:
    """Check a checkpoint with the code of the engine that would serve it.

    If the torch engine does not support it and was not ``chosen``, vLLM is asked, too.
    """
    try:
        return _checked(checkpoint, settings)
    except (ModelError, MissingPackageError) as error:
        problem = _shown(error)
        if not chosen:
            try:
                return _checked(checkpoint, replace(settings, engine="vllm"))._replace(problem=problem)
            except MedusaError as other:
                problem += "" if str(other) in str(error) else f"; and not the vllm engine: {_shown(other)}"
        return Verdict(None, problem)
    except MedusaError as error:
        return Verdict(None, _shown(error))


def _checked(checkpoint: Checkpoint, settings: Settings) -> Verdict:
    read, index = checkpoint.files.get, checkpoint.index
    found = backend(read, settings)
    check = "" if settings.engine == NO_ENGINE else engine_kind(settings.engine).check
    if check:
        try:
            imported(check)(read, index, settings)
        except ImportError as error:
            return Verdict(found, unchecked=f"its tensors were not checked, for which torch is needed ({error})")
    return Verdict(found)


def _shown(error: MedusaError) -> str:
    return f"{error} [{error.code}]"


__all__ = ["Verdict", "chose_engine", "judge"]
