"""Labels and explanations of a report's rows, for readers who do not know the rows' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Label(NamedTuple):
    """The label of a row. A ``yardstick`` answers no request, but shows how long a part of a start takes by itself."""

    name: str
    meaning: str = ""
    yardstick: bool = False


Labels = Mapping[str, Label]

_WITH_AGENT = "The same with a node agent, which holds the weights and an idle engine process."
OURS: Labels = {
    "torch": Label(
        "medusa-runtime", "`medusa serve`, from a process that does not exist yet to the first token over HTTP."
    ),
    "torch-snapshot": Label("medusa-runtime, from a snapshot", "The same after `medusa snapshot --model`."),
    "torch-prewarmed": Label("medusa-runtime, pre-warmed", _WITH_AGENT),
    "vllm-cold": Label("medusa-runtime with vLLM", "`medusa serve --engine vllm`, without compiled code."),
    "vllm-snapshot": Label(
        "medusa-runtime with vLLM, from a snapshot", "The same after `medusa snapshot --engine vllm --model`."
    ),
    "vllm-prewarmed": Label("medusa-runtime with vLLM, pre-warmed", _WITH_AGENT),
}
