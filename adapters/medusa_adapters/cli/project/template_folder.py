"""The templates, inside an installed package or at the root of a checkout, and how their files are written."""

from __future__ import annotations

from pathlib import Path

from medusa_runtime.errors import ConfigError

_SKIPPED = ("__pycache__", ".pytest_cache", ".ruff_cache")


def template_folder(*parts: str) -> Path:
    here = Path(__file__).resolve()
    for root in (here.parents[2] / "templates", here.parents[4] / "templates"):
        folder = root.joinpath(*parts)
        if folder.is_dir():
            return folder
    raise ConfigError(f"the template {'/'.join(parts)} is missing from this installation; install medusa-runtime again")


def template_files(folder: Path) -> dict[str, bytes]:
    """Read a template's files: relative path → content. Caches are left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.parts) & set(_SKIPPED)
    }


def write_files(files: dict[str, bytes], folder: Path, *, replace: bool = False) -> list[Path]:
    """Write files below ``folder``. Raises ConfigError before it writes anything if another file is in the way."""
    targets = {folder / name: content for name, content in files.items()}
    in_the_way = [path for path, content in targets.items() if path.exists() and not _same(path, content)]
    if in_the_way and not replace:
        found = ", ".join(str(path) for path in in_the_way)
        raise ConfigError(f"{found}: expected nothing there, found other content; move it or add --force")
    try:
        for path, content in targets.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    return list(targets)


def _same(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
