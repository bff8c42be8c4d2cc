"""Knowledge distillation, top to bottom: recipe -> student -> teacher -> rows -> trainer -> train -> save -> prove.

The loss is the generalised Jensen-Shannon divergence between teacher and student (arXiv:2306.13649) on the rows' answers
(off-policy), on answers that the student samples itself (on-policy), or on both in turn. TRL has the two halves in two
trainers: DistillationTrainer samples every batch and always holds a teacher, the experimental GKDTrainer mixes but leaves
the temperature out of its loss; neither takes stored scores. So the model, its adapters and the padding are those of TRL's
SFTTrainer, and the batches and the loss are this file's; tests hold both to TRL's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from blueprints.measures import label
from blueprints.recipe.schema import DistillOptions
from trainers import evaluate, scoring, sharding
from trainers.checkpoint import ResumableTrainer
from trainers.data import IGNORED, PreparedData, first_ids, open_prepared, with_labels
from trainers.divergence import TopK, distance, negative_log_likelihood
from trainers.mask import for_terminal, mask_proof
from trainers.measures import Measures, without_router_logits
from trainers.model import embedding_rows, load_model, load_tokenizer
from trainers.peft import with_adapter
from trainers.process import say, world
from trainers.run import Run, refusals, schedule_settings
from trainers.scoring import (
    Stored,
    labels_at,
    load_teacher,
    logits_at,
    open_stored,
    padded,
    plain,
    said,
    vocabulary,
)
from trainers.settings import Setting
from trainers.sft import PREPARED
from trainers.watch import WATCH

STORED = ("top_ids", "top_log_probs", "rest")
SMALLEST_GAP = 1e-3
"""Difference of student and teacher, in nats or as a share, below which a part of it means nothing."""
CUT_BATCHES = 20
"""Sampled batches in a row without an answer that ends, after which there is a warning."""
ALIKE = 1e-6
"""KL divergence, in nats per token, below which the student already does what the teacher does."""


def train(run: Run) -> None:
    """Distil a teacher into the model, on the prepared rows."""
    recipe, where = run.recipe, run.where
    options = recipe.distill
    assert options is not None
    args = config(run)
    tokenizer = load_tokenizer(where.model, recipe)
    student = load_model(where.model, recipe, args.device)
    with sharding.loaded_whole(args):
        live = options.teacher is not None and options.teacher_top_k is None
        teacher = load_teacher(where, recipe, args.device) if live else None
    size = vocabulary(student, teacher or student)
    data = open_prepared(where.dataset, recipe, size)
    stored = open_stored(where, recipe, data) if options.teacher_top_k else None
    rows = with_labels(joined(data.train, stored.train if stored else None))
    stops = end_tokens(rows, tokenizer)
    held_out = answered(held_out_rows(run, data, stored), teacher, tokenizer, run, stops, size)
    with refusals():
        student, adapter = with_adapter(run, student)
        trainer = Trainer(
            run=run,
            teacher=teacher,
            vocabulary=stored.vocabulary if stored else size,
            stops=stops,
            model=student,
            args=args,
            data_collator=Collator(tokenizer.pad_token_id),
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=run.callbacks(),
        )
    measures = Gap(run, trainer, tokenizer, held_out, stored)
    run.fit(
        trainer,
        settings=lambda: settings(trainer, data, stored, measures.teacher),
        masks=masks(trainer, rows),
        measures=measures,
    )
    run.finish(trainer, tokenizer, first_ids(data, recipe.output.proof_rows))


def config(run: Run) -> SFTConfig:
    """TRL's settings."""
    return SFTConfig(
        **run.arguments(),
        **PREPARED,
        max_length=run.recipe.training.max_length,
        router_aux_loss_coef=0.0,  # the teacher is what a mixture of experts is held to, as every other model
    )


class Trainer(SFTTrainer, ResumableTrainer):
    """TRL's SFTTrainer with the batches and the loss of distillation.

    Args:
        run: the run.
        teacher: the teacher; None if its scores are stored in the rows, or the rows are its text.
        vocabulary: tokens over which both are compared.
        stops: tokens that end an answer, beside the model's own.
        others: SFTTrainer's.
    """

    def __init__(
        self,
        *,
        run: Run,
        teacher: PreTrainedModel | None,
        vocabulary: int,
        stops: set[int],
        **others: Any,
    ) -> None:
        super().__init__(**others)
        options = run.recipe.distill
        assert options is not None
        self.run, self.options, self.teacher, self.vocabulary, self.stops = run, options, teacher, vocabulary, stops
        self.sums = torch.zeros(4, dtype=torch.float64)
        """Held out: KL to the teacher, negative log-likelihood, positions of the same likeliest token, positions."""
        self._sampled_before, self._cut_batches = False, 0

    def create_model_card(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def free_memory(self) -> None:
        """Let go of the teacher too."""
        self.teacher = None
        super().free_memory()

    # -- batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Any]:
        """The micro-batches of one optimizer step, and the number of their trained tokens over all processes."""
        rows, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [self.answered(batch, index) for index, batch in enumerate(rows)]
        return batches, self._get_num_items_in_batch(batches, device)

    def answered(self, batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        """The batch with the rows' answers, or with answers to its prompts, as it falls to this micro-step.

        What is drawn and sampled depends on seed, step and rank alone: a run that was interrupted samples the same.
        """
        options, source = self.options, f"{self.args.seed}/{self.state.global_step}/{index}"
        writer = self.teacher
        if not options.seq_kd:
            sampled = random.Random(source).random() < options.lmbda
            self._metrics["train"]["on_policy"].append(float(sampled))
            writer = self.language_model if sampled else None
        if writer is None:
            return batch
        prompts = [
            row[: int(length)].tolist() for row, length in zip(batch["input_ids"], batch["prompt_lengths"], strict=True)
        ]
        seed = random.Random(f"{source}/{world().rank}").getrandbits(32)
        generation = generation_config(writer, self.processing_class, self.stops, options, self.vocabulary)
        own = writer is not self.teacher
        answers = generate(
            writer,
            self.processing_class,
            prompts,
            generation,
            seed=seed,
            bf16=own and self.args.bf16,
            synced=own and sharding.synced(self.run.strategy),
        )
        rows = [
            {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        self._note_sampled(rows, answers, generation)
        return {name: value.to(self.args.device) for name, value in padded(rows, generation.pad_token_id).items()}

    def _note_sampled(self, rows: list[dict[str, Any]], answers: list[list[int]], generation: GenerationConfig) -> None:
        ends = set(generation.eos_token_id or [])
        cut = [answer[-1] not in ends for answer in answers]
        self._cut_batches = self._cut_batches + 1 if all(cut) else 0
        if self._cut_batches == CUT_BATCHES:
            say(
                f"warning: all answers of {CUT_BATCHES} sampled batches ran into distill.max_completion_length="
                f"{generation.max_new_tokens}: the student does not learn to end. Raise it, or lower the share of such "
                "batches (distill.lmbda) until the student has learned to end from the rows"
            )
        self._metrics["train"]["completion_length"].append(sum(map(len, answers)) / len(answers))
        self._metrics["train"]["completions_cut"].append(sum(cut) / len(cut))
        if not self._sampled_before:
            self._sampled_before = True
            proofs = self.run.record.data["proofs"]
            proof = mask_proof(rows, self.processing_class)
            say(f"The first batch of sampled answers. {for_terminal(proof)}")
            known = proofs.get("mask", {"rows": []})
            self.run.record.note(proofs=proofs | {"mask": known | {"rows": known["rows"] + proof["rows"]}})

    # -- loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean divergence from the teacher over the trained tokens; of `seq_kd` the negative log-likelihood."""
        if self.options.seq_kd:
            given = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
            return super().compute_loss(model, given, return_outputs, num_items_in_batch)
        logits = logits_at(model, inputs, self.vocabulary)
        target = self.target(inputs)
        per_token, forward, same = distance(
            logits, target, beta=self.options.beta, temperature=self.options.temperature
        )
        count = per_token.numel() if num_items_in_batch is None else num_items_in_batch
        loss = per_token.sum() / torch.as_tensor(count, device=per_token.device).clamp(min=1)
        if self.model.training:
            self._note(inputs, forward, same)
            # The count is of all processes, and their gradients are averaged.
            return loss * (self.accelerator.num_processes if num_items_in_batch is not None else 1)
        nll = negative_log_likelihood(logits, labels_at(inputs))
        found = torch.tensor([forward.sum(), nll.sum(), same.sum(), same.numel()], dtype=torch.float64)
        self.sums += self.accelerator.reduce(found.to(self.args.device)).cpu()
        return loss

    def target(self, inputs: Mapping[str, Tensor]) -> Tensor | TopK:
        """What the teacher says at the trained positions of a batch."""
        if self.teacher is None:
            return TopK(*(inputs[name] for name in STORED))
        with torch.no_grad():
            return logits_at(self.teacher, inputs, self.vocabulary)

    def _note(self, inputs: Mapping[str, Tensor], forward: Tensor, same: Tensor) -> None:
        """A micro-batch's numbers for the log, over all processes."""
        found = torch.stack([forward.sum(), same.sum(), torch.tensor(same.numel(), device=same.device)])
        found = torch.cat([found, inputs["attention_mask"].sum()[None]])
        kl, alike, count, tokens = self.accelerator.reduce(found.double()).tolist()
        self._total_train_tokens += int(tokens)
        metrics = self._metrics["train"]
        metrics["teacher_kl"].append(kl / max(1.0, count))
        metrics["teacher_agreement"].append(alike / max(1.0, count))
        metrics["num_tokens"] = [self._total_train_tokens]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Beside the held-out loss, what is measured with it."""
        if "eval_loss" in logs and not self.options.seq_kd:
            kl, nll, same, count = self.sums.tolist()
            self.sums.zero_()
            logs |= {
                "eval_teacher_kl": kl / count,
                "eval_nll": nll / count,
                "eval_teacher_agreement": same / count,
            }
        super().log(logs, start_time)


class Collator:
    """Pads rows as TRL does, and hands on where the prompts end and what the teacher's scores are.

    Args:
        pad: the padding token.
    """

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = padded(rows, self.pad)
        if "prompt_length" in rows[0]:
            batch["prompt_lengths"] = torch.tensor([row["prompt_length"] for row in rows])
        return batch | (scoring.stored_target(rows) if "rest" in rows[0] else {})


# --- answers -------------------------------------------------------------------------------------------------------


def generation_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stops: set[int],
    options: DistillOptions,
    size: int,
    *,
    greedy: bool = False,
) -> GenerationConfig:
    """How answers are written: by the whole distribution at the run's temperature, or greedily.

    Args:
        size: tokens that student and teacher have in common; no others are written.
    """
    ends = stops | evaluate.end_tokens(model, tokenizer)
    sampling = {} if greedy else {"temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        do_sample=not greedy,
        **sampling,
        max_new_tokens=options.max_completion_length,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(ends) or None,
        suppress_tokens=list(range(size, embedding_rows(plain(model)))) or None,
    )


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    generation: GenerationConfig,
    *,
    seed: int = 0,
    bf16: bool = False,
    synced: bool = False,
) -> list[list[int]]:
    """Answers to `prompts`, each to its end token or to the limit, with a key-value cache and without dropout.

    Args:
        seed: of the sampling; the random numbers of training go on as if nothing had been sampled.
        bf16: compute in bfloat16 over weights of another type.
        synced: all ranks answer at once, and none stops before the last has ended (the model is sharded).
    """
    device = next(model.parameters()).device
    batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt").to(device)
    training = model.training
    model.eval()
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        generating_as(model, generation),
        without_router_logits(model),
        torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16),
    ):
        torch.manual_seed(seed)
        found = model.generate(**batch, generation_config=generation, synced_gpus=synced)
    WATCH.tick()
    model.train(training)
    ends = torch.tensor(generation.eos_token_id or [-1], device=device)
    answers = found[:, batch["input_ids"].shape[1] :]
    # Whatever comes after the first end token is padding.
    ended = torch.isin(answers, ends).long()
    kept = (ended.cumsum(1) - ended) == 0
    return [answer[keep].tolist() for answer, keep in zip(answers, kept, strict=True)]


@contextmanager
def generating_as(model: PreTrainedModel, generation: GenerationConfig) -> Iterator[None]:
    """Keep the model's own generation settings from filling in what `generation` leaves at Transformers' default."""
    holders = {id(holder): holder for holder in (model, plain(model))}.values()
    own = [holder.generation_config for holder in holders]
    for holder in holders:
        holder.generation_config = generation
    try:
        yield
    finally:
        for holder, config in zip(holders, own, strict=True):
            holder.generation_config = config


def end_tokens(rows: Dataset, tokenizer: PreTrainedTokenizerBase, count: int = 100) -> set[int]:
    """Special tokens that the rows' answers end with: a base model does not know them as its own."""
    special, found = set(tokenizer.all_special_ids), set()
    for row in rows.select(range(min(count, len(rows)))):
        trained = [label for label in row["labels"] if label >= 0]
        if trained and trained[-1] in special:
            found.add(trained[-1])
    return found


# --- rows ----------------------------------------------------------------------------------------------------------


def joined(rows: Dataset, scores: Dataset | None) -> Dataset:
    """Prepared rows with the teacher's stored scores beside them, if there are any."""
    return rows if scores is None else concatenate_datasets([rows, scores], axis=1)


def held_out_rows(run: Run, data: PreparedData, stored: Stored | None) -> Dataset | None:
    """The held-out rows that are measured on, with labels."""
    if data.eval is None:
        return None
    rows = data.eval.select(range(min(len(data.eval), run.recipe.eval.max_rows)))
    return with_labels(joined(rows, stored.eval if stored else None))


def answered(
    rows: Dataset | None,
    teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    stops: set[int],
    size: int,
) -> Dataset | None:
    """Held-out rows; those that are prompts alone with the teacher's greedy answers, which the student is to give."""
    if rows is None or teacher is None or any(label >= 0 for row in rows for label in row["labels"]):
        return rows
    options = run.recipe.distill
    assert options is not None
    given = [dict(row) for row in rows]
    generation = generation_config(teacher, tokenizer, stops, options, size, greedy=True)
    together = run.recipe.training.per_device_eval_batch_size
    for start in range(0, len(given), together):
        batch = given[start : start + together]
        answers = generate(teacher, tokenizer, [row["input_ids"] for row in batch], generation)
        for row, answer in zip(batch, answers, strict=True):
            row["labels"] = [IGNORED] * len(row["input_ids"]) + answer
            row["input_ids"] = row["input_ids"] + answer
    return Dataset.from_list(given)


# --- what is shown and measured ------------------------------------------------------------------------------------


def settings(
    trainer: Trainer, data: PreparedData, stored: Stored | None, teacher: Mapping[str, float]
) -> list[Setting]:
    """Lines of the effective settings on the teacher, the loss, the batches and the rows."""
    options, counts = trainer.options, data.counts("train")
    held_out = len(data.eval) if data.eval else 0
    size = embedding_rows(trainer.model)
    lines = [
        Setting("teacher", "", teacher_line(trainer, stored)),
        Setting("loss", "", loss_line(options)),
        Setting("answers", "", answers_line(options)),
        Setting("compared tokens", "", f"{trainer.vocabulary:,} (the student has {size:,})"),
    ]
    if teacher:
        lines.append(Setting("teacher on held-out rows", "", said(teacher)))
    return [
        *lines,
        *schedule_settings(trainer.args, len(data.train)),
        Setting("rows", "", f"{counts['rows']:,} training, {held_out:,} held out"),
        Setting(
            "tokens per epoch", "", f"{counts['tokens']:,}, {counts['trained_tokens']:,} of them the rows' answers"
        ),
    ]


def teacher_line(trainer: Trainer, stored: Stored | None) -> str:
    """Where the teacher is."""
    name = trainer.options.teacher
    if stored is not None:
        return f"{name}: {stored.manifest['top_k']:,} likeliest tokens and the rest, stored; the model is not loaded"
    if trainer.teacher is None:
        return "none: the rows are its text"
    count = trainer.teacher.num_parameters()
    kind = "4 bits" if trainer.options.teacher_quantize else str(trainer.teacher.dtype).removeprefix("torch.")
    return f"{name}: {count:,} parameters in {kind}, frozen, beside the student"


def loss_line(options: DistillOptions) -> str:
    """What is made small."""
    if options.seq_kd:
        return "negative log-likelihood of the teacher's text"
    name = {0.0: "forward KL(teacher || student)", 1.0: "reverse KL(student || teacher)"}.get(
        options.beta, f"generalised Jensen-Shannon divergence, beta {options.beta:g}"
    )
    return f"{name}, temperature {options.temperature:g}"


def answers_line(options: DistillOptions) -> str:
    """Whose answers the batches hold."""
    sampled = f"sampled at temperature {options.temperature:g}, at most {options.max_completion_length} tokens"
    if options.seq_kd:
        return f"the teacher's, {sampled}" if options.teacher else "the rows'"
    if options.lmbda == 0:
        return "the rows'"
    share = f"{options.lmbda:.0%} of the batches the student's own, " if options.lmbda < 1 else "the student's own, "
    return share + sampled + ("; the others the rows'" if options.lmbda < 1 else "")


def masks(trainer: Trainer, rows: Dataset) -> dict[str, Any]:
    """The mask proof of the rows' answers, where batches hold them; that of sampled ones follows at the first batch."""
    options = trainer.options
    if options.lmbda == 1 or (options.seq_kd and trainer.teacher is not None):
        return {"rows": [], "note": "sampled answers alone; they are shown when the first batch of them is there"}
    return mask_proof(rows, trainer.processing_class)


class Gap(Measures):
    """Held-out measures, and how much of the student's distance to the teacher is gone after training.

    Args:
        run, trainer, tokenizer: see `Measures`.
        held_out: the rows; None: nothing is measured.
        stored: the stored scores, which hold the teacher's measures; None: its live model is measured.
    """

    def __init__(
        self, run: Run, trainer: Trainer, tokenizer: Any, held_out: Dataset | None, stored: Stored | None
    ) -> None:
        recipe = run.recipe
        measured = recipe.eval.metric != "none"
        asked, stops = [], set()
        if held_out is not None:
            asked, stops = evaluate.questions(held_out, tokenizer, len(held_out) if measured else recipe.eval.samples)
        super().__init__(
            run,
            trainer,
            tokenizer,
            rows=len(held_out) if held_out is not None else 0,
            asked=asked,
            stops=stops,
            numbers=self._numbers,
            scores=(lambda given: evaluate.scores(recipe, given, asked)) if measured else None,
        )
        self.seq_kd = trainer.options.seq_kd
        if "teacher" not in self.found:
            self.found["teacher"] = stored.measures if stored else {}
            if trainer.teacher is not None:
                run.progress.update("evaluate", message="the teacher on held-out rows")
                self.found["teacher"] = scoring.held_out_measures(
                    trainer.teacher, tokenizer, recipe, held_out, trainer.vocabulary
                )
        self.teacher: dict[str, float] = self.found["teacher"]

    def _numbers(self) -> dict[str, float]:
        found = self.trainer.evaluate()
        if self.seq_kd:
            return {"eval_loss": found["eval_loss"], "nll": found["eval_loss"]}
        names = ("nll", "teacher_kl", "teacher_agreement")
        return {"eval_loss": found["eval_loss"]} | {name: found[f"eval_{name}"] for name in names}

    def take(self, when: str) -> None:
        """Measure; tell what follows from it."""
        super().take(when)
        if when not in self.found:
            return
        own = self.found[when]["measures"]
        if when == "before" and own.get("teacher_kl", 1.0) < ALIKE:
            say(
                f"warning: the model already computes what the teacher does (KL {own['teacher_kl']:.1e} nats per token): "
                "there is nothing to learn from it. Is distill.teacher another model than model.uri?"
            )
        name, teacher = self._name(), self.teacher.get(self._name())
        if teacher is None:
            return
        if when == "before" and (own[name] <= teacher if name == "nll" else own[name] >= teacher):
            say(
                f"warning: before training, the student's {label(name)[0]} is as good as the teacher's: no gap to close"
            )
        closed = self.summary().get("teacher_gap_closed")
        if when == "after" and closed is not None:
            say(f"teacher gap closed: {closed:.1%} of the {label(name)[0]}")

    def _name(self) -> str:
        """The measure by which student and teacher are compared: the recipe's metric, else the likelihood."""
        return next((name for name in self.teacher if name != "nll"), "nll")

    def summary(self) -> dict[str, float]:
        """The measures; `teacher_NAME`, the teacher's own; `teacher_gap_closed`, 1 where the student has reached it."""
        found = super().summary() | {f"teacher_{name}": value for name, value in self.teacher.items()}
        name = self._name()
        before, after, teacher = (found.get(key) for key in (f"{name}_before", f"{name}_after", f"teacher_{name}"))
        if before is not None and after is not None and teacher is not None and abs(teacher - before) > SMALLEST_GAP:
            found["teacher_gap_closed"] = (after - before) / (teacher - before)
        return found
