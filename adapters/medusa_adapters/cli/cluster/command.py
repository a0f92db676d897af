"""`medusa cluster`: start nodes, deploy models onto them, and look at what they do."""

from __future__ import annotations

import argparse
import importlib

# Name, module with ``add_arguments(parser)`` and ``run(arguments) -> int``, and a line of help. Only the chosen one is
# imported.
_COMMANDS = (
    ("start", "medusa_adapters.cli.cluster.start", "start this machine's node, as the head or at a head's address"),
    ("deploy", "medusa_adapters.cli.cluster.deploy", "make a model known to the cluster under a name"),
    ("status", "medusa_adapters.cli.cluster.status", "show nodes, models, copies, instances and transfers"),
    ("scale", "medusa_adapters.cli.cluster.scale", "change how many instances a model may have"),
    ("remove", "medusa_adapters.cli.cluster.remove", "end a model's instances and forget it"),
    ("drain", "medusa_adapters.cli.cluster.drain", "move copies and requests off a node before it ends"),
    ("gateway", "medusa_adapters.cli.cluster.gateway", "answer the OpenAI routes for every deployed model"),
    ("lab", "medusa_adapters.cli.cluster.lab", "make a cluster of several nodes on this one machine; needs root"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, module, text in _COMMANDS:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.set_defaults(cluster_module=module)
        try:
            importlib.import_module(module).add_arguments(command)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise


def run(arguments: argparse.Namespace) -> int:
    status: int = importlib.import_module(arguments.cluster_module).run(arguments)
    return status
