"""All rows of the cold-start benchmark: those of `medusa bench coldstart`, compiled vLLM, and what to compare with."""

from __future__ import annotations

from medusa_adapters.bench.coldstart.resumed import ResumedMedusa
from medusa_adapters.bench.coldstart.rows import EAGER, ContestantFactory
from medusa_adapters.bench.coldstart.rows import ROWS as OURS
from medusa_adapters.report.labels import OURS as OUR_LABELS
from medusa_adapters.report.labels import Label, Labels

from benchmarks.coldstart.compiled import Compiled, ResumedCompiled
from benchmarks.coldstart.node_start import NodeStart
from benchmarks.coldstart.others import Script, transformers
from benchmarks.coldstart.recorded import Recorded
from benchmarks.coldstart.vllm_baselines import STARTS, VllmBaseline

# vllm imports its parts only when they are used, so one of them is named.
_IMPORT = "import vllm; vllm.LLM; print(vllm.__version__, flush=True)"

ROWS: dict[str, ContestantFactory] = {
    **OURS,
    "torch-snapshot-any": lambda _: ResumedMedusa("torch", name="torch-snapshot-any", tokenizer=False),
    "vllm-snapshot-any": lambda python: ResumedMedusa(
        "vllm", name="vllm-snapshot-any", python=python, flags=EAGER, tokenizer=False
    ),
    "torch-prompts": lambda _: Recorded(name="torch-prompts"),
    "vllm-compiled": lambda python: Compiled(name="vllm-compiled", python=python),
    "vllm-snapshot-compiled": lambda python: ResumedCompiled(name="vllm-snapshot-compiled", python=python),
    "torch-node": lambda _: NodeStart("torch", name="torch-node"),
    "torch-node-snapshot": lambda _: NodeStart("torch", name="torch-node-snapshot", resumed=True),
    "vllm-node": lambda python: NodeStart("vllm", name="vllm-node", python=python),
    "vllm-node-snapshot": lambda python: NodeStart("vllm", name="vllm-node-snapshot", python=python, resumed=True),
    "vllm-import": lambda python: Script("vllm-import", lambda _: ["-c", _IMPORT], python=python),
    "transformers": lambda _: transformers(),
    **{name: lambda python, name=name: VllmBaseline(name, python) for name in STARTS},  # type: ignore[misc]
}

_NODE = "`medusa node --prewarm {}=1`, until its idle engine process is warm; nothing is asked."
_ANY = "The same after `medusa snapshot` without `--model`: the start reads the tokenizer."
_NODE_SNAPSHOT = "The same after `medusa snapshot --engine {}`."
LABELS: Labels = {
    **OUR_LABELS,
    "torch-snapshot-any": Label("medusa-runtime, from a snapshot for any model", _ANY),
    "vllm-snapshot-any": Label("medusa-runtime with vLLM, from a snapshot for any model", _ANY),
    "torch-prompts": Label(
        "medusa-runtime, prompt recorded", "The same with a state bundle that has the keys and values of the prompt."
    ),
    "vllm-compiled": Label(
        "medusa-runtime with vLLM, compiled",
        "`medusa serve --engine vllm` with compiled code from a state bundle.",
    ),
    "vllm-snapshot-compiled": Label(
        "medusa-runtime with vLLM, compiled, from a snapshot",
        "The same from a cold process, after `medusa snapshot --engine vllm`.",
    ),
    "transformers": Label("transformers", "A bare Python script with Hugging Face transformers, without a server."),
    "llama.cpp": Label("llama.cpp", "`llama-server` with a GGUF file of the same model."),
    "torch-node": Label("node agent", _NODE.format("torch"), yardstick=True),
    "torch-node-snapshot": Label("node agent, from a snapshot", _NODE_SNAPSHOT.format("torch"), yardstick=True),
    "vllm-node": Label("node agent with vLLM", _NODE.format("vllm"), yardstick=True),
    "vllm-node-snapshot": Label("node agent with vLLM, from a snapshot", _NODE_SNAPSHOT.format("vllm"), yardstick=True),
    "torch-import": Label(
        "import torch", "Python, and the ordinary `import torch`; nothing is read or computed.", yardstick=True
    ),
    "vllm-import": Label(
        "import vllm", "Python, and the ordinary `import vllm`; nothing is read or computed.", yardstick=True
    ),
    "floor": Label(
        "plain floor",
        "A script with the ordinary `import torch`, the tokenizer, one look at all weights and one small product: "
        "about the least that a program which imports torch as usual can do. medusa-runtime can be below it: it "
        "imports only the parts of torch that inference uses, and reads the weights at the same time.",
        yardstick=True,
    ),
}

# The members of a set must generate the same tokens: they decode greedily, with the same code and the same weights.
SAME_TOKENS = (
    frozenset({"vllm-compiled", "vllm-snapshot-compiled", *STARTS} - {"vllm-eager-baseline"}),
    frozenset({"vllm-cold", "vllm-snapshot", "vllm-snapshot-any", "vllm-prewarmed", "vllm-eager-baseline"}),
)
