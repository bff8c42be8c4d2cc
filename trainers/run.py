"""One training run: what every method shares before, around and after its trainer.

A method is a function of one argument, in the table of `trainers.__main__` or named as `package.module:function`:

    def train(run: Run) -> None:
        ...                                   # tokenizer, model, rows, trainer: the method's own
        run.fit(trainer, settings=..., masks=..., measures=...)
        run.finish(trainer, tokenizer, rows)
"""

from __future__ import annotations

import difflib
import gc
import importlib.util
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback, TrainingArguments

from blueprints.errors import EnvironmentFault, ExitCode, JobFailedError, UsageError
from blueprints.measures import measures as measured
from blueprints.progress import Progress
from blueprints.recipe import LoadedRecipe
from blueprints.recipe.schema import Recipe
from trainers import earlier_adapter, proof, prove, report, sharding
from trainers.adapter_state import save_without_embeddings
from trainers.artifact import save_artifact
from trainers.callbacks import FirstStepChecks, SignsOfLife, StepReports, StopOnRequest, duration
from trainers.checkpoint import Checkpoint, ResumableTrainer, newest_valid
from trainers.data import read_manifest
from trainers.mask import for_terminal
from trainers.measures import BeforeStepOne, Measures
from trainers.memory import check_installed
from trainers.model import embedding_rows, mixed_precision
from trainers.peft import complete_heads, taken_from_base
from trainers.process import STOP, Workspace, World, say, workspace, world
from trainers.record import Record
from trainers.settings import Setting, assert_settings, check_world, model_settings
from trainers.watch import WATCH

Method = Callable[["Run"], None]


@dataclass
class Run:
    """One run of one recipe, as a method's function gets it.

    Attributes:
        loaded: the recipe with where each value came from.
        recipe: the resolved recipe, with what an earlier adapter (`lora.from`) decides.
        world: this process among the others.
        where: the workspace's directories.
        record: the run's `run.json`.
        progress: the step's progress file.
        source: the manifest of the model.
        reports, stop: callbacks that `callbacks` gives to the trainer.
        measures: set by `fit`.
        start: set by `fit`: what the adapter has taken out of the base, see `trainers.peft.taken_from_base`.
    """

    loaded: LoadedRecipe
    recipe: Recipe
    world: World
    where: Workspace
    record: Record
    progress: Progress
    source: Mapping[str, Any]
    reports: StepReports
    stop: StopOnRequest
    measures: Measures | None = None
    start: Mapping[str, torch.Tensor] = field(default_factory=dict)
    finished: bool = False

    @property
    def strategy(self) -> str:
        """How the processes share the model: alone, ddp, fsdp, zero2 or zero3."""
        return sharding.chosen(self.recipe, self.world)

    @property
    def device(self) -> torch.device:
        """CPU where the recipe asks for no GPU."""
        return torch.device("cuda", self.world.local_rank) if self.recipe.resources.gpu else torch.device("cpu")

    def knobs(self, **defaults: Any) -> dict[str, Any]:
        """The recipe's block `custom`, for a method of one's own: its values over `defaults`, which name every knob.

        Raises:
            UsageError: a knob that is not among `defaults`, or a value of another type than its default.
        """
        given = dict(self.recipe.custom or {})
        for name, value in given.items():
            if name not in defaults:
                near = difflib.get_close_matches(name, defaults, 1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                known = ", ".join(defaults) or "none"
                problem = f"{self.recipe.method} has no knob {name!r}"
                raise UsageError(problem, where=f"custom.{name}", todo=f"{hint}Its knobs: {known}")
            wanted = type(defaults[name])
            fits = isinstance(value, int | float if wanted is float else wanted) or defaults[name] is None
            if not fits or (isinstance(value, bool) and wanted in (int, float)):
                problem = f"{value!r} is no {wanted.__name__}"
                raise UsageError(problem, where=f"custom.{name}", todo=f"write a value like {defaults[name]!r}")
        return defaults | given

    def callbacks(self) -> list[TrainerCallback]:
        """What every trainer must be given: reports, stopping on request, checks of the first step."""
        return [self.reports, self.stop, FirstStepChecks(self.world, self.recipe.training), SignsOfLife()]

    def arguments(self) -> dict[str, Any]:
        """Transformers' TrainingArguments that all methods share: every one that matters is said by the recipe, none
        left to a default that surprises."""
        training, on_cpu = self.recipe.training, self.recipe.resources.gpu == 0
        return {
            "output_dir": str(self.where.output),
            "use_cpu": on_cpu,
            "bf16": mixed_precision(self.recipe, self.device),
            "fp16": False,
            "per_device_train_batch_size": training.per_device_train_batch_size,
            "per_device_eval_batch_size": training.per_device_eval_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "activation_checkpointing": training.gradient_checkpointing,
            "activation_checkpointing_kwargs": {"use_reentrant": False} if training.gradient_checkpointing else None,
            "learning_rate": training.learning_rate,
            "num_train_epochs": training.num_train_epochs,
            "max_steps": training.max_steps or -1,
            "lr_scheduler_type": training.lr_scheduler_type,
            "warmup_steps": training.warmup_steps,
            "weight_decay": training.weight_decay,
            "max_grad_norm": training.max_grad_norm,
            "adam_beta1": training.adam_beta1,
            "adam_beta2": training.adam_beta2,
            "adam_epsilon": training.adam_epsilon,
            "optim": training.optim,
            "neftune_noise_alpha": training.neftune_noise_alpha,
            "use_liger_kernel": training.use_liger_kernel,
            # Only the trainers that have it know the name; the recipe's rules refuse it for the others.
            **({"activation_offloading": True} if training.activation_offloading else {}),
            "seed": training.seed,
            "data_seed": training.data_seed,
            "remove_unused_columns": False,
            "logging_steps": 1,  # ResumableTrainer makes a line of `training.logging_steps` of them
            "logging_nan_inf_filter": False,
            "eval_strategy": "steps" if training.eval_steps else "no",
            "eval_steps": training.eval_steps,
            "save_strategy": "steps",
            "save_steps": training.save_steps,
            "save_total_limit": None,  # older checkpoints go when the newer one is sealed, not before
            "report_to": list(training.report_to) or "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": not on_cpu,
            "ddp_backend": ("gloo" if on_cpu else "nccl") if self.world.launched else None,
            "ddp_find_unused_parameters": False,
            "ddp_timeout": training.ddp_timeout,
        } | sharding.arguments(self.recipe, self.world, mixed_precision(self.recipe, self.device))

    def fit(
        self,
        trainer: ResumableTrainer,
        *,
        settings: Callable[[], Sequence[Setting]] | Sequence[Setting],
        masks: dict[str, Any],
        measures: Measures,
    ) -> None:
        """Assert and print the effective settings and the mask proof, then train, going on where an earlier start
        stopped.

        Args:
            trainer: a Transformers Trainer with `ResumableTrainer` among its bases and `self.callbacks()`.
            settings: the method's own lines of the effective settings; as a function where they need forward passes:
                it is called on all ranks once the model is wrapped and, with FSDP and ZeRO, sharded.
            masks: the mask proof, see `trainers.mask`.
            measures: taken before step 1, and again by `finish`.

        Raises:
            SystemExit: 143 when it was asked to stop, after a checkpoint.
            JobFailedError: a setting is not as asked, the training diverged.
        """
        self.measures = measures
        check_installed(self.recipe, trainer.language_model)
        complete_heads(trainer.language_model)
        if isinstance(trainer.language_model, PeftModel):
            save_without_embeddings(trainer.language_model)
        self.start = taken_from_base(trainer.language_model)
        trainer.remove_callback(PrinterCallback)
        trainer.log_every = self.recipe.training.logging_steps
        trainer.keep = self.recipe.training.save_total_limit
        self.stop.trainer = trainer
        checkpoint = resume_point(self.where.output, trainer)
        earlier = self._earlier_adapter(trainer)  # while the model is whole

        def effective() -> None:
            lines = [
                *sharding.sharding_settings(trainer, self.strategy, self.world),
                *common_settings(trainer, self.recipe),
                *earlier,
                *(settings() if callable(settings) else settings),
                Setting("resumed from", "", checkpoint.path.name if checkpoint else "nothing: first start"),
            ]
            say("\n".join(["Effective settings", *map(str, lines), "", for_terminal(masks), ""]))
            self.record.note(
                effective=assert_settings(lines),
                model={key: value for key, value in self.source.items() if key != "files"},
                proofs=self.record.data["proofs"] | {"mask": masks},
            )

        trainer.add_callback(BeforeStepOne(self, trainer, measures, effective))
        trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
        self.record.measure(**training_metrics(trainer))
        if self.stop.stopped:
            step = trainer.state.global_step
            say(f"stopped on request at step {step}: run the same command again to go on from there")
            raise SystemExit(int(ExitCode.TERMINATED))
        STOP.at_once()

    def _earlier_adapter(self, trainer: ResumableTrainer) -> list[Setting]:
        if self.recipe.lora is None or self.recipe.lora.from_uri is None:
            return []
        seen = earlier_adapter.check_start(trainer.language_model, self.recipe, self.where.root / "adapter")
        return [Setting("goes on from", "", seen)]

    def finish(
        self,
        trainer: ResumableTrainer,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Sequence[int]],
        *,
        further: Callable[[proof.Proofs, Sequence[Sequence[int]]], None] | None = None,
        conclude: Callable[[], None] | None = None,
    ) -> None:
        """Save the artifact, measure again, prove the artifact in a fresh process, write the report.

        Args:
            trainer: as given to `fit`.
            tokenizer: saved beside the model.
            rows: token ids of the rows (held-out ones where there are any) that the proof compares logits on.
            further: expects the proofs of a method's further artifacts, given the rows; on the ranks that prove.
            conclude: called on all ranks once all is measured, before the report is written.

        Raises:
            proof.ProofError: the saved artifact does not compute what was trained.
        """
        proofs = proof.Proofs(self.where.output, writes=self.world.main)
        # Of all ranks, like the forward passes of the proof.
        state = sharding.whole_state(trainer.language_model, self.strategy)
        if self.world.main:
            artifact = save_artifact(
                trainer.language_model,
                tokenizer,
                self.loaded.recipe,
                dict(self.source),
                self.where.output,
                self.start,
                state,
            )
            say(f"saved {artifact}")
        if self.world.main or sharding.synced(self.strategy):
            expect_proofs(proofs, trainer, self.recipe, rows, self.start, state)
            if further is not None:
                further(proofs, rows)
        if self.world.main and self.device.type == "cpu":
            proofs.start()  # imports and loads while the evaluation runs; a GPU has no memory to spare for it
        assert self.measures is not None
        self.measures.take("after")
        self.record.measure(**self.measures.summary())
        if conclude is not None:
            conclude()
        if self.world.main:
            with WATCH.paused():
                self._prove(trainer, proofs)
        trainer.accelerator.wait_for_everyone()
        self.finished = True

    def _prove(self, trainer: ResumableTrainer, proofs: proof.Proofs) -> None:
        self.progress.update("prove", message="a fresh process reloads the artifact")
        free_memory(trainer)
        found = self.record.data["proofs"] | finish_proofs(proofs)
        self.record.note(proofs=found, artifacts=artifacts(self.where.output))
        self.progress.update("report")
        page = report.write(self.record.closed("complete"), self.where.output, self.loaded.origins)
        say(f"report: {page}")


def execute(method: Method, loaded: LoadedRecipe, overrides: tuple[str, ...]) -> int:
    """Run `method` on what the initializers left in the workspace; go on where an earlier start stopped.

    Returns:
        exit code 0; a stop on request leaves by `SystemExit(143)`.

    Raises:
        UsageError: the processes or trackers are not as the recipe asks.
        JobFailedError: the method returned without an artifact.
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
        WATCH.on_end = record.fail
        sharding.open_group(recipe, here)
        device = torch.device("cpu" if recipe.resources.gpu == 0 else "cuda")
        reports = StepReports(where.output / "metrics.jsonl", progress, main=here.main)
        stop = StopOnRequest(here, device)
        used = earlier_adapter.effective(loaded, where.root / "adapter")
        run = Run(loaded, used, here, where, record, progress, read_manifest(where.model), reports, stop)
        method(run)
        if not run.finished:
            raise JobFailedError(
                f"the method {recipe.method} returned without an artifact",
                where=recipe.method,
                todo="end it with run.fit(...) and run.finish(...), see docs/custom-methods.md",
            )
    if here.main:
        say(outcome(record))
        progress.update("done", force=True)
    sharding.close_group()
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


def resume_point(output: Path, trainer: ResumableTrainer) -> Checkpoint | None:
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


def common_settings(trainer: ResumableTrainer, recipe: Recipe) -> list[Setting]:
    """Lines of the effective settings that every method has."""
    args, seen = trainer.args, trainer.accelerator.num_processes
    asked = (recipe.resources.num_proc_per_node or 1) * recipe.resources.num_nodes
    optimizer = str(args.optim.value)
    return [
        Setting("world size", str(asked), str(seen), seen == asked),
        *model_settings(trainer.language_model, recipe, args.device, args.bf16),
        Setting("gradient checkpointing", "", "on" if args.activation_checkpointing else "off"),
        Setting("activation offloading", "", "on" if recipe.training.activation_offloading else "off"),
        Setting("NEFTune noise", "", f"{args.neftune_noise_alpha or 'off'}"),
        Setting("optimizer", recipe.training.optim, optimizer, recipe.training.optim == optimizer),
        Setting("seed", "", f"{args.seed}, data {args.data_seed}"),
    ]


def schedule_settings(args: TrainingArguments, sequences: int) -> list[Setting]:
    """Lines on batch, steps and learning rate of a method whose steps go through `sequences` rows once per epoch."""
    size = world().size
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * size
    shares = -(-sequences // (args.per_device_train_batch_size * size))
    per_epoch = max(1, -(-shares // args.gradient_accumulation_steps))
    steps = args.max_steps if args.max_steps > 0 else -(-int(per_epoch * args.num_train_epochs * 1000) // 1000)
    parts = f"{args.per_device_train_batch_size} per process × {args.gradient_accumulation_steps} accumulated"
    return [
        Setting("learning rate", "", learning_rate(args, steps)),
        Setting("effective batch", "", f"{batch} rows ({parts} × {size} processes)"),
        Setting("steps", "", f"{steps} ({per_epoch} per epoch)"),
    ]


def learning_rate(args: TrainingArguments, steps: int) -> str:
    """Peak, shape and warm-up of the learning rate as they will be."""
    shape, warmup = args.lr_scheduler_type.value, args.get_warmup_steps(steps)
    if shape == "constant" or not warmup:
        return f"{args.learning_rate:g}, {shape}, no warm-up"
    short = f": the run ends after {steps}, below this rate" if warmup >= steps else ""
    return f"{args.learning_rate:g}, {shape}, {warmup} warm-up steps{short}"


def training_metrics(trainer: ResumableTrainer) -> dict[str, float | int]:
    """Numbers of the training loop, summed over restarts where that is what they mean."""
    spent, tokens = trainer.train_seconds, trainer.tokens_seen
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def expect_proofs(
    proofs: proof.Proofs,
    trainer: ResumableTrainer,
    recipe: Recipe,
    rows: Sequence[Sequence[int]],
    start: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Keep what the live model computes on `rows`, for the artifact and, if asked for, the merged model."""
    kind = "adapter" if recipe.lora else "model"
    proofs.expect(trainer.language_model, rows, expectation(kind, kind, trainer, recipe, start), state)
    if recipe.lora and (recipe.output.merge or recipe.qat):  # what is quantised in the end is the merged model
        proofs.expect(trainer.language_model, rows, expectation("merged", "model", trainer, recipe), state)


def finish_proofs(proofs: proof.Proofs) -> dict[str, Any]:
    """Wait for the proofs and print their findings; see `proof.Proofs.finish` for the errors."""
    found = proofs.finish()
    for kind, finding in found.items():
        say(prove.summary(kind, finding))
    return found


def free_memory(trainer: ResumableTrainer) -> None:
    """Give a GPU's memory back: the fresh process needs room for the same model."""
    if trainer.args.device.type == "cuda":
        trainer.free_memory()
        gc.collect()
        torch.cuda.empty_cache()


def expectation(
    kind: str, artifact: str, trainer: ResumableTrainer, recipe: Recipe, start: Mapping[str, torch.Tensor] | None = None
) -> proof.Expectation:
    """How an artifact is to be reloaded, and how close it must come."""
    model, args = trainer.language_model, trainer.args
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    quantised = base.config.quantization_config.to_dict() if recipe.lora and recipe.lora.quantize_base else None
    dtype = str(base.dtype).removeprefix("torch.")
    exact = dtype == "float32" and not args.bf16 and quantised is None
    tolerance = recipe.output.proof_tolerance
    # A merge rounds every weight once more, and its layers compute in another order.
    # What is quantised can lie between two steps: the last digit then decides for the one or the other.
    default = 0.1 if kind == "quantized" else 1e-3 if exact else 0.2 if kind == "merged" else 0.1
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
            "vocabulary": embedding_rows(base),
        },
        start=start or {},
        tolerance=default if tolerance is None else tolerance,
        scaled=tolerance is None,
    )


def artifacts(output: Path) -> dict[str, str]:
    """Paths of what the run leaves, by what they are."""
    found = {name: str(output / name) for name in ("adapter", "model", "quantized") if (output / name).is_dir()}
    return found | {"report": str(output / "report.html"), "proof": str(output / "proof.json")}


def outcome(record: Record) -> str:
    """The last lines of the log: what came out."""
    metrics = record.data["metrics"]
    seconds, steps, loss = duration(metrics["seconds"]), metrics["steps"], metrics["train_loss"]
    lines = [f"done in {seconds}: {steps} steps, train loss {loss:.4f}"]
    lines += [f"  {found.label:<20} {found.before} -> {found.after}" for found in measured(metrics)]
    return "\n".join(lines)
