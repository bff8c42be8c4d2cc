"""How far the student's next-token distribution is from the teacher's: arXiv:2306.13649, equations 1 and 2.

Whole distributions, or the teacher's likeliest K tokens and all others as one outcome more. Merging outcomes never
raises a divergence, so the second is a lower bound of the first; with K the size of the vocabulary both are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 512
"""Positions whose probabilities are in memory at once; those of others are computed again in the backward pass."""
LEAST = -1e4
"""Log-probability of what cannot happen: zero as a probability, and finite, so that zero times it is zero."""


@dataclass(frozen=True)
class TopK:
    """The teacher's view of N positions in K + 1 outcomes.

    Attributes:
        ids: its K likeliest tokens, (N, K).
        log_probs: their log-probabilities at the run's temperature, (N, K).
        rest: the log-probability of all other tokens together, (N,).
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor

    def split(self, size: int) -> list[TopK]:
        """The positions in groups of `size`."""
        parts = zip(self.ids.split(size), self.log_probs.split(size), self.rest.split(size), strict=True)
        return [TopK(*part) for part in parts]


def log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of all tokens at a temperature, in float32, (N, V)."""
    return functional.log_softmax(logits.float() / temperature, dim=-1).clamp(min=LEAST)


def top_k(logits: Tensor, k: int, temperature: float) -> TopK:
    """The K likeliest tokens of each position and the rest; K is at most the vocabulary.

    Args:
        logits: (N, V).
        k: K.
        temperature: divides the logits.
    """
    log_probs = log_probabilities(logits, temperature)
    found = log_probs.topk(min(k, logits.shape[-1]), dim=-1)
    return TopK(found.indices, found.values, _rest(log_probs, found.indices))


def _rest(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of all tokens but `ids`."""
    return log_probs.scatter(-1, ids, -math.inf).logsumexp(-1).clamp(min=LEAST)


def outcomes(log_probs: Tensor, target: TopK) -> tuple[Tensor, Tensor]:
    """Student and teacher over the teacher's K + 1 outcomes; K of them where K is the whole vocabulary.

    Args:
        log_probs: the student's log-probabilities of all tokens, (N, V).
        target: the teacher's.
    """
    student = log_probs.gather(-1, target.ids)
    if target.ids.shape[-1] == log_probs.shape[-1]:
        return student, target.log_probs
    rest = _rest(log_probs, target.ids)
    return torch.cat([student, rest[:, None]], -1), torch.cat([target.log_probs, target.rest[:, None]], -1)


def kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) at each position, of log-probabilities over the same outcomes."""
    return (first.exp() * (first - second)).sum(-1)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence at each position; nothing flows back to the teacher.

    With m = beta * teacher + (1 - beta) * student it is beta * KL(teacher || m) + (1 - beta) * KL(student || m); at
    the ends, where that would vanish, `beta` 0 is KL(teacher || student) and 1 is KL(student || teacher).

    Args:
        student: log-probabilities, (N, outcomes).
        teacher: log-probabilities of the same outcomes.
        beta: from 0 to 1.
    """
    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def distance(
    logits: Tensor, target: Tensor | TopK, *, beta: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence of the student's logits from the teacher's, in chunks of positions.

    Args:
        logits: the student's, (N, V).
        target: the teacher's logits, (N, V), or its likeliest tokens.
        beta: see `divergence`.
        temperature: of both; the teacher's likeliest tokens have it in them already.

    Returns:
        at each of the N positions: the divergence, which carries the gradient; KL(teacher || student); whether the
        likeliest token is the same.
    """

    def chunk(part: Tensor, wanted: Tensor | TopK) -> tuple[Tensor, Tensor, Tensor]:
        student = log_probabilities(part, temperature)
        if isinstance(wanted, TopK):
            best = wanted.ids[:, 0]
            ours, theirs = outcomes(student, wanted)
        else:
            best = wanted.argmax(-1)
            ours, theirs = student, log_probabilities(wanted, temperature)
        with torch.no_grad():
            forward, same = kl(theirs, ours), part.argmax(-1) == best
        return divergence(ours, theirs, beta), forward, same

    targets = target.split(CHUNK)
    found = [
        checkpoint(chunk, part, wanted, use_reentrant=False, preserve_rng_state=False)
        if logits.requires_grad
        else chunk(part, wanted)
        for part, wanted in zip(logits.split(CHUNK), targets, strict=True)
    ]
    per_position, forward, same = (torch.cat(parts) for parts in zip(*found, strict=True))
    return per_position, forward, same


def negative_log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log p of each token at temperature 1, (N,); without gradient, in chunks of positions."""
    with torch.no_grad():
        parts = zip(logits.split(CHUNK), tokens.split(CHUNK), strict=True)
        return torch.cat([functional.cross_entropy(part.float(), wanted, reduction="none") for part, wanted in parts])
