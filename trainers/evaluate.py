"""Held-out measures: the loss, greedy answers in batches, metrics of them; before training and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from blueprints.recipe.rows import Kind
from blueprints.recipe.schema import Recipe
from trainers.metrics import measure
from trainers.process import World
from trainers.watch import WATCH

TEXT_PROMPT = 32
"""Tokens of a plain text that are given as prompt, at most half of it."""


@dataclass(frozen=True)
class Question:
    """One held-out row as a prompt and the answer it should get.

    Attributes:
        ids: tokens of the prompt, with the template's opening of the answer.
        prompt: what was asked, as text: without the template, where the data set says it.
        reference: the answer of the data set, without special tokens.
    """

    ids: list[int]
    prompt: str
    reference: str


def questions(rows: Any, tokenizer: PreTrainedTokenizerBase, limit: int) -> tuple[list[Question], set[int]]:
    """The first `limit` held-out rows as questions, and the special tokens their answers end with.

    The answer is the last stretch of trained tokens: the last turn of a conversation.
    """
    found, stops = [], set()
    special = set(tokenizer.all_special_ids)
    for row in rows.select(range(min(limit, len(rows)))):
        ids, labels = row["input_ids"], row["labels"]
        start, end = answer_span(labels, row.get("prompt_length"))
        if end and ids[end - 1] in special:
            stops.add(ids[end - 1])
        found.append(
            Question(
                ids=list(ids[:start]),
                prompt=row.get("prompt") or tokenizer.decode(ids[:start], skip_special_tokens=True).strip(),
                reference=tokenizer.decode(ids[start:end], skip_special_tokens=True).strip(),
            )
        )
    return found, stops


def answer_span(labels: Sequence[int], prompt_length: int | None = None) -> tuple[int, int]:
    """Start and end of the last trained stretch; of a row that is trained as a whole, what comes after its prompt.

    The first token never carries loss: nothing predicts it.
    """
    end = max(index for index, label in enumerate(labels) if label >= 0) + 1
    start = end
    while start and labels[start - 1] >= 0:
        start -= 1
    if start > 1:
        return start, end
    return prompt_length or min(TEXT_PROMPT, max(1, end // 2)), end


@torch.no_grad()
def answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    stops: set[int],
    batch_size: int,
    max_new_tokens: int,
    bf16: bool,
    synced: bool = False,
    tick: Callable[[int], None],
) -> list[str]:
    """Greedy answers to `prompts`, in their order.

    Prompts go through the model in batches of about equal length, padded on the left, with a key-value cache.

    Args:
        stops: tokens that end an answer, beside the model's and the tokenizer's own.
        synced: all ranks answer at once, and none stops before the last has ended (the model is sharded).
        tick: called with the number of prompts answered so far.
    """
    device = next(model.parameters()).device
    config = _greedy(model, tokenizer, stops, max_new_tokens)
    model.eval()
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
    found = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        width = max(len(prompts[index]) for index in chosen)
        ids = torch.full((len(chosen), width), config.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for line, index in enumerate(chosen):
            ids[line, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[line, width - len(prompts[index]) :] = 1
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            out = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                synced_gpus=synced,
            )
        for index, text in zip(chosen, tokenizer.batch_decode(out[:, width:], skip_special_tokens=True), strict=True):
            found[index] = text.strip()
        WATCH.tick()
        tick(start + len(chosen))
    return found


def end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The tokens that end an answer: the model's and the tokenizer's own."""
    own = model.generation_config.eos_token_id
    ends = {own} if isinstance(own, int) else set(own or [])
    return ends | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())


def _greedy(model: nn.Module, tokenizer: PreTrainedTokenizerBase, stops: set[int], limit: int) -> GenerationConfig:
    ends = stops | end_tokens(model, tokenizer)
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=limit,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(ends) or None,
        bos_token_id=tokenizer.bos_token_id,
    )


def shared_answers(
    world: World, asked: Sequence[Question], answer: Callable[[list[list[int]]], list[str]]
) -> list[str]:
    """Every rank answers its share of the questions; all get all answers, in order.

    All shares are equally long, the last ones by repeating a question: with a sharded model, every rank must call it
    as often as the others.
    """
    if world.size == 1:
        return answer([question.ids for question in asked])
    each = -(-len(asked) // world.size)
    mine = [asked[(world.rank + turn * world.size) % len(asked)].ids for turn in range(each)]
    shares: list[list[str]] = [[] for _ in range(world.size)]
    torch.distributed.all_gather_object(shares, answer(mine))
    found = [""] * (each * world.size)
    for rank, share in enumerate(shares):
        found[rank :: world.size] = share
    return found[: len(asked)]


def scores(recipe: Recipe, given: Sequence[str], asked: Sequence[Question]) -> dict[str, float]:
    """The recipe's metric (`eval.metric`) of the answers, by its name; nothing if it has none."""
    if recipe.eval.metric == "none":
        return {}
    prompts, references = [question.prompt for question in asked], [question.reference for question in asked]
    return measure(recipe.eval.metric, prompts, given, references)


def questions_of(
    rows: Any, kind: Kind, tokenizer: PreTrainedTokenizerBase, limit: int
) -> tuple[list[Question], set[int]]:
    """The first `limit` prepared rows of any kind as questions; see `questions`.

    A preference's reference is the better answer; a prompt's is the row's `reference`, maybe empty.

    Args:
        rows: prepared rows; supervised ones with labels, see `trainers.data.with_labels`.
    """
    if kind == "supervised":
        return questions(rows, tokenizer, limit)
    found = []
    for row in rows.select(range(min(limit, len(rows)))):
        prompt = row.get("prompt") or tokenizer.decode(row["prompt_ids"], skip_special_tokens=True).strip()
        better = row.get("reference", row.get("chosen"))
        if better is None:
            better = tokenizer.decode(row["chosen_ids"], skip_special_tokens=True)
        found.append(Question(list(row["prompt_ids"]), prompt, better.strip()))
    ends = {row["chosen_ids"][-1] for row in rows.select(range(len(found)))} if kind == "preference" else set()
    return found, ends & set(tokenizer.all_special_ids)


@torch.no_grad()
def mean_loss(model: nn.Module, rows: Any, *, batch_size: int, bf16: bool, pad: int) -> float:
    """Mean cross-entropy of the trained tokens of rows with `input_ids` and `labels`.

    Args:
        batch_size: rows per forward pass; rows of about one length go together, padded on the right with `pad`.
    """
    model.eval()
    device = next(model.parameters()).device
    lines = sorted(((list(row["input_ids"]), list(row["labels"])) for row in rows), key=lambda line: len(line[0]))
    total, count = 0.0, 0
    for start in range(0, len(lines), batch_size):
        chosen = lines[start : start + batch_size]
        width = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in chosen], device=device)
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in chosen], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row, _ in chosen], device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        trained = labels[:, 1:] != -100
        losses = nn.functional.cross_entropy(logits[:, :-1][trained].float(), labels[:, 1:][trained], reduction="sum")
        total, count = total + losses.item(), count + int(trained.sum())
    return total / max(1, count)
