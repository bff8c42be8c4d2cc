"""Sampling that several processes share: each token is the one that a single process with all prompts would draw."""

from __future__ import annotations

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trainers.process import World


class SharedDraws(LogitsProcessor):
    """Draws tokens with the random numbers of the whole batch, of which this process uses its own rows'.

    PyTorch's `multinomial` takes the largest of p / E, with E exponentially distributed noise of the batch's shape. Every
    process draws all of that noise from a generator of the same seed.

    Args:
        seed: the same on every process.
    """

    def __init__(self, seed: int, device: torch.device, world: World) -> None:
        self.world = world
        self.generator = torch.Generator(device).manual_seed(seed)
        self.warpers = LogitsProcessorList()
        self._steps = 0
        self._shape = (0, 0)

    def begin_epoch(self) -> None:
        """A pass over the prompts begins, for which PyTorch's DataLoader draws a seed from the CPU's generator."""
        if self.generator.device.type == "cpu":
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)

    def begin(self, rows: int, sampling: GenerationConfig) -> GenerationConfig:
        """Start a batch, of which this process has `rows`.

        Args:
            sampling: how to draw.

        Returns:
            settings that leave the drawing to this processor.
        """
        self._steps = 0
        self._shape = (rows * self.world.size, 0)
        self.warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
        if sampling.top_k:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self.warpers.append(MinPLogitsWarper(sampling.min_p))
        given = sampling.to_dict() | {"do_sample": False}
        for name in ("temperature", "top_k", "top_p", "min_p"):
            given.pop(name, None)
        return GenerationConfig(**given)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of which only the drawn tokens' are finite."""
        probabilities = self.warpers(input_ids, scores).softmax(dim=-1)
        self._shape = (self._shape[0], scores.shape[-1])
        self._steps += 1
        mine = self._noise(probabilities)[self.world.rank * len(scores) : (self.world.rank + 1) * len(scores)]
        drawn = (probabilities / mine).argmax(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self._shape).exponential_(1, generator=self.generator)

    def end(self, like: torch.Tensor) -> None:
        """End a batch: draw what the process with the longest completion has drawn, so that all go on alike.

        A single process then shuffles the batch with numbers of the same generator, if that is the CPU's.

        Args:
            like: a tensor of the model's type of logits, on its device.
        """
        steps = torch.tensor(self._steps, device=like.device)
        torch.distributed.all_reduce(steps, op=torch.distributed.ReduceOp.MAX)
        for _ in range(int(steps) - self._steps):
            self._noise(like)
        if self.generator.device.type == "cpu":
            torch.randperm(self._shape[0], generator=self.generator)
