"""Direct preference optimisation, top to bottom: recipe -> model -> pairs -> TRL's DPOTrainer -> train -> save -> prove.

The reference, which the policy is pulled back to, is never a second model with LoRA: the adapter is switched off, or the
log-probabilities of the starting model are computed once, before step 1, and kept in the output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from trl import DPOConfig, DPOTrainer

from blueprints.recipe.schema import Recipe
from trainers import evaluate
from trainers.checkpoint import ResumableTrainer
from trainers.data import PreparedData, first_ids, open_prepared
from trainers.evaluate import Question
from trainers.mask import pair_proof
from trainers.measures import Measures
from trainers.model import elements, embedding_rows, load_model, load_tokenizer
from trainers.peft import with_adapter
from trainers.process import say, world
from trainers.run import Run, refusals, schedule_settings
from trainers.settings import Setting
from trainers.sharding import put_together

PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
"""TRL's columns for the reference's log-probability of each answer: sums over its tokens, in nats."""


class Trainer(DPOTrainer, ResumableTrainer):
    """TRL's DPOTrainer on rows that are tokenised already, with reference values that survive a restart.

    Args:
        run: the run.
    """

    def __init__(self, run: Run, **settings: Any) -> None:
        self.run = run
        super().__init__(**settings)

    def create_model_card(self, *_args: Any, **_kwargs: Any) -> None:
        """The card is written with the artifact instead."""

    def _prepare_dataset(self, dataset: Dataset, *_args: Any, **_kwargs: Any) -> Dataset:
        # TRL would tokenise the texts again, by its own rules, and cut what is too long.
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        # TRL would keep them beside the rows, which belong to another step, and compute them again after a restart.
        values = self._uniform(dataset) if self.run.recipe.dpo.reference_free else self._kept(dataset, name, batch_size)
        for index, column in enumerate(REFERENCE):
            dataset = dataset.add_column(column, values[:, index].tolist())
        return dataset

    def _uniform(self, dataset: Dataset) -> torch.Tensor:
        """A reference to which all answers are equally likely: log-ratios are the policy's own log-probabilities."""
        return torch.zeros(len(dataset), 2)

    def _kept(self, dataset: Dataset, name: str, batch_size: int) -> torch.Tensor:
        """The reference's log-probabilities: those an earlier start of this run computed, or computed now."""
        path = self.run.where.output / f"reference-{name}.safetensors"
        key = {"recipe": self.run.recipe.hash(), "rows": str(self.run.record.data["data"].get("fingerprint"))}
        found = read_reference(path, key, len(dataset))
        if found is None:
            say(f"computing the reference's log-probabilities of {len(dataset):,} {name} rows")
            with put_together(self.model):
                found = self.log_probs(dataset, batch_size, reference=True)
            if world().main:
                write_reference(path, key, found)
        return found

    @torch.no_grad()
    def log_probs(self, rows: Dataset, batch_size: int, *, reference: bool) -> torch.Tensor:
        """Log-probabilities of both answers of each row, in nats: of the policy, or of the reference.

        Every process does its share; all get all, in order, as float32 of shape (rows, 2).

        Args:
            reference: of the starting model. An adapter that is part of it (PiSSA, OLoRA, `lora.from`) is left on:
                this is called before step 1.
        """
        here, batches = world(), range(0, len(rows), batch_size)
        switched_off = reference and not starts_elsewhere(self.run.recipe)
        self.model.eval()
        mine: dict[int, list[list[float]]] = {}
        for turn in range(0, len(batches), here.size):
            # A process without a batch of its own repeats the last: sharded models need all of them at once.
            start = batches[min(turn + here.rank, len(batches) - 1)]
            mine[start] = self._pair_log_probs(rows[start : start + batch_size], switched_off=switched_off)
            self.run.progress.update("evaluate", min(start + batch_size, len(rows)), len(rows), unit="rows")
        shares: list[Any] = [mine]
        if here.size > 1:
            shares = [None] * here.size
            torch.distributed.all_gather_object(shares, mine)
        merged = {start: values for share in shares for start, values in share.items()}
        return torch.tensor([pair for start in batches for pair in merged[start]])

    def _pair_log_probs(self, columns: Mapping[str, list[Any]], *, switched_off: bool) -> list[list[float]]:
        examples = [
            dict(zip(PAIR, values, strict=True)) for values in zip(*(columns[name] for name in PAIR), strict=True)
        ]
        batch = {name: tensor.to(self.args.device) for name, tensor in self.data_collator(examples).items()}
        if switched_off:
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, batch)
        else:
            labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
            with self.accelerator.autocast():
                out = self.model(**batch, labels=labels, use_cache=False, fused_lm_head=True)
            chosen, rejected = out.log_probs.sum(dim=1).chunk(2)
        return torch.stack([chosen, rejected], dim=1).float().tolist()


def train(run: Run) -> None:
    """Direct preference optimisation on the prepared pairs."""
    recipe, where = run.recipe, run.where
    args = config(run)
    tokenizer = load_tokenizer(where.model, recipe)
    model = load_model(where.model, recipe, args.device)
    data = open_prepared(where.dataset, recipe, embedding_rows(model))
    held_out = data.eval.select(range(min(len(data.eval), recipe.eval.max_rows))) if data.eval else None
    copy = recipe.lora is None and not args.precompute_ref_log_probs
    with refusals():
        model, adapter = with_adapter(run, model)
        trainer = Trainer(
            run,
            model=model,
            ref_model=load_model(where.model, recipe, args.device) if copy else None,
            args=args,
            train_dataset=data.train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=run.callbacks(),
        )
    if isinstance(trainer.model, PeftModel) and "ref" in trainer.model.peft_config:
        # TRL's frozen copy of the adapter of `lora.from`: the reference's log-probabilities are known without it.
        trainer.model.delete_adapter("ref")
    run.fit(
        trainer,
        settings=settings(trainer, run, data),
        masks=pair_proof(data.train, tokenizer, both=args.loss_type != ["sft"]),
        measures=held_out_measures(run, trainer, tokenizer, held_out),
    )
    run.finish(trainer, tokenizer, first_ids(data, recipe.output.proof_rows))


def config(run: Run) -> DPOConfig:
    """TRL's settings."""
    options = run.recipe.dpo
    assert options is not None
    return DPOConfig(
        **run.arguments(),
        loss_type=options.loss_type,
        beta=options.beta,
        label_smoothing=options.label_smoothing,
        precompute_ref_log_probs=options.reference_free or bool(options.precompute_ref_log_probs),
        max_length=None,  # the initializer has applied training.max_length
        pad_to_multiple_of=None,
        disable_dropout=True,
        prediction_loss_only=True,
    )


def starts_elsewhere(recipe: Recipe) -> bool:
    """Whether the model with its adapter switched off is not the model that training starts from."""
    lora = recipe.lora
    return lora is not None and (lora.from_uri is not None or lora.init_lora_weights in ("pissa", "olora"))


def settings(trainer: Trainer, run: Run, data: PreparedData) -> list[Setting]:
    """Lines of the effective settings on loss, reference, rows, batch and steps."""
    options, counts = run.recipe.dpo, data.counts("train")
    assert options is not None
    kinds = ", ".join(trainer.loss_types)
    smoothing = f", label smoothing {trainer.label_smoothing:g}" if trainer.label_smoothing else ""
    held_out = len(data.eval) if data.eval else 0
    return [
        Setting("loss", options.loss_type, kinds, kinds == options.loss_type),
        Setting("beta", f"{options.beta:g}", f"{trainer.beta:g}{smoothing}", trainer.beta == options.beta),
        reference_setting(trainer, run.recipe),
        *schedule_settings(trainer.args, len(data.train)),
        Setting("rows", "", f"{counts['rows']:,} training pairs, {held_out:,} held out"),
    ]


def reference_setting(trainer: Trainer, recipe: Recipe) -> Setting:
    """What the policy is compared with, and whether it costs a second model."""
    options = recipe.dpo
    assert options is not None
    if options.reference_free:
        seen = "none: all answers equally likely"
    elif trainer.precompute_ref_logps:
        seen = "log-probabilities of the starting model, computed before step 1"
    elif trainer.ref_model is None:
        seen = "the base, with the adapter switched off"
    else:
        size = sum(map(elements, trainer.ref_model.parameters()))
        seen = f"a second model of {size:,} parameters in memory"
    second = recipe.lora is None and not trainer.precompute_ref_logps
    return Setting("reference", "", seen, second == (trainer.ref_model is not None))


def held_out_measures(run: Run, trainer: Trainer, tokenizer: Any, held_out: Dataset | None) -> Measures:
    """Held-out loss, preference accuracy, reward margin, answers and the recipe's metric on them."""
    if held_out is None:
        return Measures(run, trainer, tokenizer, rows=0)
    recipe = run.recipe
    wanted = len(held_out) if recipe.eval.metric != "none" else recipe.eval.samples
    asked = [
        Question(list(row["prompt_ids"]), row["prompt"], row["chosen"])
        for row in held_out.select(range(min(wanted, len(held_out))))
    ]
    return Measures(
        run,
        trainer,
        tokenizer,
        rows=len(held_out),
        asked=asked,
        stops={row["chosen_ids"][-1] for row in held_out} & set(tokenizer.all_special_ids),
        numbers=lambda: numbers(trainer, held_out),
        scores=None if recipe.eval.metric == "none" else lambda given: evaluate.scores(recipe, given, asked),
    )


def numbers(trainer: Trainer, held_out: Dataset) -> dict[str, float]:
    """Held-out loss; the margin of the implicit reward between the answers; the preference accuracy.

    Preference accuracy is the share of rows whose chosen answer is more likely to the model than the rejected one, each
    as a whole with its end token, without regard to the reference ("ranking accuracy", arXiv:2405.19534).
    """
    found = trainer.evaluate()
    chosen, rejected = trainer.log_probs(held_out, trainer.args.per_device_eval_batch_size, reference=False).unbind(1)
    return {
        "eval_loss": found["eval_loss"],
        "preference_accuracy": (chosen > rejected).float().mean().item(),
        "reward_margin": found["eval_rewards/margins"],
    }


def read_reference(path: Path, key: Mapping[str, str], rows: int) -> torch.Tensor | None:
    """The reference's log-probabilities that an earlier start of the same run on the same rows has kept."""
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        if file.metadata() != {"key": json.dumps(key)}:
            return None
        found: torch.Tensor = file.get_tensor("log_probs")
    return found if len(found) == rows else None


def write_reference(path: Path, key: Mapping[str, str], values: torch.Tensor) -> None:
    """Keep the reference's log-probabilities, at once: a kill never leaves half of them."""
    temporary = path.with_name(f".{path.name}.tmp")
    save_file({"log_probs": values}, temporary, metadata={"key": json.dumps(key)})
    temporary.replace(path)
