"""The replay of traces: its scenarios, what a machine does with a trace, and the simulator beside it."""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from medusa_adapters.bench.openai_client import Completion
from medusa_adapters.bench.result import Result
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_cluster.simulation import trace
from medusa_cluster.simulation.profiles import LinearSpeed, Stages
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import ConfigError, MedusaError

from benchmarks.replay.__main__ import main, nearness, tails
from benchmarks.replay.calibration import Calibration, Samples, calibrate, probe
from benchmarks.replay.machine import Machine, unanswered
from benchmarks.replay.prediction import simulate
from benchmarks.replay.scenario import Shape, requests

pytest.importorskip("simpy")

SHAPE = Shape(seconds=30.0, lengths=0.1, context=512, rate=2.0, cv=4.0, begin_s=0.0, seed=1)
START_S, PREFILL_S, DECODE_S = 0.6, 0.1, 0.02
SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Completions(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        time.sleep(float(sys.argv[3]))
        for number in range(asked["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
            time.sleep(float(sys.argv[4]))
        self.wfile.write(b"data: [DONE]\\n\\n")

time.sleep(float(sys.argv[2]))
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Completions).serve_forever()
"""


class Sleeper:
    """A system whose times are those of its sleeps, however busy the machine is."""

    name, model, concurrency = "sleeper", "", 8

    def __init__(self, script: str = SERVER) -> None:
        self.script = script

    def settle(self) -> None:
        pass

    def start(self) -> ServedInstance:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        times = [str(value) for value in (START_S, PREFILL_S, DECODE_S)]
        return ServedInstance([sys.executable, "-c", self.script, str(port), *times], port=port)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", ["poisson-2", "poisson-10", "gamma", "azure-code", "azure-conv"])
def test_a_scenario_is_the_simulators_trace_with_shorter_requests(name: str) -> None:
    found = requests(name, SHAPE)
    assert all(0 <= request.at_s < SHAPE.seconds for request in found)
    assert all(0 < request.prompt_tokens < 256 and 0 < request.output_tokens < 256 for request in found)
    if name in trace.AZURE:
        original = trace.window(trace.scale(trace.azure(name), 2.0), 0.0, 30.0)
        assert [request.at_s for request in found] == [request.at_s for request in original]


def test_a_csv_file_is_a_scenario(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text("timestamp,input_tokens,output_tokens\n5,100,40\n6,200,10\n")
    assert requests(str(file), SHAPE) == [Request(0.0, 0, 10, 4), Request(1.0, 0, 20, 1)]


@pytest.mark.parametrize(("name", "said"), [("rush", "expected names of poisson-2"), ("poisson-x", "poisson- and a")])
def test_unknown_scenarios_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        requests(name, SHAPE)


def test_lines_are_fitted_and_a_start_is_what_the_first_prefill_leaves() -> None:
    samples = Samples(
        start=[(1.0, ()), (1.2, ()), (5.0, ())],
        prefill=[(16, 0.026), (100, 0.11), (200, 0.21), (200, 9.0), (200, 0.21)],
        decode=[(1, 0.012), (4, 0.018), (8, 0.026)],
        end=[0.3],
    )
    found = calibrate(samples)
    assert found.speed.prefill(50) == pytest.approx(0.06)
    assert found.speed.decode(6) == pytest.approx(0.022)
    assert found.stages.init_s == pytest.approx(1.2 - 0.026)
    assert found.stages.end_s == 0.3


def test_a_line_weighs_deviations_in_percent_and_starts_have_a_spread() -> None:
    samples = Samples(
        start=[(math.exp(at), ()) for at in (-0.1, 0.0, 0.1)],
        prefill=[(10, 0.02), (100, 0.11)],
        decode=[(1, 0.02), (10, 0.11), (200, 3.0)],  # the last one is far off the line of the others
        end=[0.3],
    )
    found = calibrate(samples)
    assert found.start_spread == pytest.approx(0.1)
    assert found.speed.decode(1) == pytest.approx(0.02, rel=0.25)
    assert found.speed.decode(10) == pytest.approx(0.11, rel=0.5)


def test_prefills_take_what_was_sampled_and_between_samples_what_is_on_the_line_through_both() -> None:
    prefill = [(16, 0.008), (64, 0.016), (64, 0.016), (64, 0.9), (255, 0.029), (1000, 0.05)]
    speed = calibrate(Samples(start=[(1.0, ())], prefill=prefill, decode=[(1, 0.001)], end=[0.3])).speed
    assert [speed.prefill(size) for size in (16, 64, 255, 1000)] == pytest.approx([0.008, 0.016, 0.029, 0.05])
    assert speed.prefill(40) == pytest.approx(0.012)
    assert speed.prefill(4) == pytest.approx(0.006)
    assert speed.prefill(1745) == pytest.approx(0.071)


def test_simulated_starts_differ_by_their_spread_and_by_the_seed() -> None:
    calibration = Calibration(Stages(1.0, 0, 0, 1e15, 0, 0), LinearSpeed(0.01, 0, 0.01, 0), {}, start_spread=0.2)
    wanted = [Request(10.0 * number, 0, 10, 2) for number in range(30)]
    runs = [simulate(calibration, wanted, slots=1, concurrency=8, keep_alive_s=0.5, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (list(run.ttft_s) for run in runs)
    assert first == again != other
    assert min(first) < 0.9 < 1.1 < max(first)


def test_simulated_prefills_differ_by_their_spread() -> None:
    calibration = Calibration(Stages(0.1, 0, 0, 1e15, 0, 0), LinearSpeed(0.1, 0, 0.01, 0), {}, prefill_spread=0.2)
    wanted = [Request(10.0 * number, 0, 10, 1) for number in range(60)]
    found = [1000 * ttft for ttft in simulate(calibration, wanted, slots=1, concurrency=8, keep_alive_s=20).ttft_s[1:]]
    assert min(found) < 80 < 120 < max(found)
    assert median(found) == pytest.approx(100, rel=0.1)


def test_the_spread_of_prefills_is_that_of_each_size_about_its_median() -> None:
    samples = Samples(
        start=[(1.0, ())], prefill=[(16, 0.02), (16, 0.018), (16, 0.022), (200, 0.2)], decode=[(1, 0.012)], end=[0.3]
    )
    assert calibrate(samples).prefill_spread == pytest.approx(0.082, abs=0.005)


@pytest.mark.parametrize("alone", [True, False])
def test_a_burst_is_timed_only_where_its_first_prompt_is_prefilled_alone(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.replay.calibration._PAUSE_S", 0.0)

    def ask(request: Request) -> Completion:
        soon = request.at_s < 50 or (alone and request.at_s % 50 == 0)
        first_ns = time.monotonic_ns() + (100 if soon else 400) * 1_000_000
        return Completion(first_ns, first_ns, "", 1)

    found = Samples()
    probe(ask, 512, 16, found)
    bursts = [(tokens, taken_s) for tokens, taken_s in found.prefill if tokens > 255]
    assert [tokens for tokens, _ in bursts] == ([3 * 255, 7 * 255] * 2 if alone else [])
    assert all(taken_s == pytest.approx(0.3, abs=0.05) for _, taken_s in bursts)


def test_each_simulated_figure_is_shown_with_its_deviation_and_they_are_counted() -> None:
    result = Result()
    for metric, measured, simulated in (("ttft_p50", 1.0, 1.1), ("ttft_p99", 2.0, 1.0), ("node_s", 10.0, 10.0)):
        result.add("gamma, medusa", metric, "s", [measured])
        result.add("gamma, medusa", f"simulated {metric}", "s", [simulated])
    lines = nearness(result, {"gamma": []}, ["medusa"]).splitlines()
    assert lines[0] == "near   +10.0 %  gamma, medusa: ttft_p50, simulated 1.1, measured 1"
    assert lines[1].startswith("OFF    -50.0 %")
    assert lines[-1] == "2 of 3 simulated figures are within 15 % of what was measured"


def test_a_figure_that_is_off_may_be_in_the_range_of_the_runs() -> None:
    result = Result()
    for metric, simulated in (("ttft_p50", 1.3), ("ttft_p99", 2.3), ("node_s", 1.1)):
        result.add("gamma, medusa", metric, "s", [0.8, 1.0, 2.0])
        result.add("gamma, medusa", f"simulated {metric}", "s", [simulated])
    lines = nearness(result, {"gamma": []}, ["medusa"]).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["runs", "OFF", "near"]
    assert lines[0].endswith("simulated 1.3, measured 1 (0.8 to 2)")
    assert lines[-1].startswith("1 of 3 simulated figures")
    assert "1 more in the range of the runs; of 3 of them a run itself is further" in lines[-1]


def test_the_tails_of_ours_are_compared_with_each_other_system() -> None:
    result = Result()
    for name, p99 in (("medusa", 2.0), ("medusa-agent", 1.0), ("vllm-eager", 4.0)):
        result.add(f"poisson-10, {name}", "ttft_p99", "s", [p99])
    found = tails(result, {"poisson-10": []}, ["medusa", "medusa-agent", "vllm-eager"])
    assert [target.ratio for target in found] == [0.5, 0.75]
    assert [target.met for target in found] == [False, True]


@pytest.mark.slow
def test_a_machine_scales_to_zero_between_bursts_as_the_simulator_says() -> None:
    burst = [Request(number / 10, 0, 10, 5) for number in range(5)]
    wanted = [*burst, *(request._replace(at_s=request.at_s + 5.0) for request in burst)]
    found = Machine(Sleeper(), slots=1, keep_alive_s=0.8).replay(wanted)
    assert unanswered(found) == 0
    assert found.starts == 2
    calibration = Calibration(Stages(START_S, 0, 0, 1e15, 0, 0), LinearSpeed(PREFILL_S, 0, DECODE_S, 0), {})
    simulated = simulate(calibration, wanted, slots=1, concurrency=8, keep_alive_s=0.8)
    assert simulated.cold_starts == 2
    # Python's own start, which the simulator is not told of, takes long on a busy machine.
    assert found.node_s == pytest.approx(simulated.device_s, rel=0.6)
    assert all(answer.ttft_s > PREFILL_S for answer in found.answers)
    assert found.answers[0].ttft_s > START_S


def test_an_instance_that_does_not_start_ends_the_replay() -> None:
    with pytest.raises(MedusaError, match="no luck"):
        Machine(Sleeper("raise SystemExit('no luck')"), slots=1, keep_alive_s=1.0).replay([Request(0.0, 0, 10, 5)])


def test_bad_calls_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected names of medusa, medusa-bundle"):
        main(["--systems", "fast"])
    with pytest.raises(ConfigError, match="--repeat: expected a number of at least 1"):
        main(["--repeat", "0"])
    with pytest.raises(ConfigError, match="--tail: expected neither"):
        main(["--tail", "--full"])
    with pytest.raises(ConfigError, match=r"no config\.json"):
        main(["--model", "/nowhere"])


@pytest.mark.slow
def test_a_short_replay_on_real_instances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = ["--systems", "medusa-bundle", "--scenarios", "poisson-2", "--seconds", "4", "--json", str(file)]
    assert main(words) == 0
    assert "| poisson-2 | `medusa-bundle` |" in capsys.readouterr().out
    rows = {row["metric"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["unanswered"]["median"] == 0
    assert rows["starts"]["median"] == rows["simulated starts"]["median"] == 1
    assert rows["recorded zygote/import"]["median"] > 0
    assert {"ttft_p99", "simulated ttft_p99", "tpot_mean", "attainment", "node_s"} <= rows.keys()
