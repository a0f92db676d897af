"""The flags of ``vllm serve``, read by vLLM's own parsers: the engine's before the start, all of them at the mount."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError, MedusaError, MissingPackageError

from ..flags import refuse_medusas_own
from .replacement import patch_function

_NAME = re.compile(r'(?:^    |"--)([a-z0-9_-]+)(?=: |")', re.MULTILINE)  # a field of a class of flags, or a flag itself


def engine_arguments(words: list[str]) -> dict[str, Any]:
    """Return the fields of vLLM's EngineArgs that flags set; front-end flags are ignored. Raises ConfigError."""
    if not words:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        """A parser that ignores other flags than the engine's. vLLM's ``parse_args`` also takes its own spellings."""

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            found, left = super().parse_known_args(args, namespace)
            for word in left:
                name = word.partition("=")[0]
                whole = sorted(flag for flag in self._option_string_actions if flag.startswith(name))
                # The front end's parser would accept the abbreviation, but the engine would not get the flag.
                if whole and name.startswith("--") and name not in ("--", "--config"):
                    self.error(f"expected {whole[0]} in full, found {name}")
                if name.startswith("--") and not _may_be_front_ends(name):
                    self.error(f"expected a flag that this version has, found {name}")
            return found, []

        def error(self, message: str) -> Any:
            raise ConfigError(f"a flag of vllm serve cannot be used: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm serve", add_help=False, allow_abbrev=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        found = vars(parser.parse_args(list(words)))
    except MedusaError:
        raise
    except Exception as error:  # reading the file of --config may raise anything
        raise ConfigError(f"flags of vllm serve cannot be read: {error}") from error
    refuse_medusas_own(name.replace("_", "-") for name in found)  # such a file may have them, too
    known = {field.name for field in fields(EngineArgs)}  # AsyncEngineArgs has one more, which its front end reads
    return {name: value for name, value in found.items() if name in known}


def _may_be_front_ends(flag: str) -> bool:
    """Return whether vLLM's front end may have a flag, which may be abbreviated.

    Its names are read from the text of its parser, since importing that takes about a second.
    """
    import vllm

    name = flag.removeprefix("--").partition(".")[0].replace("_", "-").removeprefix("no-")
    folder = Path(str(vllm.__file__)).parent / "entrypoints"
    known: list[str] = []
    for file in ("common/cli_args.py", "launchers/cli_args.py"):  # from 0.33 on; before
        with suppress(OSError):
            known += _NAME.findall((folder / file).read_text())
    return not known or any(each.replace("_", "-").startswith(name) for each in known)


def server_arguments(words: list[str], model: str) -> argparse.Namespace:
    """Return all arguments of ``vllm serve MODEL``, with vLLM's defaults. Importing its parser takes about a second.

    Raises ConfigError for a flag that vLLM does not know.
    """
    try:
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise MissingPackageError(f"vLLM's HTTP server cannot be imported: {error}") from error

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise ConfigError(f"a flag of vllm serve cannot be used: {message}")

    parser = Parser(prog="vllm")
    command = ServeSubcommand()
    with _muted_once():
        command.subparser_init(parser.add_subparsers(required=True, dest="subparser", parser_class=Parser))
    arguments: argparse.Namespace = parser.parse_args(["serve", model, *words])
    arguments.model = arguments.model_tag
    if arguments.reasoning_parser:  # vLLM does so when it makes its configuration from these arguments
        arguments.structured_outputs_config.reasoning_parser = arguments.reasoning_parser
    try:
        command.validate(arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"flags of vllm serve cannot be used together: {error}") from error
    return arguments


@contextmanager
def _muted_once() -> Iterator[None]:
    """Mute vLLM's log while it makes its flags. It would do so for each flag, and go through all loggers each time."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with patch_function("vllm.engine.arg_utils", "suppress_logging", lambda theirs, *_: nullcontext()):
            yield
    finally:
        logging.disable(before)


__all__ = ["engine_arguments", "server_arguments"]
