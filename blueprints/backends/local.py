"""This machine as a cluster of one: the same TrainJob and runtime, the same steps, as processes.

Jobs live in directories below `home_directory()`; a detached supervisor owns each running one, so this module only
writes what is to run, starts supervisors, and reads what they record.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path

import yaml

from blueprints.backends.processes import JOB_MARKER, STEP_MARKER, add_package_path, kill_marked, write_commands
from blueprints.backends.results import Run, read_run
from blueprints.backends.state import (
    COMPLETE,
    CREATED,
    JobDirectory,
    JobStatus,
    home_directory,
    now,
    storage_faults,
)
from blueprints.backends.supervisor import ALREADY_OWNED, fresh_steps
from blueprints.errors import EnvironmentFault, UsageError
from blueprints.manifests import require_valid
from blueprints.progress import CALLED_FROM, ProgressState, read_progress
from blueprints.resolve import ResolvedJob, resolve
from blueprints.runtimes import Manifest, get_runtime, pod_spec, shipped_runtimes
from blueprints.trainjob import RECIPE_HASH, to_yaml
from blueprints.types import Event

LIBRARIES = {
    "initializers": ("pyarrow", "transformers", "huggingface_hub", "jinja2"),
    "trainers": ("torch", "transformers", "trl", "peft", "datasets", "accelerate"),
}
"""What the steps' own packages need beside the light client."""
CLUSTER_ONLY = ("nodeSelector", "tolerations", "affinity", "serviceAccountName", "imagePullSecrets", "schedulingGates")
"""Fields of a Pod that say where it lands and who it is: processes of this machine have no choice."""
STARTED, RESUMED, ALREADY_COMPLETE = "started", "resumed", "complete"
_LONGEST_NAME = 63
_NAME = re.compile(rf"[a-z][-a-z0-9]{{0,{_LONGEST_NAME - 1}}}\Z")
"""What a job can be called at all."""
_MINIMUM_FREE_BYTES = 64 * 1024 * 1024
_POLL_SECONDS = 0.2
_KILL_SECONDS = 30.0


class LocalBackend:
    """Runs TrainJobs as processes of this machine.

    Args:
        home: directory for jobs. Default: see `home_directory`.
    """

    name = "local"

    def __init__(self, home: Path | None = None) -> None:
        self.home = home_directory() if home is None else home.expanduser().absolute()
        self.jobs_directory = self.home / "jobs"

    @property
    def place(self) -> str:
        """Where the jobs are."""
        return str(self.jobs_directory)

    # -- runtimes

    def runtimes(self) -> list[Manifest]:
        """The shipped runtimes."""
        return list(shipped_runtimes().values())

    def runtime(self, name: str) -> Manifest:
        """See `blueprints.runtimes.get_runtime`."""
        return get_runtime(name)

    def notes(self, job: Manifest, runtime: Manifest) -> list[str]:
        """What a job asks of a cluster's nodes and has no meaning for processes of this machine."""
        del runtime
        asked = [key for key in CLUSTER_ONLY for pod in _patched_pods(job) if pod.get(key)]
        found = ", ".join(dict.fromkeys(asked))
        return [f"{found} of the runtimePatches: of no meaning on this machine"] if found else []

    # -- starting

    def check(self, job: Manifest, runtime: Manifest) -> Manifest:
        """See whether a job could run here; missing libraries are told of when it starts.

        Raises:
            ManifestError: the TrainJob or the runtime is invalid.
            UsageError: they need a cluster.
        """
        require_valid(job, runtime)
        require_processes(runtime)
        require_machine(job)
        return job

    def start(self, job: Manifest, runtime: Manifest, *, resume: str = "") -> str:
        """Run a job, go on with a stopped or failed one of the same name and recipe, or find it complete already.

        Args:
            job: the TrainJob.
            runtime: its runtime; a snapshot is kept with the job.
            resume: the command that starts this job again, for messages.

        Returns:
            `started`, `resumed` or `complete`.

        Raises:
            ManifestError: the TrainJob or the runtime is invalid.
            UsageError: the name is taken by a running job or by another recipe, or the runtime needs a cluster.
            EnvironmentFault: libraries are missing, or the jobs' directory cannot be written.
        """
        self.check(job, runtime)
        require_libraries(resolve(job, runtime))
        directory = JobDirectory(self.jobs_directory / job["metadata"]["name"])
        with storage_faults(self.home), self._creating():
            outcome = STARTED
            if directory.exists():
                outcome = self._existing(directory, job)
            else:
                self._create(directory, job, runtime, resume)
            if outcome != ALREADY_COMPLETE:
                self._supervise(directory)
        return outcome

    def _existing(self, directory: JobDirectory, job: Manifest) -> str:
        status = directory.read_status()
        if directory.is_owned():
            raise UsageError(
                f"a job named {status.name!r} is running",
                where="name",
                todo=f"follow it with `blueprints logs {status.name} --follow`, or choose another name",
            )
        stored = yaml.safe_load((directory.path / "trainjob.yaml").read_text(encoding="utf-8"))
        if not _same_run(stored, job):
            raise UsageError(
                f"a job named {status.name!r} with another recipe exists",
                where="name",
                todo=f"choose another name, or remove that job with `blueprints delete {status.name}`",
            )
        if status.state == COMPLETE:
            return ALREADY_COMPLETE
        directory.create()  # what a full disk has taken
        return RESUMED

    def _create(self, directory: JobDirectory, job: Manifest, runtime: Manifest, resume: str) -> None:
        free = shutil.disk_usage(self.jobs_directory).free
        if free < _MINIMUM_FREE_BYTES:
            problem = f"only {free // 2**20} MiB are free on the disk for jobs"
            raise EnvironmentFault(
                problem, where=str(self.jobs_directory), todo="free some space, or set BLUEPRINTS_HOME"
            )
        shutil.rmtree(directory.path, ignore_errors=True)  # left by a creation that was interrupted
        directory.create()
        (directory.path / "trainjob.yaml").write_text(to_yaml(job), encoding="utf-8")
        (directory.path / "runtime.yaml").write_text(to_yaml(runtime), encoding="utf-8")
        resolved = resolve(job, runtime)
        directory.write_status(
            JobStatus(
                name=directory.name,
                runtime=runtime["metadata"]["name"],
                num_nodes=resolved.num_nodes,
                state=CREATED,
                created=now(),
                resume=resume,
                steps=fresh_steps(resolved.steps),
            )
        )
        directory.event("Job", directory.name, "Created", f"on runtime {runtime['metadata']['name']}")

    def _supervise(self, directory: JobDirectory) -> None:
        write_commands(directory)  # this interpreter's: another one may have created the job
        environment = {name: value for name, value in os.environ.items() if name not in (JOB_MARKER, STEP_MARKER)}
        # The job runs elsewhere: what is meant relative to here is written out.
        paths = [str(Path(path).absolute()) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), CALLED_FROM: str(Path.cwd())}
        add_package_path(environment)
        environment |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
        with directory.supervisor_log.open("ab") as log:
            start = log.tell()
            code = subprocess.run(
                [sys.executable, "-m", "blueprints.backends.supervisor", str(directory.path)],
                cwd=directory.path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # closing the terminal or Ctrl-C in it must not reach the job
                check=False,
            ).returncode
        if code == ALREADY_OWNED:
            raise UsageError(f"a job named {directory.name!r} is running", where="name", todo="choose another name")
        if code:
            said = directory.supervisor_log.read_bytes()[start:].decode(errors="replace").strip()
            raise EnvironmentFault(
                f"the supervisor of the job could not start: {said.splitlines()[-1] if said else f'exit code {code}'}",
                where=str(directory.supervisor_log),
                todo="see that file for the whole message",
            )

    @contextlib.contextmanager
    def _creating(self) -> Iterator[None]:
        """One client at a time creates, starts or deletes."""
        self.jobs_directory.mkdir(parents=True, exist_ok=True)
        with (self.home / "jobs.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # -- looking

    def directory(self, name: str) -> JobDirectory:
        """The files of a job.

        Raises:
            UsageError: there is no such job.
        """
        well_formed = isinstance(name, str) and _NAME.match(name) is not None
        directory = JobDirectory(self.jobs_directory / name) if well_formed else None
        if directory is None or not directory.exists():
            known = self.names()
            near = difflib.get_close_matches(str(name)[:_LONGEST_NAME], known, n=3)
            listed = f"did you mean {', '.join(near)}?" if near else "`blueprints jobs` lists the jobs"
            raise UsageError(f"there is no job named {name!r}", where=str(self.jobs_directory), todo=listed)
        return directory

    def names(self) -> list[str]:
        """Names of all jobs."""
        if not self.jobs_directory.is_dir():
            return []
        found = [JobDirectory(path) for path in self.jobs_directory.iterdir() if not path.name.startswith(".")]
        return sorted(directory.name for directory in found if directory.exists())

    def get(self, name: str) -> JobStatus:
        """State of a job and of its steps."""
        return self.directory(name).read_status()

    def jobs(self) -> list[JobStatus]:
        """All jobs, the newest first."""
        statuses = [self.get(name) for name in self.names()]
        return sorted(statuses, key=lambda status: status.created, reverse=True)

    def progress(self, status: JobStatus) -> dict[str, ProgressState]:
        """What the steps last reported."""
        directory = JobDirectory(self.jobs_directory / status.name)
        reports = {step.name: read_progress(directory.progress(step.name)) for step in status.steps}
        return {name: report for name, report in reports.items() if report is not None}

    def events(self, name: str) -> list[Event]:
        """What happened to a job and its steps, oldest first."""
        kinds = {"Job": "TrainJob", "Step": "Pod"}
        return [
            Event(
                involved_object_kind=kinds.get(event["kind"], event["kind"]),
                involved_object_name=event["name"],
                message=event["message"],
                reason=event["reason"],
                event_time=datetime.fromisoformat(event["time"]),
            )
            for event in self.directory(name).events()
        ]

    def files(self, name: str) -> JobDirectory | None:
        """The job's directory."""
        return self.directory(name)

    def run(self, name: str) -> Run | None:
        """The record of a job's run; None while there is none."""
        return read_run(self.directory(name))

    def result_place(self, name: str) -> str:
        """Where what was trained lies."""
        return str(self.directory(name).output)

    def watch(self, name: str) -> DirectoryWatch:
        """Keep a job in view."""
        return DirectoryWatch(self.directory(name))

    def wait(self, name: str, *, timeout: float | None = None, states: Collection[str] = ()) -> JobStatus:
        """Wait until a job has ended, or has reached one of `states`.

        Raises:
            TimeoutError: it has not after `timeout` seconds.
        """
        directory = self.directory(name)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = directory.read_status()
            if status.finished or status.state in states:
                return status
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {name!r} is still {status.state} after {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def logs(self, name: str, steps: Collection[str] = (), *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """Lines the steps printed, with the step's name: step by step, or as they come with `follow`.

        Args:
            name: the job.
            steps: names of steps. Default: all.
            follow: go on until the job ends.

        Raises:
            UsageError: there is no such job or step.
        """
        directory = self.directory(name)
        known = [step.name for step in directory.read_status().steps]
        for step in steps:
            if step not in known:
                todo = f"its steps are {', '.join(known)}"
                raise UsageError(f"job {name!r} has no step {step!r}", where="--step", todo=todo)
        return _log_lines(directory, [step for step in known if not steps or step in steps], follow)

    # -- ending and going on

    def suspend(self, name: str) -> None:
        """Ask a running job to save its state and stop.

        Raises:
            UsageError: it does not run.
        """
        if not self.directory(name).is_owned():
            raise UsageError(f"job {name!r} does not run: it is {self.get(name).state}", where="NAME")
        self.stop(name)

    def resume(self, name: str) -> None:
        """Let a stopped or failed job go on from its last checkpoint.

        Raises:
            UsageError: it runs, or is complete.
        """
        directory = self.directory(name)
        if directory.read_status().state == COMPLETE:
            raise UsageError(f"job {name!r} is complete", where="NAME")
        stored = [
            yaml.safe_load((directory.path / file).read_text(encoding="utf-8"))
            for file in ("trainjob.yaml", "runtime.yaml")
        ]
        self.start(stored[0], stored[1])

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Ask a running job to save its state and end; with `kill`, end it now. Returns at once."""
        directory = self.directory(name)
        if directory.is_owned():
            pid = int((directory.path / "supervisor.pid").read_text(encoding="utf-8"))
            with contextlib.suppress(ProcessLookupError):  # it ended between the two lines
                os.kill(pid, signal.SIGQUIT if kill else signal.SIGTERM)

    def delete(self, name: str, *, force: bool = False, claims: bool = False) -> None:
        """Remove a job with all its files, its trained model included.

        Raises:
            UsageError: it runs, and `force` is not given; or `claims` is, which only a cluster has.
        """
        if claims:
            todo = "leave it out: all files of the job go with it"
            raise UsageError("there are no claims on this machine", where="--claims", todo=todo)
        directory = self.directory(name)
        with storage_faults(self.home), self._creating():
            if directory.is_owned():
                if not force:
                    todo = f"stop it and remove it with `blueprints delete {name} --force`"
                    raise UsageError(f"job {name!r} is running", todo=todo)
                self.stop(name, kill=True)
                _wait_until_free(directory)
            kill_marked(JOB_MARKER, str(directory.path))
            doomed = directory.path.with_name(f".deleted-{name}-{os.getpid()}")
            directory.path.rename(doomed)  # from here on the name is free, whatever happens
            shutil.rmtree(doomed)


def require_processes(runtime: Manifest) -> None:
    """See that a runtime's steps can be processes of one machine.

    Raises:
        UsageError: it starts its nodes over ssh.
    """
    if (runtime["spec"].get("mlPolicy") or {}).get("mpi") is not None:
        raise UsageError(
            "mpirun and the nodes it reaches over ssh need a cluster",
            where=f"{runtime['kind']} {runtime['metadata']['name']}",
            todo="leave runtime.name out here: several nodes are torchrun processes on this machine",
        )


class DirectoryWatch:
    """A job in view: its files are looked at again and again.

    Args:
        directory: of the job.
    """

    def __init__(self, directory: JobDirectory) -> None:
        self.directory = directory

    def status(self) -> JobStatus:
        """The status now."""
        return self.directory.read_status()

    def wait(self, seconds: float) -> None:
        """Wait so long."""
        time.sleep(seconds)

    def close(self) -> None:
        """There is nothing to close."""


def _patched_pods(job: Manifest) -> list[Manifest]:
    """The Pod specs in a TrainJob's patches."""
    patches = (job.get("spec") or {}).get("runtimePatches") or []
    specs = [((p.get("trainingRuntimeSpec") or {}).get("template") or {}).get("spec") or {} for p in patches]
    return [pod_spec(entry) for spec in specs for entry in spec.get("replicatedJobs") or []]


def require_machine(job: Manifest) -> None:
    """See that a job asks for nothing that only a cluster has and that its steps would miss.

    Raises:
        UsageError: it does.
    """
    spec = job.get("spec") or {}
    where, cluster = f"TrainJob {job['metadata']['name']}", "or run it in a cluster: --backend kubernetes"
    if any(pod.get("volumes") for pod in _patched_pods(job)):
        problem = "claims, Secrets and ConfigMaps cannot be mounted on this machine"
        todo = f"leave runtime.volumes out and name the files themselves (file:///...), {cluster}"
        raise UsageError(problem, where=where, todo=todo)
    if spec.get("suspend"):
        raise UsageError(
            "a job that is created suspended waits in a cluster",
            where=where,
            todo=f"leave runtime.suspend out, {cluster}",
        )
    if str(spec.get("managedBy") or "").startswith("kueue"):
        problem = "MultiKueue is not on this machine"
        raise UsageError(problem, where=where, todo=f"leave runtime.managed_by out, {cluster}")


def require_libraries(job: ResolvedJob) -> None:
    """See before anything starts that what the steps import is installed.

    Raises:
        EnvironmentFault: something is missing.
    """
    words = {word for step in job.steps for word in step.argv}
    needed = [name for package, names in LIBRARIES.items() if package in words for name in names]
    missing = [name for name in dict.fromkeys(needed) if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"this Python lacks {', '.join(missing)}, which the job's steps need",
            where=sys.executable,
            todo="pip install 'llm-blueprints[all]'",
        )


def _same_run(stored: Manifest, job: Manifest) -> bool:
    """Whether both train the same recipe; jobs not made from a recipe must be equal."""
    hashes = [(manifest["metadata"].get("annotations") or {}).get(RECIPE_HASH) for manifest in (stored, job)]
    if hashes[0] and hashes[1]:
        return bool(hashes[0] == hashes[1])
    return bool(stored["spec"] == job["spec"])


def _wait_until_free(directory: JobDirectory) -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while directory.is_owned():
        if time.monotonic() > deadline:
            pid = (directory.path / "supervisor.pid").read_text(encoding="utf-8").strip()
            raise EnvironmentFault("the job does not end", where=f"process {pid}", todo=f"kill -9 {pid}, then again")
        time.sleep(0.05)


def _log_lines(directory: JobDirectory, steps: list[str], follow: bool) -> Iterator[tuple[str, str]]:
    positions = dict.fromkeys(steps, 0)
    while True:
        finished = not follow or directory.read_status().finished
        for step in steps:
            yield from ((step, line) for line in _new_lines(directory.log(step), positions, step, last=finished))
        if finished:
            return
        time.sleep(_POLL_SECONDS)


def _new_lines(path: Path, positions: dict[str, int], step: str, *, last: bool) -> Iterator[str]:
    """Whole lines that were added since the last look; at the end also one without a line break."""
    try:
        with path.open("rb") as file:
            file.seek(positions[step])
            for line in file:
                if not line.endswith(b"\n") and not last:
                    break
                positions[step] += len(line)
                yield line.decode(errors="replace").rstrip("\r\n")
    except FileNotFoundError:
        return  # the step has not started, or the job was deleted
