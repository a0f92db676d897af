"""What runs in a step, and whose blocks are taken when there are none."""

from __future__ import annotations

import random

from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.serving.transcript import Transcript
from medusa_runtime.engine.torch.block_pool import BlockPool
from medusa_runtime.engine.torch.scheduler import Scheduler


def sequence(name: str, length: int) -> Sequence:
    request = GenerateRequest(name, (5,) * length, SamplingParams())
    transcript = Transcript(None, (), include_stop=False)
    return Sequence(
        request, [5] * length, lambda delta: None, limit=1000, eos_token_ids=frozenset(), transcript=transcript
    )


def scheduler(blocks: int = 100, concurrency: int = 4, tokens: int = 64) -> Scheduler:
    return Scheduler(BlockPool(blocks), max_concurrency=concurrency, max_batched_tokens=tokens)


def run(spans: list[Span]) -> list[tuple[str, int, int]]:
    """Do as if a step had been run."""
    for span in spans:
        assert len(span.sequence.blocks) * 16 >= span.stop
        assert len(set(span.sequence.slots(0, span.stop))) == span.stop
        span.sequence.computed = span.stop
        if span.stop == len(span.sequence.tokens):
            span.sequence.tokens.append(6)
    return [(span.sequence.id, span.start, span.stop) for span in spans]


def test_decodes_come_first_and_a_long_prefill_takes_what_is_left() -> None:
    made = scheduler()
    made.add(sequence("a", 10))
    assert run(made.schedule()) == [("a", 0, 10)]
    made.add(sequence("b", 150))
    made.add(sequence("c", 3))
    assert run(made.schedule()) == [("a", 10, 11), ("b", 0, 63)]
    assert run(made.schedule()) == [("a", 11, 12), ("b", 63, 126)]
    assert run(made.schedule()) == [("a", 12, 13), ("b", 126, 150), ("c", 0, 3)]
    assert run(made.schedule()) == [("a", 13, 14), ("b", 150, 151), ("c", 3, 4)]


def test_no_more_run_than_may() -> None:
    made = scheduler(concurrency=2)
    for name in "abc":
        made.add(sequence(name, 4))
    assert [name for name, _, _ in run(made.schedule())] == ["a", "b"]
    made.remove(made.running[0])
    assert run(made.schedule()) == [("b", 4, 5), ("c", 0, 4)]


def test_the_first_in_the_queue_is_not_overtaken_by_a_shorter_one() -> None:
    made = scheduler(blocks=4)
    made.add(sequence("a", 40))
    run(made.schedule())
    made.add(sequence("long", 30))
    made.add(sequence("short", 3))
    assert run(made.schedule()) == [("a", 40, 41)]
    made.remove(made.running[0])
    assert [name for name, _, _ in run(made.schedule())] == ["long", "short"]


def test_the_latest_gives_its_blocks_back_and_is_recomputed_first() -> None:
    made = scheduler(blocks=4)
    for name in "ab":
        made.add(sequence(name, 32))
    made.add(sequence("c", 5))
    assert run(made.schedule()) == [("a", 0, 32), ("b", 0, 32)]
    assert run(made.schedule()) == [("a", 32, 33)]  # b's blocks are needed for it
    assert made.preemptions == 1
    assert [waiting.id for waiting in made.waiting] == ["b", "c"]
    made.remove(made.running[0])
    assert run(made.schedule()) == [("b", 0, 33), ("c", 0, 5)]


def test_imported_sequences_lend_their_blocks_before_anybody_starves() -> None:
    pool = BlockPool(4)
    made = Scheduler(pool, max_concurrency=1, max_batched_tokens=64)
    made.add(sequence("a", 32))
    run(made.schedule())
    imported = sequence("b", 20)
    imported.blocks, imported.computed = pool.allocate(2) or [], 19
    made.add(imported)
    assert run(made.schedule()) == [("a", 32, 33)]
    assert (imported.blocks, imported.computed, made.preemptions) == ([], 0, 0)


def test_whatever_happens_no_block_is_lost_or_lent_twice() -> None:
    rng = random.Random(2)
    pool = BlockPool(12)
    made = Scheduler(pool, max_concurrency=5, max_batched_tokens=20)
    for number in range(300):
        if rng.random() < 0.5:
            made.add(sequence(str(number), rng.randrange(1, 100)))
        run(made.schedule())
        held = [block for one in made for block in one.blocks]
        assert len(held) == len(set(held)) == pool.used
        ending = [one for one in made if len(one.tokens) > 150 or rng.random() < 0.05]
        for one in ending:
            made.remove(one)
    for one in list(made):
        made.remove(one)
    assert pool.used == 0
