"""What a reader who knows no row names would call the rows of a report, and what each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Label(NamedTuple):
    """``yardstick``: it answers no request, and shows how long a part of a start takes by itself."""

    name: str
    meaning: str = ""
    yardstick: bool = False


Labels = Mapping[str, Label]

_WITH_AGENT = "The same with a node agent, which holds the weights and an idle engine process."
OURS: Labels = {
    "torch": Label(
        "medusa-runtime", "`medusa serve`, from a process that does not exist yet to the first token over HTTP."
    ),
    "torch-prewarmed": Label("medusa-runtime, pre-warmed", _WITH_AGENT),
    "vllm-cold": Label("medusa-runtime with vLLM", "`medusa serve --engine vllm`, without compiled code."),
    "vllm-prewarmed": Label("medusa-runtime with vLLM, pre-warmed", _WITH_AGENT),
}
