"""The lean import of Flask: without templates, commands, forms, signatures, and its development server.

These parts are Jinja2, Click, some of werkzeug, and modules of Python that they use. They take half of the time of
``import flask``. Here they are lazy (``medusa_runtime.imports.lazy_modules``): code that uses them gets the real ones.
The names were found by experiment, and hold for the versions in ``TESTED``. Other versions are imported plainly.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from medusa_runtime.imports.lazy_modules import LazyFinder, LazyHooks, LazyPolicy, StandIn, StandIns
from medusa_runtime.imports.lock import TESTED_PYTHONS

TESTED = ("3.1.",)
_OF_PYTHON = ("decimal", "difflib", "email.utils", "hashlib", "hmac", "platform", "secrets")
_LAZY = (
    "click", "flask.cli", "flask.templating", "jinja2", "werkzeug.formparser", "werkzeug.serving", "werkzeug.test",
    *_OF_PYTHON,
)  # fmt: skip
# Names that other modules bind while Flask is imported, or call for each new app.
_BOUND = {
    "flask.templating": (
        "DispatchingJinjaLoader", "Environment", "_default_template_ctx_processor", "render_template",
        "render_template_string", "stream_template", "stream_template_string",
    ),
    "hashlib": ("sha1",),
    "jinja2": ("BaseLoader", "FileSystemLoader"),
    "werkzeug.formparser": ("FormDataParser", "default_stream_factory"),
    "werkzeug.serving": ("is_running_from_reloader", "run_simple"),
    "werkzeug.test": ("Client",),
}  # fmt: skip


class CommandGroup:
    """A stand-in for flask.cli.AppGroup: an app's commands for the command ``flask``, which is not used to serve."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    @property
    def commands(self) -> dict[str, Any]:
        return vars(self)["_real"].commands if "_real" in vars(self) else {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "_real" not in vars(self):
            from flask import cli

            cli.locate_app  # noqa: B018 - looked up, so that the module is executed, which replaces this class there
            self._real = cli.AppGroup(name=self.name)
        return getattr(vars(self)["_real"], name)


def import_leanly() -> None:
    """Make the next import of Flask a lean one, if its version is a tested one. Call it before that import."""
    if "flask" in sys.modules:
        return
    LazyFinder(
        "flask",
        LazyPolicy(
            packages=_LAZY, whole=frozenset({"click", "jinja2"}), independent=("flask", "werkzeug", *_OF_PYTHON)
        ),
        StandIns(
            importing={module: {name: StandIn.of(module, name) for name in names} for module, names in _BOUND.items()},
            lasting={"flask.cli": {"AppGroup": CommandGroup}, "platform": {"system": lambda: os.uname().sysname}},
            bound_by=("flask",),
        ),
        LazyHooks(why_not=_why_not),
    ).install()


def _why_not(file: Path) -> str | None:
    """Return why the Flask in this file is imported plainly, or None for a lean import.

    The version is taken from the name of a folder, because reading the package's metadata would take longer.
    """
    found = next(file.parent.parent.glob("flask-*.dist-info"), None)
    version = "" if found is None else found.name.removeprefix("flask-").removesuffix(".dist-info")
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in TESTED_PYTHONS:
        return "this Python was not tested with the lean import"
    if version.startswith(TESTED):
        return None
    return f"expected Flask {' or '.join(f'{one}*' for one in TESTED)}, found {version or 'an unknown version'}"


__all__ = ["TESTED", "CommandGroup", "import_leanly"]
