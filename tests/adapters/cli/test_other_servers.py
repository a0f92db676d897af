"""Flags that people bring from other model servers: said in ours, in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_adapters.cli.command_line import command_parsers
from medusa_adapters.cli.other_servers import MEANT
from medusa_runtime.config import Settings
from medusa_runtime.errors import ConfigError
from medusa_vllm.flags import flag_words

DOCS = Path(__file__).parents[3] / "docs"
MEDUSA = Path(sys.executable).with_name("medusa")


def refused(*arguments: str) -> str:
    """The line on stderr of a call that must end with status 2."""
    result = subprocess.run([MEDUSA, *arguments], capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 2, result
    return result.stderr


def test_flags_of_other_servers_are_said_in_ours() -> None:
    for given, meant in (
        (("--max-num-seqs", "8"), "argument: --max-num-seqs; expected --max-concurrency; see medusa serve --help"),
        (("--trust-remote-code",), "--trust-remote-code; expected no flag: code that a checkpoint brings is not run;"),
        (("--tokenizer", "x"), "--tokenizer; expected no flag: the tokenizer is the one beside the weights;"),
        (("--model_name=x",), "--model_name; expected --served-model-name;"),
    ):
        assert meant in refused("serve", "m", *given)


def test_every_flag_that_is_said_instead_is_there() -> None:
    ours = command_parsers()["serve"]._option_string_actions
    for flag, meant in MEANT.items():
        assert flag not in ours
        assert set(re.findall(r"--[a-z-]+", meant)) <= set(ours)


@pytest.mark.parametrize("given", [("--api-key", "s3cret"), ("--api-key=s3cret",)])
def test_the_api_key_of_other_servers_is_no_file_and_is_not_shown(given: tuple[str, ...]) -> None:
    line = refused("serve", "--model", "m", *given)
    assert "unrecognized argument: --api-key; expected --api-key-file, or the variable MEDUSA_TOKEN" in line
    assert "s3cret" not in line


@pytest.mark.parametrize(
    "given",
    [
        ("serve", "m", "--hf-token", "s3cret"),
        ("serve", "m", "--api_key=s3cret", "--bar"),
        ("serve", "m", "--foo", "x", "--api-key", "s3cret"),
        ("serve", "--engine", "vllm", "m", "--api-key", "s3cret"),
        ("serve", "m", "s3://key:s3cret@bucket/m"),
        ("serve", "m", "--model", "s3://key:s3cret@bucket/m"),
        ("serve", "s3://key:s3cret@bucket/m", "--model", "m"),
        ("serve", "m", "--trust-state", "http://key:s3cret@host?token=s3cret"),
        ("serve", "m", "--trust-state", "http://host/?X-Amz-Signature=s3cret"),
        ("deploy", "--api-key", "s3cret"),
        ("node", "--token", "s3cret"),
        ("bench", "-p", "s3cret"),
        ("cluster", "--hf-token", "s3cret"),
    ],
)
def test_values_of_unknown_flags_and_credentials_in_urls_are_not_shown(given: tuple[str, ...]) -> None:
    line = refused(*given)
    assert "--" in line
    assert "s3cret" not in line


def test_flags_of_vllm_that_cannot_be_split_are_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"MEDUSA_VLLM_ARGS cannot be used.*No closing quotation") as refusal:
        flag_words(Settings(model="m", engine="vllm", vllm_args="--api-key 's3cret"))
    assert "s3cret" not in str(refusal.value)


def test_the_page_about_other_servers_says_the_same() -> None:
    page = (DOCS / "migrate.md").read_text()
    ours = command_parsers()["serve"]._option_string_actions
    rows = re.findall(r"^\| (.*--.*) \|$", page.partition("## Routes")[0], re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        *theirs, here = (re.findall(r"`(--[a-z-]+)", cell) for cell in row.split(" | "))
        assert set(here) <= set(ours) | {"--api-key-file"}
        for flag in (flag for cell in theirs for flag in cell):
            said = set(re.findall(r"--[a-z-]+", MEANT[flag])) if flag in MEANT else {flag}
            assert said & set(here) or (not said and not here), row
    metrics = (DOCS / "metrics.md").read_text()
    assert all(f"`{name}`" in metrics for name in re.findall(r"`(medusa_[a-z_]+)", page))
