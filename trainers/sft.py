"""Supervised fine-tuning, top to bottom: recipe -> model -> data -> TRL's SFTTrainer -> train -> save -> prove."""

from __future__ import annotations

import gc
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blueprints.errors import EnvironmentFault, ExitCode, UsageError
from blueprints.progress import Progress
from blueprints.recipe import LoadedRecipe
from blueprints.recipe.schema import Recipe
from trainers.process import STOP, say, workspace, world
from trainers.quiet import quiet

quiet(main=world().main)

import torch  # noqa: E402 - its loggers are set up first
from transformers import PrinterCallback, TrainerCallback, TrainerState  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from trainers import evaluate, proof, prove, report  # noqa: E402
from trainers.artifact import save_artifact  # noqa: E402
from trainers.callbacks import FirstStepChecks, StepReports, StopOnRequest, duration  # noqa: E402
from trainers.checkpoint import Checkpoint, ResumableTrainer, newest_valid, write_json, write_text  # noqa: E402
from trainers.data import PreparedData, open_prepared, read_manifest, with_labels  # noqa: E402
from trainers.mask import for_terminal, mask_proof  # noqa: E402
from trainers.model import load_model, load_tokenizer, mixed_precision  # noqa: E402
from trainers.peft import adapter_config  # noqa: E402
from trainers.record import Record  # noqa: E402
from trainers.settings import Setting, assert_settings, check_world, isolation, model_settings  # noqa: E402


class Trainer(SFTTrainer, ResumableTrainer):
    """TRL's SFTTrainer with sealed checkpoints; the model card is written with the artifact instead."""

    def create_model_card(self, *_args: Any, **_kwargs: Any) -> None:
        return None


def train(loaded: LoadedRecipe, overrides: tuple[str, ...]) -> int:
    """Train what `loaded` says, on what the initializers left in the workspace; go on where an earlier start stopped.

    Returns:
        exit code 0; a stop on request leaves by `SystemExit(143)`.
    """
    recipe, here, where = loaded.recipe, world(), workspace()
    check_world(recipe, here)
    check_trackers(recipe)
    record, progress = Record(where.output, writes=here.main), Progress()
    manifest = read_manifest(where.dataset)
    if not record.open(recipe, loaded.source, overrides, manifest.get("prepared", {})):
        say(f"this run is complete already: {where.output}/run.json. Nothing to do.")
        return 0
    with record.session():
        args = sft_config(recipe, where.output)
        tokenizer = load_tokenizer(where.model, recipe)
        model = load_model(where.model, recipe, args.device)
        data = open_prepared(where.dataset, recipe, model.get_input_embeddings().weight.shape[0])
        rows = with_labels(data.train)
        held_out = (
            with_labels(data.eval).select(range(min(len(data.eval), recipe.eval.max_rows))) if data.eval else None
        )
        reports = StepReports(where.output / "metrics.jsonl", progress, main=here.main)
        stop = StopOnRequest(here, args.device)
        with refusals():
            trainer = Trainer(
                model=model,
                args=args,
                train_dataset=rows,
                eval_dataset=held_out,
                processing_class=tokenizer,
                peft_config=adapter_config(recipe.lora, model) if recipe.lora else None,
                callbacks=[reports, stop, FirstStepChecks(here)],
            )
        trainer.remove_callback(PrinterCallback)
        trainer.log_every, trainer.keep, stop.trainer = (
            recipe.training.logging_steps,
            recipe.training.save_total_limit,
            trainer,
        )

        checkpoint = resume_point(where.output, trainer)
        settings = effective_settings(trainer, recipe, data, rows, checkpoint)
        masks = mask_proof(rows, tokenizer)
        source = read_manifest(where.model)
        say("\n".join(["Effective settings", *map(str, settings), "", for_terminal(masks), ""]))
        record.note(
            effective=assert_settings(settings),
            model={key: value for key, value in source.items() if key != "files"},
            proofs=record.data["proofs"] | {"mask": masks},
        )
        measures = Measures(trainer, recipe, tokenizer, held_out, where.output, progress)
        trainer.add_callback(BeforeStepOne(measures, reports))
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
        record.measure(**training_metrics(trainer))
        if stop.stopped:
            say(
                f"stopped on request at step {trainer.state.global_step}: run the same command again to go on from there"
            )
            raise SystemExit(int(ExitCode.TERMINATED))
        STOP.at_once()

        proofs = proof.Proofs(where.output)
        if here.main:
            artifact = save_artifact(trainer.model, tokenizer, recipe, source, where.output)
            say(f"saved {artifact}")
            expect_proofs(proofs, trainer, recipe, data)
            if args.device.type == "cpu":
                proofs.start()  # imports and loads while the evaluation runs; a GPU has no memory to spare for it
        measures.take("after")
        record.measure(**measures.summary())
        if here.main:
            progress.update("prove", message="a fresh process reloads the artifact")
            free_memory(trainer)
            record.note(proofs=record.data["proofs"] | finish_proofs(proofs), artifacts=artifacts(where.output))
            progress.update("report")
            say(f"report: {report.write(record.closed('complete'), where.output, loaded.origins)}")
        trainer.accelerator.wait_for_everyone()
    if here.main:
        say(outcome(record))
        progress.update("done", force=True)
    return 0


@contextmanager
def refusals() -> Iterator[None]:
    """What TRL and PEFT refuse to combine, as the recipe's fault.

    Raises:
        UsageError: they do.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(
            f"this model and these settings do not go together: {' '.join(str(error).split())}",
            where="recipe",
            todo="change the settings it names",
        ) from error


def sft_config(recipe: Recipe, output: Path) -> SFTConfig:
    """TRL's settings, every one that matters said by the recipe and none left to a default that surprises."""
    training, options = recipe.training, recipe.sft
    assert options is not None
    on_cpu = recipe.resources.gpu == 0
    device = torch.device("cpu" if on_cpu else "cuda")
    return SFTConfig(
        output_dir=str(output),
        use_cpu=on_cpu,
        bf16=mixed_precision(recipe, device),
        fp16=False,
        per_device_train_batch_size=training.per_device_train_batch_size,
        per_device_eval_batch_size=training.per_device_eval_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        activation_checkpointing=training.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if training.gradient_checkpointing else None,
        learning_rate=training.learning_rate,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps or -1,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        optim=training.optim,
        neftune_noise_alpha=training.neftune_noise_alpha,
        seed=training.seed,
        data_seed=training.data_seed,
        max_length=training.max_length,
        packing=options.packing,
        eval_packing=False,
        loss_type=options.loss_type,
        completion_only_loss=False,  # the rows' labels say which tokens are trained
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        logging_steps=1,  # ResumableTrainer makes a line of `training.logging_steps` of them
        logging_nan_inf_filter=False,
        eval_strategy="steps" if training.eval_steps else "no",
        eval_steps=training.eval_steps,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=training.save_steps,
        save_total_limit=None,  # older checkpoints go when the newer one is sealed, not before
        report_to=list(training.report_to) or "none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu,
        ddp_backend=("gloo" if on_cpu else "nccl") if world().by_torchrun else None,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
    )


def check_trackers(recipe: Recipe) -> None:
    """Every tracker of the recipe is installed.

    Raises:
        EnvironmentFault: one is not.
    """
    for name in recipe.training.report_to:
        if importlib.util.find_spec(name) is None:
            raise EnvironmentFault(
                f"the tracker {name} is not installed", where="training.report_to", todo=f"pip install {name}"
            )


def resume_point(output: Path, trainer: Trainer) -> Checkpoint | None:
    """The checkpoint to go on from: rank 0 looks, all ranks agree."""
    found: list[Any] = [None]
    if world().main:
        checkpoint, passed = newest_valid(output)
        for line in passed:
            say(line)
        found = [checkpoint]
    if world().size > 1:
        torch.distributed.broadcast_object_list(found)
    checkpoint = found[0]
    if checkpoint is not None:
        trainer.restore(checkpoint.state)
        say(f"going on from {checkpoint.path.name}")
    return checkpoint


def effective_settings(
    trainer: Trainer, recipe: Recipe, data: PreparedData, rows: Any, checkpoint: Checkpoint | None
) -> list[Setting]:
    """The block that is asserted and printed before step 1."""
    args, here = trainer.args, world()
    asked = (recipe.resources.num_proc_per_node or 1) * recipe.resources.num_nodes
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * here.size
    shares = -(-len(rows) // (args.per_device_train_batch_size * here.size))
    per_epoch = max(1, -(-shares // args.gradient_accumulation_steps))
    steps = args.max_steps if args.max_steps > 0 else -(-int(per_epoch * args.num_train_epochs * 1000) // 1000)
    counts = data.counts("train")
    lines = [
        Setting("world size", str(asked), str(trainer.accelerator.num_processes), trainer.accelerator.num_processes == asked),
        *model_settings(trainer.model, recipe, args.device, args.bf16),
        Setting("gradient checkpointing", "", "on" if args.activation_checkpointing else "off"),
        Setting("NEFTune noise", "", f"{args.neftune_noise_alpha or 'off'}"),
        Setting("packing", "on" if recipe.sft and recipe.sft.packing else "off", "on" if data.packed else "off",
                bool(recipe.sft and recipe.sft.packing) == data.packed),
    ]  # fmt: skip
    if data.packed:
        row = next((row for row in rows if len(row["seq_lengths"]) > 1), rows[0])
        seen = isolation(trainer.model, row["input_ids"], row["seq_lengths"], args.device, args.bf16)
        lines.append(
            Setting("packing isolation", "", f"measured on {seen['documents']} documents: logits differ by "
                    f"{seen['difference']:.1e} from the documents alone, leak {seen['leak']:.1e}")
        )  # fmt: skip
    return [
        *lines,
        Setting("optimizer", recipe.training.optim, str(args.optim.value), recipe.training.optim == args.optim.value),
        Setting("learning rate", "", learning_rate(args, steps)),
        Setting("effective batch", "", f"{batch} rows ({args.per_device_train_batch_size} per process × "
                f"{args.gradient_accumulation_steps} accumulated × {here.size} processes)"),
        Setting("steps", "", f"{steps} ({per_epoch} per epoch)"),
        Setting("tokens per epoch", "", f"{counts['tokens']:,}, {counts['trained_tokens']:,} of them trained"),
        Setting("rows", "", f"{counts['rows']:,} training in {len(rows):,} sequences, "
                f"{len(data.eval) if data.eval else 0:,} held out"),
        Setting("seed", "", f"{args.seed}, data {args.data_seed}"),
        Setting("resumed from", "", checkpoint.path.name if checkpoint else "nothing: first start"),
    ]  # fmt: skip


def learning_rate(args: SFTConfig, steps: int) -> str:
    """Peak, shape and warm-up of the learning rate as they will be."""
    shape, warmup = args.lr_scheduler_type.value, args.get_warmup_steps(steps)
    if shape == "constant" or not warmup:
        return f"{args.learning_rate:g}, {shape}, no warm-up"
    short = f": the run ends after {steps}, below this rate" if warmup >= steps else ""
    return f"{args.learning_rate:g}, {shape}, {warmup} warm-up steps{short}"


class Measures:
    """Held-out loss and answers, before training and after; those from before are kept over restarts."""

    def __init__(
        self, trainer: Trainer, recipe: Recipe, tokenizer: Any, held_out: Any, output: Path, progress: Progress
    ) -> None:
        self.trainer, self.recipe, self.tokenizer, self.held_out = trainer, recipe, tokenizer, held_out
        self.output, self.progress = output, progress
        self.path = output / "eval.json"
        self.found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        wanted = len(held_out) if held_out is not None and recipe.eval.metric != "none" else recipe.eval.samples
        self.asked, self.stops = (
            evaluate.questions(held_out, tokenizer, wanted) if held_out is not None else ([], set())
        )

    def take(self, when: str) -> None:
        """Measure, unless an earlier start of this run has: what is trained meanwhile cannot be measured again."""
        if self.held_out is None or when in self.found:
            return
        label = "before training" if when == "before" else "after training"
        self.progress.update("evaluate", 0, len(self.asked), unit="rows", message=label)
        loss = self.trainer.evaluate()["eval_loss"]
        given = evaluate.shared_answers(world(), self.asked, self._answer)
        self.found[when] = {"loss": loss, "rows": len(self.held_out), "answers": given}
        text = f"{label}: held-out loss {loss:.4f} ({len(self.held_out)} rows)"
        if self.recipe.eval.metric == "exact_match":
            self.found[when]["exact_match"] = evaluate.exact_match(given, self.asked)
            text += f", exact match {self.found[when]['exact_match']:.1%}"
        say(text)
        if world().main:
            write_json(self.path, self.found)
            self._write_samples()
        self.trainer.accelerator.wait_for_everyone()

    def _answer(self, prompts: list[list[int]]) -> list[str]:
        with without_router_logits(self.trainer.model):
            return evaluate.answers(
                self.trainer.model,
                self.tokenizer,
                prompts,
                stops=self.stops,
                batch_size=self.recipe.training.per_device_eval_batch_size,
                max_new_tokens=self.recipe.eval.max_new_tokens,
                bf16=self.trainer.args.bf16,
                tick=lambda done: self.progress.update("evaluate", done, len(prompts), unit="rows"),
            )

    def _write_samples(self) -> None:
        lines = []
        for index, question in enumerate(self.asked[: self.recipe.eval.samples]):
            line = {"prompt": question.prompt, "reference": question.reference}
            line |= {when: self.found[when]["answers"][index] for when in ("before", "after") if when in self.found}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_text(self.output / "samples.jsonl", "".join(lines))

    def summary(self) -> dict[str, float]:
        """The measures by their names in `run.json`."""
        return {
            f"{name}_{when}": self.found[when][key]
            for when in ("before", "after")
            for name, key in (("eval_loss", "loss"), ("exact_match", "exact_match"))
            if when in self.found and key in self.found[when]
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
    """The measures from before training, taken once the model stands as it is trained.

    Not earlier: a model that Transformers has evaluated is never wrapped for data parallelism afterwards, and each
    process would train for itself.
    """

    def __init__(self, measures: Measures, reports: StepReports) -> None:
        self.measures, self.reports = measures, reports

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: all is prepared and loaded, no step is done."""
        trainer = self.measures.trainer
        # Whether it is measured or was measured by an earlier start, training must meet the same random numbers.
        with torch.random.fork_rng():
            self.measures.take("before")
        self.reports.begin(state.global_step, trainer._total_train_tokens)
        trainer.begin_clock()
        STOP.at_step_end()


def training_metrics(trainer: Trainer) -> dict[str, float | int]:
    """Numbers of the training loop, summed over restarts where that is what they mean."""
    spent = trainer.train_seconds
    tokens = trainer._total_train_tokens
    peak = torch.cuda.max_memory_allocated() if trainer.args.device.type == "cuda" else _resident_peak()
    return {
        "train_loss": trainer.losses.loss_sum / max(1, trainer.state.global_step),
        "steps": trainer.state.global_step,
        "tokens": tokens,
        "train_seconds": round(spent, 2),
        "tokens_per_second": round(tokens / max(1e-9, spent), 1),
        "peak_memory_bytes": peak,
    }


def _resident_peak() -> int:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def expect_proofs(proofs: proof.Proofs, trainer: Trainer, recipe: Recipe, data: PreparedData) -> None:
    """Keep what the live model computes on held-out rows, for the artifact and, if asked for, the merged model."""
    rows = data.eval if data.eval is not None else data.train
    ids = [row["input_ids"] for row in rows.select(range(min(len(rows), recipe.output.proof_rows)))]
    kind = "adapter" if recipe.lora else "model"
    proofs.expect(trainer.model, ids, expectation(kind, kind, trainer, recipe))
    if recipe.lora and recipe.output.merge:
        proofs.expect(trainer.model, ids, expectation("merged", "model", trainer, recipe))


def finish_proofs(proofs: proof.Proofs) -> dict[str, Any]:
    """Wait for the proofs and print their findings; see `proof.Proofs.finish` for the errors."""
    found = proofs.finish()
    for kind, finding in found.items():
        say(prove.summary(kind, finding))
    return found


def free_memory(trainer: Trainer) -> None:
    """Give a GPU's memory back: the fresh process needs room for the same model."""
    if trainer.args.device.type == "cuda":
        trainer.accelerator.free_memory()
        trainer.model = trainer.model_wrapped = trainer.optimizer = None
        gc.collect()
        torch.cuda.empty_cache()


def expectation(kind: str, artifact: str, trainer: Trainer, recipe: Recipe) -> proof.Expectation:
    """How an artifact is to be reloaded, and how close it must come."""
    model, args = trainer.model, trainer.args
    base = model.get_base_model() if recipe.lora else model
    quantised = base.config.quantization_config.to_dict() if recipe.lora and recipe.lora.quantize_base else None
    dtype = str(base.dtype).removeprefix("torch.")
    exact = dtype == "float32" and not args.bf16 and quantised is None
    tolerance = recipe.output.proof_tolerance
    # A merge rounds every weight once more, and its layers compute in another order.
    default = 1e-3 if exact else 0.2 if kind == "merged" else 0.1
    return proof.Expectation(
        kind=kind,
        artifact=artifact,
        base=str(workspace().model),
        load={
            "dtype": dtype,
            "attn_implementation": str(base.config._attn_implementation),
            "trust_remote_code": recipe.model.trust_remote_code,
            "quantization": quantised,
            "device": "cpu" if args.device.type == "cpu" else str(args.device),
            "bf16": args.bf16,
        },
        tolerance=default if tolerance is None else tolerance,
        scaled=tolerance is None,
    )


def artifacts(output: Path) -> dict[str, str]:
    """Paths of what the run leaves, by what they are."""
    found = {name: str(output / name) for name in ("adapter", "model") if (output / name).is_dir()}
    return found | {"report": str(output / "report.html"), "proof": str(output / "proof.json")}


def outcome(record: Record) -> str:
    """The last lines of the log: what came out."""
    metrics = record.data["metrics"]
    lines = [
        f"done in {duration(metrics['seconds'])}: {metrics['steps']} steps, train loss {metrics['train_loss']:.4f}"
    ]
    for name, key, style in (("held-out loss", "eval_loss", ".4f"), ("exact match", "exact_match", ".1%")):
        if f"{key}_before" in metrics and f"{key}_after" in metrics:
            lines.append(f"  {name:<14} {metrics[f'{key}_before']:{style}} -> {metrics[f'{key}_after']:{style}}")
    return "\n".join(lines)
