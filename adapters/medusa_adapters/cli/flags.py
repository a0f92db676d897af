"""What all commands' flags share: names, the checkpoint's location, the log level, and how defaults are shown."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from medusa_runtime.config import LOG_FORMATS, OPTIONS, parse_option
from medusa_runtime.errors import ConfigError, json_excerpt
from medusa_runtime.storage.base import redacted

# Earlier names of flags. They still work, but print a line with the new name.
RENAMED = {"--timeout": "--timeout-s", "--concurrency": "--max-concurrency"}
_LOG_LEVEL = next(option for option in OPTIONS if option.field == "log_level")


class HelpFormatter(argparse.HelpFormatter):
    """Help that shows every default as ``[default: …]``, and a variable before it as ``[VARIABLE; default: …]``."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        text = re.sub(r"\(([^()]+); default: (%\(default\)s|[^()]*)\)", r"(\1) [default: \2]", text)
        text = re.sub(r"\(default: ([^()]*(?:\([^()]*\)[^()]*)?)\)", r"[default: \1]", text)
        text = re.sub(r"(\w+): ([^;]*) \(default\)", r"\1: \2 [default: \1]", text)
        text = re.sub(r"^default: (.*)$", r"[default: \1]", text)
        text = re.sub(r"; default:? ([^;\[\]]*)$", r" [default: \1]", text)
        text = re.sub(r"; default:? ([^;\[\]]*) \[(\w+)\]$", r" [\2; default: \1]", text)
        text = re.sub(r"\]; default:? ", "; default: ", text)
        shown = action.default not in (None, False, [], "", 0, argparse.SUPPRESS) and "default" not in text
        value = f"{action.default:g}" if isinstance(action.default, float) else "%(default)s"
        return f"{text} [default: {value}]" if shown and action.option_strings else text


class RawHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help like HelpFormatter's that keeps the line breaks of the description."""


def add_model(parser: argparse.ArgumentParser, text: str | None = None) -> None:
    """Add the checkpoint, as ``URL`` or ``--model URL``; see ``model_argument``."""
    option = next(option for option in OPTIONS if option.field == "model")
    parser.add_argument("checkpoint", nargs="?", metavar="URL", help=text or option.help)
    parser.add_argument("--model", metavar=option.form, help="the same [MEDUSA_MODEL]")


def model_argument(arguments: argparse.Namespace) -> str | None:
    """Return the checkpoint that was given. Raises ConfigError when two were."""
    if arguments.checkpoint is not None and arguments.model is not None:
        raise ConfigError(
            f"expected one checkpoint, found {redacted(arguments.checkpoint)!r} and --model "
            f"{redacted(arguments.model)!r}; leave one out"
        )
    if (arguments.checkpoint or "").endswith(".py"):
        raise ConfigError(f"expected a checkpoint, found {arguments.checkpoint!r}; code is given as --handler FILE")
    found: str | None = arguments.checkpoint if arguments.model is None else arguments.model
    return found


def request_body(text: str) -> bytes:
    """Return the body given with ``--request``: the text or, for ``@FILE``, a file's content, and for ``@-`` stdin's.

    Raises ConfigError.
    """
    if not text.startswith("@"):
        return text.encode()
    try:
        if text == "@-":
            return sys.stdin.buffer.read()
        return Path(text[1:]).read_bytes()
    except OSError as error:
        raise ConfigError(f"--request={text}: expected a file that can be read: {error.strerror}") from None


def output_file(text: str) -> Path:
    """Return the file that a flag names; the ``type`` of flags for what is written after minutes of work.

    Raises ArgumentTypeError if it could not be written.
    """
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that is there, found {json_excerpt(text)}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, may not write {json_excerpt(text)}")
    return path


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Give the parsers of a command and of its subcommands the names and the help that all commands share."""
    if parser.formatter_class is not RawHelpFormatter:
        parser.formatter_class = HelpFormatter
    known = parser._option_string_actions
    for old, new in RENAMED.items():
        if old in known and new not in known:
            action = known[old]
            action.option_strings = [new]
            known[new] = action
    subcommands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in subcommands:
        for subparser in {id(value): value for value in action.choices.values()}.values():
            add_common_options(subparser)
    if not subcommands and _LOG_LEVEL.flag not in known:
        parser.add_argument(_LOG_LEVEL.flag, metavar=_LOG_LEVEL.form, help=f"{_LOG_LEVEL.help} [MEDUSA_LOG_LEVEL]")


def warn_of_renamed(argv: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Print a line for each flag that was given by its earlier name; ``parser`` is the chosen command's."""
    known = {name for action in parser._actions for name in action.option_strings}
    for word in argv:
        old = word.partition("=")[0]
        if old not in known and RENAMED.get(old) in known:
            print(f"medusa: {old} is called {RENAMED[old]} now; the old name goes on working", file=sys.stderr)


def chosen_parser(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the subcommand that the words name; without one, the command's own."""
    for action in parser._actions:
        for word in argv if isinstance(action, argparse._SubParsersAction) else ():
            if action.choices and word in action.choices:
                return chosen_parser(dict(action.choices)[word], argv)
    return parser


def log_level(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the level that ``--log-level`` or MEDUSA_LOG_LEVEL sets, even if the rest of the command is invalid."""
    for number, word in enumerate(argv):
        flag, sign, value = word.partition("=")
        if flag == _LOG_LEVEL.flag:
            value = value if sign else "".join(argv[number + 1 : number + 2])
            return str(parse_option(_LOG_LEVEL, value, _LOG_LEVEL.flag))
    given = environ.get("MEDUSA_LOG_LEVEL")
    return str(parse_option(_LOG_LEVEL, given, "MEDUSA_LOG_LEVEL")) if given else ""


def add_log_format(parser: argparse.ArgumentParser) -> None:
    text = "json: each line of the log is an object [MEDUSA_LOG_FORMAT]"
    parser.add_argument("--log-format", choices=LOG_FORMATS, help=text)


def log_settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the level and the format of a log by the flags, or else by the environment. Raises ConfigError."""
    return chosen(arguments, "log_level", environ) or "info", chosen(arguments, "log_format", environ) or "text"


def chosen(arguments: argparse.Namespace, field: str, environ: Mapping[str, str]) -> str:
    """Return what the flag of a setting says or, without it, its variable. Raises ConfigError for a bad variable."""
    if given := getattr(arguments, field):
        return str(given)
    option = next(option for option in OPTIONS if option.field == field)
    value = environ.get(option.variable)
    return str(parse_option(option, value, option.variable)) if value else ""


def misspelt(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each variable that looks like a misspelt setting, and the name that was probably meant."""
    known = {option.variable for option in OPTIONS}
    for variable in sorted(environ):
        if variable in known or not variable.startswith("MEDUSA_") or variable.startswith("MEDUSA_NODE_"):
            continue
        from difflib import get_close_matches

        bare = variable.removeprefix("MEDUSA_")
        # Kubernetes sets MEDUSA_PORT=tcp://… beside a Service named medusa.
        if bare in known and "://" not in environ[variable]:
            yield variable, bare
        elif close := get_close_matches(variable, known, n=1, cutoff=0.85):
            yield variable, close[0]
