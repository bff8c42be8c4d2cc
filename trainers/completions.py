"""Sampled completions for people: `completions.jsonl`, and some of them in the log, with their rewards."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from trainers.checkpoint import write_text
from trainers.process import say
from trainers.rewards import Text, text_of

FILE = "completions.jsonl"
WIDTH = 160
"""Characters of a line where there is no terminal."""


@dataclass(frozen=True)
class Sampled:
    """One sampled completion.

    Attributes:
        step: the first optimizer step that is trained on it.
        prompt, completion: as text.
        rewards: by name; None where a reward does not apply.
        reward: their weighted sum.
        advantage: how much better it is than the others of its group; with PPO the mean over its tokens of how much
            better it became than was foreseen.
    """

    step: int
    prompt: str
    completion: str
    rewards: Mapping[str, float | None]
    reward: float | None
    advantage: float


class CompletionLog(TrainerCallback):
    """Writes batches of completions into a file and shows some at each log line; rank 0 alone.

    Args:
        path: the `completions.jsonl`.
        shown: completions at each log line.
        main: whether this is rank 0.
    """

    def __init__(self, path: Path, *, shown: int, main: bool) -> None:
        self.path, self.shown, self.main = path, shown, main
        self._new: list[Sampled] = []

    def add(self, batch: Sequence[Sampled]) -> None:
        """Take a batch: it is written now and shown with the next log line."""
        if self.main:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(map(_line, batch))
        self._new = list(batch)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: batches of steps after the checkpoint, written by a run that was killed, are taken back.

        The batch that was in use at the checkpoint stays: it is gone on with.
        """
        if self.main:
            kept = [each for each in read(self.path) if each.step <= state.global_step]
            write_text(self.path, "".join(map(_line, kept)))

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Transformers' event: a line is logged; the newest batch's best and worst completions go with it."""
        if not self._new or "loss" not in (logs or {}):
            return
        chosen = telling(self._new, self.shown)
        if chosen:
            say("\n".join(f"    {line_of(each, terminal_width())}" for each in chosen))
        self._new = []


def telling(batch: Sequence[Sampled], count: int) -> list[Sampled]:
    """`count` completions spread from the best to the worst by advantage."""
    ranked = sorted(batch, key=lambda each: -each.advantage)
    count = min(count, len(ranked))
    return [ranked[index * (len(ranked) - 1) // max(1, count - 1)] for index in range(count)]


def line_of(sampled: Sampled, width: int) -> str:
    """A completion on one line: reward, advantage, the end of its prompt, its beginning."""
    reward = "   n/a" if sampled.reward is None else f"{sampled.reward:6.2f}"
    head = f"reward {reward}  advantage {sampled.advantage:+.2f}  "
    room = max(40, width - len(head) - 8)
    completion = _cut(_one_line(sampled.completion), room * 2 // 3)
    prompt = _one_line(sampled.prompt)
    left = room - len(completion)
    prompt = prompt if len(prompt) <= left else f"…{prompt[-left + 1 :]}"
    return f"{head}{prompt} -> {completion or '(nothing)'}"


def terminal_width() -> int:
    """Characters of a line: the terminal's, or `WIDTH` in a log."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def _one_line(text: str) -> str:
    return text.strip().replace("\n", "⏎")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _line(each: Sampled) -> str:
    return json.dumps(asdict(each), ensure_ascii=False) + "\n"


def read(path: Path) -> list[Sampled]:
    """The lines of a `completions.jsonl`; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):  # texts may hold other line breaks
        try:
            found.append(Sampled(**json.loads(line)))
        except ValueError:
            break
    return found


def sampled(
    step: int,
    prompts: Sequence[Text],
    completions: Sequence[Text],
    rewards: Mapping[str, Sequence[float | None]],
    sums: Sequence[float | None],
    advantages: Sequence[float],
) -> list[Sampled]:
    """A batch's completions from its columns."""
    names = list(rewards)
    rows = zip(prompts, completions, zip(*rewards.values(), strict=True), sums, advantages, strict=True)
    return [
        Sampled(step, text_of(prompt), text_of(completion), dict(zip(names, given, strict=True)), total, advantage)
        for prompt, completion, given, total, advantage in rows
    ]
