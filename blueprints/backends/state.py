"""The state of a local job: a directory of plain files that anyone can read.

trainjob.yaml, runtime.yaml    what runs (the runtime as it was when the job was made)
status.json                    state of the job and of each step
events.jsonl                   what happened, one line each
logs/<step>.log                what each step printed
progress/<step>.json           where each step is
termination/<step>             why a step failed, in its own words
workspace/                     the job's /workspace: model, dataset, output
supervisor.{pid,log,lock}      the process that owns the job; it holds the lock as long as it lives
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from blueprints.errors import EnvironmentFault, JobFailedError

CREATED, RUNNING, COMPLETE, FAILED = "Created", "Running", "Complete", "Failed"
FINISHED = (COMPLETE, FAILED)
START_SECONDS = 30.0
"""A job without a supervisor is taken for lost only when it is older than this."""
_RESERVE_BYTES = 256 * 1024
_FULL_BYTES = 64 * 1024


@dataclass
class StepStatus:
    """One step as the supervisor last saw it."""

    name: str
    replicated_job: str
    index: int
    gpus: int = 0
    """GPUs it asks for."""
    device: str = ""
    """What it computes on: `gpu`, `tpu`, `mig-1g.10gb`, ... or `cpu`; empty: told by `gpus`."""
    device_count: int = 0
    """How many; 0: not limited, or told by `gpus`."""
    pod: str = ""
    """Name of its newest Pod; empty on this machine."""
    status: str = "Pending"
    """`Pending`, `Running`, `Succeeded` or `Failed`: the phases of a Pod."""
    pid: int | None = None
    exit_code: int | None = None
    started: str | None = None
    ended: str | None = None
    attempts: int = 0
    failure: dict[str, Any] | None = None
    """Its termination message: `problem`, `where`, `todo`, `faults`, ..."""


@dataclass
class JobStatus:
    """A job as the supervisor last saw it."""

    name: str
    runtime: str
    num_nodes: int
    state: str = CREATED
    """`Created`, `Running`, `Complete` or `Failed`; in a cluster also `Suspended`, `Queued` and `Initializing`."""
    reason: str = ""
    """Why it failed or does not go on, in one word: `StepFailed`, `Stopped`, `DeadlineExceeded`, `Unschedulable`, ..."""
    message: str = ""
    todo: str = ""
    exit_code: int | None = None
    """What `blueprints wait` exits with; None while it runs."""
    failed_step: str | None = None
    created: str = ""
    started: str | None = None
    ended: str | None = None
    runs: int = 0
    """Times it was started: 1 plus the times it was resumed."""
    supervisor_pid: int | None = None
    resume: str = ""
    """The command that makes it go on."""
    notes: list[str] = field(default_factory=list)
    steps: list[StepStatus] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Complete or failed."""
        return self.state in FINISHED

    def as_dict(self) -> dict[str, Any]:
        """The status as plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> JobStatus:
        """The reverse of `as_dict`; fields of other versions are left out."""
        known = {item.name for item in dataclasses.fields(cls)}
        step_keys = {item.name for item in dataclasses.fields(StepStatus)}
        steps = [
            StepStatus(**{key: value for key, value in step.items() if key in step_keys})
            for step in data.get("steps") or []
        ]
        return cls(**{key: value for key, value in data.items() if key in known and key != "steps"}, steps=steps)


def now() -> str:
    """The time in UTC, as RFC 3339 with milliseconds."""
    return _timestamp(datetime.now(UTC))


def _timestamp(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_between(start: str | None, end: str | None) -> float | None:
    """Seconds from `start` to `end` (None: to now); None if it has not started."""
    if start is None:
        return None
    last = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
    return max(0.0, (last - datetime.fromisoformat(start)).total_seconds())


def home_directory() -> Path:
    """Where jobs are kept: `$BLUEPRINTS_HOME`, else `$XDG_DATA_HOME/llm-blueprints`, else under `~/.local/share`."""
    if os.environ.get("BLUEPRINTS_HOME"):
        return Path(os.environ["BLUEPRINTS_HOME"]).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser().absolute() / "llm-blueprints"


@contextlib.contextmanager
def storage_faults(where: Path) -> Iterator[None]:
    """Turn a full disk, a read-only or forbidden directory into a message for the user.

    Raises:
        EnvironmentFault: the storage below `where` cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem, todo = "no space left on the device", "free some space, or set BLUEPRINTS_HOME to another disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            problem = f"the directory for jobs cannot be written: {error.strerror}"
            todo = "set BLUEPRINTS_HOME to a directory of yours"
        else:  # such as a path too long, a loop of links, a file system that takes no directories, a broken disk
            problem = f"the directory for jobs cannot be used: {error.strerror or error}"
            todo = "set BLUEPRINTS_HOME to another directory"
        raise EnvironmentFault(problem, where=str(error.filename or where), todo=todo) from None


def write_atomic(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def is_full(path: Path) -> bool:
    """Whether next to nothing can be written below `path`."""
    return shutil.disk_usage(path).free < _FULL_BYTES


class JobDirectory:
    """The files of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.workspace = path / "workspace"
        self.output = self.workspace / "output"
        self.supervisor_log = path / "supervisor.log"

    def __repr__(self) -> str:
        return f"JobDirectory({str(self.path)!r})"

    def log(self, step: str) -> Path:
        """What the step printed."""
        return self.path / "logs" / f"{step}.log"

    def progress(self, step: str) -> Path:
        """Where the step is."""
        return self.path / "progress" / f"{step}.json"

    def termination(self, step: str) -> Path:
        """Why the step failed."""
        return self.path / "termination" / step

    def create(self) -> None:
        """Make the empty directories and the reserve that lets the last status be written on a full disk."""
        for name in ("logs", "progress", "termination", "workspace", "bin"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        (self.path / ".reserve").write_bytes(b"\0" * _RESERVE_BYTES)

    def exists(self) -> bool:
        """Whether there is such a job."""
        return (self.path / "status.json").is_file()

    def write_status(self, status: JobStatus, *, last: bool = False) -> None:
        """Record the status; the last one finds room on a full disk too, since the reserve is given up for it."""
        if last:
            (self.path / ".reserve").unlink(missing_ok=True)
        write_atomic(self.path / "status.json", json.dumps(status.as_dict(), indent=1))

    def read_status(self) -> JobStatus:
        """The status, with a job whose supervisor died reported as failed.

        Raises:
            JobFailedError: the job has been deleted.
        """
        status = self._stored_status()
        if status.finished or self.is_owned():
            return status
        status = self._stored_status()  # it may have ended between the two looks
        age = seconds_between(status.started or status.created, None) or 0.0
        if status.finished or (status.supervisor_pid is None and age < START_SECONDS):
            return status
        return _lost(status, (self.path / "status.json").stat().st_mtime)

    def _stored_status(self) -> JobStatus:
        try:
            text = (self.path / "status.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            raise JobFailedError(
                f"the job {self.name!r} was deleted meanwhile",
                where=str(self.path),
                todo="`blueprints jobs` lists the jobs",
            ) from None
        return JobStatus.from_dict(json.loads(text))

    def event(self, kind: str, name: str, reason: str, message: str) -> None:
        """Append an event."""
        line = json.dumps({"time": now(), "kind": kind, "name": name, "reason": reason, "message": message})
        try:
            with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:  # an event is not worth a job
            print(f"could not record the event {line}: {error}", flush=True)

    def events(self) -> list[dict[str, str]]:
        """All events, oldest first."""
        path = self.path / "events.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def is_owned(self) -> bool:
        """Whether a living supervisor holds the job."""
        try:
            with (self.path / "supervisor.lock").open("rb") as file:
                return not _try_lock(file, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def acquire(self, patience: float = 2.0) -> IO[bytes] | None:
        """Become the owner: the lock is held until the file is closed. None if another process has it."""
        file = (self.path / "supervisor.lock").open("ab")
        deadline = time.monotonic() + patience
        while not _try_lock(file, fcntl.LOCK_EX):  # someone may be looking just now: see is_owned
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.02)
        return file


def _try_lock(file: IO[bytes], mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lost(status: JobStatus, last_seen: float) -> JobStatus:
    status.ended = status.ended or _timestamp(datetime.fromtimestamp(last_seen, UTC))
    status.state, status.reason, status.exit_code = FAILED, "SupervisorLost", 4
    status.message = "the process that supervised the job is gone (killed, or the machine was restarted)"
    status.todo = f"run it again and it goes on where it stopped: {status.resume}" if status.resume else "run it again"
    for step in status.steps:
        if step.status == "Running":
            step.status, step.pid, step.ended = "Failed", None, status.ended
    return status
