"""Logs of a job's steps, over restarts of containers and Pods and over cut connections, each line once."""

from __future__ import annotations

import queue
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from blueprints.backends.kubernetes.api import ApiError, Cluster
from blueprints.backends.kubernetes.objects import main_container, parse_time, phase, pods_at, restarts
from blueprints.backends.kubernetes.watching import JobWatch
from blueprints.backends.state import JobStatus, StepStatus
from blueprints.errors import UsageError
from blueprints.runtimes import Manifest

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)(?: |$)")
PAUSE = 1.0
"""Longest time between two looks at a Pod whose log has ended or not begun."""
MARGIN = timedelta(seconds=2)
"""A log is read again from so long before its last line: the lines of two streams come a little out of order."""
_KEEP = 2000


@dataclass
class SeenLines:
    """Which lines at the end of a log were read, so that reading on after a cut repeats none."""

    newest: str = ""
    _lines: Counter[str] = field(default_factory=Counter)
    _again: Counter[str] = field(default_factory=Counter)

    def since(self) -> str | None:
        """The time to read on from, whole seconds; None: from the beginning."""
        if not self.newest:
            return None
        return (parse_time(self.newest) - MARGIN).strftime("%Y-%m-%dT%H:%M:%SZ")

    def begin(self) -> None:
        """The log is read again."""
        self._again = Counter(self._lines)

    def is_new(self, line: str) -> bool:
        """Whether a line, with its time in front, was not read before."""
        if self._again[line]:
            self._again[line] -= 1
            return False
        self.newest = max(self.newest, stamp_of(line))
        self._lines[line] += 1
        if len(self._lines) > _KEEP:
            self._forget()
        return True

    def _forget(self) -> None:
        """Keep the lines that reading on could bring again."""
        horizon = parse_time(self.newest) - 2 * MARGIN
        kept = {line: count for line, count in self._lines.items() if parse_time(stamp_of(line)) >= horizon}
        self._lines = Counter(kept)


def stamp_of(line: str) -> str:
    """The time in front of a line; empty where the kubelet speaks itself."""
    found = _STAMP.match(line)
    return found[0].strip() if found else ""


def text_of(line: str) -> str:
    """A line without its time."""
    return _STAMP.sub("", line, count=1) if _STAMP.match(line) else line


def printed(cluster: Cluster, pods: list[Manifest]) -> Iterator[str]:
    """What the Pods of one place have printed so far, the oldest first."""
    for pod in pods:
        seen = SeenLines()
        if restarts(pod):
            yield from _read(cluster, pod, seen, previous=True)
        yield from _read(cluster, pod, seen)


def _read(
    cluster: Cluster, pod: Manifest, seen: SeenLines, *, follow: bool = False, previous: bool = False
) -> Iterator[str]:
    """The new lines of a Pod's log, without their times; nothing where it has none."""
    seen.begin()
    name = pod["metadata"]["name"]
    try:
        for line in cluster.log(name, main_container(pod), follow=follow, since=seen.since(), previous=previous):
            if seen.is_new(line):
                yield text_of(line)
    except ApiError as error:
        if error.status not in (400, 404):  # it has not started, or is gone
            raise


class Follower:
    """Follows the logs of several steps at once.

    Args:
        cluster: where the job is.
        watch: the job under watch; closed at the end.
        steps: which.
    """

    def __init__(self, cluster: Cluster, watch: JobWatch, steps: list[StepStatus]) -> None:
        self.cluster, self.watch, self.steps = cluster, watch, steps
        self._lines: queue.Queue[tuple[str, str] | ApiError | None] = queue.Queue(maxsize=10_000)
        self._changed = threading.Condition()
        self._status: JobStatus = watch.status()
        self._pods = watch.pods
        self._over = threading.Event()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Step and line, until nothing more can come.

        Raises:
            ApiError: a log cannot be read.
        """
        try:
            left = []
            for step in self.steps:  # in order, what has ended before we came
                if step.status == "Succeeded":
                    pods = pods_at(self._pods, step.replicated_job, step.index)
                    yield from ((step.name, line) for line in printed(self.cluster, pods))
                else:
                    left.append(step)
            threading.Thread(target=self._look, daemon=True).start()
            for step in left:
                threading.Thread(target=self._run, args=(step,), daemon=True).start()
            running = len(left)
            while running:
                item = self._lines.get()
                if item is None:
                    running -= 1
                elif isinstance(item, ApiError):
                    raise item
                else:
                    yield item
        finally:
            self._over.set()
            self.watch.close()

    def _look(self) -> None:
        """Keep the Pods and the status current for all steps."""
        while not self._over.is_set():
            self.watch.next(PAUSE)
            try:
                status = self.watch.status()
            except UsageError:  # deleted: there is nothing more to read
                self._tell(JobStatus(self._status.name, "", 0, state="Failed"), [])
                return
            except ApiError as error:
                self._put(error)
                return
            self._tell(status, self.watch.pods)

    def _tell(self, status: JobStatus, pods: list[Manifest]) -> None:
        with self._changed:
            self._status, self._pods = status, pods
            self._changed.notify_all()

    def _put(self, item: tuple[str, str] | ApiError | None) -> None:
        while not self._over.is_set():
            try:
                self._lines.put(item, timeout=1.0)
            except queue.Full:
                continue
            return

    def _run(self, step: StepStatus) -> None:
        try:
            for line in self._step(step):
                self._put((step.name, line))
        except ApiError as error:
            self._put(error)
        self._put(None)

    def _step(self, step: StepStatus) -> Iterator[str]:
        """One step's lines over the Pods that run it."""
        seen: dict[str, SeenLines] = {}
        starts: dict[str, int] = {}
        complete: set[str] = set()
        while not self._over.is_set():
            with self._changed:
                pods, status = pods_at(self._pods, step.replicated_job, step.index), self._status
            over = status.finished or any(
                item.name == step.name and item.status == "Succeeded" for item in status.steps
            )
            for pod in pods:
                uid = pod["metadata"]["uid"]
                if uid in complete or phase(pod) == "Pending":
                    continue
                lines = seen.setdefault(uid, SeenLines())
                if restarts(pod) > starts.get(uid, 0):  # the end of what was printed before the restart
                    starts[uid] = restarts(pod)
                    yield from _read(self.cluster, pod, lines, previous=True)
                ended = phase(pod) != "Running"
                yield from _read(self.cluster, pod, lines, follow=not ended and not over)
                if ended:
                    complete.add(uid)
            if over:
                return
            with self._changed:
                if self._status is status:
                    self._changed.wait(PAUSE)
