"""The run record: `output/run.json`, who may write it, and whether a second start goes on, is done or is refused."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from blueprints import __version__
from blueprints.errors import BlueprintError, EnvironmentFault, ExitCode, UsageError
from blueprints.recipe.schema import Recipe
from trainers.checkpoint import write_json

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "torchao",
)
LOCK_PATIENCE = 15.0
"""Seconds to wait for a killed run's last process to let go of the output."""


class Record:
    """`run.json` of one output directory.

    Args:
        output: the workspace's `output`.
        writes: whether this process writes it (rank 0); others read only.
    """

    def __init__(self, output: Path, *, writes: bool) -> None:
        self.output, self.writes = output, writes
        self.path = output / "run.json"
        self.data: dict[str, Any] = self._read()
        self._lock: IO[str] | None = None
        self._started = time.monotonic()
        self._seconds_before = 0.0

    def _read(self) -> dict[str, Any]:
        try:
            data: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return data

    def open(self, recipe: Recipe, name: str, overrides: tuple[str, ...], data: dict[str, Any]) -> bool:
        """Begin, or go on with, the run of `recipe` in this output.

        Returns:
            False if this very run is complete already: there is nothing to do.

        Raises:
            UsageError: the output belongs to another recipe or other rows.
            EnvironmentFault: another process is training into it.
        """
        if self.writes:
            self.output.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self.data = self._read()
        before = self.data if self._worth_keeping() else {}
        if before:
            self._refuse_another(before, recipe, data)
        elif self.writes:
            self._clear()
        if before.get("status") == "complete":
            return False
        started = before.get("started") or now()
        self._seconds_before = float(before.get("metrics", {}).get("seconds") or 0)
        self.data = before | {
            "schema": 1,
            "status": "running",
            "recipe": recipe.model_dump(mode="json"),
            "recipe_hash": recipe.hash(),
            "recipe_name": name,
            "overrides": list(overrides),
            "versions": versions(),
            "data": data,
            "metrics": before.get("metrics", {}),
            "proofs": before.get("proofs", {}),
            "artifacts": before.get("artifacts", {}),
            "started": started,
            "ended": None,
            "error": None,
            "starts": int(before.get("starts", 0)) + 1,
        }
        self.save()
        return True

    def _worth_keeping(self) -> bool:
        """Whether an earlier start got as far as a checkpoint: one that failed before holds nothing to protect."""
        return self.data.get("status") == "complete" or any(self.output.glob("checkpoint-*"))

    def _refuse_another(self, before: dict[str, Any], recipe: Recipe, data: dict[str, Any]) -> None:
        theirs, ours = str(before.get("recipe_hash"))[:12], recipe.hash()[:12]
        if theirs != ours:
            problem = f"the output holds the run of another recipe (its hash begins {theirs}, this one's {ours})"
        elif not _same_rows(before.get("data", {}), data):
            problem = "the output holds a run on other rows: the data set was prepared again since"
        else:
            return
        raise UsageError(
            problem, where=str(self.output), todo="delete that job or directory, or give this run a name of its own"
        )

    def _clear(self) -> None:
        """Remove what a start that got nowhere has left."""
        for name in ("metrics.jsonl", "eval.json", "samples.jsonl", "proof.json", "report.html", "run.json"):
            (self.output / name).unlink(missing_ok=True)

    def _take_lock(self) -> None:
        self._lock = (self.output / ".lock").open("w")
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise EnvironmentFault(
                        "another process is training into this output",
                        where=str(self.output),
                        todo="wait for it, or stop it first",
                    ) from None
                time.sleep(0.2)
            else:
                return

    def note(self, **entries: Any) -> None:
        """Set entries of the record and save it."""
        self.data |= entries
        self.save()

    def measure(self, **metrics: float | int | None) -> None:
        """Set metrics of the record and save it."""
        self.data["metrics"] = self.data.get("metrics", {}) | metrics
        self.save()

    def save(self) -> None:
        """Write `run.json`, on rank 0."""
        if self.writes:
            write_json(self.path, self.data)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Whatever ends the block is in the record: complete is said by the block itself; stopped and failed here."""
        try:
            yield
        except SystemExit as ended:
            stopped = ended.code == int(ExitCode.TERMINATED)
            self._close("stopped" if stopped else "failed")
            raise
        except (Exception, KeyboardInterrupt) as error:
            from trainers.diagnose import translate

            found = translate(error)
            self._close("failed", found)
            raise
        else:
            self._close("complete")

    def closed(self, status: str, error: BlueprintError | None = None) -> dict[str, Any]:
        """The record as it will be once the run has ended now."""
        seconds = self._seconds_before + time.monotonic() - self._started
        metrics = self.data.get("metrics", {}) | {"seconds": round(seconds, 1)}
        ended = {"status": status, "ended": now(), "error": error.as_dict() if error else None}
        return self.data | {"metrics": metrics} | ended

    def fail(self, error: BlueprintError) -> None:
        """The run ends here and now: its process is about to be ended from another thread."""
        self._close("failed", error)

    def _close(self, status: str, error: BlueprintError | None = None) -> None:
        self.data = self.closed(status, error)
        try:
            self.save()
        except OSError:
            # A full disk is what is being reported: that report must not be lost over the record of it.
            if error is None:
                raise
        finally:
            if self._lock is not None:
                self._lock.close()


def _same_rows(before: dict[str, Any], data: dict[str, Any]) -> bool:
    """Whether two preparations gave the same rows; the fingerprint differs with the code that prepared them too."""
    if before.get("fingerprint") == data.get("fingerprint"):
        return True
    contents = [_contents(prepared) for prepared in (before, data)]
    return bool(contents[0]) and contents[0] == contents[1]


def _contents(prepared: dict[str, Any]) -> list[tuple[str, str]]:
    """Split and sha256 of every shard, empty if the manifest does not say."""
    splits = prepared.get("splits", {})
    shards = [(name, shard) for name, split in splits.items() for shard in split.get("shards", [])]
    return [(name, str(shard["sha256"])) for name, shard in shards if isinstance(shard, dict)]


def now() -> str:
    """The time, as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of what this run computed with."""
    found = {"llm-blueprints": __version__, "python": platform.python_version()}
    found |= {name: _version(name) for name in PACKAGES}
    found["platform"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {name: version for name, version in found.items() if version}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
