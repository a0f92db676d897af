"""`medusa cluster`: start nodes, deploy models onto them, and look at what they do."""

from __future__ import annotations

import argparse

from ..subcommands import add_subcommands, run_subcommand

_COMMANDS = (
    ("start", "medusa_adapters.cli.cluster.start", "start this machine's node, as the head or at a head's address"),
    ("deploy", "medusa_adapters.cli.cluster.deploy", "make a model known to the cluster under a name"),
    ("status", "medusa_adapters.cli.cluster.status", "show nodes, models, copies, instances and transfers"),
    ("logs", "medusa_adapters.cli.cluster.logs", "show what a node's processes or a model's instances have logged"),
    ("scale", "medusa_adapters.cli.cluster.scale", "change how many instances a model may have"),
    ("remove", "medusa_adapters.cli.cluster.remove", "end a model's instances and forget it"),
    ("drain", "medusa_adapters.cli.cluster.drain", "move copies and requests off a node before it ends"),
    ("gateway", "medusa_adapters.cli.cluster.gateway", "answer the OpenAI routes for every deployed model"),
    ("lab", "medusa_adapters.cli.cluster.lab", "make a cluster of several nodes on this one machine; needs root"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subcommands(parser, _COMMANDS, metavar="command")


def run(arguments: argparse.Namespace) -> int:
    return run_subcommand(arguments)
