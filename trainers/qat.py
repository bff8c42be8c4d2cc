"""Quantisation-aware training, top to bottom: recipe -> model -> layers that round -> TRL's SFTTrainer -> train -> save ->
quantise -> prove.

To know what it was good for, the same training without rounding is done first (`qat.compare`), and held-out loss is
measured three times: of that plain model, of that plain model quantised, and of the model trained for being quantised.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig

from trainers import proof, sft
from trainers.callbacks import StepReports, StopOnRequest
from trainers.checkpoint import write_json
from trainers.data import first_ids, open_prepared, with_labels
from trainers.mask import mask_proof
from trainers.measures import Measures
from trainers.model import embedding_rows, load_model, load_tokenizer
from trainers.peft import with_adapter
from trainers.process import say
from trainers.quantize import quantised_layers, simulate, simulated, switch, torchao_config, unquantised, weight_type
from trainers.run import Run, expectation, refusals
from trainers.settings import Setting

PLAIN = "plain"
"""Directory in the output where the training without rounding has its checkpoints while it lasts."""
LOSSES = "plain.json"
"""File in the output with what it came to."""


def train(run: Run) -> None:
    """Quantisation-aware training on the prepared rows."""
    recipe, where, options = run.recipe, run.where, run.recipe.qat
    assert options is not None
    tokenizer = load_tokenizer(where.model, recipe)
    model = load_model(where.model, recipe, run.device)
    data = open_prepared(where.dataset, recipe, embedding_rows(model))
    rows = with_labels(data.train)
    held_out = with_labels(data.eval).select(range(min(len(data.eval), recipe.eval.max_rows))) if data.eval else None
    job = Job(run, tokenizer, rows, held_out, quantised_layers(model, options))
    masks = mask_proof(rows, tokenizer)
    plain = None
    if options.compare and held_out is not None:
        plain = kept_losses(run)
        if plain is None:
            plain = plain_losses(job, model, masks)
            model = load_model(where.model, recipe, run.device)  # that one is trained now
    trainer = job.trainer(run, model)
    job.round(trainer)
    measures = sft.held_out_measures(run, trainer, tokenizer, held_out, lambda: losses(trainer))
    run.fit(
        trainer,
        settings=lambda: [*sft.settings(trainer, run, data, rows), *settings(trainer, job)],
        masks=masks,
        measures=measures,
    )
    switch(trainer.model, on=False)  # what is saved first is not quantised
    run.finish(
        trainer,
        tokenizer,
        first_ids(data, recipe.output.proof_rows),
        further=lambda proofs, proved: expect_quantised(proofs, proved, trainer, job),
        conclude=lambda: conclude(run, measures, plain),
    )


@dataclass(frozen=True)
class Job:
    """What both trainings have in common.

    Attributes:
        layers: names of the layers that are quantised in the end.
    """

    run: Run
    tokenizer: PreTrainedTokenizerBase
    rows: Dataset
    held_out: Dataset | None
    layers: Sequence[str]

    def trainer(self, run: Run, model: PreTrainedModel) -> sft.Trainer:
        """TRL's trainer, writing where `run` writes."""
        with refusals():
            model, adapter = with_adapter(run, model)
            return sft.Trainer(
                model=model,
                args=config(run),
                train_dataset=self.rows,
                eval_dataset=self.held_out,
                processing_class=self.tokenizer,
                peft_config=adapter,
                callbacks=run.callbacks(),
            )

    def round(self, trainer: sft.Trainer) -> None:
        """Make the layers round from now on."""
        options = self.run.recipe.qat
        assert options is not None
        simulate(trainer.model, self.layers, torchao_config(options.base_config, options.group_size))


def config(run: Run) -> SFTConfig:
    """TRL's settings."""
    options = run.recipe.qat
    assert options is not None
    return SFTConfig(
        **run.arguments(), **sft.PREPARED, max_length=run.recipe.training.max_length, packing=options.packing
    )


def settings(trainer: sft.Trainer, job: Job) -> list[Setting]:
    """Lines of the effective settings on what rounds."""
    options = job.run.recipe.qat
    assert options is not None
    rounding = simulated(trainer.model)
    weights = sum(layer.in_features * layer.out_features for layer in rounding)
    activations = sum(layer.activation_fake_quantizer is not None for layer in rounding)
    bits = {str(layer.weight_fake_quantizer.config.dtype) for layer in rounding}
    asked, seen = len(job.layers), len(rounding)
    return [
        Setting("weights rounded to", str(weight_type(options.base_config)), ", ".join(bits), len(bits) == 1),
        Setting("layers that round", f"{asked}", f"{seen}", asked == seen),
        Setting("rounded weights", "", f"{weights:,} in groups of {options.group_size}; embeddings and head stay"),
        Setting(
            "rounded activations", "", f"of {activations} layers, to int8 for each token" if activations else "none"
        ),
        Setting(
            "compared with", "", "the same training without rounding" if options.compare and job.held_out else "nothing"
        ),
    ]


def losses(trainer: sft.Trainer) -> dict[str, float]:
    """Held-out loss with rounding, which is that of the quantised model, and without."""
    rounded = trainer.evaluate()["eval_loss"]
    with unquantised(trainer.model):
        return {"eval_loss": rounded, "eval_loss_unquantized": trainer.evaluate()["eval_loss"]}


@dataclass(frozen=True)
class PlainLosses:
    """Held-out losses of the model that was trained without rounding: as it is, and quantised after training."""

    full_precision: float
    post_training: float


def plain_losses(job: Job, model: PreTrainedModel, masks: dict[str, Any]) -> PlainLosses:
    """Train `model` without rounding, as a run of its own inside this one's output, and measure it both ways.

    Raises:
        SystemExit: 143 when it was asked to stop, after a checkpoint: the next start goes on from there.
    """
    run = job.run
    say("First the same training without rounding, to compare with (qat.compare=false leaves it out)")
    where = replace(run.where, name=f"{run.where.name}/{PLAIN}")
    where.output.mkdir(exist_ok=True)
    aside = replace(
        run,
        where=where,
        reports=StepReports(where.output / "metrics.jsonl", run.progress, main=run.world.main),
        stop=StopOnRequest(run.world, run.device),
    )
    trainer = job.trainer(aside, model)
    aside.fit(trainer, settings=[], masks=masks, measures=Measures(aside, trainer, job.tokenizer, rows=0))
    full = trainer.evaluate()["eval_loss"]
    job.round(trainer)
    found = PlainLosses(full, trainer.evaluate()["eval_loss"])
    trainer.accelerator.wait_for_everyone()
    if run.world.main:
        shutil.rmtree(where.output)  # its checkpoints have served
        write_json(run.where.output / LOSSES, {"run": identity(run)} | asdict(found))
    trainer.free_memory()
    return found


def kept_losses(run: Run) -> PlainLosses | None:
    """What an earlier start of this very run has found out about training without rounding."""
    path = run.where.output / LOSSES
    if not path.exists():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    return PlainLosses(**kept) if kept.pop("run") == identity(run) else None


def identity(run: Run) -> list[str]:
    """What makes two starts the same run: recipe and rows."""
    return [run.recipe.hash(), str(run.record.data["data"].get("fingerprint"))]


def expect_quantised(proofs: proof.Proofs, rows: Sequence[Sequence[int]], trainer: sft.Trainer, job: Job) -> None:
    """Have the quantised model made by the proof's fresh process, and held against the live model that rounds."""
    options = job.run.recipe.qat
    assert options is not None
    switch(trainer.model, on=True)  # from now on: what is measured and answered next is the quantised model
    what = expectation("quantized", "quantized", trainer, job.run.recipe)
    quantised = {"base_config": options.base_config, "group_size": options.group_size, "layers": list(job.layers)}
    proofs.expect(trainer.model, rows, replace(what, load={**what.load, "torchao": quantised}))


def conclude(run: Run, measures: Measures, plain: PlainLosses | None) -> None:
    """Put the three losses into the record, and say how much of what quantisation loses the training has won back."""
    if plain is None or "after" not in measures.found:
        return
    trained = measures.found["after"]["measures"]["eval_loss"]
    lost = plain.post_training - plain.full_precision
    recovered = (plain.post_training - trained) / lost if lost > 0 else None
    found = {"full_precision": plain.full_precision, "post_training": plain.post_training, "qat": trained}
    run.record.note(quantization=found | {"recovered": recovered})
    share = (
        f"{recovered:.0%} of what quantisation loses is won back"
        if recovered is not None
        else ("quantisation loses nothing here: there was nothing to win back")
    )
    say(
        f"held-out loss: full precision {plain.full_precision:.4f}, quantised after training {plain.post_training:.4f}, "
        f"quantised with QAT {trained:.4f}; {share}"
    )
