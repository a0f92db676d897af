"""Build hook: compiles the CPU kernels into the package, and adds the documents.

Without a C compiler, or with MEDUSA_PURE set, the package is pure and uses torch's products.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Installed into share/doc/medusa-runtime. With an editable installation, the clone's are read.
DOCUMENTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "docs", "monitoring")
KERNELS = Path("runtime/medusa_runtime/kernels")


class KernelBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the sources (an editable install finds the library there) and add it to the wheel."""
        root = Path(self.root)
        if version != "editable" and (root / "docs").is_dir():  # an image is built without them
            build_data["shared_data"] |= {str(root / name): f"share/doc/medusa-runtime/{name}" for name in DOCUMENTS}
        if os.environ.get("MEDUSA_PURE"):
            return
        kernels = runpy.run_path(str(root / KERNELS / "build.py"))
        library = Path(root, KERNELS, kernels["LIBRARY_NAME"])
        if version == "editable" and kernels["is_fresh"](library):
            return  # it is found beside the sources, also where the compiler is gone
        try:
            kernels["build"](library)
        except kernels["KernelBuildError"] as error:
            for name in (kernels["LIBRARY_NAME"], kernels["PROGRAM_NAME"]):
                library.with_name(name).unlink(missing_ok=True)  # one of an earlier build may not match
            self.app.display_warning(
                f"medusa-runtime is built without its CPU kernels, bf16 products will be slow: {error}"
            )
            return
        # No Python ABI in it: one wheel a platform, for every Python. The compiler may be one for another machine.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{kernels['machine']()}"
        made = (library, library.with_name(kernels["PROGRAM_NAME"]))
        build_data["artifacts"] += [str(path.relative_to(root)) for path in made if path.exists()]
