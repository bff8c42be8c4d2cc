"""Supervised fine-tuning, top to bottom: recipe -> model -> data -> TRL's SFTTrainer -> train -> save -> prove."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trl import SFTConfig, SFTTrainer

from blueprints.recipe.rows import row_options
from trainers import evaluate
from trainers.checkpoint import ResumableTrainer
from trainers.data import PreparedData, first_ids, open_prepared, with_labels
from trainers.mask import mask_proof
from trainers.measures import Measures
from trainers.model import embedding_rows, load_model, load_tokenizer
from trainers.peft import with_adapter
from trainers.run import Run, refusals, schedule_settings
from trainers.settings import Setting, isolation

PREPARED: dict[str, Any] = {
    "eval_packing": False,
    "completion_only_loss": False,  # the rows' labels say which tokens are trained
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "prediction_loss_only": True,
    "average_tokens_across_devices": True,
}
"""TRL's settings for rows that come prepared."""


class Trainer(SFTTrainer, ResumableTrainer):
    """TRL's SFTTrainer with sealed checkpoints; the model card is written with the artifact instead."""

    def create_model_card(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def train(run: Run) -> None:
    """Supervised fine-tuning on the prepared rows."""
    recipe, where = run.recipe, run.where
    args = config(run)
    tokenizer = load_tokenizer(where.model, recipe)
    model = load_model(where.model, recipe, args.device)
    data = open_prepared(where.dataset, recipe, embedding_rows(model))
    rows = with_labels(data.train)
    held_out = with_labels(data.eval).select(range(min(len(data.eval), recipe.eval.max_rows))) if data.eval else None
    with refusals():
        model, adapter = with_adapter(run, model)
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=rows,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=run.callbacks(),
        )
    run.fit(
        trainer,
        settings=lambda: settings(trainer, run, data, rows),
        masks=mask_proof(rows, tokenizer),
        measures=held_out_measures(run, trainer, tokenizer, held_out),
    )
    run.finish(trainer, tokenizer, first_ids(data, recipe.output.proof_rows))


def config(run: Run) -> SFTConfig:
    """TRL's settings."""
    options = run.recipe.sft
    assert options is not None
    return SFTConfig(
        **run.arguments(),
        **PREPARED,
        max_length=run.recipe.training.max_length,
        packing=options.packing,
        loss_type=options.loss_type,
    )


def settings(trainer: Trainer, run: Run, data: PreparedData, rows: Any) -> list[Setting]:
    """Lines of the effective settings on rows, packing, batch and steps."""
    counts, args = data.counts("train"), trainer.args
    asked = bool(row_options(run.recipe)["packing"])
    lines = [Setting("packing", "on" if asked else "off", "on" if data.packed else "off", asked == data.packed)]
    if data.packed:
        row = next((row for row in rows if len(row["seq_lengths"]) > 1), rows[0])
        seen = isolation(trainer.model, row["input_ids"], row["seq_lengths"], args.device, args.bf16)
        text = (
            f"measured on {seen['documents']} documents: logits differ by {seen['difference']:.1e} from the documents "
            f"alone, leak {seen['leak']:.1e}"
        )
        lines.append(Setting("packing isolation", "", text))
    held_out = len(data.eval) if data.eval else 0
    return [
        *lines,
        *schedule_settings(args, len(rows)),
        Setting("tokens per epoch", "", f"{counts['tokens']:,}, {counts['trained_tokens']:,} of them trained"),
        Setting("rows", "", f"{counts['rows']:,} training in {len(rows):,} sequences, {held_out:,} held out"),
    ]


def held_out_measures(
    run: Run,
    trainer: ResumableTrainer,
    tokenizer: Any,
    held_out: Any,
    numbers: Callable[[], Mapping[str, float]] | None = None,
) -> Measures:
    """Held-out loss (or other `numbers`), answers, and the recipe's metric on them."""
    if held_out is None:
        return Measures(run, trainer, tokenizer, rows=0)
    recipe = run.recipe
    wanted = len(held_out) if recipe.eval.metric != "none" else recipe.eval.samples
    asked, stops = evaluate.questions(held_out, tokenizer, wanted)
    return Measures(
        run,
        trainer,
        tokenizer,
        rows=len(held_out),
        asked=asked,
        stops=stops,
        numbers=numbers or (lambda: {"eval_loss": trainer.evaluate()["eval_loss"]}),
        scores=None if recipe.eval.metric == "none" else lambda given: evaluate.scores(recipe, given, asked),
    )
