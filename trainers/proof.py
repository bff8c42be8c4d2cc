"""The artifact proof: a fresh process reloads what was saved and must compute what the live model computed.

This half runs in the training process: it keeps the live model's logits on some rows and a sha256 of every trained
tensor in `output/proof/`, and starts `python -m trainers.prove`, the other half. Both stay there, so that anyone can
run the proof again later.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn

from blueprints.errors import ExitCode, JobFailedError
from trainers.adapter_state import adapter_state
from trainers.checkpoint import write_json
from trainers.peft import on_untouched_base

KEPT_LOGITS = 8_000_000
"""Logits kept for the proof: 32 MB. With a large vocabulary the last positions of each row are compared."""
ROW_TOKENS = 512
"""Tokens of a row that are fed to the model, at most."""
NO_START: Mapping[str, torch.Tensor] = {}
"""Of an adapter that has taken nothing out of its base."""
TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Expectation:
    """What a reloaded artifact is held against.

    Attributes:
        kind: `adapter`, `model`, `merged` or `quantized`.
        artifact: directory that was saved, relative to the output.
        base: the base model's directory, for an adapter.
        load: how to load: dtype, attention kernel, 4-bit settings, device, autocast.
        tolerance: largest difference of a logit allowed, before scaling by the logits' spread.
        start: what the adapter has taken out of the base, see `trainers.peft.taken_from_base`.
        scaled: whether the bound grows with the spread of the logits (not where the recipe names a tolerance).
    """

    kind: str
    artifact: str
    base: str
    load: Mapping[str, Any]
    tolerance: float
    scaled: bool
    start: Mapping[str, torch.Tensor] = field(default_factory=dict)


def tensor_hash(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's values; 16-bit floats are widened first, which is exact."""
    values = tensor.detach().cpu().contiguous()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def hashes(
    model: nn.Module, start: Mapping[str, torch.Tensor] = NO_START, state: Mapping[str, torch.Tensor] | None = None
) -> dict[str, str]:
    """sha256 of every tensor the artifact must hold: the adapter's, or all of the model's.

    Args:
        start: what the adapter has taken out of the base, see `trainers.peft.taken_from_base`.
        state: the weights by name, of a sharded model; None: the model holds them.
    """
    tensors: dict[str, torch.Tensor]
    if isinstance(model, PeftModel):
        tensors = on_untouched_base(adapter_state(model, state), start)
    elif state is None:
        tensors = dict(model.named_parameters())
    else:
        tensors = {name: state[name] for name, _ in model.named_parameters()}
    return {name: tensor_hash(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def last_logits(model: nn.Module, rows: Sequence[Sequence[int]], positions: int, bf16: bool) -> list[torch.Tensor]:
    """Logits of the last `positions` tokens of each row, float32, one row at a time (no padding to differ in)."""
    model.eval()
    device = next(model.parameters()).device
    found = []
    for ids in rows:
        tokens = torch.tensor([list(ids)], device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
        found.append(logits[0, -positions:].float().cpu().contiguous())
    return found


def expect(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    output: Path,
    what: Expectation,
    state: Mapping[str, torch.Tensor] | None = None,
    *,
    writes: bool = True,
) -> Path:
    """Keep what the live model computes on `rows`.

    Args:
        state: the weights by name, of a sharded model, whose ranks must all call this; None: the model holds them.
        writes: whether this process keeps it, or only takes part in the forward passes.

    Returns:
        the file for `trainers.prove`.
    """
    directory = output / "proof"
    short = [list(row)[:ROW_TOKENS] for row in rows]
    vocabulary = int(model.config.get_text_config().vocab_size)
    positions = max(1, KEPT_LOGITS // (len(short) * vocabulary))
    logits = last_logits(model, short, positions, bool(what.load["bf16"]))
    path = directory / f"{what.kind}.json"
    if not writes:
        return path
    directory.mkdir(exist_ok=True)
    save_file({f"row-{index}": tensor for index, tensor in enumerate(logits)}, directory / f"{what.kind}.safetensors")
    spread = torch.cat([tensor.flatten() for tensor in logits]).std().item()
    write_json(
        path,
        {
            "kind": what.kind,
            "artifact": what.artifact,
            "base": what.base,
            "load": dict(what.load),
            "rows": short,
            "positions": positions,
            "tolerance": what.tolerance,
            "bound": what.tolerance * max(1.0, spread) if what.scaled else what.tolerance,
            # Merging and quantising make other tensors of them: there the logits alone are compared.
            "tensors": {} if what.kind in ("merged", "quantized") else hashes(model, what.start, state),
        },
    )
    return path


class Proofs:
    """The proofs of one run's artifacts, each in a fresh process, one after the other.

    Args:
        output: the workspace's `output`; `proof.json` there holds the findings.
        writes: whether this process keeps what is to be proved (rank 0).
    """

    def __init__(self, output: Path, *, writes: bool = True) -> None:
        self.output, self.writes = output, writes
        self.found: dict[str, Any] = {}
        self._waiting: list[Path] = []
        self._process: subprocess.Popen[str] | None = None

    def expect(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        what: Expectation,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Keep what the live model computes on `rows`, to be proved when `finish` is called; see `expect`."""
        self._waiting.append(expect(model, rows, self.output, what, state, writes=self.writes))

    def start(self) -> None:
        """Start the first proof now: it imports and loads while the caller does other things."""
        if self._process is None and self._waiting:
            specification = self._waiting[0]
            # A proved adapter is merged by the process that has it loaded, if the merged model is to be proved next; the
            # quantised model is made by the process that proves it.
            merge = specification.stem == "adapter" and any(path.stem == "merged" for path in self._waiting)
            flags = ["--merge"] if merge else ["--quantize"] if specification.stem == "quantized" else []
            self._process = _start(specification, flags)

    def finish(self) -> dict[str, Any]:
        """Wait for all proofs.

        Returns:
            the findings by kind: rows, positions, largest difference, bound.

        Raises:
            ProofError: an artifact is not what was trained, or could not be loaded.
        """
        try:
            while self._waiting:
                self.start()
                assert self._process is not None
                specification = self._waiting.pop(0)
                self.found[specification.stem] = _finish(self._process, specification)
                self._process = None
        except ProofError as error:
            self.found[error.kind] = error.found
            raise
        finally:
            self.stop()
            write_json(self.output / "proof.json", self.found)
        return self.found

    def stop(self) -> None:
        """End a proof that nobody waits for any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _start(specification: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
    """Start the fresh process on what `expect` has kept, with `flags` of `trainers.prove`."""
    specification.with_name(f"{specification.stem}.result.json").unlink(missing_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in TORCHRUN_VARIABLES and not name.startswith(("TORCHELASTIC_", "PET_", "BLUEPRINTS_LAUNCH"))
    }
    command = [sys.executable, "-m", "trainers.prove", str(specification), *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process: subprocess.Popen[str], specification: Path) -> dict[str, Any]:
    said, _ = process.communicate()
    kind = specification.stem
    result = specification.with_name(f"{kind}.result.json")
    if process.returncode in (int(ExitCode.DONE), int(ExitCode.JOB_FAILED)) and result.exists():
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    else:
        tail = "\n    ".join(said.strip().splitlines()[-15:])
        found = {
            "passed": False,
            "faults": [f"the proof's process ended with exit code {process.returncode}:\n    {tail}"],
        }
    if not found["passed"]:
        raise ProofError(kind, found)
    return found


class ProofError(JobFailedError):
    """The saved artifact does not compute what was trained: exit code 4."""

    def __init__(self, kind: str, found: dict[str, Any]) -> None:
        self.kind, self.found = kind, found
        super().__init__(
            f"the artifact proof failed for the saved {kind}: " + "; ".join(found["faults"]),
            where=f"output/proof/{kind}.json",
            todo="do not use this artifact. The same command saves and proves again from the last checkpoint; that helps "
            "where the disk was full or faulty. Logits that differ little: output.proof_tolerance says how much is allowed",
        )
