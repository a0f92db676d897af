"""The errors of medusa-runtime.

MedusaError
├── ConfigError                 Config.Invalid           a flag, variable or file has a bad value
│   └── MissingPackageError     Config.MissingPackage    an optional package is needed; the message says which
├── LimitError                  Limit.Reached            too few open files, processes or bytes for this process
├── StorageError                Storage.Failed           an object store did not answer as expected
│   ├── UnreachableError        Storage.Unreachable
│   ├── ForbiddenError          Storage.Forbidden
│   ├── ObjectNotFoundError     Storage.NotFound
│   ├── ObjectChangedError      Storage.Changed          the object was replaced while it was read
│   └── WrongBytesError         Storage.WrongBytes       a peer sent bytes that do not have their checksum
├── WeightsError                Weights.Invalid          a checkpoint cannot be used
│   ├── CorruptError            Weights.Corrupt          header, length or checksum is wrong
│   ├── MismatchError           Weights.Mismatch         missing, unexpected or misshaped tensors
│   └── TooLargeError           Weights.TooLarge         does not fit into the memory there is
├── StateError                  State.Invalid            a state bundle, or a part of it, cannot be used
├── ModelError                  Model.Unsupported        no engine here runs this architecture
├── EngineError                 Engine.Failed            the engine process failed
│   ├── RequestError            Engine.BadRequest        a request that the engine cannot serve, with the reason
│   │   └── ContextLengthError  Engine.ContextLength     its prompt, or its max_tokens, is beyond the model's context
│   └── OverloadedError         Engine.Overloaded        the waiting queue is full; retry_after_s says when to try again
├── DeviceError                 Device.Failed            a GPU that was asked for cannot be used
├── NodeError                   Node.Failed              the node agent cannot be used; a function starts without it
│   ├── NodeAwayError           Node.Away                the node agent is not there, or does not answer in time
│   └── NodeRefusedError        Node.Refused             the node agent may not or will not give what was asked
├── LabError                    Lab.Failed               a laboratory of nodes cannot be made on this machine
├── ClusterError                Cluster.Failed           a node or the cluster cannot do what was asked
│   ├── UnauthorizedError       Cluster.Unauthorized     the cluster's token is missing or wrong
│   ├── NoControllerError       Cluster.NoController     the controller is away; it comes back by itself
│   ├── UnknownNameError        Cluster.UnknownName      no deployment or node has this name
│   ├── NoInstanceError         Cluster.NoInstance       this node has no such instance, or not any more
│   └── InstanceError           Cluster.Instance         an instance could not start, or ended by itself
├── DeployError                 Deploy.Failed            a platform, or its client, refused
└── HandlerError                Handler.Failed           user code failed
    └── HandlerLoadError        Handler.NotFound         user code could not be imported or has no such name
"""

from __future__ import annotations

from typing import Any

_MOST_SHOWN = 80


class MedusaError(Exception):
    """The base of every error that a user can see.

    ``code`` is stable. The message says what was expected, what was found, and what to do.
    """

    code = "Medusa.Failed"


class ConfigError(MedusaError):
    code = "Config.Invalid"


class MissingPackageError(ConfigError):
    code = "Config.MissingPackage"


class LimitError(MedusaError):
    code = "Limit.Reached"


class StorageError(MedusaError):
    code = "Storage.Failed"


class UnreachableError(StorageError):
    code = "Storage.Unreachable"


class ForbiddenError(StorageError):
    code = "Storage.Forbidden"


class ObjectNotFoundError(StorageError):
    code = "Storage.NotFound"


class ObjectChangedError(StorageError):
    code = "Storage.Changed"


class WrongBytesError(StorageError):
    code = "Storage.WrongBytes"


class WeightsError(MedusaError):
    code = "Weights.Invalid"


class CorruptError(WeightsError):
    code = "Weights.Corrupt"


class MismatchError(WeightsError):
    code = "Weights.Mismatch"


class TooLargeError(WeightsError):
    code = "Weights.TooLarge"


class StateError(MedusaError):
    code = "State.Invalid"


class ModelError(MedusaError):
    code = "Model.Unsupported"


class EngineError(MedusaError):
    code = "Engine.Failed"


class RequestError(EngineError):
    """A request that the engine cannot serve. ``param`` is the field at fault, where there is one."""

    code = "Engine.BadRequest"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    code = "Engine.ContextLength"


class OverloadedError(EngineError):
    code = "Engine.Overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeviceError(MedusaError):
    code = "Device.Failed"


class NodeError(MedusaError):
    code = "Node.Failed"


class NodeAwayError(NodeError):
    code = "Node.Away"


class NodeRefusedError(NodeError):
    code = "Node.Refused"


class LabError(MedusaError):
    code = "Lab.Failed"


class ClusterError(MedusaError):
    code = "Cluster.Failed"


class UnauthorizedError(ClusterError):
    code = "Cluster.Unauthorized"


class NoControllerError(ClusterError):
    code = "Cluster.NoController"


class UnknownNameError(ClusterError):
    code = "Cluster.UnknownName"


class NoInstanceError(ClusterError):
    code = "Cluster.NoInstance"


class InstanceError(ClusterError):
    code = "Cluster.Instance"


class DeployError(MedusaError):
    code = "Deploy.Failed"


class HandlerError(MedusaError):
    code = "Handler.Failed"


class HandlerLoadError(HandlerError):
    code = "Handler.NotFound"


def json_excerpt(value: Any) -> str:
    """Return a value that came from outside as JSON, cut where it is long, for a message."""
    import json  # here, because a process that does not fail need not import it

    if value is None:
        return "nothing"
    text = ""
    try:
        # Piece by piece: with YAML's aliases, a value of a few hundred bytes can have gigabytes of text.
        for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
            text += piece
            if len(text) > _MOST_SHOWN:
                break
    except (RecursionError, ValueError):  # one that contains itself is a ValueError
        return "something that is nested too deeply"
    return printable(text)


def short_repr(value: Any, most: int = 160) -> str:
    """Return the beginning of a value's repr, for a message about a file that is not trusted.

    The value may be megabytes long, or a number that is too long to print.
    """
    if isinstance(value, list):
        value = value[:8]
    try:
        text = repr(value[: most + 1] if isinstance(value, str) else value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}…"


def printable(text: str) -> str:
    """Return text that came from outside for a message: cut where it is long, and with JSON's surrogates escaped."""
    text = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


def json_kind(value: Any) -> str:
    """Return the name that JSON has for a value's type."""
    kinds = ((type(None), "null"), (bool, "true or false"), (str, "a string"), (list, "an array"), (dict, "an object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "a number")


def from_code(code: str, message: str) -> MedusaError:
    """Make the error with this code again after it came from another process.

    Returns the base error, with the code in its message, for an unknown code.
    """
    pending: list[type[MedusaError]] = [MedusaError]
    while pending:
        kind = pending.pop()
        if kind.code == code:
            return kind(message)
        pending.extend(kind.__subclasses__())
    return MedusaError(f"{code}: {message}")
