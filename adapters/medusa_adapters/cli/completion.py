"""`medusa completion`: a script that completes commands, flags and their values in a shell."""

from __future__ import annotations

import argparse
import sys

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# source <(medusa completion bash)
_medusa() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "$command $before" in
{values}
    esac
    case "$command" in
{flags}
    esac
    [ "${{#COMPREPLY[@]}}" -gt 0 ] || COMPREPLY=($(compgen -f -- "$word"))
}}
complete -o filenames -F _medusa medusa
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a script: source <(medusa completion bash), or medusa completion fish | source"
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace) -> int:
    from .command_line import command_parsers

    sys.stdout.write(script(arguments.shell, command_parsers()))
    return 0


def script(shell: str, commands: dict[str, argparse.ArgumentParser]) -> str:
    """Return the script for commands with these parsers."""
    if shell == "fish":
        return _fish(commands)
    values, flags = [], []
    for name, parser in commands.items():
        words = [word for action in parser._actions for word in action.option_strings if word.startswith("--")]
        flags.append(f'        {name}) COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word")) ;;')
        for flag, choices in _choices(parser):
            answer = f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$word")); return'
            values.append(f'        "{name} {flag}") {answer} ;;')
    text = _BASH.format(commands=" ".join(commands), values="\n".join(values), flags="\n".join(flags))
    if shell == "zsh":
        text = "autoload -U +X bashcompinit && bashcompinit\n" + text.replace("bash)", "zsh)")
    return text


def _fish(commands: dict[str, argparse.ArgumentParser]) -> str:
    lines = ["# medusa completion fish | source", "complete -c medusa -n __fish_use_subcommand -f"]
    for name, parser in commands.items():
        text = (parser.description or name).splitlines()[0].replace("'", "\\'")
        lines.append(f"complete -c medusa -n __fish_use_subcommand -a {name} -d '{text}'")
        choices = dict(_choices(parser))
        for action in parser._actions:
            for word in action.option_strings:
                if word.startswith("--"):
                    given = f" -x -a '{' '.join(choices[word])}'" if word in choices else ""
                    lines.append(f"complete -c medusa -n '__fish_seen_subcommand_from {name}' -l {word[2:]}{given}")
    return "\n".join(lines) + "\n"


def _choices(parser: argparse.ArgumentParser) -> list[tuple[str, list[str]]]:
    """Return the flags that take one of a few words, with these words."""
    from medusa_runtime.config import OPTIONS

    known = {option.flag: list(getattr(option.parse, "accepted", ())) for option in OPTIONS}
    found = []
    for action in parser._actions:
        words = [str(choice) for choice in action.choices] if action.choices else []
        for flag in action.option_strings:
            if accepted := (words or known.get(flag, [])):
                found.append((flag, accepted))
    return found
