"""Sampling against plain references."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.serving.sequence import Sequence
from medusa_runtime.engine.serving.transcript import Transcript
from medusa_runtime.engine.torch.penalties import adjust
from medusa_runtime.engine.torch.sampler import sample
from torch import Tensor

VOCAB = 50


def sequence(prompt: tuple[int, ...] = (1, 2, 2), completion: tuple[int, ...] = (), **params: Any) -> Sequence:
    request = GenerateRequest("r", prompt, SamplingParams(**params))
    made = Sequence(
        request,
        list(prompt),
        lambda delta: None,
        limit=100,
        eos_token_ids=frozenset({0}),
        transcript=Transcript(None, (), include_stop=False),
    )
    made.tokens += completion
    return made


def logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draws(row: Tensor, count: int = 4000, **params: Any) -> Counter[int]:
    """Return how often each token comes up."""
    drawing = sequence(seed=1, **params)
    return Counter(sample(row, [drawing])[0].token for _ in range(count))


def assert_follows(found: Counter[int], expected: Tensor) -> None:
    """A chi-squared test far beyond chance; tokens without probability must not come up at all."""
    total = sum(found.values())
    assert not [token for token in found if expected[token] == 0]
    chi = sum(
        (found[token] - total * float(p)) ** 2 / (total * float(p)) for token, p in enumerate(expected) if p * total > 5
    )
    assert chi < 3 * VOCAB


def test_greedy_is_argmax_alone_and_beside_others() -> None:
    rows = logits(4)
    mixed = [sequence(temperature=0.0), sequence(temperature=1.0), sequence(temperature=0.0), sequence(temperature=0)]
    found = [sampled.token for sampled in sample(rows.bfloat16(), mixed)]
    best = rows.bfloat16().argmax(-1).tolist()
    assert [found[0], *found[2:]] == [best[0], *best[2:]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    row = logits()
    assert_follows(draws(row, temperature=temperature), torch.softmax(row[0] / temperature, -1))


def test_top_k() -> None:
    row = logits()
    kept = torch.full_like(row[0], float("-inf"))
    best = row[0].topk(5).indices
    kept[best] = row[0][best]
    assert_follows(draws(row, top_k=5), torch.softmax(kept, -1))


@pytest.mark.parametrize("top_k", [0, 10])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_k: int) -> None:
    row = logits() / 2  # flat enough that many tokens are kept
    order = row[0].argsort(descending=True)[: top_k or VOCAB]
    probs = torch.softmax(row[0][order], -1)
    count = next(n for n in range(1, VOCAB) if float(probs[:n].sum()) >= 0.7)
    assert 3 < count < len(order)
    expected = torch.zeros(VOCAB)
    expected[order[:count]] = probs[:count] / probs[:count].sum()
    assert_follows(draws(row, top_p=0.7, top_k=top_k), expected)


def test_top_p_over_more_tokens_than_are_looked_at_first() -> None:
    flat = torch.zeros(1, 4096)
    found = draws(flat, 500, top_p=0.9)
    assert max(found.values()) <= 5
    assert len(found) > 400


def test_min_p() -> None:
    row = logits()
    probs = torch.softmax(row[0], -1)
    probs = torch.where(probs < 0.2 * probs.max(), 0, probs)
    assert_follows(draws(row, min_p=0.2), probs / probs.sum())


def test_extreme_values_stay_valid() -> None:
    row = logits()
    best = int(row[0].argmax())
    for params in ({"temperature": 1e-9}, {"temperature": 1e-4}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert draws(row, 20, **params) == Counter({best: 20})  # type: ignore[arg-type]
    assert len(draws(row, 300, temperature=1e6)) > 30
    assert len(draws(row, 300, top_k=10**9, temperature=1e6)) > 30


def test_penalties_are_those_of_a_plain_reference() -> None:
    given = sequence(
        prompt=(3, 4, 4, 5),
        completion=(5, 6, 6, 6),
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={6: 1.5, 7: -2.0},
        min_tokens=10,
        stop_token_ids=(8,),
    )
    row = logits()[0]
    expected = row.tolist()
    expected[6] += 1.5
    expected[7] -= 2.0
    expected[0] = expected[8] = float("-inf")
    for token in {3, 4, 5, 6}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token, count in Counter((5, 6, 6, 6)).items():
        expected[token] -= 0.5 * count + 0.25
    adjust(row, given)
    assert row.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("count", [3, VOCAB // 4, VOCAB])
def test_biases_and_allowed_tokens_are_those_of_a_plain_reference(count: int) -> None:
    chosen = random.Random(count).sample(range(VOCAB), count)
    bias = {token: (token % 7 - 3) * (1 if token % 2 else 0.5) for token in chosen}
    allowed = tuple(chosen[: max(2, count // 2)]) * 2
    for given in (
        {"logit_bias": bias},
        {"allowed_token_ids": allowed},
        {"logit_bias": bias, "allowed_token_ids": allowed},
    ):
        row = logits()[0]
        expected = [value + given.get("logit_bias", {}).get(token, 0) for token, value in enumerate(row.tolist())]
        if "allowed_token_ids" in given:
            expected = [value if token in allowed else float("-inf") for token, value in enumerate(expected)]
        made = sequence(**given)
        for _ in range(2):
            changed = row.clone()
            adjust(changed, made)
            assert changed.tolist() == pytest.approx(expected)


def test_bad_words_are_those_of_a_plain_reference() -> None:
    chance = random.Random(5)
    for _ in range(200):
        words = [chance.choices((1, 2, 3), k=chance.randrange(1, 5)) for _ in range(6)]
        given = sequence(tuple(chance.choices((1, 2, 3), k=3)), tuple(chance.choices((1, 2, 3), k=chance.randrange(6))))
        given.bad_words = words
        completion = given.tokens[3:]
        expected = {word[-1] for word in words if completion[max(len(completion) - len(word) + 1, 0) :] == word[:-1]}
        row = torch.zeros(VOCAB)
        adjust(row, given)
        assert {token for token in range(VOCAB) if row[token] < 0} == expected


def test_long_bad_words_are_not_compared_where_the_token_before_their_last_one_did_not_come() -> None:
    class Tokens(list[int]):
        slices = 0

        def __getitem__(self, key: Any) -> Any:
            Tokens.slices += isinstance(key, slice)
            return super().__getitem__(key)

    given = sequence(completion=(1,) * 2000)
    given.bad_words = [[1] * 1000 + [2, number % VOCAB] for number in range(128)]
    given.tokens = Tokens(given.tokens)
    adjust(torch.zeros(VOCAB), given)
    assert Tokens.slices == 0
    given.tokens.append(2)
    adjust(torch.zeros(VOCAB), given)
    assert Tokens.slices == 1


def test_penalties_follow_the_tokens_that_are_added() -> None:
    given = sequence(prompt=(3, 4, 4), repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25)
    for step in range(12):
        row, tokens = torch.ones(VOCAB), given.tokens
        counts = Counter(tokens[3:])
        adjust(row, given)
        expected = [(1 / 1.3 if token in tokens else 1) - 0.5 * counts[token] for token in range(VOCAB)]
        expected = [value - (0.25 if counts[token] else 0) for token, value in enumerate(expected)]
        assert row.tolist() == pytest.approx(expected)
        tokens.extend([4, 7 + step % 3][: 1 + step % 2])


def test_a_large_bias_and_many_stop_tokens_cost_others_little() -> None:
    vocab, steps = 150_000, 20
    rows = logits(vocab=vocab)
    large = sequence(
        temperature=0,
        logit_bias=dict.fromkeys(range(vocab), 1.0),
        min_tokens=10**6,
        stop_token_ids=tuple(range(vocab - 1)),
    )
    began = time.process_time()
    for _ in range(steps):
        assert sample(rows, [large])[0].token == vocab - 1
    assert (time.process_time() - began) / steps < 0.03  # it took 0.08 s when it was made anew for each token


def test_penalties_change_neither_other_rows_nor_logprobs() -> None:
    rows = logits(2)
    before = rows.clone()
    found = sample(rows, [sequence(temperature=0, logprobs=2, logit_bias={9: 100.0}), sequence(temperature=0)])
    assert torch.equal(rows, before)
    assert found[0].token == 9
    assert found[0].logprob == pytest.approx(float(torch.log_softmax(before[0], -1)[9]))
    assert found[1].token == int(before[1].argmax())


def test_a_seed_draws_the_same_in_any_batch() -> None:
    rows = logits(3)
    for params in ({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}):
        alone = [sample(rows[:1], [one])[0].token for one in [sequence(seed=4, **params)] for _ in range(20)]
        one = sequence(seed=4, **params)
        crowd = [sample(rows, [one, sequence(), sequence(top_p=0.5)])[0].token for _ in range(20)]
        assert alone == crowd
        assert len({*alone}) > 1
