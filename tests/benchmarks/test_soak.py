"""Long runs: what counts as growth, and one run that is short."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_runtime.errors import MedusaError

from benchmarks.soak.growth import growths, table

ROOT = Path(__file__).parents[2]


def test_what_grows_with_the_work_is_told_from_what_settles_and_from_noise() -> None:
    rng = random.Random(1)
    samples = []
    for done in range(0, 4000, 100):
        settled = 90.0 + min(done, 800) / 20
        samples.append(
            (
                float(done),
                {"memory leak": 90 + done / 100, "memory settles": settled, "memory noise": 90 + rng.random() * 20},
            )
        )
    found = {each.name: each for each in growths(samples)}
    assert [name for name, each in found.items() if each.grows] == ["memory leak"]
    assert found["memory leak"].slope == pytest.approx(10)
    assert "GROWS" in table(list(found.values())).splitlines()[1]


def test_a_thing_that_came_and_stayed_grows() -> None:
    samples = [(float(done), {"processes worker": 1.0 + done // 10}) for done in range(20)]
    assert not growths(samples)[0].grows, "once may be chance"
    samples = [(float(done), {"processes worker": 1.0 + done // 4}) for done in range(20)]
    assert growths(samples)[0].grows


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(MedusaError, match="run it for longer"):
        growths([(1.0, {}), (2.0, {})])


@pytest.mark.slow
@pytest.mark.parametrize("faults", [(), ("--faults",)])
def test_a_short_run_of_a_function(faults: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "serve", "--seconds", "60", "--clients", "4", *faults]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "WRONG" not in ran.stdout, ran.stdout
    assert "completion 200" in ran.stdout, ran.stdout + ran.stderr
    assert "descriptors worker" in ran.stdout, ran.stdout + ran.stderr
    growing = [line for line in ran.stdout.splitlines() if line.endswith("GROWS") and not line.startswith("memory")]
    assert faults or not growing, "memory settles only after minutes"


@pytest.mark.slow
def test_a_run_goes_on_until_there_are_enough_samples() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "serve", "--seconds", "0", "--clients", "1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "descriptors worker" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_short_run_of_commands() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "commands", "--seconds", "60", "--only", "fetch,materialize"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "WRONG" not in ran.stdout, ran.stdout
    assert "fetch whole 0" in ran.stdout, ran.stdout + ran.stderr
