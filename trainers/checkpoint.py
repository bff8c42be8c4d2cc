"""Checkpoints that are whole or not there, and what Transformers does not keep in them.

Transformers writes `checkpoint-N` file by file. A run killed meanwhile leaves a directory that looks like a checkpoint
and is none. Here each gets a seal (`complete.json`: every file's size and sha256) as its last file; without a seal that
fits, it is never resumed from. Older checkpoints go only once the newer one is sealed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME

from blueprints.digests import hash_file
from trainers import sharding
from trainers.diagnose import TrainingDivergedError

SEAL = "complete.json"
LAST_VALUE = ("learning_rate", "num_tokens")
"""Logged numbers of which the last counts; of the others the mean over the logged steps."""


@dataclass(frozen=True)
class Checkpoint:
    """A sealed checkpoint: its directory, its optimizer step and the trainer's own state."""

    path: Path
    step: int
    state: Mapping[str, Any]


@dataclass
class LossLog:
    """Losses since the last log line and since step 1, so that a resumed run logs what the unbroken one would.

    Attributes:
        pending: numbers of the steps that wait for the next log line.
        loss_sum: sum of the loss over all steps of the run.
    """

    pending: list[dict[str, float]] = field(default_factory=list)
    loss_sum: float = 0.0

    def merged(self) -> dict[str, float]:
        """The pending steps as one line, and forget them."""
        names = dict.fromkeys(name for step in self.pending for name in step)  # some numbers are not of every step
        seen = {name: [step[name] for step in self.pending if name in step] for name in names}
        line = {name: values[-1] if name in LAST_VALUE else sum(values) / len(values) for name, values in seen.items()}
        self.pending.clear()
        return line


class ResumableTrainer(Trainer):
    """Goes after TRL's trainer in the bases: sealed checkpoints, loss sums and token counts that survive a restart.

    Transformers logs to it at every step (`logging_steps=1`); it passes a line on every `log_every` steps.
    """

    log_every: int = 1
    keep: int = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses = LossLog()
        self._seconds_before = 0.0
        self._began: float | None = None
        super().__init__(*args, **kwargs)

    def begin_clock(self) -> None:
        """Training begins, or goes on, now."""
        self._began = time.monotonic()

    @property
    def language_model(self) -> PreTrainedModel | PeftModel:
        """The model that is measured, saved and proved: `model`, unless a method trains something beside it."""
        model: PreTrainedModel | PeftModel = self.model
        return model

    def free_memory(self) -> None:
        """Let go of all that was needed to train: a GPU needs the room for the proof's fresh process."""
        self.accelerator.free_memory()
        self.model = self.model_wrapped = self.optimizer = None

    @property
    def tokens_seen(self) -> int:
        """Tokens trained on so far by all processes, as TRL counts them; padding does not count."""
        return int(self._total_train_tokens)

    @property
    def train_seconds(self) -> float:
        """Seconds spent on the steps that this run has kept, over restarts; evaluations in between included."""
        return self._seconds_before + (0.0 if self._began is None else time.monotonic() - self._began)

    def _run_epoch(self, **kwargs: Any) -> None:
        # Going on from a checkpoint of the last step, Transformers would make one step too many: it looks at max_steps
        # only after a step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Collect a training step's numbers; every `log_every` steps and at the last one they become a line.

        Raises:
            TrainingDivergedError: loss or gradient norm is not a finite number.
        """
        if "loss" not in logs:
            super().log(logs, start_time)
            return
        step = self.state.global_step
        TrainingDivergedError.check(step, logs["loss"], logs.get("grad_norm"), logs.get("learning_rate"))
        self.losses.loss_sum += logs["loss"]
        self.losses.pending.append({name: float(value) for name, value in logs.items() if value is not None})
        if step % self.log_every == 0 or step >= self.state.max_steps:
            super().log(self.losses.merged(), start_time)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        sharding.fsdp_everywhere(self)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        sharding.wrapped(self)
        return prepared

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        target = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            discard(target)
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                seal(target, self.state.global_step, self.resumable_state())
        except Exception:
            if self.args.should_save:
                discard(target)  # of a full disk, this much is free again
            raise
        if self.args.should_save:
            rotate(target.parent, self.keep)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Of a sharded model nothing: its checkpoints hold each rank's part, the artifact is saved by `Run.finish`."""
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save and output_dir is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharding.save_shards(self, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.is_fsdp_enabled:  # its weights come with the optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            sharding.load_shards(self, Path(checkpoint))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def resumable_state(self) -> dict[str, Any]:
        """What a resumed run needs beyond Transformers' own state."""
        return {
            "num_tokens": self.tokens_seen,
            "loss_sum": self.losses.loss_sum,
            "pending": self.losses.pending,
            "train_seconds": round(self.train_seconds, 3),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint's seal."""
        # TRL counts tokens from 0 in every process.
        self._total_train_tokens = int(state["num_tokens"])
        self.losses = LossLog([dict(step) for step in state["pending"]], float(state["loss_sum"]))
        self._seconds_before = float(state["train_seconds"])


def seal(directory: Path, step: int, state: Mapping[str, Any]) -> None:
    """Declare a checkpoint whole: size and sha256 of every file, written last and at once."""
    files = {
        str(path.relative_to(directory)): {"size": path.stat().st_size, "sha256": hash_file(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    write_json(directory / SEAL, {"step": step, "state": dict(state), "files": files})


def discard(directory: Path) -> None:
    """Remove a checkpoint: its seal first, so that a half-removed one is not taken for a whole one."""
    if directory.exists():
        (directory / SEAL).unlink(missing_ok=True)
        shutil.rmtree(directory)


def rotate(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` sealed checkpoints, and whatever was never sealed."""
    found = sorted(output.glob("checkpoint-*"), key=_step, reverse=True)
    sealed = [path for path in found if (path / SEAL).exists()]
    for path in found:
        if path not in sealed[:keep]:
            discard(path)


def newest_valid(output: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of `output` that is whole, and why each newer one is not.

    Returns:
        the checkpoint, None if there is none; one line per checkpoint that was passed over.
    """
    passed: list[str] = []
    for path in sorted(output.glob("checkpoint-*"), key=_step, reverse=True):
        fault = fault_of(path)
        if fault is None:
            data = json.loads((path / SEAL).read_text(encoding="utf-8"))
            return Checkpoint(path, int(data["step"]), data["state"]), passed
        passed.append(f"{path.name} is not used: {fault}")
    return None, passed


def fault_of(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is exactly what was saved."""
    try:
        files = json.loads((directory / SEAL).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return "the run ended while it was being written"
    except (ValueError, KeyError, OSError):
        return f"its {SEAL} is damaged"
    for name, stated in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != stated["size"]:
            return f"{name} has {size} bytes, {stated['size']} were written"
        if hash_file(path) != stated["sha256"]:
            return f"{name} has changed since it was written"
    return None


def _step(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def write_json(path: Path, data: Any) -> None:
    """Replace a JSON file at once: a reader, or a kill, never meets half of it."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file at once and durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
