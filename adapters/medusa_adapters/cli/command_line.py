"""What the command `medusa` does.

``medusa serve`` runs this file on its way to the first token, so it imports one command's module and nothing heavy.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import medusa_vllm  # noqa: F401  makes --engine vllm known
from medusa_runtime.errors import ConfigError, MedusaError
from medusa_runtime.resource_limits import as_limit_error

# Name, module with ``add_arguments(parser)`` and ``run(arguments) -> int``, and a line of help.
_COMMANDS = (
    ("serve", "medusa_adapters.cli.serve", "serve a model or a function, and show where its start's time went"),
    ("fetch", "medusa_adapters.cli.fetch", "fetch a checkpoint into a folder or, for timing, into memory"),
    ("new", "medusa_adapters.cli.new", "make a small complete project: handler, test, Dockerfile"),
    ("deploy", "medusa_adapters.deploy.command", "bring a function to Knative, OpenFaaS or SageMaker"),
    ("materialize", "medusa_adapters.cli.materialize", "make the state bundle that lets starts skip work"),
    ("inspect", "medusa_adapters.cli.inspect", "show what a checkpoint contains"),
    ("bench", "medusa_adapters.bench.command", "measure cold starts and fetches against others"),
    ("node", "medusa_adapters.cli.node", "keep models and warm engine processes for all functions of this node"),
    ("doctor", "medusa_adapters.cli.doctor", "check this machine, and say what to do"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}{'' if message.endswith('?') else ';'} see {self.prog} --help")


class _Version(argparse.Action):
    def __call__(self, *_: object, **__: object) -> None:
        from importlib.metadata import version  # 30 ms

        print(f"medusa-runtime {version('medusa-runtime')}")
        raise SystemExit(0)


def run(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status: 0, 2 for a call that cannot be meant so, 1 for the rest."""
    _open_standard_streams()
    # Of torch, when it is imported in full where NumPy is not installed; nothing of ours needs that.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        arguments = _parse(argv)
        status: int = importlib.import_module(arguments.module).run(arguments)
        sys.stdout.flush()
        return status
    except MedusaError as error:
        return _tell(error)
    except BrokenPipeError:
        # The reader of our output has gone (`medusa inspect … | head`); Python would complain again while closing it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, MemoryError, RuntimeError) as error:
        known = as_limit_error(error)
        if known is None:
            raise
        return _tell(known)


def _tell(error: MedusaError) -> int:
    if os.environ.get("MEDUSA_LOG_LEVEL") == "debug":
        raise error
    print(f"medusa: {error} [{error.code}]", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _open_standard_streams() -> None:
    """A closed stdin, stdout or stderr is /dev/null; else a socket of ours would take its number and get its text."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="medusa", description="Serverless model functions that answer as soon as weights can be read."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="command", required=True)
    chosen: argparse.ArgumentParser = parser
    for name, module, text in _COMMANDS:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(module=module)
        if name in argv[:1]:
            chosen = command
            importlib.import_module(module).add_arguments(command)
    if not argv:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if chosen is parser and not argv[0].startswith("-"):
        names = [name for name, *_ in _COMMANDS]
        raise ConfigError(
            f"{argv[0]!r} is no command{_meant(argv[0], names) or '.'} Expected one of {', '.join(names)}"
        )
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(flag, list(chosen._option_string_actions))}")
    return arguments


def _meant(word: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
