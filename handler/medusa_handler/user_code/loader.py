"""Loads user code: the object that ``file.py:name`` or ``module:name`` names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from medusa_runtime.errors import HandlerLoadError

from .user_traceback import is_ours

DEFAULT_NAMES = ("Handler", "handle")
_WEB_FRAMEWORKS = ("fastapi", "flask", "litestar", "quart", "starlette")  # their objects are callable, too
PRIVATE_MODULE = "_medusa_function_"  # and the file's name: collides with no package


def load_target(spec: str) -> Any:
    """Return the object that ``spec`` names: a function or a class. Raises HandlerLoadError, from the user's error."""
    place, _, name = spec.partition(":")
    path = _source(place)
    module = _import_module(place) if path is None else _import_file(path)
    shown = place if path is None else str(path)
    for candidate in [name] if name else DEFAULT_NAMES:
        if hasattr(module, candidate):
            target = getattr(module, candidate)
            if not callable(target) and not hasattr(target, "predict"):
                raise HandlerLoadError(
                    f"{shown}: {candidate!r} is a {type(target).__name__}; expected a function or a class"
                )
            if type(target).__module__.partition(".")[0] in _WEB_FRAMEWORKS:
                raise HandlerLoadError(
                    f"{shown}: {candidate!r} is a web application ({type(target).__name__}); expected a function or a "
                    "class, which docs/migrate.md shows how to make of it"
                )
            return target
    expected = repr(name) if name else " or ".join(map(repr, DEFAULT_NAMES))
    defined = _defined(module)
    todo = f"name one with --handler {place}:NAME"
    if "model_fn" in defined:  # of SageMaker's own containers; none of its functions is a handler
        todo = "docs/migrate.md shows a handler that calls SageMaker's model_fn and the others"
    raise HandlerLoadError(f"{shown} does not define {expected}; it defines {', '.join(defined) or 'nothing'}; {todo}")


def _source(place: str) -> Path | None:
    """Return the file that a spec's first part means; None for a module that Python itself must find."""
    if place.endswith(".py") or "/" in place:
        path = Path(place).absolute()
        if not path.is_file():
            raise HandlerLoadError(f"there is no file {path}; expected --handler file.py:name or module:name")
        if path.suffix != ".py":
            raise HandlerLoadError(f"{path}: expected a Python file, whose name ends in .py")
        return path
    if not place:
        raise HandlerLoadError("--handler names no file; expected file.py:name or module:name")
    path = Path.cwd() / f"{place}.py"
    if not path.is_file() and (Path.cwd() / place).is_file():
        raise HandlerLoadError(f"{Path.cwd() / place}: expected a Python file, whose name ends in .py")
    return path if path.is_file() else None


def _import_file(path: Path) -> ModuleType:
    """Run the file as a module under a private name. Make its folder importable."""
    name = f"{PRIVATE_MODULE}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _make_importable(path.parent)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise HandlerLoadError(_import_failure(str(path), error)) from error
    return module


def _import_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # one that the module imports
            raise HandlerLoadError(_import_failure(name, error)) from error
        raise HandlerLoadError(
            f"there is no module {name} and no file {Path.cwd() / name}.py; expected --handler file.py:name or "
            "module:name"
        ) from None
    except (Exception, SystemExit) as error:
        raise HandlerLoadError(_import_failure(name, error)) from error


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _import_failure(shown: str, error: BaseException) -> str:
    message = f"cannot import {shown}: {type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return message
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".py")]
    users = [frame for frame in frames if not is_ours(frame.filename)]
    place = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    todo = "; expected it beside the handler, or installed from requirements.txt"
    return message + place + (todo if isinstance(error, ModuleNotFoundError) else "")


def _defined(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    )
