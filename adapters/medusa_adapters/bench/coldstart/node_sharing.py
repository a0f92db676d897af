"""The memory of many functions of one model beside one node agent, and what the origin had to send for them."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from medusa_runtime.errors import MedusaError

from ...cli.progress import note
from ..node import Node, taken_engine
from ..process import pss_bytes
from ..result import Result, Target
from ..served_instance import ServedInstance
from .contestants import Medusa, Question, weights_mb
from .metrics import add


def measure_node(result: Result, ours: Medusa, question: Question, *, runs: int, functions: int) -> None:
    """Add rows of PSS in MB, taken when every function has answered a request, so that all weights have been read.

    ``alone`` is one function without an agent. ``function`` is the median of all functions: supervisor, function
    process and the engine process that it took. ``agent`` is the agent, its zygote and its idle engine process.
    ``node`` is all of them, with each shared page once, and ``fall_mb``, the fall of the machine's available memory.
    ``origin`` is what the store has sent to the node, unless it is a local folder. Raises MedusaError if a function
    started an engine of its own, or answers differently from the others.
    """
    alone, each, agent, total, fall, sent = [], [], [], [], [], []
    for number in range(runs):
        with ExitStack() as stack:
            instance, text = _answered(stack, ours, question)
            alone.append(pss_bytes(instance.tree()) / 1e6)
        with ExitStack() as stack:
            sent_before, available = question.sent_bytes() if question.sent_bytes else 0, _available_mb()
            node = stack.enter_context(closing(Node(ours.command, ours.engine, question.env)))
            started: list[list[int]] = []
            for _ in range(functions):
                node.wait_warm(question.model)
                instance, answer = _answered(stack, ours, question, "--node-socket", node.socket)
                if (engine := taken_engine(instance.stages())) is None:
                    raise instance.failure("started an engine of its own, expected it to take the node's")
                if answer != text:
                    raise MedusaError(f"a function of the node says {answer[:80]!r}, one without it {text[:80]!r}")
                started.append([*instance.tree(), engine])
            node.wait_warm(question.model)
            fall.append(available - _available_mb())
            engines = {pid for pids in started for pid in pids}
            own = [pss_bytes(pids) / 1e6 for pids in started]
            each.append(sorted(own)[(len(own) - 1) // 2])
            agent.append(pss_bytes([pid for pid in node.process.tree() if pid not in engines]) / 1e6)
            total.append(sum(own) + agent[-1])
            if question.sent_bytes:
                sent.append((question.sent_bytes() - sent_before) / 1e6)
        note(f"run {number + 1}: {functions} functions and agent take {total[-1]:.0f} MB, one alone {alone[-1]:.0f} MB")
    weights = weights_mb(question)
    for name, metric, samples in (
        ("alone", "pss_mb", alone),
        ("function", "pss_mb", each),
        ("agent", "pss_mb", agent),
        ("node", "pss_mb", total),
        ("node", "fall_mb", fall),
        ("origin", "sent_mb", sent),
        ("weights", "size_mb", [weights] if weights else []),
    ):
        add(result, name, metric, samples)


def node_targets(result: Result, functions: int) -> list[Target]:
    """Compare the node's memory with that of functions that share nothing, and the bytes sent with the weights."""
    found = []
    node, alone = result.median("node", "pss_mb"), result.median("alone", "pss_mb")
    sent, size = result.median("origin", "sent_mb"), result.median("weights", "size_mb")
    if node and alone and size:
        # The weights once, and each function's other memory. More would mean that weights are in memory twice.
        bound = (size + functions * max(alone - size, 0.0)) / (functions * alone)
        text = f"memory of {functions} functions on the node, to {functions} alone"
        found.append(Target(text, node / (functions * alone), bound, at_least=False))
    if sent and size:
        found.append(Target("bytes the origin sent, to the weights", sent / size, 1.1, at_least=False))
    return found


def _answered(stack: ExitStack, ours: Medusa, question: Question, *flags: str) -> tuple[ServedInstance, str]:
    """Return an instance that has answered a request, and so read all its weights, and its answer."""
    instance = stack.enter_context(ours.start(question, *flags))
    return instance, instance.completion(question.body).text


def _available_mb() -> float:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "MemAvailable:") * 1024 / 1e6
