"""Proximal policy optimisation as formulas: rewards, advantages and losses per token.

Everything here is a function of tensors of shape (completions, tokens): float32, padded on the right; `mask` is 1 on the
tokens of a completion and 0 on padding, which no result depends on. Log-probabilities are in nats.
"""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k3"]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens that are no padding; 0 where there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whiten(values: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """`values` scaled to variance 1 over all tokens of the batch, and shifted to mean 0 unless told otherwise.

    As in the code of arXiv:1909.08593: the variance is that of the population, and 1e-8 keeps it from 0.
    """
    mean = masked_mean(values, mask)
    variance = masked_mean((values - mean) ** 2, mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return (whitened if shift_mean else whitened + mean) * mask


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """An estimate of KL(policy || reference) from one sampled token: `k1` or `k3` of joschu.net/blog/kl-approx.html.

    k1 is the log-ratio: without bias, may be negative. k3 = exp(-k1) - 1 + k1: without bias, never negative, less noisy.
    """
    ratio = logprobs - reference
    return ratio if estimator == "k1" else torch.expm1(-ratio) + ratio


def token_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:  # fmt: skip
    """Reward of each token (arXiv:1909.08593, section 2): the KL penalty on all, the completion's score on its last.

    Args:
        scores: one per completion.
        kl: estimate per token.
    """
    rewards = -kl_coef * kl * mask
    last = (mask.sum(dim=1) - 1).long()
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16): of a token t

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t,

    where V and A are 0 after a completion's last token: an episode ends there, cut off by the limit or not.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for token in reversed(range(rewards.shape[1])):
        delta = rewards[:, token] + gamma * next_value - values[:, token]
        there = mask[:, token]
        next_advantage = (delta + gamma * lam * next_advantage) * there
        next_value = values[:, token] * there
        advantages[:, token] = next_advantage
    return advantages, (advantages + values) * mask


def policy_losses(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate objective, negated (arXiv:1707.06347, equation 7), per token.

    Returns:
        losses; 1 where clipping decides, so that the token has no gradient.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.maximum(plain, clipped), (clipped > plain).float()


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error of the value, which may move by `cliprange_value` from what it was at sampling, per token.

    The larger of the errors with and without that limit counts, as in the code of arXiv:1909.08593.

    Returns:
        losses; 1 where clipping decides.
    """
    limited = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    plain, clipped = (values - returns) ** 2, (limited - returns) ** 2
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).float()


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """Share of the returns' variance that the values foresaw: 1 all, 0 no more than a constant, negative: less.

    0 where all returns are equal.
    """

    def variance(of: torch.Tensor) -> torch.Tensor:
        return masked_mean((of - masked_mean(of, mask)) ** 2, mask)

    total = variance(returns)
    return float(1 - variance(returns - values) / total) if total > 0 else 0.0


def adapted_kl_coef(kl_coef: float, kl: float, target: float, horizon: float, completions: int) -> float:
    """The penalty's weight for the next batch (arXiv:1909.08593, section 2.2): it rises where `kl` is above `target`.

    Args:
        kl: mean over the batch of a completion's summed KL.
        horizon: completions over which the weight changes by a fifth at most.
        completions: of the batch.
    """
    error = min(0.2, max(-0.2, kl / target - 1))
    return kl_coef * (1 + error * completions / horizon)
