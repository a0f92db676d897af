"""Where the time to the first token goes, of samples made by hand."""

from medusa_adapters.bench.coldstart.contestants import Sample
from medusa_adapters.bench.coldstart.stages import stages_table
from medusa_runtime.timeline import Stage

MS = 1_000_000


def sample(*stages: tuple[str, str, int, int], ttft_ms: int = 100, began_ms: int = 1000) -> Sample:
    """Stages as (process, name, begin, end) in ms after the beginning."""
    made = [Stage(name, process, (began_ms + a) * MS, (began_ms + b) * MS, {}) for process, name, a, b in stages]
    return Sample(ttft_ms / 1e3, stages=tuple(made), began_ns=began_ms * MS)


def lines(*samples: Sample) -> list[list[str]]:
    return [line.split() for line in stages_table("row", samples).splitlines()[2:]]


def test_when_each_stage_began_how_long_it_took_and_what_nothing_else_covers() -> None:
    one = sample(
        ("zygote", "import", 10, 60),
        ("prefetcher", "fetch", 0, 30),
        ("engine", "load", 60, 75),
        ("engine", "load", 65, 80),  # touches the one before: one track
        ("engine", "first_forward", 80, 100),
        ("engine", "first_token", 100, 100),
    )
    assert stages_table("row", [one]).startswith("row: 100 ms to the first token, median of 1\n")
    assert lines(one) == [
        ["0", "30", "10", "prefetcher:", "fetch"],
        ["10", "50", "30", "zygote:", "import"],
        ["60", "20", "20", "engine:", "load"],
        ["80", "20", "20", "engine:", "first_forward"],
    ]


def test_medians_and_what_is_no_part_of_it() -> None:
    samples = [
        sample(("engine", "plan", 5, 5 + took), ("function", "app", 90, 300), ("engine", "ready", 95, 95))
        for took in (10, 20, 90)
    ]
    samples[0] = sample(("engine", "plan", 5, 15), ("function", "app", 90, 300), ("engine", "tokenizer", 0, 9))
    assert lines(*samples) == [
        ["5", "20", "20", "engine:", "plan"],
        ["90", "10", "10", "function:", "app"],  # until the first token; of the third its beginning lay in the plan's
    ], "a stage that not all have is left out, and so is what takes no time"
