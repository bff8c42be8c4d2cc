"""PPO's formulas against a plain reference written from the papers: loops over tokens, no tensors.

Generalised advantage estimation: arXiv:1506.02438, equations 11 to 16. The clipped objective: arXiv:1707.06347,
equations 6 and 7. KL penalty per token, clipped values: arXiv:1909.08593 and the code published with it.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers import ppo_math

Rows = list[list[float]]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """The sum of equation 16 as it stands: A_t = sum over l of (gamma lam)^l delta_{t+l}; no recursion."""
    length = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < length else 0.0) - values[t] for t in range(length)]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def rewards_of(
    score: float, logprobs: list[float], reference: list[float], kl_coef: float, estimator: str
) -> list[float]:
    found = []
    for t, (policy, old) in enumerate(zip(logprobs, reference, strict=True)):
        kl = policy - old if estimator == "k1" else math.exp(old - policy) - 1 - (old - policy)
        found.append(-kl_coef * kl + (score if t == len(logprobs) - 1 else 0.0))
    return found


def whitened(rows: Rows, *, shift: bool) -> Rows:
    flat = [value for row in rows for value in row]
    mean = sum(flat) / len(flat)
    variance = sum((value - mean) ** 2 for value in flat) / len(flat)
    return [[(value - mean) / math.sqrt(variance + 1e-8) + (0 if shift else mean) for value in row] for row in rows]


def policy_loss(new: float, old: float, advantage: float, clip: float) -> float:
    ratio = math.exp(new - old)
    limited = min(max(ratio, 1 - clip), 1 + clip)
    return -min(ratio * advantage, limited * advantage)


def value_loss(new: float, old: float, target: float, clip: float) -> float:
    limited = min(max(new, old - clip), old + clip)
    return 0.5 * max((new - target) ** 2, (limited - target) ** 2)


def rows_of(source: random.Random, lengths: list[int], scale: float = 1.0) -> Rows:
    return [[source.gauss(0, scale) for _ in range(length)] for length in lengths]


def tensor(rows: Rows, padding: float = 0.0) -> torch.Tensor:
    """Rows as float64, padded on the right with whatever may stand there."""
    width = max(map(len, rows))
    return torch.tensor([row + [padding] * (width - len(row)) for row in rows], dtype=torch.float64)


def mask_of(lengths: list[int]) -> torch.Tensor:
    return tensor([[1.0] * length for length in lengths])


def close(found: torch.Tensor, expected: Rows, mask: torch.Tensor) -> None:
    torch.testing.assert_close(found * mask, tensor(expected), rtol=1e-9, atol=1e-9)


CASES = st.tuples(
    st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(0, 1), st.floats(0, 1)
)


@settings(max_examples=60, deadline=None)
@given(CASES, st.floats(-50, 50))
def test_advantages_and_returns(case: tuple[int, list[int], float, float], padding: float) -> None:
    seed, lengths, gamma, lam = case
    source = random.Random(seed)
    rewards, values = rows_of(source, lengths), rows_of(source, lengths)
    mask = mask_of(lengths)
    found = ppo_math.advantages_and_returns(tensor(rewards, padding), tensor(values, padding), mask, gamma, lam)
    pairs = [gae(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]
    close(found[0], [advantages for advantages, _ in pairs], mask)
    close(found[1], [returns for _, returns in pairs], mask)
    assert not (found[0] * (1 - mask)).any()
    assert not (found[1] * (1 - mask)).any()


@settings(max_examples=40, deadline=None)
@given(CASES, st.sampled_from(["k1", "k3"]), st.floats(0, 2))
def test_rewards_of_tokens(case: tuple[int, list[int], float, float], estimator: str, kl_coef: float) -> None:
    source, lengths = random.Random(case[0]), case[1]
    logprobs, reference = rows_of(source, lengths), rows_of(source, lengths)
    scores = [source.gauss(0, 3) for _ in lengths]
    mask = mask_of(lengths)
    kl = ppo_math.kl_estimate(tensor(logprobs), tensor(reference), estimator)
    found = ppo_math.token_rewards(torch.tensor(scores, dtype=torch.float64), kl, mask, kl_coef)
    expected = [
        rewards_of(score, new, old, kl_coef, estimator)
        for score, new, old in zip(scores, logprobs, reference, strict=True)
    ]
    close(found, expected, mask)


@pytest.mark.parametrize("shift", [True, False])
def test_whitening_knows_no_padding(shift: bool) -> None:
    source, lengths = random.Random(3), [5, 1, 8, 2]
    rows = rows_of(source, lengths, 4.0)
    found = ppo_math.whiten(tensor(rows, 1e6), mask_of(lengths), shift_mean=shift)
    close(found, whitened(rows, shift=shift), mask_of(lengths))


def test_whitening_of_equal_values_is_finite() -> None:
    found = ppo_math.whiten(torch.full((2, 3), 7.0), torch.ones(2, 3))
    assert found.abs().max() < 1e-3


@settings(max_examples=60, deadline=None)
@given(CASES, st.floats(0.01, 1.5), st.floats(0.01, 1.5))
def test_losses(case: tuple[int, list[int], float, float], clip: float, clip_value: float) -> None:
    source, lengths = random.Random(case[0]), case[1]
    new, old, advantages = (rows_of(source, lengths, 0.5) for _ in range(3))
    values, old_values, returns = (rows_of(source, lengths) for _ in range(3))
    mask = mask_of(lengths)
    policy, clipped = ppo_math.policy_losses(tensor(new), tensor(old), tensor(advantages), clip)
    close(policy, [[policy_loss(*each, clip) for each in zip(*row, strict=True)]
                   for row in zip(new, old, advantages, strict=True)], mask)  # fmt: skip
    value, limited = ppo_math.value_losses(tensor(values), tensor(old_values), tensor(returns), clip_value)
    close(value, [[value_loss(*each, clip_value) for each in zip(*row, strict=True)]
                  for row in zip(values, old_values, returns, strict=True)], mask)  # fmt: skip
    # Where clipping decides, the loss has no gradient.
    at = tensor(new).requires_grad_()
    (ppo_math.policy_losses(at, tensor(old), tensor(advantages), clip)[0] * mask).sum().backward()
    assert torch.equal((at.grad == 0) & (mask > 0), (clipped > 0) & (mask > 0))
    at = tensor(values).requires_grad_()
    (ppo_math.value_losses(at, tensor(old_values), tensor(returns), clip_value)[0] * mask).sum().backward()
    assert torch.equal((at.grad == 0) & (mask > 0), (limited > 0) & (mask > 0))


def test_explained_variance() -> None:
    returns, mask = tensor([[1.0, 2.0, 3.0], [4.0]]), mask_of([3, 1])
    assert ppo_math.explained_variance(returns, returns, mask) == pytest.approx(1)
    assert ppo_math.explained_variance(torch.zeros_like(returns), returns, mask) == pytest.approx(0)
    assert ppo_math.explained_variance(-returns, returns, mask) == pytest.approx(-3)
    # A value that is wrong by a constant foresees all the variance; padding does not count.
    assert ppo_math.explained_variance(returns + 5, tensor([[1.0, 2.0, 3.0], [4.0]], 99.0), mask) == pytest.approx(1)
    assert ppo_math.explained_variance(returns, torch.ones_like(returns), mask) == 0


def test_the_weight_of_the_penalty_follows_the_divergence() -> None:
    assert ppo_math.adapted_kl_coef(0.1, 6.0, 6.0, 10000, 64) == pytest.approx(0.1)
    assert ppo_math.adapted_kl_coef(0.1, 6.6, 6.0, 10000, 64) == pytest.approx(0.1 * (1 + 0.1 * 64 / 10000))
    assert ppo_math.adapted_kl_coef(0.1, 60.0, 6.0, 10000, 64) == pytest.approx(0.1 * (1 + 0.2 * 64 / 10000))
    assert ppo_math.adapted_kl_coef(0.1, -5.0, 6.0, 10000, 64) == pytest.approx(0.1 * (1 - 0.2 * 64 / 10000))
