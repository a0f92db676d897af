import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import medusa_adapters
from medusa_adapters.bench.bytecode import compile_packages


def test_our_packages_are_compiled_for_an_interpreter(tmp_path: Path) -> None:
    package = tmp_path / "medusa_adapters"
    shutil.copytree(Path(medusa_adapters.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    module = importlib.util.cache_from_source(str(package / "trial.py"))
    assert not os.path.exists(module)
    compile_packages(str(python))
    assert os.path.exists(module)


def test_an_interpreter_that_has_none_of_them_is_no_fault(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    compile_packages(str(python))
    assert subprocess.run([python, "-c", "import medusa_runtime"], stderr=subprocess.DEVNULL, check=False).returncode
