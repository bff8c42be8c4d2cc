"""The process that owns a local job: it starts the steps in order, watches them, and records everything.

`python -m blueprints.backends.supervisor JOB_DIRECTORY` takes the job's lock, leaves its caller's session and returns
0 once the job is its own. Signals: SIGTERM stops the job gracefully, SIGQUIT kills it. One thread, so that a step's
parent-death signal means this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import yaml

from blueprints.backends.processes import (
    JOB_MARKER,
    STEP_MARKER,
    Port,
    command_line,
    installed_gpus,
    kill_marked,
    requested_gpus,
    reserve_port,
    send,
    start_process,
    step_environment,
)
from blueprints.backends.state import COMPLETE, FAILED, RUNNING, JobDirectory, JobStatus, StepStatus, is_full, now
from blueprints.errors import BlueprintError, EnvironmentFault, ExitCode
from blueprints.resolve import ResolvedJob, Step, resolve
from blueprints.termination import read_termination

ALREADY_OWNED = 75
POLL_SECONDS = 0.1
PEER_GRACE_SECONDS = 10.0
"""How long a step may take to end after another step of the job has failed: it may hang in a collective."""
MAX_BACKOFF_SECONDS = 4.0
FREE_SPACE = "free some disk space and run it again; it goes on where it stopped"
_TAIL_BYTES = 2048


class Group:
    """The steps of one replicatedJob: they start together, and if one fails they start again together."""

    def __init__(self, steps: list[Step], statuses: dict[str, StepStatus]) -> None:
        self.steps = steps
        self.name = steps[0].replicated_job
        self.statuses = [statuses[step.name] for step in steps]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.attempts = 0
        self.outcome: str | None = None
        """None until it is over: COMPLETE or FAILED."""
        self.first_failure: StepStatus | None = None
        self.start_at = 0.0
        self.kill_at: float | None = None
        self.port: Port | None = None

    @property
    def waiting(self) -> bool:
        """Not started, or to be started again."""
        return self.outcome is None and not self.running


class Supervisor:
    """Runs one job to its end.

    Args:
        directory: the job's files.
        job: its steps.
        status: the state to go on from.
    """

    def __init__(self, directory: JobDirectory, job: ResolvedJob, status: JobStatus) -> None:
        self.directory, self.job, self.status = directory, job, status
        self.environment = dict(os.environ)
        statuses = {step.name: step for step in status.steps}
        names = dict.fromkeys(step.replicated_job for step in job.steps)
        self.groups = {
            name: Group([step for step in job.steps if step.replicated_job == name], statuses) for name in names
        }
        self.started = time.monotonic()
        self.requests: list[int] = []
        self.ending: tuple[str, str] | None = None
        """Reason and message of an end that was asked for or forced; the steps are being stopped."""
        self.lacks_devices = False
        self.failure: StepStatus | None = None

    def run(self) -> None:
        """Until every step has ended and the last status is recorded."""
        self._say("Job", self.job.name, "Started", f"run {self.status.runs}, supervisor {os.getpid()}")
        self._note_devices()
        self._record(RUNNING)
        while not self._finished():
            self._handle_requests()
            self._check_deadline()
            if self.ending is None:
                self._start_ready()
            for group in self.groups.values():
                self._watch(group)
            time.sleep(POLL_SECONDS)
        self._conclude()

    # -- what is asked of the job

    def _handle_requests(self) -> None:
        while self.requests:
            number = self.requests.pop(0)
            if number == signal.SIGQUIT:
                self.ending = None
                self._end("Stopped", "killed on request; checkpoints written before stay")
                self._stop_all(0.0)
            elif self.ending is None:
                self._end("Stopped", "stopped on request")
                self._stop_all(None)

    def _check_deadline(self) -> None:
        seconds = self.job.deadline_seconds
        if self.ending is None and seconds is not None and time.monotonic() - self.started > seconds:
            self._end("DeadlineExceeded", f"ran longer than activeDeadlineSeconds: {seconds}")
            self._stop_all(None)

    def _end(self, reason: str, message: str) -> None:
        if self.ending is None:
            self.ending = (reason, message)
            self._say("Job", self.job.name, reason, message)

    def _stop_all(self, grace: float | None) -> None:
        for group in self.groups.values():
            self._stop(group, max(s.grace_seconds for s in group.steps) if grace is None else grace)

    def _stop(self, group: Group, grace: float) -> None:
        for process in group.running.values():
            send(process, signal.SIGTERM)
        limit = time.monotonic() + grace
        group.kill_at = limit if group.kill_at is None else min(group.kill_at, limit)

    # -- starting

    def _start_ready(self) -> None:
        for group in self.groups.values():
            if group.waiting and time.monotonic() >= group.start_at and self._dependencies_met(group):
                self._start(group)

    def _dependencies_met(self, group: Group) -> bool:
        for dependency in group.steps[0].depends_on:
            other = self.groups[dependency.replicated_job]
            ready = len(other.running) == len(other.steps) or other.outcome == COMPLETE
            if not (ready if dependency.status == "Ready" else other.outcome == COMPLETE):
                return False
        return True

    def _start(self, group: Group) -> None:
        group.attempts += 1
        group.first_failure = group.kill_at = None
        try:
            group.port = reserve_port(self.directory.path.parents[1] / "ports")
            for step, status in zip(group.steps, group.statuses, strict=True):
                self._start_step(group, step, status, group.port)
        except BlueprintError as error:
            failed = next((s for s in group.statuses if s.name not in group.running), group.statuses[0])
            failed.status, failed.exit_code, failed.failure = "Failed", int(error.exit_code), error.as_dict()
            self._fail(group, failed)
        self._record()

    def _start_step(self, group: Group, step: Step, status: StepStatus, port: Port) -> None:
        nodes = len(group.steps)
        environment = step_environment(step, self.directory, self.environment, port=port.number, nodes=nodes)
        argv = command_line(step, self.directory, environment)
        for path in (self.directory.termination(step.name), self.directory.progress(step.name)):
            path.unlink(missing_ok=True)
        try:
            with self.directory.log(step.name).open("ab") as log:
                _separate(log, self.status.runs, group.attempts)
                process = start_process(argv, environment, self.directory.workspace, log)
        except OSError as error:
            todo = "see that its program is installed, and that disk and memory are not full"
            problem = f"cannot start {argv[0]!r}: {error.strerror}"
            raise EnvironmentFault(problem, where=f"step {step.name}", todo=todo) from None
        group.running[step.name] = process
        status.status, status.pid, status.attempts = "Running", process.pid, group.attempts
        status.started, status.ended, status.exit_code, status.failure = now(), None, None, None
        self._say("Step", step.name, "Started", f"attempt {group.attempts}, process {process.pid}")

    # -- watching

    def _watch(self, group: Group) -> None:
        ended = [(status, code) for status in group.statuses if (code := self._exit_of(group, status)) is not None]
        for status, code in ended:
            self._step_ended(group, status, code)
        failed = [status for status, code in ended if code != 0]
        if failed and group.first_failure is None and self.ending is None:
            group.first_failure = min(failed, key=self._failure_order)
            self._stop(group, PEER_GRACE_SECONDS)
        if group.kill_at is not None and time.monotonic() > group.kill_at:
            for name in group.running:
                self._kill_step(name, group.running[name])
        if ended and not group.running:
            self._group_ended(group)
        if ended:
            self._record()

    def _exit_of(self, group: Group, status: StepStatus) -> int | None:
        process = group.running.get(status.name)
        code = process.poll() if process else None
        return code if code is None or code >= 0 else 128 - code  # as a container reports death by a signal

    def _step_ended(self, group: Group, status: StepStatus, code: int) -> None:
        self._kill_step(status.name, group.running.pop(status.name))  # as a container ends with its first process
        status.exit_code, status.ended, status.pid = code, now(), None
        status.status = "Failed" if code else "Succeeded"
        if code:
            status.failure = self._cause(status.name, code)
        self._say("Step", status.name, status.status, f"exit code {code}")

    def _kill_step(self, name: str, process: subprocess.Popen[bytes]) -> None:
        kill_marked(STEP_MARKER, str(self.directory.termination(name)), root=process.pid)

    def _failure_order(self, status: StepStatus) -> tuple[bool, float]:
        """Of steps found dead at the same look, the one that first said why comes first."""
        try:
            return (False, self.directory.termination(status.name).stat().st_mtime)
        except OSError:
            return (True, 0.0)

    def _cause(self, name: str, code: int) -> dict[str, object]:
        said = read_termination(self.directory.termination(name))
        if said is not None:
            return said
        if is_full(self.directory.path):
            return {"problem": "no space left on the device", "where": str(self.directory.path), "todo": FREE_SPACE}
        cause: dict[str, object] = {"problem": f"ended with exit code {code}", "log": _tail(self.directory.log(name))}
        if code == 128 + signal.SIGKILL:
            cause["problem"] = "was killed (SIGKILL): most often the machine ran out of memory"
        return cause

    def _group_ended(self, group: Group) -> None:
        if group.port is not None:
            group.port.release()
            group.port = None
        if all(status.exit_code == 0 for status in group.statuses):
            group.outcome = COMPLETE
        elif self.ending is not None or self._succeeded():
            group.outcome = FAILED
        else:
            self._retry_or_fail(group)

    def _retry_or_fail(self, group: Group) -> None:
        failed = group.first_failure or next(status for status in group.statuses if status.exit_code)
        policy = group.steps[0].failure
        lacking = self.lacks_devices and failed.exit_code == ExitCode.ENVIRONMENT  # no GPU will grow here meanwhile
        hopeless = failed.exit_code in policy.fail_on or lacking or is_full(self.directory.path)
        if hopeless or group.attempts > policy.backoff_limit:
            self._fail(group, failed)
            return
        delay = min(2.0 ** (group.attempts - 1), MAX_BACKOFF_SECONDS)
        group.start_at = time.monotonic() + delay
        for status in group.statuses:
            status.status = "Pending"
        message = (
            f"exit code {failed.exit_code}: attempt {group.attempts + 1} of {policy.backoff_limit + 1} in {delay:g} s"
        )
        self._say("Step", failed.name, "Retrying", message)

    def _fail(self, group: Group, failed: StepStatus) -> None:
        group.outcome, self.failure = FAILED, failed
        self._end("StepFailed", f"step {failed.name} failed with exit code {failed.exit_code}")
        self._stop_all(PEER_GRACE_SECONDS)

    # -- ending

    def _finished(self) -> bool:
        running = [group for group in self.groups.values() if group.running]
        if running:
            if self.ending is None and self._succeeded():
                for group in running:  # helpers are not waited for once the targets are done
                    if group.kill_at is None:
                        self._stop(group, PEER_GRACE_SECONDS)
            return False
        return self.ending is not None or self._succeeded()

    def _succeeded(self) -> bool:
        return all(self.groups[name].outcome == COMPLETE for name in self.job.success)

    def _conclude(self) -> None:
        status = self.status
        status.ended, status.supervisor_pid = now(), None
        if self._succeeded():
            status.reason, status.exit_code = "Completed", 0
            self._record(COMPLETE)
        else:
            reason, message = self.ending or ("", "")
            status.reason, status.message = reason, message
            status.exit_code = int(ExitCode.JOB_FAILED)
            if self.failure is not None:
                self._explain(self.failure)
            elif reason == "DiskFull":
                status.exit_code, status.todo = int(ExitCode.ENVIRONMENT), FREE_SPACE
            elif status.resume:
                status.todo = f"to go on where it stopped: {status.resume}"
            self._record(FAILED)
        self._say("Job", self.job.name, status.state, status.message or status.reason)

    def _explain(self, failed: StepStatus) -> None:
        cause = failed.failure or {}
        status = self.status
        status.failed_step = failed.name
        status.message = f"step {failed.name}: {cause.get('problem', '')}"
        status.todo = str(cause.get("todo") or f"see its log: blueprints logs {status.name} --step {failed.name}")
        told = (ExitCode.USER_INPUT, ExitCode.INVALID_DATA, ExitCode.ENVIRONMENT)
        status.exit_code = int(failed.exit_code if failed.exit_code in told else ExitCode.JOB_FAILED)
        if cause.get("todo") == FREE_SPACE:
            status.exit_code = int(ExitCode.ENVIRONMENT)

    # -- records

    def _note_devices(self) -> None:
        trainers = [step for step in self.job.steps if requested_gpus(step)]
        wanted = sum(requested_gpus(step) for step in trainers)
        present = len(installed_gpus(self.environment)) if wanted else 0
        if wanted > present:
            self.lacks_devices = True
            note = f"the recipe asks for {wanted} GPU(s), this machine shows {present}: set resources.gpu to match"
            self.status.notes.append(note)
            self._say("Job", self.job.name, "DevicesMissing", note)

    def _record(self, state: str | None = None) -> None:
        last = state in (COMPLETE, FAILED)
        self.status.state = state or self.status.state
        try:
            self.directory.write_status(self.status, last=last)
        except OSError as error:
            if last or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self.ending is None:
                self._end("DiskFull", f"no space left on the device: {self.directory.path}")
                self._stop_all(PEER_GRACE_SECONDS)

    def _say(self, kind: str, name: str, reason: str, message: str) -> None:
        with contextlib.suppress(OSError):  # on a full disk the job matters more than its diary
            print(f"{now()} {kind} {name} {reason}: {message}", flush=True)
        self.directory.event(kind, name, reason, message)


def _separate(log: IO[bytes], run: int, attempt: int) -> None:
    if log.tell():
        log.write(f"--- {now()} run {run}, attempt {attempt} ---\n".encode())
        log.flush()


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def fresh_steps(steps: Iterable[Step]) -> list[StepStatus]:
    """The status of steps that have not started."""
    return [StepStatus(step.name, step.replicated_job, step.index, requested_gpus(step)) for step in steps]


def main(argv: list[str]) -> int:
    """Take the job and return 0 to the caller; the child goes on alone."""
    directory = JobDirectory(Path(argv[0]))
    lock = directory.acquire()
    if lock is None:
        return ALREADY_OWNED
    # A supervisor that was killed may have left steps behind: they must not write beside the new ones.
    kill_marked(JOB_MARKER, str(directory.path))
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return 0 if os.read(reader, 1) else int(ExitCode.BUG)
    os.close(reader)
    _own(directory, writer)
    lock.close()
    os._exit(0)  # the parent's exit handlers are not this process's


def _own(directory: JobDirectory, ready: int) -> None:
    supervisor: Supervisor | None = None
    requests: list[int] = []
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, lambda received, _frame: requests.append(received))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _received, _frame: None)  # SIG_IGN would be inherited by the steps
    status = JobStatus.from_dict(_load(directory.path / "status.json"))
    try:
        job = resolve(_load(directory.path / "trainjob.yaml"), _load(directory.path / "runtime.yaml"))
        status.supervisor_pid, status.started, status.ended, status.state = os.getpid(), now(), None, RUNNING
        status.reason = status.message = status.todo = ""
        status.exit_code = status.failed_step = None
        status.notes = []
        status.runs += 1
        status.steps = fresh_steps(job.steps)
        (directory.path / "supervisor.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
        directory.write_status(status)
        os.write(ready, b"1")
        supervisor = Supervisor(directory, job, status)
        supervisor.requests = requests
        supervisor.run()
    except Exception as error:  # noqa: BLE001 - the outermost edge: whatever happens, the job must not look alive
        kill_marked(JOB_MARKER, str(directory.path))
        _record_breakdown(directory, status, error)
        with contextlib.suppress(OSError):
            traceback.print_exc()


def _record_breakdown(directory: JobDirectory, status: JobStatus, error: Exception) -> None:
    system = isinstance(error, OSError)
    status.state, status.ended, status.supervisor_pid = FAILED, now(), None
    status.reason = "SystemError" if system else "SupervisorFailed"
    status.message = f"the job could not be supervised: {error}"
    status.exit_code = int(ExitCode.ENVIRONMENT if system else ExitCode.BUG)
    again = f" and run it again: {status.resume}" if status.resume else " and run it again"
    system_todo = f"see that disk, memory and process limits are not exhausted{again}"
    status.todo = system_todo if system else f"please report it with {directory.supervisor_log}"
    for step in status.steps:
        if step.status == "Running":
            step.status, step.pid = "Failed", None
    directory.write_status(status, last=True)


def _load(path: Path) -> dict[str, object]:
    data: dict[str, object] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
