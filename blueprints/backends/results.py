"""What a job's trainer left behind: the record of the run and the answers before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blueprints.backends.state import JobDirectory


@dataclass(frozen=True)
class Run:
    """`run.json` and `samples.jsonl` of a job's output.

    Attributes:
        status: what the trainer said last: `running`, `complete`, `stopped` or `failed`.
        metrics: `train_loss`, `exact_match_before`, `exact_match_after`, `tokens_per_second`, ...
        proofs: by name; those that can fail have `passed`.
        artifacts: paths by what they are: `adapter`, `model`, `report`, `proof`.
        samples: held-out prompts with reference and answers before and after.
        recipe_name: the recipe the trainer was given.
    """

    status: str
    metrics: Mapping[str, Any]
    proofs: Mapping[str, Any]
    artifacts: Mapping[str, str]
    samples: list[dict[str, Any]]
    recipe_name: str


def read_run(directory: JobDirectory) -> Run | None:
    """The record of a job's run; None while there is none."""
    try:
        data = json.loads((directory.output / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict):
        return None
    return Run(
        status=str(data.get("status", "")),
        metrics=_map(data.get("metrics")),
        proofs=_map(data.get("proofs")),
        artifacts={str(key): str(value) for key, value in _map(data.get("artifacts")).items()},
        samples=_samples(directory.output / "samples.jsonl"),
        recipe_name=str(data.get("recipe_name", "")),
    )


def _map(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _samples(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [sample for line in lines if line.strip() and isinstance(sample := json.loads(line), dict)]
