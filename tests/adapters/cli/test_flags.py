"""Flags as a user finds them: one name for one thing, earlier names accepted, one way to show a default."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import medusa_command
from medusa_adapters.cli.command_line import command_parsers
from plain_environ import plain_environ

EXAMPLE = Path(__file__).parents[3] / "examples/pydoc-lm"
DEPLOY = ("deploy", "knative", "hello", "--image", "registry/hello:1")


def medusa(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    if arguments[0] != "fetch":  # which has a process that fetches
        return medusa_command.medusa(*arguments, environ=variables)
    environ = plain_environ() | variables
    command = [sys.executable, "-m", "medusa_adapters.cli.main", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_an_earlier_name_does_the_same_and_says_so() -> None:
    new, old = medusa(*DEPLOY, "--timeout-s", "90"), medusa(*DEPLOY, "--timeout", "90")
    assert (new.returncode, new.stderr) == (0, "")
    assert old.stdout == new.stdout
    assert old.stderr == "medusa: --timeout is called --timeout-s now; the old name goes on working\n"
    assert "--timeout-s" in medusa("deploy", "knative", "--help").stdout


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    for command in (("bench", "fetch"), ("bench", "coldstart")):
        done = medusa(*command, EXAMPLE, "--json", tmp_path / "none" / "file")
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
        assert "--json: expected a file in a folder that is there, found" in done.stderr


def test_a_checkpoint_is_given_either_way() -> None:
    example = EXAMPLE
    for command in ("inspect", "fetch"):
        done = [medusa(command, *given) for given in ((example,), ("--model", example))]
        done.append(medusa(command, MEDUSA_MODEL=str(example)))
        assert [one.returncode for one in done] == [0, 0, 0]
        both = medusa(command, example, "--model", example)
        assert (both.returncode, "expected one checkpoint" in both.stderr) == (2, True)
        none = medusa(command)
        assert (none.returncode, "expected a checkpoint" in none.stderr) == (2, True)


def test_defaults_are_shown_in_one_way() -> None:
    for parser in all_parsers(command_parsers().values()):
        text = " ".join(parser.format_help().split())
        assert "(default" not in text
        assert "default %" not in text
        assert not re.search(r"default: [0-9]+\.0\]", text), parser.prog
        for shown in text.split("default:")[:-1]:
            assert re.search(r"\[(\w+; )?$", shown), (parser.prog, shown[-60:])


def all_parsers(parsers: Iterable[argparse.ArgumentParser]) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands, and those of their subcommands."""
    for parser in parsers:
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from all_parsers(action.choices.values())


def test_the_log_level_has_two_forms_of_one_thing() -> None:
    flag, variable = medusa("fetch", "nope", "--log-level", "debug"), medusa("fetch", "nope", MEDUSA_LOG_LEVEL="debug")
    for done in (flag, variable):
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert done.stderr.rstrip().endswith("[Storage.NotFound]")
    assert "Traceback" not in medusa("fetch", "nope").stderr
    wrong = medusa("fetch", "nope", "--log-level", "loud")
    assert (wrong.returncode, "expected one of debug" in wrong.stderr) == (2, True)
