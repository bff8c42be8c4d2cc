"""Progress of one step of a job, as a small JSON file that is replaced atomically.

Every step (initializers, trainer) reports here; whoever runs the step watches the file that `BLUEPRINTS_PROGRESS`
names. Where the variable is unset nothing is written. Standard library only: containers import this early.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

Phase = Literal["download", "validate", "prepare", "train", "evaluate", "prove", "report", "done"]

VARIABLE = "BLUEPRINTS_PROGRESS"
CALLED_FROM = "BLUEPRINTS_CALLED_FROM"
"""The directory that a job of this machine was started from: functions of the user's own are looked for there too."""
MIN_INTERVAL = 0.2
"""Seconds between two writes of the same phase: at most five a second."""


class ProgressState(TypedDict):
    """What the file holds."""

    phase: str
    completed: float
    total: float | None
    unit: str
    metrics: dict[str, float]
    eta_seconds: float | None
    message: str
    updated: float
    """Seconds since the epoch."""


class Progress:
    """Writer of one step's progress.

    Args:
        path: the file to write. Default: the environment's `BLUEPRINTS_PROGRESS`; without either nothing is written.
    """

    def __init__(self, path: str | None = None) -> None:
        name = os.environ.get(VARIABLE) if path is None else path
        self.path = Path(name) if name else None
        self._phase = ""
        self._phase_started = 0.0
        self._phase_first = 0.0
        self._written = 0.0

    def update(
        self,
        phase: Phase,
        completed: float = 0,
        total: float | None = None,
        *,
        unit: str = "",
        metrics: Mapping[str, float] | None = None,
        eta_seconds: float | None = None,
        message: str = "",
        force: bool = False,
    ) -> None:
        """Report where the step is. Cheap to call often: it writes at most five times a second.

        A change of phase, the last unit of a phase (`completed >= total`) and `force` are always written. A file that
        cannot be written never stops the step.

        Args:
            phase: what the step is doing.
            completed: units done in this phase.
            total: units in this phase, None if unknown.
            unit: `bytes`, `rows`, `steps` or `tokens`.
            metrics: numbers to show, such as `loss` and `tokens_per_second`.
            eta_seconds: seconds to the end of the phase. Default: from the pace since the phase began.
            message: one line for a person.
        """
        if self.path is None:
            return
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._phase_started, self._phase_first, force = phase, now, completed, True
        last = total is not None and completed >= total
        if not (force or last) and now - self._written < MIN_INTERVAL:
            return
        self._written = now
        state: ProgressState = {
            "phase": phase,
            "completed": completed,
            "total": total,
            "unit": unit,
            "metrics": dict(metrics or {}),
            "eta_seconds": self._eta(completed, total, now) if eta_seconds is None else eta_seconds,
            "message": message,
            "updated": time.time(),
        }
        _replace(self.path, state)

    def _eta(self, completed: float, total: float | None, now: float) -> float | None:
        done = completed - self._phase_first
        if total is None or done <= 0:
            return None
        return max(0.0, (total - completed) * (now - self._phase_started) / done)


def read_progress(path: Path) -> ProgressState | None:
    """The last report in `path`, None if there is none or it is not a report."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict) or not isinstance(data.get("phase"), str):
        return None
    metrics = data.get("metrics")
    return {
        "phase": data["phase"],
        "completed": _number(data.get("completed")) or 0,
        "total": _number(data.get("total")),
        "unit": str(data.get("unit") or ""),
        "metrics": {str(k): v for k, v in metrics.items() if _number(v) is not None}
        if isinstance(metrics, dict)
        else {},
        "eta_seconds": _number(data.get("eta_seconds")),
        "message": str(data.get("message") or ""),
        "updated": _number(data.get("updated")) or 0,
    }


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _replace(path: Path, state: ProgressState) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        # A reader never sees half a report. No fsync: after a power cut the progress is worth nothing.
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk shows in what the step itself writes
