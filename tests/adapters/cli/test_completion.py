"""`medusa completion` and `-V`: what the shells themselves make of the scripts."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from medusa_command import medusa


def completed(line: str) -> list[str]:
    """Return what bash offers at the end of a line."""
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    script = (
        f"{medusa('completion', 'bash').stdout}\n"
        f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _medusa; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_flags_and_values() -> None:
    assert {"serve", "node", "materialize"} <= set(completed("medusa "))
    assert completed("medusa mat") == ["materialize"]
    assert "--max-model-len" in completed("medusa serve --max-")
    assert set(completed("medusa serve --engine ")) >= {"torch", "vllm", "none"}
    assert completed("medusa serve --dtype b") == ["bfloat16"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(shell: str) -> None:
    text = medusa("completion", shell).stdout
    assert "serve" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=text, text=True, check=True)


def test_an_unknown_shell_is_refused() -> None:
    done = medusa("completion", "csh")
    assert done.returncode == 2
    assert "bash" in done.stderr


def test_the_version() -> None:
    assert medusa("-V").stdout == medusa("--version").stdout
    assert medusa("-V").stdout.startswith("medusa-runtime ")
