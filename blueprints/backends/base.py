"""What runs jobs: this machine or a cluster, behind one set of calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Protocol

from blueprints.errors import UsageError

if TYPE_CHECKING:
    from blueprints.backends.results import Run
    from blueprints.backends.state import JobDirectory, JobStatus
    from blueprints.progress import ProgressState
    from blueprints.runtimes import Manifest
    from blueprints.types import Event

BACKENDS = ("local", "kubernetes")


class Watch(Protocol):
    """One job kept in view."""

    def status(self) -> JobStatus:
        """Its status now."""

    def wait(self, seconds: float) -> None:
        """Wait until something may have changed, or so long."""

    def close(self) -> None:
        """Look no more."""


class Backend(Protocol):
    """Runs TrainJobs. Every call that names a job raises `UsageError` if there is none of that name."""

    @property
    def name(self) -> str:
        """`local` or `kubernetes`."""

    @property
    def place(self) -> str:
        """Where the jobs are, for messages."""

    def runtimes(self) -> list[Manifest]:
        """The runtimes a job can name."""

    def runtime(self, name: str) -> Manifest:
        """One of them, by its name with or without its version; `UsageError` if there is none."""

    def notes(self, job: Manifest, runtime: Manifest) -> list[str]:
        """What of a job has no effect here, or needs care."""

    def check(self, job: Manifest, runtime: Manifest) -> Manifest:
        """See whether a job would be taken, and change nothing; returns it as it would be."""

    def start(self, job: Manifest, runtime: Manifest, *, resume: str = "") -> str:
        """Run a job; returns `started`, `resumed` or `complete`."""

    def get(self, name: str) -> JobStatus:
        """State of a job and its steps."""

    def jobs(self) -> list[JobStatus]:
        """All jobs, the newest first."""

    def progress(self, status: JobStatus) -> dict[str, ProgressState]:
        """By step, how far it is."""

    def events(self, name: str) -> list[Event]:
        """What happened, oldest first."""

    def logs(self, name: str, steps: Collection[str] = (), *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """Step and line of what the steps printed."""

    def watch(self, name: str) -> Watch:
        """Keep a job in view."""

    def wait(self, name: str, *, timeout: float | None = None, states: Collection[str] = ()) -> JobStatus:
        """Wait until a job has ended or has one of `states`; `TimeoutError` if it has not in time."""

    def suspend(self, name: str) -> None:
        """Stop a job so that it can go on later."""

    def resume(self, name: str) -> None:
        """Let a stopped job go on."""

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Ask a job to save its state and stop; with `kill`, end it now."""

    def delete(self, name: str, *, force: bool = False, claims: bool = False) -> None:
        """Remove a job; with `force` also one that runs, with `claims` also the claims that it leaves in a cluster."""

    def files(self, name: str) -> JobDirectory | None:
        """The job's files; None where this machine does not have them."""

    def run(self, name: str) -> Run | None:
        """The record of a job's run; None where there is none to be read."""

    def result_place(self, name: str) -> str:
        """Where what was trained lies."""


def open_backend(
    name: str, *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
) -> Backend:
    """The backend of that name.

    Args:
        name: `local` or `kubernetes`.
        kubeconfig: file, for `kubernetes`. Default: as kubectl finds it, or the Pod's own account.
        context: of the kubeconfig. Default: its current one.
        namespace: of the jobs. Default: the context's.

    Raises:
        UsageError: there is no such backend, or the arguments do not fit it.
    """
    given = {"kubeconfig": kubeconfig, "context": context, "namespace": namespace}
    if name == "kubernetes":
        from blueprints.backends.kubernetes.backend import KubernetesBackend

        return KubernetesBackend.connect(**given)
    if name != "local":
        raise UsageError(f"there is no backend {name!r}", where="backend", todo=f"use {' or '.join(BACKENDS)}")
    wrong = [key for key, value in given.items() if value is not None]
    if wrong:
        problem = f"{' and '.join(wrong)} {'means' if len(wrong) == 1 else 'mean'} nothing on this machine"
        raise UsageError(problem, where="backend local", todo="add the backend kubernetes (`--backend kubernetes`)")
    from blueprints.backends.local import LocalBackend

    return LocalBackend()
