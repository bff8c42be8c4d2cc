"""TrainJobs in a cluster: create, look, follow, suspend, resume, delete."""

from __future__ import annotations

import copy
import difflib
import queue
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from blueprints.backends.kubernetes import api, truth
from blueprints.backends.kubernetes.api import ApiError, Cluster, Informer, Kind
from blueprints.backends.kubernetes.tokens import delete_tokens, give_tokens, tokens_from
from blueprints.backends.kubernetes.truth import Objects
from blueprints.backends.state import COMPLETE, JobStatus, StepStatus
from blueprints.errors import UsageError
from blueprints.manifests import require_valid
from blueprints.progress import ProgressState
from blueprints.runtimes import Manifest, shipped_runtimes
from blueprints.trainjob import RECIPE_HASH

SUBMISSION = "blueprints.llm-blueprints.dev/submission"
"""Annotation by which a creation whose answer was lost is known again."""
STARTED, RESUMED, ALREADY_COMPLETE = "started", "resumed", "complete"
RACE_SECONDS = 10.0
"""The webhook may not have seen a runtime yet that was created a moment ago."""
STEP_LINE = re.compile(
    r"step (?P<step>\d+)/(?P<steps>\d+)  loss (?P<loss>[-\d.naif]+).*?(?:(?P<pace>[\d,]+) tokens/s)?(?:  ETA (?P<eta>[\d:]+))?$"
)
"""The trainer's line of a step, as its log has it."""
LOG_PAUSE = 1.0


@dataclass(frozen=True)
class Event:
    """One event of a job or of something that belongs to it."""

    time: str
    kind: str
    name: str
    reason: str
    message: str
    type: str = "Normal"


class KubernetesBackend:
    """Runs TrainJobs in a cluster with Kubeflow Trainer.

    Args:
        cluster: the API server and namespace.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @classmethod
    def connect(
        cls, *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
    ) -> KubernetesBackend:
        """See `Cluster.connect`."""
        return cls(Cluster.connect(kubeconfig=kubeconfig, context=context, namespace=namespace))

    # -- runtimes

    def runtimes(self) -> list[Manifest]:
        """The runtimes that a job can name: the cluster's and the namespace's own."""
        found = self.cluster.find_all(api.CLUSTER_RUNTIMES)
        try:
            found += self.cluster.find_all(api.RUNTIMES)
        except ApiError as error:
            if error.status != 403:
                raise
        return found

    def runtime(self, name: str, kind: str = "ClusterTrainingRuntime") -> Manifest:
        """One runtime of the cluster.

        Raises:
            UsageError: there is none of that name.
        """
        where = api.RUNTIMES if kind == "TrainingRuntime" else api.CLUSTER_RUNTIMES
        found = self.cluster.find(where, name)
        if found is None:
            known = [item["metadata"]["name"] for item in self.runtimes()]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            ships = name in shipped_runtimes()
            todo = "install it: `blueprints runtimes apply`" if ships else f"installed: {', '.join(known) or 'none'}"
            raise UsageError(
                f"the cluster has no {kind} {name!r}", where=f"{self.cluster.server}", todo=f"{hint}{todo}"
            )
        return found

    # -- starting

    def start(self, job: Manifest, runtime: Manifest, *, resume: str = "") -> str:
        """Create a TrainJob; one of the same name and recipe that is there is gone on with, or complete already.

        Args:
            job: the TrainJob.
            runtime: the runtime it was written for; the cluster's own of that name is what it is checked against.
            resume: not used here: a TrainJob goes on by itself, or is created again.

        Returns:
            `started`, `resumed` (it was suspended) or `complete`.

        Raises:
            ManifestError: the TrainJob is invalid for the cluster's runtime.
            UsageError: the name is taken by another recipe, the runtime is not installed, or the cluster refuses.
            ApiError: the cluster cannot be reached or used.
        """
        del resume
        installed = self.runtime(runtime["metadata"]["name"], str(runtime.get("kind", "ClusterTrainingRuntime")))
        require_valid(job, installed)
        there = self.cluster.find(api.TRAINJOBS, job["metadata"]["name"])
        if there is not None:
            return self._existing(there, job)
        body = copy.deepcopy(job)
        body["metadata"]["namespace"] = self.cluster.namespace
        body["metadata"].setdefault("annotations", {})[SUBMISSION] = str(uuid.uuid4())
        tokens = tokens_from(body)
        created_secret = give_tokens(self.cluster, body, tokens) if tokens else None
        try:
            created = self._create(body)
        except ApiError:
            if created_secret:
                delete_tokens(self.cluster, body["metadata"]["name"])
            raise
        if created_secret:
            created_secret(created)
        return STARTED

    def _create(self, body: Manifest) -> Manifest:
        deadline = time.monotonic() + RACE_SECONDS
        while True:
            try:
                return self.cluster.create(api.TRAINJOBS, body)
            except ApiError as error:
                race = "must be created before the TrainJob is created" in str(error)
                if not race or time.monotonic() > deadline:
                    raise
                self.cluster.pause(0.5)

    def _existing(self, there: Manifest, job: Manifest) -> str:
        name = job["metadata"]["name"]
        hashes = [(item["metadata"].get("annotations") or {}).get(RECIPE_HASH) for item in (there, job)]
        same = hashes[0] == hashes[1] if all(hashes) else there["spec"] == job["spec"]
        status = self.get(name)
        if not same:
            todo = f"choose another name, or remove that job with `blueprints delete {name} --backend kubernetes`"
            raise UsageError(f"a job named {name!r} with another recipe exists", where="name", todo=todo)
        if status.state == COMPLETE:
            return ALREADY_COMPLETE
        if status.state == truth.SUSPENDED:
            self.resume(name)
            return RESUMED
        todo = (
            f"remove it with `blueprints delete {name} --backend kubernetes`; its claim, and what was saved on it, stays"
            if status.finished
            else f"follow it with `blueprints logs {name} --backend kubernetes --follow`, or choose another name"
        )
        raise UsageError(f"a job named {name!r} is {status.state}", where="name", todo=todo)

    # -- looking

    def manifest(self, name: str) -> Manifest:
        """The TrainJob as the cluster has it.

        Raises:
            UsageError: there is none of that name.
        """
        found = self.cluster.find(api.TRAINJOBS, name)
        if found is None:
            known = [item["metadata"]["name"] for item in self.cluster.find_all(api.TRAINJOBS)]
            near = difflib.get_close_matches(name, known, 3)
            listed = f"did you mean {', '.join(near)}?" if near else "`blueprints jobs` lists the jobs"
            raise UsageError(
                f"there is no TrainJob {name!r} in the namespace {self.cluster.namespace}", where="NAME", todo=listed
            )
        return found

    def get(self, name: str) -> JobStatus:
        """State of a job and of its steps, and why it is stuck or failed."""
        return truth.status_of(self.objects(self.manifest(name)))

    def objects(self, job: Manifest) -> Objects:
        """Everything that belongs to a TrainJob."""
        name = job["metadata"]["name"]
        selector = f"{truth.JOBSET_NAME}={name}"
        return Objects(
            job=job,
            runtime=self._snapshot(job),
            job_set=self._allowed(api.JOBSETS, name),
            jobs=self.cluster.find_all(api.JOBS, labels=selector),
            pods=self.cluster.find_all(api.PODS, labels=selector),
            events=self._raw_events(name),
            workload=self._workload(job),
        )

    def _snapshot(self, job: Manifest) -> Manifest | None:
        """The runtime as the controller keeps it for this job, else as it is."""
        name = job["metadata"]["name"]
        kept = self._allowed(api.CONFIG_MAPS, f"{name}-runtime-snapshot")
        text = ((kept or {}).get("data") or {}).get("runtime")
        if text:
            found: Manifest = yaml.safe_load(text)
            return found
        reference = job["spec"]["runtimeRef"]
        kind = api.RUNTIMES if reference.get("kind") == "TrainingRuntime" else api.CLUSTER_RUNTIMES
        return self._allowed(kind, reference["name"])

    def _allowed(self, kind: Kind, name: str) -> Manifest | None:
        """An object that adds to the picture, None where it is missing or may not be read."""
        try:
            return self.cluster.find(kind, name)
        except ApiError as error:
            if error.status == 403:
                return None
            raise

    def _workload(self, job: Manifest) -> Manifest | None:
        if truth.QUEUE not in (job["metadata"].get("labels") or {}):
            return None
        try:
            for item in self.cluster.find_all(api.WORKLOADS):
                owners = item["metadata"].get("ownerReferences") or []
                if any(owner.get("uid") == job["metadata"].get("uid") for owner in owners):
                    return item
        except ApiError as error:
            if error.status not in (403, 404):
                raise
        return None

    def _raw_events(self, name: str) -> list[Manifest]:
        """Events of the TrainJob and of everything named after it: JobSet, Jobs, Pods that are gone already too."""
        mine = re.compile(rf"{re.escape(name)}(-[a-z0-9-]+)?\Z")
        found = self.cluster.find_all(api.EVENTS)
        kinds = ("TrainJob", "JobSet", "Job", "Pod", "PodGroup", "Workload", "PersistentVolumeClaim")
        return [
            event for event in found
            if (target := event.get("involvedObject") or {}).get("kind") in kinds
            and _names_it(str(target.get("name")), name, mine)
        ]  # fmt: skip

    def events(self, name: str) -> list[Event]:
        """What happened to a job and all that belongs to it, in the order of time."""
        self.manifest(name)
        return [
            Event(
                time=truth.event_time(event),
                kind=str(event["involvedObject"].get("kind")),
                name=str(event["involvedObject"].get("name")),
                reason=str(event.get("reason") or ""),
                message=" ".join(str(event.get("message") or event.get("note") or "").split()),
                type=str(event.get("type") or "Normal"),
            )
            for event in sorted(self._raw_events(name), key=truth.event_time)
        ]

    def jobs(self) -> list[JobStatus]:
        """All jobs of the namespace, the newest first, in one sweep of lists."""
        jobs = self.cluster.find_all(api.TRAINJOBS)
        pods = _by_job(self.cluster.find_all(api.PODS, labels=truth.JOBSET_NAME))
        kube_jobs = _by_job(self.cluster.find_all(api.JOBS, labels=truth.JOBSET_NAME))
        sets = {item["metadata"]["name"]: item for item in self.cluster.find_all(api.JOBSETS)}
        events: dict[str, list[Manifest]] = {}
        for event in self.cluster.find_all(api.EVENTS):
            events.setdefault(str((event.get("involvedObject") or {}).get("name")), []).append(event)
        found = []
        for job in jobs:
            name = job["metadata"]["name"]
            parts = Objects(
                job, None, sets.get(name), kube_jobs.get(name, []), pods.get(name, []), events.get(name, [])
            )
            found.append(truth.status_of(parts))
        return sorted(found, key=lambda status: status.created, reverse=True)

    def progress(self, status: JobStatus) -> dict[str, ProgressState]:
        """Where the training is: as the trainer posted it, else as its log says."""
        step = next(
            (step for step in status.steps if step.index == 0 and step.name.startswith(("node", "launcher"))), None
        )
        if step is None or step.status != "Running":
            return {}
        posted = truth.progress_of(self.manifest(status.name))
        report = posted or self._from_log(status.name, step)
        return {step.name: report} if report else {}

    def _from_log(self, name: str, step: StepStatus) -> ProgressState | None:
        pod = self._pods(name, step)[-1]
        try:
            lines = list(self.cluster.log(pod["metadata"]["name"], _container(pod), tail=200))
        except ApiError:
            return None  # the Pod has not begun to print, or has gone
        for line in reversed(lines):
            found = STEP_LINE.search(line.partition(" ")[2])
            if found:
                return _report(found)
        return None

    # -- waiting

    def follow(self, name: str, stop: threading.Event | None = None) -> Iterator[JobStatus]:
        """The job's status whenever something of it changes, until it has ended or was deleted.

        The objects are watched; where the connection, the server or a version is lost, the watch goes on and no state
        is told twice.

        Raises:
            UsageError: there is no such job, or it was deleted.
        """
        job = self.manifest(name)
        changed = threading.Event()
        selector = f"{truth.JOBSET_NAME}={name}"
        only = f"metadata.name={name}"
        watched = {
            api.TRAINJOBS: Informer(self.cluster, api.TRAINJOBS, changed, fields=only),
            api.JOBSETS: Informer(self.cluster, api.JOBSETS, changed, fields=only),
            api.JOBS: Informer(self.cluster, api.JOBS, changed, labels=selector),
            api.PODS: Informer(self.cluster, api.PODS, changed, labels=selector),
        }
        try:
            for informer in watched.values():
                informer.start()
            yield from self._changes(name, job, watched, changed, stop or threading.Event())
        finally:
            for informer in watched.values():
                informer.stop()

    def _changes(
        self,
        name: str,
        job: Manifest,
        watched: dict[Kind, Informer],
        changed: threading.Event,
        stop: threading.Event,
    ) -> Iterator[JobStatus]:
        last: dict[str, Any] | None = None
        runtime, uid = self._snapshot(job), job["metadata"]["uid"]
        while not stop.is_set():
            changed.clear()
            failure = next((informer.failure for informer in watched.values() if informer.failure), None)
            if failure is not None:
                raise failure
            mine = next((item for item in watched[api.TRAINJOBS].items() if item["metadata"]["uid"] == uid), None)
            if mine is None:
                raise UsageError(f"the TrainJob {name!r} was deleted", where=self.cluster.namespace)
            objects = Objects(
                mine, runtime, next(iter(watched[api.JOBSETS].items()), None), watched[api.JOBS].items(),
                watched[api.PODS].items(), self._raw_events(name), self._workload(mine),
            )  # fmt: skip
            status = truth.status_of(objects)
            if status.as_dict() != last:
                last = status.as_dict()
                yield status
            if status.finished:
                return
            # Events and Kueue's Workload are not watched: they only explain, and are looked at now and then.
            changed.wait(5.0)

    def wait(self, name: str, *, timeout: float | None = None, states: Collection[str] = ()) -> JobStatus:
        """Wait until a job has ended, or has reached one of `states`.

        Raises:
            TimeoutError: it has not after `timeout` seconds.
        """
        stop = threading.Event()
        timer = threading.Timer(timeout, stop.set) if timeout is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        status: JobStatus | None = None
        try:
            for status in self.follow(name, stop):
                if status.finished or status.state in states:
                    return status
        finally:
            if timer is not None:
                timer.cancel()
        state = self.get(name).state if status is None else status.state
        raise TimeoutError(f"job {name!r} is still {state} after {timeout:g} s")

    # -- logs

    def logs(self, name: str, steps: Collection[str] = (), *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """Lines that the steps printed, with the step's name: step by step, or as they come with `follow`, over
        restarts of Pods.

        Raises:
            UsageError: there is no such job or step.
        """
        status = self.get(name)
        known = [step.name for step in status.steps]
        for step in steps:
            if step not in known:
                raise UsageError(
                    f"job {name!r} has no step {step!r}", where="--step", todo=f"its steps are {', '.join(known)}"
                )
        chosen = [step for step in status.steps if not steps or step.name in steps]
        if follow:
            return self._followed(name, chosen)
        return ((step.name, line) for step in chosen for line in self._printed(name, step))

    def _pods(self, name: str, step: StepStatus) -> list[Manifest]:
        labels = f"{truth.JOBSET_NAME}={name},{truth.REPLICATED_JOB}={step.replicated_job}"
        return truth.pods_at(self.cluster.find_all(api.PODS, labels=labels), step.replicated_job, step.index)

    def _printed(self, name: str, step: StepStatus) -> Iterator[str]:
        for pod in self._pods(name, step):
            try:
                for line in self.cluster.log(pod["metadata"]["name"], _container(pod)):
                    yield line.partition(" ")[2]
            except ApiError as error:
                if error.status not in (400, 404):  # it has not started, or is gone
                    raise

    def _followed(self, name: str, steps: list[StepStatus]) -> Iterator[tuple[str, str]]:
        lines: queue.Queue[tuple[str, str] | BaseException | None] = queue.Queue(maxsize=10_000)

        def read(step: StepStatus) -> None:
            try:
                for line in self._follow_step(name, step):
                    lines.put((step.name, line))
            except (ApiError, UsageError) as error:
                lines.put(error)
            lines.put(None)

        for step in steps:
            threading.Thread(target=read, args=(step,), daemon=True).start()
        left = len(steps)
        while left:
            item = lines.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    def _follow_step(self, name: str, step: StepStatus) -> Iterator[str]:
        """One step's lines over the Pods that run it, each line once."""
        seen: dict[str, _Position] = {}
        while True:
            ended = self._is_over(name, step)
            for pod in self._pods(name, step):
                position = seen.setdefault(pod["metadata"]["uid"], _Position())
                position.begin()
                running = (pod.get("status") or {}).get("phase") == "Running"
                try:
                    for line in self.cluster.log(
                        pod["metadata"]["name"], _container(pod), follow=running, since=position.time or None
                    ):
                        if position.is_new(line):
                            yield line.partition(" ")[2]
                except ApiError as error:
                    if error.status not in (400, 404):
                        raise
            if ended:
                return
            time.sleep(LOG_PAUSE)

    def _is_over(self, name: str, step: StepStatus) -> bool:
        """Whether no further line of a step can come; looked at before its last lines are read."""
        job = self.cluster.find(api.TRAINJOBS, name)
        if job is None:
            return True
        status = truth.status_of(self.objects(job))
        now = next((item for item in status.steps if item.name == step.name), None)
        return status.finished or (now is not None and now.status == "Succeeded")

    # -- changing

    def suspend(self, name: str) -> None:
        """Stop a job's Pods (they save a checkpoint); what the initializers have done stays done.

        Raises:
            UsageError: it has ended.
        """
        self._set_suspend(name, True)

    def resume(self, name: str) -> None:
        """Let a suspended job go on from its last checkpoint.

        Raises:
            UsageError: it has ended.
        """
        self._set_suspend(name, False)

    def _set_suspend(self, name: str, value: bool) -> None:
        status = truth.status_of(Objects(self.manifest(name)))
        if status.finished:
            raise UsageError(f"job {name!r} is {status.state}: it has ended", where="NAME")
        self.cluster.patch(api.TRAINJOBS, name, {"spec": {"suspend": value}})

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Suspend a job; with `kill`, delete it."""
        if kill:
            self.delete(name, force=True)
        else:
            self.suspend(name)

    def delete(self, name: str, *, force: bool = False, claims: bool = False) -> None:
        """Remove a TrainJob with all that belongs to it, in the background; the claim with the results stays.

        Args:
            force: also if it runs.
            claims: also remove the claims that the runtime retains, with what was trained.

        Raises:
            UsageError: it runs, and `force` is not given.
        """
        job = self.manifest(name)
        if not force and not truth.status_of(Objects(job)).finished:
            todo = f"stop it and remove it with `blueprints delete {name} --backend kubernetes --force`"
            raise UsageError(f"job {name!r} has not ended", where="NAME", todo=todo)
        kept = self.claims(name) if claims else []
        self.cluster.delete(api.TRAINJOBS, name, uid=job["metadata"].get("uid"))
        delete_tokens(self.cluster, name)
        for claim in kept:
            self.cluster.delete(api.CLAIMS, claim)

    def claims(self, name: str) -> list[str]:
        """Names of the job's volume claims."""
        found = self.cluster.find_all(api.CLAIMS, labels=f"{truth.JOBSET_NAME}={name}")
        return [item["metadata"]["name"] for item in found]


@dataclass
class _Position:
    """How far a log was read: the time of the last line, and how many lines of that time."""

    time: str = ""
    count: int = 0
    _again: int = 0

    def begin(self) -> None:
        """The log is read again from the time of the last line on."""
        self._again = 0

    def is_new(self, line: str) -> bool:
        stamp = line.partition(" ")[0]
        if stamp < self.time:
            return False
        if stamp == self.time:
            self._again += 1
            if self._again <= self.count:
                return False
            self.count = self._again
            return True
        self.time, self.count, self._again = stamp, 1, 1
        return True


def _container(pod: Manifest) -> str:
    names = [item["name"] for item in (pod.get("spec") or {}).get("containers") or []]
    return next((name for name in ("node", "dataset-initializer", "model-initializer") if name in names), names[0])


def _names_it(target: str, name: str, pattern: re.Pattern[str]) -> bool:
    return target == name or (pattern.match(target) is not None) or target.endswith(f"-{name}")


def _by_job(items: list[Manifest]) -> dict[str, list[Manifest]]:
    found: dict[str, list[Manifest]] = {}
    for item in items:
        found.setdefault((item["metadata"].get("labels") or {}).get(truth.JOBSET_NAME, ""), []).append(item)
    return found


def _report(found: re.Match[str]) -> ProgressState:
    metrics = {"loss": float(found["loss"])}
    if found["pace"]:
        metrics["tokens_per_second"] = float(found["pace"].replace(",", ""))
    eta = None
    if found["eta"]:
        eta = 0.0
        for part in found["eta"].split(":"):
            eta = eta * 60 + int(part)
    return {
        "phase": "train", "completed": float(found["step"]), "total": float(found["steps"]), "unit": "steps",
        "metrics": metrics, "eta_seconds": eta, "message": "", "updated": time.time(),
    }  # fmt: skip
