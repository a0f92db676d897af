"""`medusa new NAME --template …`: make a small complete project that runs at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from medusa_runtime.errors import ConfigError

from ...deploy.manifests import values
from ..flags import RawHelpFormatter
from .template_folder import template_files, template_folder, write_files

TEMPLATES = {
    "chat": "answers conversations with a language model, streamed",
    "embed": "sentence embeddings with a pretrained encoder, all-MiniLM-L6-v2",
    "entities": "names in a text, with any token classifier of transformers",
    "classify": "your own torch module, trained and served",
    "stream": "a generator as server-sent events, no model",
    "cloudevent": "takes a CloudEvent and replies with one",
}
_FILLED = (".md", "Dockerfile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = RawHelpFormatter
    parser.description = "Make a small complete project.\n\n" + "\n".join(
        f"  {name:10} {text}" for name, text in TEMPLATES.items()
    )
    parser.add_argument("name", metavar="NAME", help="the function's name, and its folder")
    parser.add_argument("--template", default="stream", choices=tuple(TEMPLATES), help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def run(arguments: argparse.Namespace) -> int:
    folder = create(arguments.name, arguments.template, Path.cwd(), replace=arguments.force)
    print(f"made {folder.name}/ from the template {arguments.template}; {folder.name}/README.md tells how to go on:\n")
    print(next_steps(folder))
    return 0


def create(name: str, template: str, parent: Path, *, replace: bool = False) -> Path:
    """Make the project and return its folder. Raises ConfigError for an invalid name, or if files are in the way."""
    values.name(name)
    if template not in TEMPLATES:
        raise ConfigError(f"--template={template!r} cannot be used: expected one of {', '.join(TEMPLATES)}")
    files = template_files(template_folder(template))
    for path, content in files.items():
        if path.endswith(_FILLED):
            files[path] = content.replace(b"{{name}}", name.encode())
    folder = parent / name
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"NAME={name!r}: {folder} is there and is no folder")
    write_files(files, folder, replace=replace)
    return folder


def next_steps(folder: Path) -> str:
    """Return the first block of commands in the project's README."""
    text = (folder / "README.md").read_text()
    return "  " + text.split("```sh\n", 1)[1].split("```", 1)[0].strip().replace("\n", "\n  ")
