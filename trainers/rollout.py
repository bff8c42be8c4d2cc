"""Completions sampled from the policy, and what is known of them: the batch that PPO takes its steps on.

Sampling is a function of the weights, the seed and a completion's place in the run alone: not of how many processes or
batches share the work, nor of what was drawn before. A resumed run therefore samples what the unbroken one would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn.

    Attributes:
        temperature: divides the logits.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the most likely tokens whose probabilities add up to this; 1: all.
        max_new_tokens: longest completion.
        ends: tokens that end a completion.
        pad: token that fills rows up; never looked at.
    """

    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    ends: frozenset[int]
    pad: int

    def warpers(self) -> list[LogitsProcessor]:
        """What is done to the logits before a token is drawn."""
        found: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        return found


@dataclass(frozen=True)
class Completion:
    """One sampled completion and what is known of each of its tokens.

    Attributes:
        row: index of its prompt among the training rows.
        prompt, tokens: token ids; `tokens` with the end token, if it ended.
        ended: whether it ended by itself; otherwise it ran into the limit.
        scores: of each reward, None where it does not apply.
        score: their weighted sum.
        logprobs, ref_logprobs, values: per token, float32; `ref_logprobs` is None without a reference.
    """

    row: int
    prompt: list[int]
    tokens: list[int]
    ended: bool
    scores: list[float | None]
    score: float
    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    values: torch.Tensor


@dataclass(frozen=True)
class Rollout:
    """A batch of completions with their advantages, the same on every process.

    Attributes:
        number: which one of the run, from 0.
        sequences: prompt and completion of each, as token ids.
        lengths: tokens of each completion.
        tensors: `logprobs`, `values`, `advantages`, `returns`: (completions, tokens) in float32, padded with 0.
        stats: what is logged of it.
    """

    number: int
    sequences: list[list[int]]
    lengths: list[int]
    tensors: dict[str, torch.Tensor]
    stats: dict[str, float]

    def state(self) -> dict[str, Any]:
        """Plain data that `torch.load` reads without running code."""
        return dict(vars(self))

    def tokens(self, chosen: Sequence[int]) -> int:
        """Completion tokens of the chosen completions."""
        return sum(self.lengths[index] for index in chosen)

    def batch(self, chosen: Sequence[int], device: torch.device) -> dict[str, torch.Tensor]:
        """The chosen completions as the model's inputs and the losses' targets.

        Returns:
            `sequences`' inputs, and the tensors cut to the longest completion chosen.
        """
        longest = max(self.lengths[index] for index in chosen)
        inputs = padded([self.sequences[index] for index in chosen], [self.lengths[index] for index in chosen])
        rows = {name: tensor[list(chosen), :longest] for name, tensor in self.tensors.items()}
        return {name: tensor.to(device) for name, tensor in (inputs | rows).items()}


def padded(sequences: Sequence[Sequence[int]], lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Sequences, padded on the right, with the places of their completions.

    On the right, because then neither positions nor the attention of a causal model know of the padding.

    Args:
        sequences: prompt and completion.
        lengths: tokens of each completion, at the sequence's end.

    Returns:
        `input_ids`, `attention_mask` (n, longest sequence); `places` (n, longest completion): index in the sequence of
        each completion token, on padding that of the last; `mask` of the same shape: 1 on tokens, 0 on padding.
    """
    width, longest = max(map(len, sequences)), max(lengths)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for line, sequence in enumerate(sequences):
        ids[line, : len(sequence)] = torch.tensor(sequence)
        attention[line, : len(sequence)] = 1
    ends, counts = torch.tensor([len(sequence) for sequence in sequences]), torch.tensor(lengths)
    steps = torch.arange(longest)[None]
    places = torch.minimum((ends - counts)[:, None] + steps, (ends - 1)[:, None])
    mask = (steps < counts[:, None]).float()
    return {"input_ids": ids, "attention_mask": attention, "places": places, "mask": mask}


def filled(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of different lengths as one tensor, filled up with 0 on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class SeededSampling(LogitsProcessor):
    """Draws by each row's own random numbers: the most likely token after it is one drawn from the distribution.

    With E exponentially distributed noise, argmax(p / E) has the distribution p (the Gumbel-max trick).

    Args:
        seeds: of each row.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        return scores.log_softmax(dim=-1) - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_()


def seed_of(seed: int, rollout: int, place: int) -> int:
    """Seed of the completion at `place` of a rollout."""
    return random.Random(f"{seed}/{rollout}/{place}").getrandbits(63)


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], seeds: Sequence[int], how: Sampling
) -> list[list[int]]:
    """A completion of each prompt, with its end token if it has ended.

    Args:
        model: the language model, in evaluation mode, without PEFT's wrapper (its adapters are in its layers).
        seeds: of each completion.
    """
    width, device = max(map(len, prompts)), next(model.parameters()).device
    ids = torch.full((len(prompts), width), how.pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, prompt in enumerate(prompts):
        ids[line, width - len(prompt) :] = torch.tensor(prompt)
        mask[line, width - len(prompt) :] = 1
    config = GenerationConfig(
        do_sample=False, num_beams=1, max_new_tokens=how.max_new_tokens, use_cache=True, pad_token_id=how.pad,
        eos_token_id=sorted(how.ends) or None,
    )  # fmt: skip
    with own_generation_settings(model):
        out = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            logits_processor=LogitsProcessorList([*how.warpers(), SeededSampling(seeds, device)]),
        )
    return [cut(row, how.ends) for row in out[:, width:].tolist()]


def cut(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """`tokens` up to the first end token, which stays."""
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: last + 1]


@contextmanager
def own_generation_settings(model: PreTrainedModel) -> Iterator[None]:
    """Switch off what the model's `generation_config.json` adds to every generation (repetition penalties, suppressed
    tokens): completions must come from the distribution whose log-probabilities are trained."""
    before, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before


def from_state(state: Mapping[str, Any]) -> Rollout:
    """The rollout that `Rollout.state` gave."""
    return Rollout(**state)
