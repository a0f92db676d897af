"""The command `medusa`: parses its arguments, runs one of its commands, and reports errors.

``medusa serve`` runs this file on its way to the first token, so it imports one command's module and nothing heavy.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import medusa_cluster  # noqa: F401  makes --engine cluster and --engine group known
import medusa_vllm  # noqa: F401  makes --engine vllm known
from medusa_runtime.errors import ConfigError, MedusaError
from medusa_runtime.process_limits import as_limit_error
from medusa_runtime.storage.base import redacted

from .flags import add_common_options, chosen_parser, log_level, warn_of_renamed

# Name, module with ``add_arguments(parser)`` and ``run(arguments) -> int``, and a line of help.
_COMMANDS = (
    ("serve", "medusa_adapters.cli.serve", "serve a model or a function, and show where its start's time went"),
    ("run", "medusa_adapters.cli.project.run", "call a handler once, with or without a model"),
    ("batch", "medusa_adapters.cli.batch.command", "answer a file of requests, in the form of OpenAI's Batch API"),
    ("build", "medusa_adapters.cli.project.build", "build an image of a function, by podman, docker or buildah"),
    ("fetch", "medusa_adapters.cli.checkpoint.fetch", "fetch a checkpoint into a folder or, for timing, into memory"),
    ("new", "medusa_adapters.cli.project.new", "make a small complete project: handler, test, Dockerfile"),
    ("deploy", "medusa_adapters.deploy.command", "print what a platform needs to run a function, or bring it there"),
    ("materialize", "medusa_adapters.cli.checkpoint.materialize", "make the state bundle that lets starts skip work"),
    ("snapshot", "medusa_adapters.cli.snapshot", "save an imported engine, so that starts need not import it"),
    ("inspect", "medusa_adapters.cli.checkpoint.inspect", "show what a checkpoint contains"),
    ("bench", "medusa_adapters.bench.command", "measure cold starts and fetches of a model"),
    ("node", "medusa_adapters.cli.node", "keep models and warm engine processes for all functions of this node"),
    ("cluster", "medusa_adapters.cli.cluster.command", "run many machines as one: nodes, models, an entrance"),
    ("simulate", "medusa_adapters.cli.simulate", "simulate a fleet of machines that serves a trace"),
    ("completion", "medusa_adapters.cli.completion", "print a script that completes commands in a shell"),
    ("doctor", "medusa_adapters.cli.doctor", "check this machine, and say what to do"),
)

# Behind --, these take flags of vllm serve.
_WITH_ENGINE_FLAGS = ("serve", "batch", "materialize")

# These also work without memfd, /proc and prctl.
_ANYWHERE = ("run", "new", "build", "completion", "deploy", "inspect", "simulate")

# These have flags for the form of their log.
_LOG_THEMSELVES = (
    "medusa_adapters.cli.serve", "medusa_adapters.cli.node",
    "medusa_adapters.cli.cluster.start", "medusa_adapters.cli.cluster.gateway",
)  # fmt: skip

# The temporary files of these are removed when the command ends, however it ends.
_WITH_SCRATCH = (
    "medusa_adapters.cli.checkpoint.materialize", "medusa_adapters.cli.snapshot", "medusa_adapters.bench.command",
)  # fmt: skip


_prepared: dict[str, _Parser] = {}
_NUMBERS: dict[object, str] = {int: "a whole number", float: "a number"}


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        self._words: list[str] = list(args or ())
        return super().parse_known_args(args, namespace)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError:
            if (expected := _NUMBERS.get(action.type)) is None:
                raise
            raise ConfigError(f"{_argument_name(action)}={text!r} cannot be used: expected {expected}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if not action.option_strings and (flag := self._unknown_flag_before(value)):
            self.error(f"unrecognized argument: {flag}")  # the word behind it may be a secret
        known = [str(choice) for choice in action.choices]
        meant = _suggestion(str(value), known)
        raise ConfigError(
            f"{_argument_name(action)}={str(value)!r} cannot be used: expected one of {', '.join(known)}{meant}"
        )

    def _unknown_flag_before(self, word: object) -> str | None:
        """Return the unknown flag directly before ``word``, which argparse takes for no value of the flag's."""
        for flag, behind in pairwise(self._words):
            if behind == word and flag.startswith("-") and flag not in self._option_string_actions:
                return flag.partition("=")[0]
        return None

    def _get_option_tuples(self, option_string: str) -> Any:
        """Return the flags that this one may shorten: --api-key of other servers is no --api-key-file."""
        from .other_servers import MEANT

        return [] if option_string.partition("=")[0] in MEANT else super()._get_option_tuples(option_string)

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}{'' if message.endswith('?') else ';'} see {self.prog} --help")


class _Version(argparse.Action):
    def __call__(self, *_: object, **__: object) -> None:
        from medusa_runtime import __version__

        print(f"medusa-runtime {__version__}")
        raise SystemExit(0)


def run(argv: Sequence[str], *, in_child: bool = False) -> int:
    """Run one command; returns the exit status: 0, 2 for a bad call, 1 for every other failure.

    ``in_child``: in a child process where the command needs one, so that Ctrl-C always ends it.
    """
    _open_standard_streams()
    # torch warns if NumPy is not installed when it is imported in full; our code does not need NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        arguments = _parse(argv)
        module = importlib.import_module(arguments.module)
        if not _logs_itself(arguments) and (level := log_level(argv, os.environ)):
            from medusa_runtime.logs import configure_logging

            configure_logging(level)

        def command() -> int:
            status: int = module.run(arguments)
            sys.stdout.flush()
            return status

        if not in_child:
            return command()
        from .foreground import end, end_at_interrupt, run_in_child

        if hasattr(module, "can_end_anywhere") and module.can_end_anywhere(arguments):
            end_at_interrupt()
            end(command())
        leftovers = module.leftovers(arguments) if hasattr(module, "leftovers") else ()
        return run_in_child(command, leftovers, scratch=arguments.module in _WITH_SCRATCH)
    except MedusaError as error:
        return _print_error(error, argv)
    except BrokenPipeError:
        _drop_output()  # the reader of stdout has gone (`medusa inspect … | head`)
        return 141
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        known = as_limit_error(error)
        if known is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return _print_error(known, argv)


def _drop_output() -> None:
    """Redirect stdout to /dev/null, because Python would report its unwritten rest again when it closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _logs_itself(arguments: argparse.Namespace) -> bool:
    """Return whether this command sets up its logging itself."""
    return getattr(arguments, "subcommand", arguments.module) in _LOG_THEMSELVES


def _print_error(error: MedusaError, argv: Sequence[str]) -> int:
    with suppress(ConfigError):  # for an invalid log level: this error reports it, or came before it
        if log_level(argv, os.environ) == "debug":
            import traceback

            traceback.print_exception(error)
    from medusa_runtime.logs import for_terminal

    # A name in a checkpoint may have line ends: what follows them must not look like a line of ours.
    text = "\n  ".join(map(for_terminal, _without_credentials(str(error)).split("\n")))
    if not _logged_as_json(text, error):
        print(f"medusa: {text} [{error.code}]", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _without_credentials(text: str) -> str:
    """Return an error's text without user, password and query of URLs in it: a wrong value may be one."""
    text = re.sub(r"(\w://)[^\s/'\"@]*@", r"\1", text)
    return re.sub(r"(\w://[^\s'\"?]*)\?[^\s'\"]+", r"\1", text)


def _logged_as_json(text: str, error: MedusaError) -> bool:
    """Log the error if the log has lines of JSON; return whether it has."""
    json_log = sys.modules.get("medusa_runtime.json_log")
    if json_log is None:
        return False
    import logging

    if not any(isinstance(handler.formatter, json_log.JsonFormatter) for handler in logging.getLogger().handlers):
        return False
    logging.getLogger(__name__).error("%s", text, extra={"code": error.code})
    return True


def _open_standard_streams() -> None:
    """Open /dev/null for a closed stdin, stdout or stderr. Else a socket of ours would get its number, and output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    command = next((command for command in _COMMANDS if command[0] in argv[:1]), None)
    if command is None:
        return _parse_without_command(argv)
    name, module, _ = command
    if sys.platform != "linux" and name not in _ANYWHERE:
        raise _needs_linux(name)
    parser = _prepared.pop(name, None) or _parser(command)
    argv, engine_flags = _split_at_dashes(argv)
    parser.set_defaults(module=module, engine_flags=engine_flags)
    arguments, unknown = parser.parse_known_args(argv[1:])
    chosen = chosen_parser(parser, argv[1:])
    warn_of_renamed(argv, chosen)
    if unknown:
        from .other_servers import MEANT

        flag = unknown[0].partition("=")[0]
        if name in _WITH_ENGINE_FLAGS and "vllm" not in argv and flag in MEANT:
            chosen.error(f"unrecognized argument: {flag}; expected {MEANT[flag]}")  # its value may be a secret
        meant = _suggestion(flag, list(chosen._option_string_actions))
        if name in _WITH_ENGINE_FLAGS and flag.startswith("--") and (not meant or "vllm" in argv):
            meant += f"{'' if meant else ';'} flags of vllm serve follow behind --: --engine vllm … -- {flag}"
        chosen.error(f"unrecognized arguments: {' '.join(_without_values(_before_program(unknown, argv)))}{meant}")
    return arguments


def _without_values(words: Sequence[str]) -> list[str]:
    """Return the words of flags that are not known without their values, which may be secrets."""
    shown: list[str] = []
    for word in words:
        if word.startswith("-"):
            shown.append(word.partition("=")[0])
        elif not (shown and shown[-1].startswith("-")):
            shown.append(redacted(word))
    return shown


def _before_program(unknown: Sequence[str], argv: Sequence[str]) -> Sequence[str]:
    """Return the unknown words before ``--``. Those after it only count as unknown if there is one before."""
    program = list(argv[argv.index("--") :]) if "--" in argv else []
    for program_words in filter(None, (program, program[1:])):
        if list(unknown[-len(program_words) :]) == program_words and len(unknown) > len(program_words):
            return unknown[: -len(program_words)]
    return unknown


def _split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``medusa serve … -- …`` at ``--``, behind which flags of the engine's own server stand."""
    if argv[0] not in _WITH_ENGINE_FLAGS or "--" not in argv:
        return list(argv), []
    place = list(argv).index("--")
    return list(argv[:place]), list(argv[place + 1 :])


def _parse_without_command(argv: Sequence[str]) -> argparse.Namespace:
    """Show the help or the version and exit. Raises ConfigError for everything else."""
    parser = _Parser(
        prog="medusa",
        description="Serverless model functions that answer as soon as weights can be read.",
        epilog=_documents(),
        formatter_class=argparse.RawDescriptionHelpFormatter,  # no paths that are broken at a hyphen
    )
    parser.add_argument("-V", "--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, _, text in _COMMANDS:
        commands.add_parser(name, help=text)
    if not argv:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if not argv[0].startswith("-"):
        names = [name for name, *_ in _COMMANDS]
        raise ConfigError(
            f"{argv[0]!r} is no command{_suggestion(argv[0], names) or '.'} Expected one of {', '.join(names)}"
        )
    if argv[0] in ("-h", "--help", "-V", "--version"):
        parser.parse_args(argv)
    flag = argv[0].partition("=")[0]  # the value may be a secret
    raise ConfigError(f"expected a command before {flag}, such as medusa serve {flag} …; see medusa --help")


def _documents() -> str | None:
    """Return lines that say where the documents are: in the clone, or where the wheel has put them."""
    import sysconfig
    from pathlib import Path

    for folder in (Path(__file__).parents[3], Path(sysconfig.get_path("data"), "share/doc/medusa-runtime")):
        if (folder / "docs/index.md").exists():
            return f"documents: {folder}/README.md\nerrors:    {folder}/docs/troubleshooting.md"
    return None


def _parser(command: tuple[str, str, str]) -> _Parser:
    """Return the parser of one command, whose module is imported for it."""
    name, module, text = command
    parser = _Parser(prog=f"medusa {name}", description=text[0].upper() + text[1:] + ".")
    importlib.import_module(module).add_arguments(parser)
    add_common_options(parser)
    return parser


def prepare(name: str) -> None:
    """Make the parser of a command, which takes two milliseconds, for the next call of ``run`` with that command."""
    _prepared[name] = _parser(next(command for command in _COMMANDS if command[0] == name))


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return all commands with their parsers, for completion. Imports each command's module."""
    found: dict[str, argparse.ArgumentParser] = {}
    for command in _COMMANDS:
        # A command that cannot run here is not completed.
        with suppress(ImportError, AttributeError, OSError):
            found[command[0]] = _parser(command)
    return found


def _needs_linux(name: str) -> ConfigError:
    system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    return ConfigError(
        f"medusa {name} needs Linux, found {system}: run it in a container (docker run IMAGE medusa {name} …, see "
        "docs/images.md); here `medusa run handler.py` calls a handler without a model"
    )


def _argument_name(action: argparse.Action) -> str:
    """Return the name by which an error refers to an argument: its flag or, without one, its name in the help."""
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _suggestion(word: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    # Letters in another order are the likelier slip: --modle is --model, although --mode is as close.
    same = [name for name in known if sorted(name) == sorted(word)]
    close = same or get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
