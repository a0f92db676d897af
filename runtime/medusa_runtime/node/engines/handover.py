"""The handover from a function to the idle engine process that it takes: its settings and descriptors."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ...config import Settings
from ...container_limits import cpu_count
from ...errors import NodeError, NodeRefusedError
from ...region.seals import seals_of
from ..callers.file_status import file_status

# Settings that do not concern an engine, secrets, and whose code is run, which the agent decides.
PRIVATE = {"token", "handler", "host", "port", "platform", "node_socket", "snapshots", "trust_state", "trust_key"}

# Settings by which an engine process runs code, starts processes, opens paths or connects to hosts.
WITH_AGENTS_RIGHTS = {
    "vllm_args", "vllm_mode", "tensor_parallel", "group", "cluster", "cluster_token_file", "api_key_file",
}  # fmt: skip

# The descriptors of a "take" message, in this order.
TAKE_DESCRIPTORS = ("region", "demand", "listener", "timeline", "reports", "lease")


def settings_to_body(settings: Settings) -> dict[str, Any]:
    """Return the part of a function's settings that its engine needs."""
    return {name: value for name, value in asdict(settings).items() if name not in PRIVATE}


def settings_from_body(body: Any) -> Settings:
    """Read what ``settings_to_body`` wrote. Raises NodeError for anything else, such as another version's settings."""
    known = {field.name for field in fields(Settings)} - PRIVATE
    if not isinstance(body, dict) or not known.issuperset(body):
        unknown = sorted(set(body) - known) if isinstance(body, dict) else body
        raise NodeError(f"the function's settings cannot be used: found {unknown!r}; expected the same version here")
    return Settings(**body)


def check_engine(kind: str, settings: Mapping[str, Any]) -> None:
    """Raise NodeError if the settings are for another engine than the one that was asked for.

    An engine process becomes what its settings say, which may be none that the agent keeps.
    """
    if (found := settings.get("engine", kind)) != kind:
        raise NodeError(f"engine: expected {kind[:40]!r}, which was asked for, found {str(found)[:40]!r}")


def check_rights(settings: Mapping[str, Any], gpus: str | None) -> None:
    """Raise NodeRefusedError if another user has an engine process do more than compute on the agent's GPUs.

    It has the agent's rights: a flag of vLLM, for example, may name a file of code.
    """
    defaults = Settings()
    sources = [] if gpus is None else ["CUDA_VISIBLE_DEVICES"]
    for name in sorted(WITH_AGENTS_RIGHTS):
        if settings.get(name, default := getattr(defaults, name)) != default:
            sources.append(f"--{name.replace('_', '-')}")
    if sources:
        raise NodeRefusedError(
            f"{sources[0]}: an engine process of the node agent's has its user's rights, and takes this from that user "
            "alone; the function has to start an engine of its own"
        )


def with_own_threads(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with at most as many threads as there are CPUs here.

    With more, another user's engine process could take all the process ids that the agent and others need. Raises
    NodeError for a value that is no number of threads.
    """
    threads = settings.get("threads")
    if threads is None:
        return settings
    if type(threads) is not int or threads < 1:
        raise NodeError(f"threads: expected a whole number above 0, found {str(threads)[:40]!r}")
    return {**settings, "threads": min(threads, cpu_count())}


def check_descriptors(descriptors: list[int]) -> None:
    """Raise NodeError unless these descriptors are of the kinds that a function hands to an engine process.

    The engine process writes to them with the agent's rights.
    """
    if len(descriptors) != len(TAKE_DESCRIPTORS) - 2:
        raise NodeError(f"expected {len(TAKE_DESCRIPTORS) - 2} descriptors, found {len(descriptors)}")
    listener, timeline, reports, lease = descriptors
    expected = ((listener, stat.S_ISSOCK, "socket"), (reports, stat.S_ISFIFO, "pipe"), (lease, stat.S_ISSOCK, "socket"))
    for descriptor, is_kind, kind in expected:
        if not is_kind(file_status(descriptor).mode):
            raise NodeError(f"expected a {kind} among the descriptors for an engine process, found something else")
    try:
        seals_of(timeline)
    except OSError:
        raise NodeError("expected a timeline in shared memory for an engine process, found another file") from None
