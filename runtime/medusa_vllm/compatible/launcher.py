"""Runs ``vllm serve``, in any version, with those limits on requests that do not need vLLM's inner parts.

Arguments: those of ``vllm``. Chat templates are rendered within limits, and pydantic stops at a request's first wrong
item. A version that uses neither Jinja nor pydantic has no such limits. A server that demands keys (``--api-key``) also
takes the one in the variable KEY, by which the engine asks it.
"""

from __future__ import annotations

import argparse
import os
import sys

from ..serving.fail_fast import fail_fast_in_collections
from ..templates import limit_templates

KEY = "_MEDUSA_ENGINE_KEY"


def main() -> None:
    fail_fast_in_collections()  # before the first of vLLM's models of requests is built
    limit_templates()
    try:
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.entrypoints.cli.main import main as other_main

        sys.exit(other_main())
    # vLLM's own main needs a distribution named vllm, but builds for CPUs have another name.
    parser, command = FlexibleArgumentParser(prog="vllm"), ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    arguments = parser.parse_args()
    command.validate(arguments)
    _admit_engine(arguments)
    command.cmd(arguments)


def _admit_engine(arguments: argparse.Namespace) -> None:
    keys = getattr(arguments, "api_key", None) or os.environ.get("VLLM_API_KEY")
    if keys and KEY in os.environ:
        arguments.api_key = [*([keys] if isinstance(keys, str) else keys), os.environ[KEY]]


if __name__ == "__main__":
    main()
