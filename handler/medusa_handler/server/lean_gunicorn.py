"""The lean import of gunicorn: without what only its error pages and its look for installed packages need."""

from __future__ import annotations

import sys

from medusa_runtime.imports.lazy_modules import LazyFinder, LazyPolicy
from medusa_runtime.imports.lock import TESTED_PYTHONS

_LAZY = ("html", "importlib.metadata")


def import_leanly() -> None:
    """Make the next import of gunicorn a lean one; call it before that import. Other code gets the real modules."""
    if "gunicorn" in sys.modules or sys.version_info[:2] not in TESTED_PYTHONS:
        return
    LazyFinder("gunicorn", LazyPolicy(packages=_LAZY, independent=("gunicorn", "html", "importlib"))).install()


__all__ = ["import_leanly"]
