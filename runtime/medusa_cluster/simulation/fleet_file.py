"""The file of a fleet, its models and its requests, in YAML. ``data/fleet.schema.json`` describes it for editors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError, json_excerpt

from ..policy.sizing import DEVICE_OVERHEAD_BYTES
from . import trace
from .fleet import Fleet, Machine, Model
from .profiles import PROFILES, LinearSpeed, Profile, Stages
from .strategy import STRATEGIES
from .trace import LENGTHS, Request

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_AMOUNT = re.compile(r"([0-9.]+)\s*([kKmMgGtT]i?)?(B|[bB]it|bps)?(?:/s)?")  # not b: 16Gb may be bits or bytes
_UNCLEAR = re.compile(r"[0-9.]+\s*[kKmMgGtT]i?b(?:/s)?")

_LARGEST_BYTES = 4 << 20
_MOST = 1_000_000  # of whatever is counted
_ABOVE_0 = 1e-9
_LARGEST_NUMBER = 1e300


@dataclass(frozen=True, slots=True)
class Workload:
    """The origin of the requests. Each rate is simulated with each coefficient of variation."""

    arrivals: str = "gamma"
    rates: tuple[float, ...] = (1.0,)
    cvs: tuple[float, ...] = (1.0,)
    seconds: float = 3600.0
    popularity: float = 0.0  # Zipf's exponent; 0: all models alike
    seed: int = 1
    folder: Path = Path()  # of the file, for the paths in it

    def requests(self, models: Sequence[Model], lengths: Sequence[str], rate: float, cv: float) -> Sequence[Request]:
        """Make, or read, the requests of one run."""
        if self.arrivals == "gamma":
            rates = trace.popularity(len(models), rate, self.popularity)
            return trace.gamma(rates, cv, self.seconds, [LENGTHS[name] for name in lengths], self.seed)
        if self.arrivals in trace.AZURE:
            found = trace.azure(self.arrivals)
        else:
            found = trace.read_csv(self.folder / self.arrivals, [model.name for model in models])
        if rate > 0:
            found = trace.scale(found, rate, self.seed)
        whole = trace.repeat(found, self.seconds) if self.seconds else found
        if self.arrivals in trace.AZURE:
            whole = trace.assign_models(whole, trace.popularity(len(models), 1.0, self.popularity), self.seed)
        return trace.Requests(whole)


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """A file's content.

    ``lengths`` names the distribution of each model's prompts and answers. ``goal`` is the part of first tokens that
    should be in time, from 0 to 1.
    """

    fleet: Fleet
    lengths: tuple[str, ...]
    workload: Workload
    strategies: tuple[str, ...]
    tick_s: float
    device_hour: float  # price; 0: not given
    goal: float


def read_simulation_plan(path: Path) -> SimulationPlan:
    """Read a file. Raises ConfigError that names the place, what was expected there, and what was found."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError('the simulator needs pyyaml: pip install "medusa-runtime[cluster]"') from None
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ConfigError(f"{path}: expected a file of at most {_LARGEST_BYTES} bytes, found a larger one")
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"the fleet {path} could not be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected YAML, found bytes that are no UTF-8 text") from None
    except RecursionError:
        raise ConfigError(f"{path}: expected YAML, found some that is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where}: expected YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The last five are the parser's own failures: a date that is none, a number of too many digits, an empty !!int.
        raise ConfigError(f"{path}: expected YAML: {' '.join(str(error).split())}") from None
    return parse(content, path.parent, str(path))


def parse(content: Any, folder: Path = Path(), name: str = "fleet") -> SimulationPlan:
    top = _Section(content, name, ": ")
    machines = tuple(_machine(item) for item in top.items("machines"))
    pairs: list[tuple[Model, str]] = []
    for item in top.items("models"):
        pairs += _models(item, machines)
        if len(pairs) > _MOST:
            raise ConfigError(f"{name}: models: expected at most {_MOST} models, found more")
    requests = top.section("requests")
    goal = top.number("goal", 95.0, most=100.0)
    if 0 < goal < 1:
        raise top.wrong("goal", "percent, such as 95", goal)
    strategies = tuple(top.words("strategies", ("medusa", "serverlessllm", "vllm"), STRATEGIES))
    plan = SimulationPlan(
        Fleet(
            top.word("name", "fleet"),
            machines,
            tuple(model for model, _ in pairs),
            top.number("hop_s", 0.001),
            top.amount("store", math.inf, above_0=True),
            top.number("start_spread", 0.0),
        ),
        tuple(lengths for _, lengths in pairs),
        _workload(requests, folder),
        strategies,
        top.number("tick_s", 0.25, least=0.01),
        top.number("device_hour", 0.0),
        goal / 100,
    )
    top.end()
    least = sum(model.min for model in plan.fleet.models)
    if least > plan.fleet.devices:
        raise ConfigError(
            f"{name}: models: expected a min of at most {plan.fleet.devices} instances together, as many as the "
            f"machines have devices, found {least}"
        )
    names = [model.name for model in plan.fleet.models]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{name}: models: expected different names, found {twice!r} twice")
    return plan


def _machine(item: _Section) -> Machine:
    machine = Machine(
        item.word("name", None),
        item.whole("count", 1),
        item.amount("link", None, above_0=True),
        item.whole("devices", 1),
        item.word("device", ""),
        int(item.amount("memory", 0.0)),
        item.amount("disk", math.inf, above_0=True),
        item.word("leaf", ""),
        item.whole("fast_group", 1),
        item.amount("fast_link", math.inf, above_0=True),
        int(item.amount("device_memory", 0.0)),
    )
    item.end()
    return machine


def _models(item: _Section, machines: Sequence[Machine]) -> list[tuple[Model, str]]:
    name, count = item.word("name", None), item.whole("count", 1)
    profile = PROFILES[item.choice("profile", None, PROFILES)] if item.has("profile") else _profile(item)
    device = item.word("device", "")
    devices = {machine.device: None for machine in machines if machine.device}
    if device and device not in devices:
        known = (
            f"a device of the machines ({', '.join(devices)})" if devices else "none, as no machine names its device"
        )
        raise item.wrong("device", known, device)
    fitting = [machine for machine in machines if device in ("", machine.device)]
    if all(0 < machine.memory_bytes < profile.size_bytes for machine in fitting):
        most = max(machine.memory_bytes for machine in fitting)
        expected = f"weights that fit in the memory of a machine that may run them (at most {most / 1e9:g} GB)"
        raise item.wrong("size" if item.has("size") else "profile", expected, f"{profile.size_bytes / 1e9:g} GB")
    rooms = [math.inf if not each.device_bytes else each.device_bytes - DEVICE_OVERHEAD_BYTES for each in fitting]
    if max(rooms) < profile.size_bytes:
        where = "in a device of a machine that may run them"
        expected = f"weights that fit {where} (at most {max(*rooms, 0) / 1e9:.3g} GB, beside 2 GiB for the engine)"
        raise item.wrong("size" if item.has("size") else "profile", expected, f"{profile.size_bytes / 1e9:g} GB")
    slo = item.section("slo", optional=True)
    model = Model(
        name,
        profile,
        device,
        slo.seconds("ttft", math.inf),
        slo.seconds("tpot", math.inf),
        item.whole("min", 0, least=0),
        item.whole("max", 1_000_000),
        item.whole("concurrency", 8),
        item.number("tokens_per_s", 0.0),
        item.flag("disaggregated"),
    )
    if model.min > model.max:
        raise item.wrong("min", f"at most max ({model.max})", model.min)
    lengths = item.choice("lengths", "sharegpt", LENGTHS)
    slo.end()
    item.end()
    if count == 1:
        return [(model, lengths)]
    return [(replace(model, name=f"{name}-{number}"), lengths) for number in range(count)]


def _profile(item: _Section) -> Profile:
    """Read a user's own model, with times that ``medusa materialize`` has recorded, or guesses."""
    times = item.section("times")
    stages = Stages(
        times.seconds("container", 0.0),
        times.seconds("device", 0.0),
        times.seconds("import", 0.0),
        times.amount("load", 16e9, above_0=True),
        times.seconds("init", 0.0),
        0.0,
        times.seconds("plain_init", times.seconds("init", 0.0)),
        0.0,
        times.seconds("plain_init", times.seconds("init", 0.0)),
        0.0,
    )
    speed = LinearSpeed(
        times.seconds("prefill", None),
        times.seconds("prefill_per_token", 0.0),
        times.seconds("decode", None),
        times.seconds("decode_per_sequence", 0.0),
    )
    times.end()
    return Profile(int(item.amount("size", None)), item.whole("layers", None), stages, speed)


def _workload(item: _Section, folder: Path) -> Workload:
    arrivals = item.word("arrivals", "gamma")
    if arrivals not in ("gamma", "poisson", *trace.AZURE) and not arrivals.endswith(".csv"):
        raise item.wrong("arrivals", f"gamma, poisson, {', '.join(trace.AZURE)} or a file *.csv", arrivals)
    if item.has("cv") and arrivals != "gamma":
        raise item.wrong("cv", f"none, as only gamma arrivals have one and these are {arrivals}", item.content["cv"])
    if arrivals == "poisson":
        arrivals, item.content["cv"] = "gamma", 1
    recorded = arrivals != "gamma"
    workload = Workload(
        arrivals,
        item.numbers("rate", (0.0,) if recorded else None, least=0.0 if recorded else _ABOVE_0),
        item.numbers("cv", (1.0,), least=1e-3, most=100.0),
        item.number("seconds", 0.0 if recorded else 3600.0, least=0.0 if recorded else _ABOVE_0),
        item.number("popularity", 0.0),
        item.whole("seed", 1, least=0),
        folder,
    )
    item.end()
    return workload


class _Section:
    """A mapping in the file, with its place there. ``end`` raises ConfigError for keys that were never read.

    ``between`` is the text between the mapping's place and a key's name.
    """

    def __init__(self, content: Any, place: str, between: str = ".") -> None:
        if not isinstance(content, Mapping):
            raise ConfigError(f"{place}: expected a mapping, found {json_excerpt(content)}")
        self.content, self._place, self._known = dict(content), place, set[str]()
        self._inside = place + between

    def has(self, key: str) -> bool:
        return key in self.content

    def wrong(self, key: str, expected: str, found: Any, known: Iterable[str] = ()) -> ConfigError:
        return ConfigError(
            f"{self._inside}{key}: expected {expected}, found {json_excerpt(found)}{_suggestion(found, known)}"
        )

    def end(self) -> None:
        unknown = self.content.keys() - self._known
        if unknown:
            key = sorted(map(str, unknown))[0]
            known = ", ".join(sorted(self._known))
            raise ConfigError(f"{self._place}: unknown key {key!r}; known are {known}{_suggestion(key, self._known)}")

    def section(self, key: str, *, optional: bool = False) -> _Section:
        return _Section(self._get(key, {} if optional else None, "a mapping"), f"{self._inside}{key}")

    def items(self, key: str) -> list[_Section]:
        found = self._get(key, None, "a list")
        if not isinstance(found, list) or not found:
            raise self.wrong(key, "a list with at least one entry", found)
        return [_Section(item, f"{self._inside}{key}[{number}]") for number, item in enumerate(found)]

    def word(self, key: str, default: str | None) -> str:
        found = self._get(key, default, "a name")
        if not isinstance(found, str) or (not found and default is None):
            raise self.wrong(key, "a name", found)
        return found

    def choice(self, key: str, default: str | None, known: Mapping[str, object]) -> str:
        found = self._get(key, default, f"one of {', '.join(known)}")
        return self._one_of(key, found, known)

    def words(self, key: str, default: Sequence[str], known: Mapping[str, object]) -> list[str]:
        found = self._get(key, list(default), "a list of names")
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not found:
            raise self.wrong(key, f"a list of {', '.join(known)}", found)
        return [self._one_of(f"{key}[{number}]", item, known) for number, item in enumerate(found)]

    def flag(self, key: str) -> bool:
        found = self._get(key, False, "true or false")
        if not isinstance(found, bool):
            raise self.wrong(key, "true or false", found)
        return found

    def number(
        self, key: str, default: float | None, *, least: float = 0.0, most: float = _LARGEST_NUMBER, unit: str = ""
    ) -> float:
        found = self._get(key, default, f"a number{unit}")
        if found is not default and not _is_number(found, least, most):
            raise self.wrong(key, f"a number {_range(least, most)}{unit}", found)
        return float(found)

    def seconds(self, key: str, default: float | None) -> float:
        return self.number(key, default, unit=", in seconds")

    def numbers(
        self, key: str, default: tuple[float, ...] | None, *, least: float, most: float = _LARGEST_NUMBER
    ) -> tuple[float, ...]:
        found = self._get(key, list(default) if default is not None else None, "a number or a list of numbers")
        found = found if isinstance(found, list) else [found]
        bad = [n for n in found if not _is_number(n, least, most)]
        if bad or not found:
            raise self.wrong(key, f"a number {_range(least, most)}, or a list of them", bad[0] if bad else found)
        return tuple(float(item) for item in found)

    def whole(self, key: str, default: int | None, *, least: int = 1) -> int:
        found = self._get(key, default, "a whole number")
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise self.wrong(key, f"a whole number of at least {least}", found)
        if found > _MOST:
            raise self.wrong(key, f"a whole number of at most {_MOST}", found)
        return found

    def amount(self, key: str, default: float | None, *, above_0: bool = False) -> float:
        """Read bytes, or bytes a second: 12.5GB, 16Gbit, 400MB/s."""
        expected = f"a size {'above 0 ' if above_0 else ''}such as 12.5GB or 16Gbit"
        found = self._get(key, default, expected)
        value = found if found is default else _amount(found)
        if isinstance(found, str) and _UNCLEAR.fullmatch(found.strip()):
            expected += " (a small b may be a bit or a byte)"
        if value is None or (above_0 and value <= 0):
            raise self.wrong(key, expected, found)
        return float(value)

    def _one_of(self, key: str, found: Any, known: Mapping[str, object]) -> str:
        if not isinstance(found, str) or found not in known:
            raise self.wrong(key, f"one of {', '.join(known)}", found, known)
        return found

    def _get(self, key: str, default: Any, expected: str) -> Any:
        self._known.add(key)
        found = self.content.get(key, default)
        if found is None:
            misspelt = get_close_matches(key, map(str, self.content.keys() - self._known), 1, cutoff=0.7)
            instead = f", but {misspelt[0]!r}; did you mean {key!r}?" if misspelt else ""
            raise ConfigError(f"{self._place}: expected {key}, {expected}, found none{instead}")
        return found


def _amount(found: Any) -> float | None:
    """Return a size in bytes, or None if it is none."""
    if _is_number(found, 0.0, _LARGEST_NUMBER):
        return float(found)
    match = _AMOUNT.fullmatch(found.strip()) if isinstance(found, str) else None
    if match is None:
        return None
    try:
        value = float(match[1]) * _UNITS[(match[2] or "").lower()]
    except ValueError:
        return None
    return value / 8 if (match[3] or "").lower() in ("bit", "bps") else value


def _range(least: float, most: float) -> str:
    from_ = "above 0" if least == _ABOVE_0 else f"of at least {least:g}"
    return from_ if most == _LARGEST_NUMBER else f"{from_} and at most {most:g}"


def _is_number(found: Any, least: float, most: float) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and least <= found <= most


def _suggestion(found: Any, known: Iterable[str]) -> str:
    close = get_close_matches(found, known, 1) if isinstance(found, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""
