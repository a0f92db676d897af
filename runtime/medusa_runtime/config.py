"""The settings of an instance. They are frozen, and read from the environment in one place.

A flag takes precedence over the environment, and the environment over the default. ``auto`` is resolved once, into a
new object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import ConfigError
from .registry import NO_ENGINE, engine_names, offered_engines

PLATFORMS = ("auto", "local", "knative", "kserve", "openfaas", "sagemaker", "lambda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
HOST_WEIGHTS = ("keep", "release")
GRAPHS = ("auto", "capture", "restore")
ACCESS_LOGS = ("off", "text", "json")
TRACES = ("off", "otlp")
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "openai", "none")
REASONING_PARSERS = ("auto", "deepseek_r1", "openai_gptoss", "qwen3", "none")
VLLM_MODES = ("auto", "compatible")
COMPILE = ("auto", "always", "never")
ENGINE_STARTS = ("now", "request")
ADAPTER_NAME = re.compile(r"[\w.:/-]{1,200}")
NODE_SOCKET = "/run/medusa/node.sock"
KERNELS = ("auto", "library")
LOAD_PRIORITIES = ("interactive", "background")
TORCH_IMPORTS = ("auto", "lean", "plain")
SERVER_TIMINGS = ("total", "stages")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of ``medusa serve``. Each has a flag and an environment variable (see OPTIONS)."""

    model: str | None = None
    handler: str | None = None
    engine: str = "torch"
    platform: str = "auto"
    state: str | None = None
    trust_state: str | None = None
    trust_key: str | None = None
    served_model_name: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    lora_modules: str | None = None
    max_loras: int = 8
    max_lora_rank: int = 64
    max_lora_mb: int = 1024
    allow_lora: str | None = None
    host: str = "0.0.0.0"
    port: int = 8080
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_concurrency: int = 64
    max_waiting: int = 256
    max_batched_tokens: int = 2048
    kv_cache_mb: int | None = None
    prefix_cache_mb: int | None = None
    compile: str = "auto"
    kernels: str = "auto"
    tensor_parallel: int = 1
    vllm_args: str | None = None
    vllm_mode: str = "auto"
    layers: str | None = None
    group: str | None = None
    threads: int | None = None
    connections: int | None = None
    load_priority: str = "interactive"
    torch_import: str = "auto"
    snapshots: str = "auto"
    node_socket: str | None = None
    node_user: int | None = None
    cluster: str | None = None
    cluster_token_file: str | None = None
    engine_start: str = "now"
    host_weights: str = "keep"
    graphs: str = "auto"
    memory_limit_mb: int | None = None
    heartbeat_s: float = 10.0
    hold_s: float = 600.0
    drain_s: float = 30.0
    timeout_s: float = 900.0
    read_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    max_body_mb: int = 32
    server_timing: str = "total"
    body_memory_mb: int | None = None
    token: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    cors_origins: str | None = None
    access_log: str = "off"
    traces: str = "off"
    log_level: str = "info"
    log_format: str = "text"

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb * 1_000_000


class Option(NamedTuple):
    """A flag and environment variable of one setting.

    ``parse`` turns its text into the value, and raises ValueError with the accepted form. ``own_variable`` is the name
    of the environment variable where it is not ``MEDUSA_`` and the name of the field.
    """

    field: str
    parse: Callable[[str], Any]
    help: str
    own_variable: str | None = None

    @property
    def variable(self) -> str:
        return self.own_variable or "MEDUSA_" + self.field.removesuffix("_s").upper()

    @property
    def flag(self) -> str:
        return "--" + self.field.removesuffix("_bytes").replace("_", "-")

    @property
    def form(self) -> str:
        """The placeholder for the value in a line of help: the accepted values, or the field's last word."""
        if isinstance(self.parse, OneOf):
            return "{" + ",".join(self.parse.accepted) + "}"
        return self.field.removesuffix("_bytes").rpartition("_")[2].upper()


def positive(value: str) -> int:
    number = int(value)
    if number <= 0:
        raise ValueError("a whole number above 0")
    return number


def _model_len(value: str) -> int:
    number = int(value)
    if number < 2:
        raise ValueError("a whole number, 2 or more: a token of prompt and one of completion")
    return number


def _count(value: str) -> int:
    number = int(value)
    if number < 0:
        raise ValueError("a whole number, 0 or more")
    return number


def _port(value: str) -> int:
    number = int(value)
    if not 0 <= number <= 65535:
        raise ValueError("a port between 0 and 65535")
    return number


def layer_range(value: str) -> str:
    """Return a range of layers, START:STOP, without leading zeros. Raises ValueError with the accepted form."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", value)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError("START:STOP with START below STOP, such as 0:8")
    return f"{int(match[1])}:{int(match[2])}"


def seconds(value: str) -> float:
    try:
        number = float(value.removesuffix("s"))
    except ValueError:
        raise ValueError("seconds, such as 90 or 90s") from None
    if not 0 <= number <= 1e9:  # the longest that locks and sockets can wait, some thirty years
        raise ValueError("seconds, 0 to 1e9")
    return number


def _duration(value: str) -> float:
    number = seconds(value)
    if not number:
        raise ValueError("seconds above 0")
    return number


def _token(value: str) -> str:
    if not (value.isascii() and value.isprintable()) or " " in value:
        # The error of every other option shows the value; a secret must not be shown.
        raise ConfigError("--token (MEDUSA_TOKEN) cannot be used: expected printable ASCII without spaces")
    return value


def _origins(value: str) -> str:
    """Check ``*``, or origins as browsers send them: scheme, host and port."""
    parts = [part.strip() for part in value.split(",")]
    if parts != ["*"] and not all(re.fullmatch(r"https?://[^/\s,*]+/?", part) for part in parts):
        raise ValueError("* or origins such as https://app.example, with commas between them")
    return ",".join(parts)


def trust_prefixes(value: str) -> str:
    """Check the folders and URL prefixes of ``--trust-state``, separated by commas.

    Returns them without spaces. Raises ValueError with the accepted form.
    """
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts or not all(map(_is_trust_prefix, parts)):
        raise ValueError(
            "absolute folders and URL prefixes with a host or bucket, such as /models/ or s3://bucket/team/, "
            "with commas between them"
        )
    return ",".join(parts)


def _is_trust_prefix(text: str) -> bool:
    scheme, separator, rest = text.partition("://")
    if ".." in text.split("/") or any(mark in text for mark in "?#*\\"):
        return False
    if not separator:
        return text.startswith("/")
    host = rest.partition("/")[0]
    return bool(scheme and host) and "::" not in scheme and not (scheme.startswith("http") and "@" in host)


def trust_keys(value: str) -> str:
    """Read public keys, separated by commas: each is ``ed25519:<base64>``, or the path of a PEM file.

    Returns all of them as ``ed25519:<base64>``. Raises ValueError with the accepted form.
    """
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        raise ValueError(_KEY_FORM)
    return ",".join(map(_public_key, parts))


_KEY_FORM = "ed25519:<base64 of 32 bytes>, as materialize --sign prints it, or a PEM file of such a public key"
_KEY_BYTES = 32
# The bytes in front of the key in DER (RFC 8410): SubjectPublicKeyInfo { id-Ed25519 } BIT STRING.
_DER_PREFIX = bytes.fromhex("302a300506032b6570032100")


def _public_key(text: str) -> str:
    # Parsed by hand: a start without a signed bundle must not pay for an import of the cryptography package.
    import base64

    try:
        if text.startswith("ed25519:"):
            raw = base64.b64decode(text.removeprefix("ed25519:"), validate=True)
        else:
            with open(text, encoding="ascii") as file:
                lines = file.read(4096).split("-----")  # around BEGIN, the key in lines of base64, and END
            whole = len(lines) > 2 and "BEGIN PUBLIC KEY" in lines
            der = base64.b64decode("".join(lines[2].split()), validate=True) if whole else b""
            raw = der.removeprefix(_DER_PREFIX) if der.startswith(_DER_PREFIX) else b""
    except OSError as error:
        raise ValueError(f"{_KEY_FORM}; {text}: {error.strerror}") from None
    except ValueError:
        raise ValueError(_KEY_FORM) from None
    if len(raw) != _KEY_BYTES:
        raise ValueError(_KEY_FORM)
    return "ed25519:" + base64.b64encode(raw).decode()


def lora_modules(value: str | None) -> dict[str, str]:
    """Parse ``--lora-modules`` into the adapters' URLs, by name. Raises ValueError with the accepted form."""
    found: dict[str, str] = {}
    for part in filter(None, (value or "").split(",")):
        name, separator, url = (text.strip() for text in part.partition("="))
        if not separator or not url or not ADAPTER_NAME.fullmatch(name) or name in found:
            raise ValueError("NAME=URL[,NAME=URL] with names of letters, digits, and .:/_-, each of them once")
        found[name] = url
    return found


def adapters(settings: Settings) -> dict[str, str]:
    """Return the URLs of the torch engine's adapters, by name. Raises ValueError with the accepted form."""
    return lora_modules(settings.lora_modules)


def _lora_modules(value: str) -> str:
    lora_modules(value)
    return value


class OneOf:
    """A parser that accepts one of a few words.

    Each argument is a word, or a function that returns words, which is called each time they are needed. The words that
    ``unlisted`` returns are accepted, too, but users are not offered them.
    """

    def __init__(
        self, *accepted: str | Callable[[], tuple[str, ...]], unlisted: Callable[[], tuple[str, ...]] = tuple
    ) -> None:
        self._accepted = accepted
        self._unlisted = unlisted

    @property
    def accepted(self) -> tuple[str, ...]:
        return tuple(word for one in self._accepted for word in ((one,) if isinstance(one, str) else one()))

    def __call__(self, value: str) -> str:
        if value not in self.accepted and value not in self._unlisted():
            raise ValueError("one of " + ", ".join(self.accepted))
        return value


OPTIONS = (
    Option("model", str, "checkpoint: a folder, file, http(s)://, s3://, hf://org/name or any fsspec URL"),
    Option("handler", str, "user code as file.py:name or module:name"),
    Option(
        "engine",
        OneOf(lambda: (*offered_engines(), NO_ENGINE), unlisted=engine_names),
        "torch (fast start), vllm (throughput), cluster (a deployed model) or none (the handler's own module)",
    ),
    Option("platform", OneOf(*PLATFORMS), "whose protocol to speak; auto tells from the environment"),
    Option("state", str, "where the state bundle lies (default: beside the weights); none: use none"),
    Option(
        "trust_state",
        trust_prefixes,
        "PREFIX[,PREFIX]: folders and URLs whose state bundles may bring code that is run; default: your own bundles",
    ),
    Option(
        "trust_key",
        trust_keys,
        "KEY[,KEY]: ed25519 public keys (or PEM files); code in bundles signed with one of them is run, too",
    ),
    Option("served_model_name", str, "the model's name in the OpenAI routes"),
    Option(
        "tool_call_parser",
        OneOf(*TOOL_CALL_PARSERS),
        "how the model writes tool calls; auto: as its chat template says",
    ),
    Option(
        "reasoning_parser",
        OneOf(*REASONING_PARSERS),
        "how the model writes its reasoning; auto: as its chat template says; none: it stays in the answer",
    ),
    Option(
        "lora_modules",
        _lora_modules,
        "NAME=URL[,NAME=URL]: LoRA adapters of the model, by the names that requests give as their model",
    ),
    Option("max_loras", positive, "adapters in memory; the one that was not used longest goes"),
    Option("max_lora_rank", positive, "largest rank of an adapter"),
    Option("max_lora_mb", positive, "largest size of an adapter"),
    Option(
        "allow_lora",
        trust_prefixes,
        "PREFIX[,PREFIX]: folders and URLs from which /v1/load_lora_adapter may load; default: none",
    ),
    Option("host", str, "address to bind"),
    Option("port", _port, "port to bind; 0 takes a free one", "PORT"),
    Option("device", OneOf(*DEVICES), "where to compute; auto is a GPU if there is one"),
    Option("dtype", OneOf(*DTYPES), "type to compute in; auto is the checkpoint's own"),
    Option("max_model_len", _model_len, "longest prompt plus completion, in tokens"),
    Option("max_concurrency", positive, "requests served at the same time"),
    Option("max_waiting", _count, "requests that may wait; more get 429"),
    Option("max_batched_tokens", positive, "tokens of one forward pass (prefill chunk)"),
    Option("kv_cache_mb", positive, "size of the KV cache; default: from free memory"),
    Option(
        "prefix_cache_mb",
        _count,
        "how much of the KV cache keeps prompts of ended requests; 0: every prompt is computed; default: 1024, or all "
        "on a GPU",
    ),
    Option("compile", OneOf(*COMPILE), "vllm: compile the model; auto does if a bundle saves the time"),
    Option(
        "kernels",
        OneOf(*KERNELS),
        "vllm: auto multiplies with ours on CPUs without 16-bit products; library: vLLM's own",
    ),
    Option("tensor_parallel", positive, "vllm: processes that share one model's layers"),
    Option("vllm_args", str, "vllm: flags of vllm serve, as after -- on the command line"),
    Option("vllm_mode", OneOf(*VLLM_MODES), "vllm: compatible starts vLLM's own processes; auto does so where it must"),
    Option("layers", layer_range, "START:STOP: the layers that are fetched and loaded first, of a group"),
    Option("group", str, "group: the file that describes the workers which share the model"),
    Option("threads", positive, "compute threads; default: the container's CPUs"),
    Option("connections", positive, "connections to the store; default: measured"),
    Option(
        "load_priority",
        OneOf(*LOAD_PRIORITIES),
        "background: its fetch gives way to those of other functions on the machine",
    ),
    Option(
        "torch_import",
        OneOf(*TORCH_IMPORTS),
        "torch, the engine's and a handler's: lean puts off what eager inference never uses; auto: lean where tested",
    ),
    Option("snapshots", str, "folder with `medusa snapshot`'s snapshots; auto: the installation's; none: use none"),
    Option("host_weights", OneOf(*HOST_WEIGHTS), "keep or free the host's copy when a GPU has its own"),
    Option("graphs", OneOf(*GRAPHS), "CUDA graphs: capture, or restore the bundle's; auto: restore, but not vLLM's"),
    Option("node_socket", str, "the node agent's socket, or none; default: if there is one"),
    Option("node_user", _count, "user id of the node agent, if not root or our own"),
    Option("cluster", str, "--engine cluster: a gateway's URL, or several with commas"),
    Option("cluster_token_file", str, "--engine cluster: the gateway's client token"),
    Option("engine_start", OneOf(*ENGINE_STARTS), "now, or with the first request"),
    Option("memory_limit_mb", positive, "memory to stay within; default: the container's"),
    Option("heartbeat_s", seconds, "seconds of silence after which a stream gets a comment"),
    Option("hold_s", seconds, "how long a request waits for the model"),
    Option("drain_s", seconds, "how long running requests may go on after SIGTERM"),
    Option("timeout_s", seconds, "how long a request may take, then 504; 0: for ever"),
    Option("read_timeout_s", _duration, "how long a client may take to send its request"),
    Option("write_timeout_s", _duration, "how long an answer may wait for its client, beside a second for each 256 kB"),
    Option("max_body_mb", positive, "largest request body"),
    Option(
        "server_timing",
        OneOf(*SERVER_TIMINGS),
        "what the first answer's Server-Timing header shows of the start: its length, or all stages",
    ),
    Option("body_memory_mb", positive, "memory for request bodies in sum; default: at most eight of the largest"),
    Option("token", _token, "secret that requests must bear; better as variable than as flag"),
    Option("api_key_file", str, "file with a token a line; read again when it changes"),
    Option("cors_origins", _origins, "web pages that may call: origins with commas, or *"),
    Option("access_log", OneOf(*ACCESS_LOGS), "a line on stderr for each answered request"),
    Option("traces", OneOf(*TRACES), "otlp: spans to OTEL_EXPORTER_OTLP_ENDPOINT (extra otel)"),
    Option("log_level", OneOf(*LOG_LEVELS), "how much to log"),
    Option("log_format", OneOf(*LOG_FORMATS), "json: each line of the log is an object"),
)


# How Python's own messages begin for a text that is no number, or one of thousands of digits.
_NO_NUMBER = ("invalid literal", "could not convert", "Exceeds the limit")


def parse_option(option: Option, text: str, source: str) -> Any:
    """Parse the value of one option. Raises ConfigError, which names the source, the value, and the accepted form.

    ``source`` is the flag or the variable that held the text.
    """
    try:
        return option.parse(text)
    except ValueError as error:
        accepted = "a number" if any(words in str(error) for words in _NO_NUMBER) else str(error)
        raise ConfigError(f"{source}={text!r} cannot be used: expected {accepted}") from None


def read_options(options: Iterable[Option], environ: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values by field: from flags that are not None, or else from the environment.

    A flag's value may be a text, which is parsed, or a parsed value. Raises ConfigError for a bad value.
    """
    values = {}
    for option in options:
        given, source = flags.get(option.field), option.flag
        if given is None:
            given, source = environ.get(option.variable) or None, option.variable
        if given is not None:
            values[option.field] = parse_option(option, given, source) if isinstance(given, str) else given
    return values


def from_env(environ: Mapping[str, str], **flags: Any) -> Settings:
    """Read the settings from flags and, where a flag is None, from the environment. Raises ConfigError."""
    return Settings(**read_options(OPTIONS, environ, flags))


def require_handler(settings: Settings) -> None:
    """Raise ConfigError for ``--engine none`` without a handler."""
    if settings.engine == "none" and settings.handler is None:
        raise ConfigError("with --engine none nothing runs the model: expected --handler, whose code builds it")


def check_engine(settings: Settings) -> None:
    """Raise ConfigError for settings that the engine does not have, or has in a form of its own."""
    require_handler(settings)
    engine, parser = settings.engine, settings.reasoning_parser
    if (settings.lora_modules or settings.allow_lora) and engine != "torch":
        raise ConfigError(
            f"--lora-modules and --allow-lora need --engine torch, found --engine {engine}; vLLM takes adapters as "
            "-- --enable-lora --lora-modules name=path"
        )
    if engine == "vllm" and parser not in ("auto", "none"):
        raise ConfigError(f"--reasoning-parser: with --engine vllm, expected vLLM's: -- --reasoning-parser {parser}")


def to_env(settings: Settings) -> dict[str, str]:
    """Return the variables from which ``from_env`` reads these settings, for an instance that another one starts."""
    default = Settings()
    return {
        option.variable: str(value)
        for option in OPTIONS
        if (value := getattr(settings, option.field)) is not None and value != getattr(default, option.field)
    }
