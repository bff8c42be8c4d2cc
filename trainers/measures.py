"""Held-out measures before training and after it: whatever a method measures, and the answers it gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState

from blueprints.measures import label
from trainers import evaluate
from trainers.checkpoint import ResumableTrainer, write_json, write_text
from trainers.evaluate import Question
from trainers.process import STOP, say, world
from trainers.sharding import synced

if TYPE_CHECKING:
    from trainers.run import Run

Numbers = Mapping[str, float]


class Measures:
    """What is measured on held-out rows before training and after it. Those from before are kept over restarts.

    Args:
        run: the run.
        trainer: holds the model that is measured.
        tokenizer: the model's.
        rows: how many held-out rows there are; 0: nothing is measured.
        asked: held-out prompts that get greedy answers, of at most `eval.max_new_tokens`.
        stops: tokens that end an answer, beside the model's own.
        numbers: measures that need no answers, such as `eval_loss`; called on all ranks.
        scores: measures of the answers, which it gets in the order of `asked`, such as `exact_match`; called on all
            ranks.
    """

    def __init__(
        self,
        run: Run,
        trainer: ResumableTrainer,
        tokenizer: Any,
        *,
        rows: int,
        asked: Sequence[Question] = (),
        stops: set[int] | None = None,
        numbers: Callable[[], Numbers] | None = None,
        scores: Callable[[Sequence[str]], Numbers] | None = None,
    ) -> None:
        self.run, self.trainer, self.tokenizer, self.rows = run, trainer, tokenizer, rows
        self.asked, self.stops, self.numbers, self.scores = asked, stops or set(), numbers, scores
        self.path: Path = run.where.output / "eval.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def take(self, when: str) -> None:
        """Measure, unless an earlier start of this run has: what is trained meanwhile cannot be measured again."""
        if not self.rows or when in self.found:
            return
        title = f"{when} training"
        numbers, given = self._measure(title)
        self.found[when] = {"rows": self.rows, "measures": numbers, "answers": given}
        shown = ", ".join("{} {:{}}".format(label(name)[0], value, label(name)[1]) for name, value in numbers.items())
        say(f"{title}: {shown} ({self.rows} rows)")
        if world().main:
            write_json(self.path, self.found)
            self._write_samples()
        self.trainer.accelerator.wait_for_everyone()

    def now(self) -> Numbers:
        """The measures of the model as it is in the middle of training."""
        return self._measure("in training")[0]

    def _measure(self, title: str) -> tuple[dict[str, float], list[str]]:
        """The measures, and the answers."""
        self.run.progress.update("evaluate", 0, len(self.asked), unit="rows", message=title)
        numbers: dict[str, float] = dict(self.numbers()) if self.numbers else {}
        given = evaluate.shared_answers(world(), self.asked, self._answer) if self.asked else []
        numbers |= self.scores(given) if self.scores and given else {}
        return numbers, given

    def _answer(self, prompts: list[list[int]]) -> list[str]:
        recipe = self.run.recipe
        with without_router_logits(self.trainer.language_model):
            return evaluate.answers(
                self.trainer.language_model,
                self.tokenizer,
                prompts,
                stops=self.stops,
                batch_size=recipe.training.per_device_eval_batch_size,
                max_new_tokens=recipe.eval.max_new_tokens,
                synced=synced(self.run.strategy),
                bf16=self.trainer.args.bf16,
                tick=lambda done: self.run.progress.update("evaluate", done, len(prompts), unit="rows"),
            )

    def _write_samples(self) -> None:
        lines = []
        for index, question in enumerate(self.asked[: self.run.recipe.eval.samples]):
            line = {"prompt": question.prompt, "reference": question.reference}
            line |= {when: self.found[when]["answers"][index] for when in ("before", "after") if when in self.found}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_text(self.run.where.output / "samples.jsonl", "".join(lines))

    def summary(self) -> dict[str, float]:
        """The measures by their names in `run.json`: `NAME_before`, `NAME_after`."""
        return {
            f"{name}_{when}": value
            for when in ("before", "after")
            if when in self.found
            for name, value in self.found[when]["measures"].items()
        }


@contextmanager
def without_router_logits(model: Any) -> Iterator[None]:
    """TRL makes mixture-of-experts models return their routers' logits, which generation with a cache cannot take."""
    config = model.config.get_text_config()
    on = bool(config.to_dict().get("output_router_logits"))
    if on:
        config.output_router_logits = False
    try:
        yield
    finally:
        if on:
            config.output_router_logits = True


class BeforeStepOne(TrainerCallback):
    """The effective settings and the measures from before training, taken once the model stands as it is trained.

    Not earlier: a model that Transformers has evaluated is never wrapped for data parallelism afterwards, and each
    process would train for itself.
    """

    def __init__(self, run: Run, trainer: ResumableTrainer, measures: Measures, settings: Callable[[], None]) -> None:
        self.run, self.trainer, self.measures, self.settings = run, trainer, measures, settings

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: all is prepared and loaded, no step is done."""
        # Whether it is measured or was measured by an earlier start, training must meet the same random numbers.
        with torch.random.fork_rng():
            self.settings()
            self.measures.take("before")
        self.run.reports.begin(state.global_step, self.trainer.tokens_seen)
        self.trainer.begin_clock()
        STOP.at_step_end()
