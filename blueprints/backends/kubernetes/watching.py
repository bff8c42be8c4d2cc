"""One job under watch: its objects as the cluster sends them, state by state."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping

from blueprints.backends.kubernetes import api, truth
from blueprints.backends.kubernetes.api import ApiError, Cluster, Informer, Kind
from blueprints.backends.kubernetes.objects import JOBSET_NAME, Objects, mentions
from blueprints.backends.state import JobStatus
from blueprints.errors import UsageError
from blueprints.runtimes import Manifest

SETTLE_SECONDS = 0.3
"""Time without a change after which the end of a job is told."""
Change = tuple[Kind, Mapping[str, Manifest]]


class JobWatch:
    """The status of one job, kept up to date over lost connections, expired versions and restarts of the server.

    Args:
        cluster: where it is.
        job: the TrainJob as it is now.
        explain: reads what is not watched because it only explains: the runtime, and Kueue's Workload.
        again: reads the status anew, for the last word on a job that has ended.

    Raises:
        ApiError: the cluster refuses, or cannot be reached.
    """

    def __init__(
        self,
        cluster: Cluster,
        job: Manifest,
        explain: Callable[[Objects], Objects],
        again: Callable[[], JobStatus],
    ) -> None:
        self.job, self.explain, self.again = job, explain, again
        self._last: JobStatus | None = None
        self._end: Change | None = None
        self._changes: queue.Queue[Change] = queue.Queue()
        self._now: dict[Kind, Mapping[str, Manifest]] = {}
        name = job["metadata"]["name"]
        selector, only = f"{JOBSET_NAME}={name}", f"metadata.name={name}"
        self._informers = [
            self._informer(cluster, api.TRAINJOBS, fields=only),
            self._informer(cluster, api.JOBSETS, fields=only),
            self._informer(cluster, api.JOBS, labels=selector),
            self._informer(cluster, api.PODS, labels=selector),
            self._informer(cluster, api.EVENTS, wanted=lambda event: mentions(event, name)),
        ]
        try:
            for informer in self._informers:
                informer.start()
        except ApiError:
            self.close()
            raise
        while not self._changes.empty():
            self._take(self._changes.get())

    def _informer(
        self,
        cluster: Cluster,
        kind: Kind,
        *,
        labels: str = "",
        fields: str = "",
        wanted: Callable[[Manifest], bool] = lambda _: True,
    ) -> Informer:
        return Informer(cluster, kind, lambda items: self._changes.put((kind, items)), labels, fields, wanted)

    def _take(self, change: Change) -> None:
        self._now[change[0]] = change[1]

    def _items(self, kind: Kind) -> list[Manifest]:
        return list(self._now.get(kind, {}).values())

    def next(self, seconds: float) -> bool:
        """Take up the next change; False if there is none for so many seconds.

        The end of the TrainJob is taken up last: what its Pods and Jobs did before may be told a moment later.
        """
        try:
            change = self._changes.get(timeout=seconds if self._end is None else min(seconds, SETTLE_SECONDS))
        except queue.Empty:
            last, self._end = self._end, None
            if last is not None:
                self._take(last)
            return last is not None
        if change[0] is api.TRAINJOBS and any(truth.ended(job) for job in change[1].values()):
            self._end = change
        else:
            self._take(change)
        return True

    def wait(self, seconds: float) -> None:
        """Wait for a change, or so long."""
        self.next(seconds)

    @property
    def pods(self) -> list[Manifest]:
        """The job's Pods."""
        return self._items(api.PODS)

    def status(self) -> JobStatus:
        """The status after the changes taken up so far.

        Raises:
            UsageError: the job was deleted.
            ApiError: the cluster does not let it be watched any more.
        """
        failure = next((informer.failure for informer in self._informers if informer.failure), None)
        if failure is not None:
            raise failure
        uid, name = self.job["metadata"].get("uid"), self.job["metadata"]["name"]
        mine = next((item for item in self._items(api.TRAINJOBS) if item["metadata"].get("uid") == uid), None)
        if mine is None:
            raise UsageError(f"the TrainJob {name!r} was deleted", todo="`blueprints jobs --backend kubernetes`")
        job_sets = [item for item in self._items(api.JOBSETS) if item["metadata"]["name"] == name]
        seen = Objects(
            mine, None, next(iter(job_sets), None), self._items(api.JOBS), self.pods, self._items(api.EVENTS)
        )
        status = truth.status_of(self.explain(seen))
        return self._ended(status) if status.finished else status

    def _ended(self, status: JobStatus) -> JobStatus:
        """The end of the TrainJob may be seen before the end of the Pod that is its cause: they are watched apart."""
        if self._last is None:
            try:
                self._last = self.again()
            except UsageError:  # deleted at once
                self._last = status
        return self._last if self._last.finished else status

    def close(self) -> None:
        """Watch no more."""
        for informer in self._informers:
            informer.stop()
