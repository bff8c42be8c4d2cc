"""An exception becomes a cause, a next action and an exit code: told by type, not by guessing from text.

Importing this module is quick; libraries are looked at only if they are loaded already.
"""

from __future__ import annotations

import errno
import math
import sys
import traceback

from blueprints.errors import BlueprintError, DataError, EnvironmentFault, ExitCode, JobFailedError
from blueprints.termination import write_termination
from trainers.process import world


class TrainingDivergedError(JobFailedError):
    """Loss or gradient left the finite numbers: exit code 4."""

    @classmethod
    def check(cls, step: int, loss: float, grad_norm: float | None, learning_rate: float | None) -> None:
        """Stop when a step's loss or gradient norm is not finite.

        Raises:
            TrainingDivergedError: it is not.
        """
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if value is not None and not math.isfinite(value):
                rate = f" at learning rate {learning_rate:.3g}" if learning_rate is not None else ""
                raise cls(
                    f"the {name} became {value} at step {step}{rate}",
                    where=f"step {step}",
                    todo="lower training.learning_rate, raise training.warmup_steps or lower training.max_grad_norm; "
                    "in 16 bits also try training.bf16=false or model.dtype=float32",
                )


def report(error: BaseException) -> int:
    """Print the cause, write the termination message, and say the exit code.

    Returns:
        the exit code of the process.
    """
    found = translate(error)
    text = f"error: {found}"
    if world().size > 1:
        found.where = f"rank {world().rank}" + (f", {found.where}" if found.where else "")
        text = f"error: {found}"
    if found.exit_code == ExitCode.BUG:
        traceback.print_exception(error)
    print(text, file=sys.stderr, flush=True)
    write_termination(found)
    watch = sys.modules.get("trainers.watch")
    if watch is not None and not isinstance(found, LostPeerError):
        watch.WATCH.fail(found)
    return int(found.exit_code)


def translate(error: BaseException) -> BlueprintError:
    """The cause behind an exception, as an error with a next action."""
    if isinstance(error, BlueprintError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return JobFailedError("interrupted", todo="run the same command again: it goes on from the last checkpoint")
    for known in (_out_of_memory, _disk_full, _library_missing, _damaged_weights, _lost_peer):
        found = known(error)
        if found is not None:
            return found
    return BlueprintError(
        f"unexpected {type(error).__name__}: {_short(error)}",
        todo="this is a fault of llm-blueprints: please report it with the traceback in the log",
    )


def _out_of_memory(error: BaseException) -> BlueprintError | None:
    knobs = (
        "in this order: training.gradient_checkpointing=true; halve training.per_device_train_batch_size and double "
        "training.gradient_accumulation_steps; lower training.max_length; train an adapter (lora) or a 4-bit base "
        "(lora.quantize_base=true); optim=adamw_bnb_8bit"
    )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return JobFailedError(f"the GPU's memory is used up: {_short(error)}", todo=knobs)
    if isinstance(error, MemoryError):
        return JobFailedError("the machine's memory is used up", todo=knobs)
    return None


_UNWRITABLE = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file too large",
}
_TORCH_WRITES = ("PytorchStreamWriter failed", "file write failed", "unexpected pos")


def _disk_full(error: BaseException) -> BlueprintError | None:
    if isinstance(error, OSError):
        what = _UNWRITABLE.get(error.errno or 0)
    else:
        # safetensors, torch and DeepSpeed report a failed write as their own error, with the system's words inside.
        said = str(error)
        what = next((text for text in _UNWRITABLE.values() if text.casefold() in said.casefold()), None)
        if what is None and any(text in said for text in _TORCH_WRITES):
            what = "a file could not be written to its end, as on a full disk"
    if what is None:
        return None
    where = str(error.filename or "") if isinstance(error, OSError) else ""
    return EnvironmentFault(
        f"{what}: {_short(error)}",
        where=where,
        todo="free disk space, lower training.save_total_limit, and run the same command again: it goes on from the "
        "last whole checkpoint",
    )


def _library_missing(error: BaseException) -> BlueprintError | None:
    if not isinstance(error, ImportError):
        return None
    name = error.name or ""
    return EnvironmentFault(
        f"a library is missing: {_short(error)}",
        todo=f"pip install {name.split('.')[0]}" if name else "pip install 'llm-blueprints[trainers]'",
    )


def _damaged_weights(error: BaseException) -> BlueprintError | None:
    safetensors = sys.modules.get("safetensors")
    if safetensors is None or not isinstance(error, safetensors.SafetensorError):
        return None
    return DataError(
        f"a weights file is damaged: {_short(error)}",
        todo="delete the workspace's model directory and run the model initializer again",
    )


def _lost_peer(error: BaseException) -> BlueprintError | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    if isinstance(error, torch.distributed.DistError):
        return LostPeerError(str(error))
    gloo = isinstance(error, RuntimeError) and ("gloo" in str(error) or "Connection reset by peer" in str(error))
    if gloo and world().size > 1:
        return LostPeerError(str(error))
    return None


class LostPeerError(EnvironmentFault):
    """Another training process has gone; named where the watch can tell. A consequence, never the first cause."""

    def __init__(self, said: str) -> None:
        from trainers.watch import WATCH

        found = WATCH.lost()
        super().__init__(
            found or f"another training process went away: {' '.join(said.split())[:300]}",
            todo="look at that process's own log for the cause; the same command goes on from the last checkpoint",
        )


def _short(error: BaseException, limit: int = 600) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else f"{text[:limit]}…"
