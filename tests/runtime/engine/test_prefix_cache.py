"""Prefix caching: which sequences find what earlier ones have computed, for how long, and that it is theirs."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.serving.transcript import Transcript
from medusa_runtime.engine.torch.adapters import Adapter
from medusa_runtime.engine.torch.block_pool import BlockPool
from medusa_runtime.engine.torch.prefix_cache import PrefixCache
from medusa_runtime.engine.torch.scheduler import Scheduler

SYSTEM = "Tokens flow from storage to memory, and from memory to layers. " * 6


def sequence(name: str, tokens: list[int], salt: str | None = None, **params: Any) -> Sequence:
    request = GenerateRequest(name, tuple(tokens), SamplingParams(**params), cache_salt=salt)
    transcript = Transcript(None, (), include_stop=False)
    return Sequence(request, tokens, lambda delta: None, limit=10_000, eos_token_ids=frozenset(), transcript=transcript)


def scheduler(
    blocks: int = 100, kept: int = 100, concurrency: int = 4, tokens: int = 64, recorded: Any = None
) -> Scheduler:
    pool = BlockPool(blocks)
    pool.most_kept = kept
    prefixes = PrefixCache(pool, recorded)
    return Scheduler(pool, max_concurrency=concurrency, max_batched_tokens=tokens, prefixes=prefixes)


class Recorded:
    """Recorded blocks of these prompts. ``values`` has the value of each slot, which stands for its tokens."""

    beginning = -1

    def __init__(self, *prompts: list[int], values: dict[int, Any] | None = None) -> None:
        self.present, self.pending = True, False
        self.copied = 0
        self.patience = 1  # blocks that are worth waiting for
        self._values = {} if values is None else values
        self._children: dict[tuple[int, bytes], int] = {}
        self._tokens: list[list[int]] = []
        for prompt in prompts:
            parent = -1
            for stop in range(16, len(prompt) + 1, 16):
                key = (parent, array("i", prompt[stop - 16 : stop]).tobytes())
                if key not in self._children:
                    self._children[key] = len(self._tokens)
                    self._tokens.append(prompt[:stop])
                parent = self._children[key]

    def child(self, parent: int, tokens: bytes) -> int | None:
        return self._children.get((parent, tokens))

    def is_worth_waiting(self, blocks: int) -> bool:
        return blocks >= self.patience

    def copy(self, numbers: list[int], blocks: list[int]) -> None:
        assert self.present
        for number, block in zip(numbers, blocks, strict=True):
            tokens = self._tokens[number]
            for at in range(16):
                self._values[block * 16 + at] = (0, None, tuple(tokens[: len(tokens) - 15 + at]))
        self.copied += len(numbers)

    def holds(self, tokens: list[int], at: int) -> bool:
        """Return True if the block that has the token with this number is recorded."""
        return tokens[: at // 16 * 16 + 16] in self._tokens


def run(made: Scheduler, **options: Any) -> list[tuple[str, int, int]]:
    """Do as if the next step had been run."""
    spans = made.schedule(**options)
    for span in spans:
        compute(span)
    return [(span.sequence.id, span.start, span.stop) for span in spans]


def compute(span: Span) -> None:
    span.sequence.computed = span.stop
    if span.stop == len(span.sequence.tokens):
        span.sequence.tokens.append(6)


def test_a_prompt_goes_on_behind_what_an_ended_one_has_computed() -> None:
    made = scheduler()
    first, second = sequence("first", [*range(40)]), sequence("second", [*range(40), 7])
    made.add(first)
    assert run(made) == [("first", 0, 40)]
    made.remove(first)
    made.add(second)
    assert run(made) == [("second", 32, 41)]  # two whole blocks
    assert (first.cached_tokens, second.cached_tokens, made.cached_tokens) == (0, 32, 32)


def test_the_last_token_is_always_computed() -> None:
    made = scheduler()
    for _ in range(2):
        one = sequence("one", [*range(32)])
        made.add(one)
        spans = run(made)
        made.remove(one)
    assert spans == [("one", 16, 32)]


def test_an_answer_is_found_by_the_next_turn() -> None:
    made = scheduler()
    first = sequence("first", [*range(10)])
    made.add(first)
    for _ in range(30):
        run(made)
    made.remove(first)
    second = sequence("second", [*first.tokens, 7, 8])
    made.add(second)
    assert run(made) == [("second", 32, 42)]  # 39 tokens of the first turn had been computed


def test_prompts_that_run_are_shared_too() -> None:
    made = scheduler()
    made.add(sequence("first", [*range(40)]))
    run(made)
    made.add(sequence("second", [*range(40)]))
    assert run(made) == [("first", 40, 41), ("second", 32, 40)]
    first, second = made.running
    assert first.blocks[:2] == second.blocks[:2]
    assert not set(first.blocks[2:]) & set(second.blocks[2:])


def test_alike_prompts_that_come_together_are_computed_once() -> None:
    made = scheduler(tokens=64)
    for name in "abc":
        made.add(sequence(name, [*range(100)]))
    made.add(sequence("other", [*range(500, 540)]))
    assert run(made) == [("a", 0, 64)]
    assert run(made) == [("a", 64, 100)]  # the others wait for all of it
    assert run(made) == [("a", 100, 101), ("b", 96, 100), ("c", 96, 100), ("other", 0, 40)]


def test_nobody_waits_for_a_small_part_of_a_prompt() -> None:
    made = scheduler(tokens=100)
    made.add(sequence("a", [*range(16), *range(100, 120)]))
    made.add(sequence("b", [*range(16), *range(200, 220)]))
    assert run(made) == [("a", 0, 36), ("b", 0, 36)]


def test_salts_and_adapters_keep_prompts_apart() -> None:
    made = scheduler()
    adapter = Adapter("tuned", 1)
    for salt, used in ((None, None), ("a", None), ("b", None), (None, adapter), ("a", adapter)):
        for start in (0, 32):
            one = sequence("one", [*range(40)], salt)
            one.adapter = used
            made.add(one)
            assert run(made) == [("one", start, 40)], (salt, used)
            made.remove(one)


def test_a_reloaded_adapter_is_another_one() -> None:
    made = scheduler()
    for number in (1, 2):
        one = sequence("one", [*range(40)])
        one.adapter = Adapter("tuned", number)
        made.add(one)
        assert run(made) == [("one", 0, 40)]
        made.remove(one)


def test_a_prompt_whose_tokens_are_scored_is_computed_whole_and_found_by_others() -> None:
    made = scheduler()
    for name in ("first", "second"):
        one = sequence(name, [*range(40)], prompt_logprobs=1)
        made.add(one)
        assert run(made) == [(name, 0, 40)]
        made.remove(one)
    made.add(sequence("third", [*range(40)]))
    assert run(made) == [("third", 32, 40)]


def test_what_was_not_used_for_longest_goes_first_and_a_prompts_end_before_its_beginning() -> None:
    made = scheduler(blocks=8, kept=8)
    for name, start in (("a", 0), ("b", 100), ("a", 0)):
        one = sequence(name, [*range(start, start + 50)])  # three whole blocks, and one that is not
        made.add(one)
        run(made)
        made.remove(one)
    one = sequence("c", [*range(200, 240)])  # takes the free blocks, and then b's last one
    made.add(one)
    run(made)
    made.remove(one)
    for name, start, cached in (("a", 0, 48), ("b", 100, 32)):
        one = sequence(name, [*range(start, start + 50)])
        made.add(one)
        assert run(made) == [(name, cached, 50)]
        made.remove(one)


def test_no_more_is_kept_than_may_be() -> None:
    made = scheduler(blocks=100, kept=5)
    for start in range(0, 1000, 100):
        one = sequence("one", [*range(start, start + 50)])
        made.add(one)
        run(made)
        made.remove(one)
        assert len(made._pool._kept) <= 5
        assert made._pool.used == 0
        assert made._pool.free == 100
    assert made._pool._fresh <= 4 + 5  # so many blocks have ever taken memory


def test_without_a_cache_everything_is_computed() -> None:
    made = Scheduler(BlockPool(100), max_concurrency=4, max_batched_tokens=64)
    for _ in range(2):
        one = sequence("one", [*range(40)])
        made.add(one)
        assert run(made) == [("one", 0, 40)]
        made.remove(one)


def test_a_preempted_sequence_finds_what_is_left_of_its_own() -> None:
    made = scheduler(blocks=6, kept=6)
    made.add(sequence("a", [*range(32)]))
    made.add(sequence("b", [*range(100, 160)]))
    assert run(made) == [("a", 0, 32), ("b", 0, 32)]
    assert run(made) == [("a", 32, 33)]  # a takes b's last block
    assert made.preemptions == 1
    made.remove(made.running[0])
    assert run(made) == [("b", 32, 60)]
    run(made)
    made.add(sequence("c", [*range(100, 160)]))
    assert run(made) == [("b", 61, 62), ("c", 48, 60)]
    assert made.cached_tokens == 48  # b's were its own


def test_a_prompt_that_others_may_compute_is_left_to_them_unless_little_is_missing() -> None:
    for length, expected in ((200, [("second", 0, 200)]), (70, [("second", 64, 70)])):
        made = scheduler(tokens=64)
        made.add(sequence("first", [*range(65)]))
        run(made)
        run(made)
        made.remove(made.running[0])
        made.add(sequence("second", [*range(length)]))
        assert run(made, whole=256) == expected


def test_forgotten_prefixes_are_computed_again() -> None:
    made = scheduler()
    made.add(sequence("gone", [*range(100, 140)]))
    run(made)
    made.remove(made.running[0])
    made.add(sequence("running", [*range(40)]))
    run(made)
    run(made)
    made.forget_prefixes()
    made.add(sequence("alike", [*range(40)]))  # what runs is still there
    made.add(sequence("again", [*range(100, 140)]))
    assert run(made) == [("running", 41, 42), ("alike", 32, 40), ("again", 0, 40)]


def test_a_prompt_that_waits_for_room_loses_forgotten_prefixes_too() -> None:
    made = scheduler(blocks=8, kept=8, tokens=200)
    made.add(sequence("gone", [*range(70)]))
    run(made)
    made.remove(made.running[0])
    made.add(sequence("running", [*range(100, 130)]))
    run(made)
    made.add(sequence("waiting", [*range(130)]))
    assert run(made) == [("running", 30, 31)]
    made.forget_prefixes()
    assert not made.waiting[0].computed
    made.remove(made.running[0])
    made.remove(made.waiting[0])
    made.add(sequence("again", [*range(70)]))
    assert run(made) == [("again", 0, 70)]


def test_recorded_prompts_belong_to_all_and_what_follows_to_its_own_salt() -> None:
    recorded = Recorded([*range(48)])
    made = scheduler(recorded=recorded)
    cases = (("first", "a", 48), ("own", "a", 64), ("other", "b", 48), ("again", "b", 64), ("nobody", None, 48))
    for name, salt, cached in cases:
        one = sequence(name, [*range(70)], salt)
        made.add(one)
        assert run(made) == [(name, cached, 70)]
        made.remove(one)
    assert recorded.copied == 3
    tuned = sequence("tuned", [*range(70)])
    tuned.adapter = Adapter("tuned", 1)
    made.add(tuned)
    assert run(made) == [("tuned", 0, 64)]


def test_recorded_blocks_take_what_room_there_is() -> None:
    recorded = Recorded([*range(160)])
    made = scheduler(blocks=12, kept=12, recorded=recorded)
    made.add(sequence("long", [*range(500, 560)]))
    assert run(made) == [("long", 0, 60)]
    made.add(sequence("one", [*range(150)]))  # 9 blocks to copy, and 8 are free
    assert run(made) == [("long", 60, 61)]
    assert recorded.copied == 0
    made.remove(made.running[0])
    assert run(made) == [("one", 144, 150)]
    assert recorded.copied == 9


def test_a_prompt_waits_for_recorded_blocks_while_they_may_come() -> None:
    recorded = Recorded([*range(32)])
    recorded.present, recorded.pending = False, True
    made = scheduler(recorded=recorded)
    made.add(sequence("other", [*range(7, 50)]))
    made.add(sequence("one", [*range(40)]))
    assert run(made) == [("other", 0, 43)]
    recorded.present, recorded.pending = True, False
    assert run(made) == [("other", 43, 44), ("one", 32, 40)]


@pytest.mark.parametrize(("tokens", "recorded_blocks"), [(40, 2), (32, 1), (200, 9), (8, 0)])
def test_a_prompt_waits_only_for_recorded_blocks_that_it_would_use(tokens: int, recorded_blocks: int) -> None:
    recorded = Recorded([*range(32)], [*range(144)], [*range(500, 900)])
    recorded.present, recorded.pending = False, True
    prompt = [*range(tokens)] if tokens > 40 else [*range(min(tokens, 32)), *range(1000, 1000 + tokens - 32)]
    for patience in (recorded_blocks, recorded_blocks + 1):
        recorded.patience = patience
        made = scheduler(recorded=recorded, tokens=256)
        made.add(sequence("one", prompt))
        waits = bool(recorded_blocks) and patience == recorded_blocks
        assert run(made) == ([] if waits else [("one", 0, tokens)])


def test_what_is_computed_again_counts_as_computed() -> None:
    made = scheduler(recorded=Recorded([*range(32)]))
    for name in ("one", "two"):
        made.add(sequence(name, [*range(40)], name))
    assert run(made) == [("one", 32, 40), ("two", 32, 40)]
    made._prefixes._recorded.present = False
    for one in made.running:
        one.tokens.pop()  # what was sampled is not delivered
    made.recompute()
    assert made.cached_tokens == 0
    assert not made.running
    assert run(made) == [("one", 0, 40), ("two", 0, 24)]


@pytest.mark.parametrize("has_recorded", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_shared_block_holds_what_it_should(seed: int, has_recorded: bool) -> None:
    """Sequences come, run, end, are preempted and lose everything, at random.

    A slot's value stands for a token and all that comes before it, as its key and value do.
    """
    random_ = random.Random(seed)
    values: dict[int, Any] = {}
    prompts = [[random_.randrange(3) for _ in range(random_.choice((16, 60, 100)))] for _ in range(3)]
    recorded = Recorded(*prompts, [*prompts[0], *prompts[1]], values=values) if has_recorded else None
    made = scheduler(random_.choice((24, 40, 100)), kept=random_.choice((3, 30, 100)), recorded=recorded)
    beginnings = [[random_.randrange(3) for _ in range(random_.choice((16, 30, 64, 90)))] for _ in range(4)]
    beginnings += prompts * has_recorded
    histories: list[list[int]] = []
    shared = 0

    def value(one: Sequence, at: int) -> Any:
        number = 0 if one.adapter is None else one.adapter.number
        if recorded is not None and not number and recorded.holds(one.tokens, at):
            return (0, None, tuple(one.tokens[: at + 1]))
        return (number, one.request.cache_salt, tuple(one.tokens[: at + 1]))

    def check() -> None:
        for one in made:
            for at, slot in enumerate(one.slots(0, one.computed)):
                assert values[slot] == value(one, at), (one.id, at)

    for number in range(400):
        for _ in range(random_.randrange(3)):
            start = random_.choice([*beginnings, *histories[-4:]])[: random_.randrange(1, 200)]
            tokens = [*start, *(random_.randrange(3) for _ in range(random_.randrange(1, 40)))]
            one = sequence(str(number), tokens, random_.choice((None, None, "salt")))
            if random_.random() < 0.1:
                one.adapter = Adapter("tuned", 1)
            made.add(one)
        spans = made.schedule()
        shared += sum(span.start > 0 and span.sequence.computed == span.sequence.cached_tokens for span in spans)
        for one, start, stop in spans:
            for at, slot in enumerate(one.slots(start, stop), start):
                values[slot] = value(one, at)
        fails = random_.random() < 0.02
        for span in spans:
            if fails:  # its values may be anything
                values |= dict.fromkeys(span.sequence.slots(span.start, span.stop))
                made.remove(span.sequence)
            else:
                span.sequence.computed = span.stop
                if span.stop == len(span.sequence.tokens):
                    span.sequence.tokens.append(random_.randrange(3))
        check()
        for one in list(made):
            if random_.random() < (0.3 if len(made.running) > 2 else 0.1):
                histories.append(list(one.tokens))
                made.remove(one)
        if random_.random() < 0.02:
            values |= dict.fromkeys(values)
            made.forget_prefixes()
            for one in list(made.running):
                made.rewind(one, 0)
        check()
        pool = made._pool
        holders = [block for one in made for block in one.blocks]
        assert pool.used == len(set(holders))
        assert pool.free + pool.used == pool.blocks
    assert shared > 20
    assert recorded is None or recorded.copied > 20
    for one in list(made):
        made.remove(one)
    assert made._pool.used == 0
    assert not made._prefixes._named


def test_answers_are_those_of_an_engine_that_computes_everything(serve: Any) -> None:
    cached, computed = serve(), serve(prefix_cache_mb=0)
    questions = ["What flows?", "What flows to memory?", "Was springt?", "What flows?"]
    found: dict[Any, list[Any]] = {cached: [], computed: []}
    for served, answers in found.items():
        for question in questions:
            answers.append(served.ask(SYSTEM + question, max_tokens=24, logprobs=2).wait())
    for one, other in zip(found[cached], found[computed], strict=True):
        assert one.tokens == other.tokens
        for delta, expected in zip(one.deltas, other.deltas, strict=True):
            assert delta.logprobs[0].logprob == pytest.approx(expected.logprobs[0].logprob, abs=1e-4)
    assert [answer.last.cached_tokens > 64 for answer in found[cached]] == [False, True, True, True]
    assert not any(answer.last.cached_tokens for answer in found[computed])
    stats = cached.engine.stats()
    assert stats["cached_tokens_total"] == sum(answer.last.cached_tokens for answer in found[cached])
    assert stats["kv_tokens_used"] == 0  # what is kept is free
    assert computed.engine.stats()["cached_tokens_total"] == 0


def test_several_answers_to_a_prompt_compute_it_once(serve: Any) -> None:
    served = serve()
    answers = [served.ask(SYSTEM, max_tokens=20, seed=seed, temperature=1.0) for seed in range(4)]
    found = sorted(answer.last.cached_tokens for answer in answers)
    length = answers[0].last.prompt_tokens
    assert found == [0, *[(length - 1) // 16 * 16] * 3]
    alone = serve(prefix_cache_mb=0)
    for seed, answer in enumerate(answers):
        assert answer.tokens == alone.ask(SYSTEM, max_tokens=20, seed=seed, temperature=1.0).tokens


def test_a_full_cache_serves_on(serve: Any) -> None:
    """More prompts than fit, which all begin alike in pairs; nothing is lost when all are gone."""
    served, alone = serve(kv_cache_mb=1), serve(prefix_cache_mb=0)
    prompts = [f"{number} {SYSTEM}{question}" for number in range(12) for question in ("And?", "But?")]
    answers = [served.ask(prompt, max_tokens=8) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == alone.ask(prompt, max_tokens=8).tokens
    assert served.engine.stats()["kv_tokens_used"] == 0
