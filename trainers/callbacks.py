"""What happens between the steps: progress for people and machines, metrics.jsonl, and stopping on request."""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import KubeflowCallback

from blueprints.errors import JobFailedError
from blueprints.measures import LABELS, label
from blueprints.progress import Progress
from blueprints.recipe.schema import TrainingConfig
from trainers.checkpoint import write_text
from trainers.memory import check_optimizer, liger_modules
from trainers.process import STOP, World, say
from trainers.watch import WATCH

BAR = 24
"""Characters of the bar at a terminal."""
SHOWN = {"reward": "reward", "kl": "KL", "rewards/margins": "margin", "rewards/accuracies": "accuracy"}
"""A method's own numbers that belong into the line of a step, and what they are called there."""


class StepReports(TrainerCallback):
    """One line per logged step: on screen, in `metrics.jsonl` and in the progress file; rank 0 alone.

    Args:
        path: the `metrics.jsonl`.
        progress: the step's progress file.
    """

    def __init__(self, path: Path, progress: Progress, *, main: bool) -> None:
        self.path, self.progress, self.main = path, progress, main
        self._since: tuple[float, float] | None = None
        self.started = 0.0
        self._first_step = 0
        self.tokens_per_second = 0.0
        self._training = False

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Transformers' event: the loop has ended. Evaluations outside of it are for whoever asked for them to show."""
        self._training = False

    def begin(self, step: int, num_tokens: float) -> None:
        """Go on from `step`: lines of later steps, written by a run that was killed, are taken back."""
        self._since, self._first_step = (time.monotonic(), num_tokens), step
        self.started = time.monotonic()
        self._training = True
        if self.main:
            kept = [line for line in read_metrics(self.path) if line["step"] <= step]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Transformers' event: a line of training or of evaluation."""
        shown = any(name == "loss" or name.startswith("eval_") for name in logs or ())
        if not self.main or not logs or not shown or not self._training:
            return
        line = {"step": state.global_step} | {name: value for name, value in logs.items() if name != "total_flos"}
        if "loss" in logs and self._since is not None:
            now, tokens = time.monotonic(), logs["num_tokens"]
            self.tokens_per_second = (tokens - self._since[1]) / max(1e-9, now - self._since[0])
            self._since = (now, tokens)
            line["tokens_per_second"] = round(self.tokens_per_second, 1)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._show(state, logs)

    def _show(self, state: TrainerState, logs: dict[str, float]) -> None:
        if "loss" not in logs:
            keys = {name if name in LABELS else name.removeprefix("eval_"): value for name, value in logs.items()}
            found = [(*label(key), value) for key, value in keys.items() if key in LABELS]
            text = ", ".join(f"{called} {value:{style}}" for called, style, value in found)
            _print_line(f"step {state.global_step}/{state.max_steps}  held out: {text}")
            return
        done = state.global_step - self._first_step
        eta = (state.max_steps - state.global_step) * (time.monotonic() - self.started) / max(1, done)
        self.progress.update(
            "train",
            state.global_step,
            state.max_steps,
            unit="steps",
            metrics={name: float(value) for name, value in logs.items()}
            | {"tokens_per_second": self.tokens_per_second},
            eta_seconds=eta,
        )
        own = "".join(f"{label} {logs[name]:.3f}  " for name, label in SHOWN.items() if name in logs)
        text = (
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  {own}lr {logs['learning_rate']:.2e}  "
            f"grad norm {logs.get('grad_norm', float('nan')):.3f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"ETA {duration(eta)}"
        )
        if sys.stdout.isatty() and state.global_step < state.max_steps:
            full = BAR * state.global_step // max(1, state.max_steps)
            print(f"\r\x1b[2K{'█' * full}{'░' * (BAR - full)} {text}", end="", flush=True)
        else:
            _print_line(text)


def _print_line(text: str) -> None:
    print(f"\r\x1b[2K{text}" if sys.stdout.isatty() else text, flush=True)


class StopOnRequest(TrainerCallback):
    """SIGTERM to any rank: all ranks agree at the end of the step, save a checkpoint and leave the loop.

    Attributes:
        stopped: whether training ended this way.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.stopped = False
        self.trainer: Any = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Transformers' event: one optimizer step is done."""
        asked = STOP.asked
        if self.world.size > 1:
            flag = torch.tensor(int(asked), device=self.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            asked = bool(flag.item())
        if asked:
            self.stopped = True
            control.should_save, control.should_training_stop, control.should_evaluate = True, True, False
            # It would report 100 % at the end of the loop: of a job that was stopped.
            self.trainer.remove_callback(KubeflowCallback)
        return control


class SignsOfLife(TrainerCallback):
    """Tells the watch over the processes that this one comes on."""

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: a step begins."""
        WATCH.tick()

    def on_substep_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: a micro-step is done."""
        WATCH.tick()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: a step is done."""
        WATCH.tick(state.global_step)

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: a batch is evaluated."""
        WATCH.tick()

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Transformers' event: a checkpoint is sealed."""
        WATCH.tick()


class FirstStepChecks(TrainerCallback):
    """At the first step: activations are recomputed, kernels and optimizer are those asked for, every trainable parameter
    has a gradient, and all processes take the same step."""

    def __init__(self, world: World, training: TrainingConfig) -> None:
        self.world, self.training = world, training
        self._checked = False
        self._stepped = False
        self._compared = world.size == 1
        self._reached: set[str] = set()
        self._handles: list[Any] = []

    def _note_gradient(self, name: str, _gradient: torch.Tensor) -> None:
        self._reached.add(name)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Transformers' event: all is prepared, no step is done."""
        assert model is not None
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # DeepSpeed takes gradients away as soon as they are there
                note = functools.partial(self._note_gradient, name)
                self._handles.append(parameter.register_hook(note))
        base = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
        if base is not None and base.is_activation_checkpointing != args.activation_checkpointing:
            asked, seen = ("on", "off") if args.activation_checkpointing else ("off", "on")
            raise JobFailedError(
                f"gradient checkpointing: asked {asked}, in effect {seen}",
                where="effective settings",
                todo="this is a fault of llm-blueprints: please report it",
            )

        if self.training.use_liger_kernel and not (model is not None and liger_modules(model)):
            raise JobFailedError(
                "Liger's kernels: asked on, in effect off",
                where="effective settings",
                todo="set training.use_liger_kernel=false, and please report the model's architecture",
            )

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Transformers' event: the optimizer has taken a step, and has its state."""
        if self._stepped:
            return
        self._stepped = True
        optimizer = kwargs["optimizer"]
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        found = check_optimizer(self.training.optim, optimizer, kwargs["model"])
        if self.world.main:
            say(f"optimizer: {found}")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Transformers' event: weights are changed. Data-parallel processes must hold the same ones."""
        if self._compared or model is None:
            return
        self._compared = True
        if any(isinstance(parameter, DTensor) or "ds_numel" in vars(parameter) for parameter in model.parameters()):
            return  # sharded: there is one copy of each weight
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        mine = torch.stack([parameter.detach().double().sum() for parameter in trained]).sum()
        sums = [torch.zeros_like(mine) for _ in range(self.world.size)]
        torch.distributed.all_gather(sums, mine)
        if any(not torch.allclose(other, sums[0], rtol=1e-9, atol=0) for other in sums):
            raise JobFailedError(
                "the training processes hold different weights after the first step: they do not share gradients",
                where="first step",
                todo="this is a fault of llm-blueprints: please report it",
            )

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Transformers' event: gradients are complete, weights not yet changed."""
        if self._checked or model is None:
            return
        self._checked = True
        for handle in self._handles:
            handle.remove()
        # An expert that no token of the batch chose has none, rightly.
        without = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None and name not in self._reached and "expert" not in name
        ]
        if without:
            raise JobFailedError(
                f"{len(without)} trainable parameters get no gradient, such as {', '.join(without[:3])}: "
                "they would stay as they are",
                where="first step",
                todo="take these layers out of lora.target_modules and lora.modules_to_save",
            )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def duration(seconds: float) -> str:
    """`75.4` as `1:15`, with hours where there are any."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
