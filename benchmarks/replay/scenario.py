"""The traces of a replay: the simulator's, cut and scaled to a load that a small model on a CPU can serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medusa_cluster.simulation import trace
from medusa_cluster.simulation.trace import LENGTHS, Request
from medusa_runtime.errors import ConfigError

SCENARIOS = ("poisson-2", "poisson-10", "gamma", *trace.AZURE)


@dataclass(frozen=True)
class Shape:
    """How long a scenario is, and how its requests are scaled.

    ``rate`` is the requests per second of Gamma arrivals and of recorded traces, and ``cv`` the coefficient of
    variation of Gamma arrivals. A recorded trace is cut from ``begin_s`` on. The lengths of prompts and answers are
    multiplied by ``lengths``, and together are at most ``context`` tokens.
    """

    seconds: float
    lengths: float
    context: int
    rate: float
    cv: float
    begin_s: float
    seed: int


def requests(name: str, shape: Shape) -> list[Request]:
    """Return the requests of a scenario or a CSV file. Raises ConfigError for an unknown name, or if there are none."""
    if name.startswith("poisson-"):
        found = trace.poisson([_rate(name)], shape.seconds, [LENGTHS["sharegpt"]], shape.seed)
    elif name == "gamma":
        found = trace.gamma([shape.rate], shape.cv, shape.seconds, [LENGTHS["sharegpt"]], shape.seed)
    elif name in trace.AZURE:
        whole = trace.scale(trace.azure(name), shape.rate, shape.seed)
        found = trace.window(whole, shape.begin_s, shape.begin_s + shape.seconds)
    elif name.endswith(".csv"):
        found = trace.window(trace.read_csv(Path(name), ["model"]), shape.begin_s, shape.begin_s + shape.seconds)
    else:
        raise ConfigError(f"--scenarios: expected names of {', '.join(SCENARIOS)} or a file *.csv, found {name!r}")
    if not found:
        raise ConfigError(f"{name}: expected requests within {shape.seconds:g} s, found none; try another --seed")
    return [_scaled(request, shape) for request in found]


def _rate(name: str) -> float:
    try:
        return float(name.removeprefix("poisson-"))
    except ValueError:
        raise ConfigError(f"--scenarios: expected poisson- and a rate, found {name!r}") from None


def _scaled(request: Request, shape: Shape) -> Request:
    most = shape.context // 2 - 1
    prompt = min(max(round(request.prompt_tokens * shape.lengths), 1), most)
    output = min(max(round(request.output_tokens * shape.lengths), 1), most)
    return request._replace(model=0, prompt_tokens=prompt, output_tokens=output)
