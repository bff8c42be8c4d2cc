"""TrainJobs in a cluster: create, look, follow, suspend, resume, delete."""

from __future__ import annotations

import copy
import difflib
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from blueprints.backends.kubernetes import api, truth
from blueprints.backends.kubernetes.api import ApiError, Cluster, Kind
from blueprints.backends.kubernetes.logs import Follower, printed, text_of
from blueprints.backends.kubernetes.objects import (
    EVENT_KINDS,
    JOBSET_NAME,
    QUEUE,
    REPLICATED_JOB,
    Objects,
    event_time,
    main_container,
    mentions,
    parse_time,
    pods_at,
)
from blueprints.backends.kubernetes.tokens import create_owned, refer, tokens_for
from blueprints.backends.kubernetes.watching import JobWatch
from blueprints.backends.results import Run
from blueprints.backends.state import COMPLETE, JobStatus, StepStatus
from blueprints.errors import UsageError
from blueprints.manifests import require_valid
from blueprints.progress import ProgressState
from blueprints.runtimes import Manifest, find_runtime, get_runtime, shared_claim_note, short_name
from blueprints.trainjob import RECIPE_HASH
from blueprints.types import Event

SUBMISSION = "blueprints.llm-blueprints.dev/submission"
"""Annotation by which a creation whose answer was lost is known again."""
STARTED, RESUMED, ALREADY_COMPLETE = "started", "resumed", "complete"
RACE_SECONDS = 10.0
"""The webhook may not have seen a runtime yet that was created a moment ago."""
PROGRESS_SECONDS = 5.0
"""Least time between two looks at a log for its last step."""
EXPLAIN_SECONDS = 5.0
"""Least time between two looks at what only explains."""
STEP_LINE = re.compile(r"\bstep (?P<step>\d+)/(?P<steps>\d+)  loss (?P<loss>[-+\w.]+)")
_PACE = re.compile(r"(?P<pace>[\d,]+) tokens/s")
_ETA = re.compile(r"ETA (?P<eta>.+)$")
_UNITS = {"s": 1, "min": 60, "h": 3600}


class KubernetesBackend:
    """Runs TrainJobs in a cluster with Kubeflow Trainer.

    Args:
        cluster: the API server and namespace.
    """

    name = "kubernetes"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._progress: dict[str, tuple[float, ProgressState | None]] = {}

    @classmethod
    def connect(
        cls, *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
    ) -> KubernetesBackend:
        """See `Cluster.connect`."""
        return cls(Cluster.connect(kubeconfig=kubeconfig, context=context, namespace=namespace))

    @property
    def place(self) -> str:
        """Where the jobs are, for messages."""
        context = f"context {self.cluster.context}, " if self.cluster.context else ""
        return f"{context}namespace {self.cluster.namespace} of {self.cluster.server}"

    # -- runtimes

    def runtimes(self) -> list[Manifest]:
        """The runtimes that a job can name: the namespace's own, then the cluster's."""
        found = []
        for kind in (api.RUNTIMES, api.CLUSTER_RUNTIMES):
            try:
                found += self.cluster.find_all(kind)
            except ApiError as error:
                if error.status != 403 or kind is api.CLUSTER_RUNTIMES:
                    raise
        return found

    def runtime(self, name: str) -> Manifest:
        """One installed runtime, by its name with or without its version; one of the namespace before one of the cluster.

        Raises:
            UsageError: there is none of that name.
        """
        for kind in (api.RUNTIMES, api.CLUSTER_RUNTIMES):
            if (exact := self._allowed(kind, name)) is not None:
                return kind.named(exact)
        installed = self.runtimes()
        found = find_runtime(name, installed)
        if found is not None:
            return found
        names = sorted({short_name(item) for item in installed})
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        todo = f"{hint}Installed are: {', '.join(names) or 'none'}"
        if _ships(name):
            todo = f"the cluster's admin installs it with `blueprints runtimes apply {name}`. {todo}"
        raise UsageError(f"the cluster has no runtime {name!r}", where=self.place, todo=todo)

    def notes(self, job: Manifest, runtime: Manifest) -> list[str]:
        """What needs care."""
        nodes = int((job["spec"].get("trainer") or {}).get("numNodes") or 1)
        note = shared_claim_note(runtime, nodes)
        return [note] if note else []

    # -- starting

    def start(self, job: Manifest, runtime: Manifest, *, resume: str = "") -> str:
        """Create a TrainJob; one of the same name and recipe that is suspended goes on, a complete one is left.

        Args:
            job: the TrainJob.
            runtime: the cluster's runtime that it names.
            resume: not used here: a TrainJob goes on by itself.

        Returns:
            `started`, `resumed` or `complete`.

        Raises:
            ManifestError: the TrainJob is invalid for the runtime.
            UsageError: the name is taken.
            ApiError: the cluster refuses, or cannot be reached or used.
        """
        del resume
        require_valid(job, runtime)
        there = self.cluster.find(api.TRAINJOBS, job["metadata"]["name"])
        if there is not None:
            return self._existing(there, job)
        self._refuse_old_claims(job, runtime)
        body, secret = self._body(job)
        if secret is not None:  # may it be created? Asked before there is a job that waits for it
            self.cluster.create(api.SECRETS, secret, dry_run=True)
        created = self._create(body)
        if secret is not None:
            try:
                create_owned(self.cluster, secret, created)
            except ApiError:
                self.cluster.delete(api.TRAINJOBS, created["metadata"]["name"], uid=created["metadata"]["uid"])
                raise
        return STARTED

    def check(self, job: Manifest, runtime: Manifest) -> Manifest:
        """Ask the API server whether it would take a job, its webhooks included; nothing is created.

        Returns:
            the TrainJob as the cluster would have it.
        """
        require_valid(job, runtime)
        if self.cluster.find(api.TRAINJOBS, job["metadata"]["name"]) is None:
            self._refuse_old_claims(job, runtime)
        body, secret = self._body(job)
        if secret is not None:
            self.cluster.create(api.SECRETS, secret, dry_run=True)
        return self._create(body, dry_run=True)

    def _body(self, job: Manifest) -> tuple[Manifest, Manifest | None]:
        """What is sent: the TrainJob, and the Secret with the tokens that it needs."""
        body = copy.deepcopy(job)
        body["metadata"]["namespace"] = self.cluster.namespace
        body["metadata"].setdefault("annotations", {})[SUBMISSION] = str(uuid.uuid4())
        return body, refer(body, tokens_for(body))

    def _create(self, body: Manifest, *, dry_run: bool = False) -> Manifest:
        deadline = time.monotonic() + RACE_SECONDS
        while True:
            try:
                return self.cluster.create(api.TRAINJOBS, body, dry_run=dry_run)
            except ApiError as error:
                race = "must be created before the TrainJob is created" in str(error)
                if not race or time.monotonic() > deadline:
                    raise
                self.cluster.pause(0.5)

    def _existing(self, there: Manifest, job: Manifest) -> str:
        name = job["metadata"]["name"]
        hashes = [(item["metadata"].get("annotations") or {}).get(RECIPE_HASH) for item in (there, job)]
        status = self.get(name)
        if hashes[0] != hashes[1] or hashes[0] is None:
            todo = f"choose another name, or remove that job with `blueprints delete {name} --backend kubernetes`"
            raise UsageError(f"a job named {name!r} with another recipe exists", where="name", todo=todo)
        if status.state == COMPLETE:
            return ALREADY_COMPLETE
        if status.state == truth.SUSPENDED:
            self.resume(name)
            return RESUMED
        todo = (
            f"choose another name, or remove it with `blueprints delete {name} --claims --backend kubernetes`, which also "
            "removes its claim and the checkpoints on it"
            if status.finished
            else f"follow it with `blueprints logs {name} --follow --backend kubernetes`, or choose another name"
        )
        raise UsageError(f"a job named {name!r} exists and is {status.state}", where="name", todo=todo)

    def _refuse_old_claims(self, job: Manifest, runtime: Manifest) -> None:
        """A claim that an earlier job of that name left would keep the new one from starting.

        Raises:
            UsageError: there is one.
        """
        name = job["metadata"]["name"]
        for claim in _retained_claims(runtime):
            if "volumeName" in (claim.get("spec") or {}):
                continue  # spelled out for being used again
            full = f"{claim['metadata']['name']}-{name}"
            if self._allowed(api.CLAIMS, full) is not None:
                todo = f"choose another name, or remove it with what is on it: `kubectl delete pvc {full}`"
                raise UsageError(f"an earlier job named {name!r} left its claim {full}", where="name", todo=todo)

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
            todo = (
                f"did you mean {', '.join(near)}?" if near else "`blueprints jobs --backend kubernetes` lists the jobs"
            )
            raise UsageError(f"there is no TrainJob {name!r}", where=self.place, todo=todo)
        return found

    def get(self, name: str) -> JobStatus:
        """State of a job and of its steps, and why it is stuck or failed."""
        return truth.status_of(self._objects(self.manifest(name)))

    def _objects(self, job: Manifest) -> Objects:
        """Everything that belongs to a TrainJob."""
        name = job["metadata"]["name"]
        selector = f"{JOBSET_NAME}={name}"
        seen = Objects(
            job=job,
            job_set=self._allowed(api.JOBSETS, name),
            jobs=self.cluster.find_all(api.JOBS, labels=selector),
            pods=self.cluster.find_all(api.PODS, labels=selector),
            events=[event for event in self.cluster.find_all(api.EVENTS) if mentions(event, name)],
        )
        return self._explained(seen)

    def _explained(self, seen: Objects) -> Objects:
        """With what is needed only as long as a job waits: its runtime, Kueue's Workload."""
        runtime = self._runtime_of(seen.job) if seen.job_set is None else None
        return replace(seen, runtime=runtime, workload=self._workload(seen.job))

    def _runtime_of(self, job: Manifest) -> Manifest | None:
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
        """Kueue's Workload of a job that waits in a queue."""
        return self._workloads().get(str(job["metadata"].get("uid"))) if _waits(job) else None

    def _workloads(self) -> dict[str, Manifest]:
        """Kueue's Workloads by their owner's uid; none where Kueue is not, or may not be looked at."""
        for kind in api.WORKLOADS:
            try:
                items = self.cluster.find_all(kind)
            except ApiError as error:
                if error.status not in (403, 404):
                    raise
                continue
            owners = [(item["metadata"].get("ownerReferences") or [], item) for item in items]
            return {str(owner.get("uid")): item for references, item in owners for owner in references}
        return {}

    def events(self, name: str) -> list[Event]:
        """What happened to a job and all that belongs to it, in the order of time."""
        return [
            Event(
                involved_object_kind=str(event["involvedObject"].get("kind")),
                involved_object_name=str(event["involvedObject"].get("name")),
                message=" ".join(str(event.get("message") or event.get("note") or "").split()),
                reason=str(event.get("reason") or ""),
                event_time=parse_time(event_time(event)),
                type=str(event.get("type") or "Normal"),
            )
            for event in self._objects(self.manifest(name)).own_events
        ]

    def jobs(self) -> list[JobStatus]:
        """All jobs of the namespace, the newest first, in one sweep of lists."""
        jobs = self.cluster.find_all(api.TRAINJOBS)
        if all((truth.ended(job) or {}).get("type") == "Complete" for job in jobs):
            parts = [Objects(job) for job in jobs]  # nothing to explain
        else:
            parts = self._sweep(jobs)
        return sorted(map(truth.status_of, parts), key=lambda status: status.created, reverse=True)

    def _sweep(self, jobs: list[Manifest]) -> list[Objects]:
        pods = _by_job(self.cluster.find_all(api.PODS, labels=JOBSET_NAME))
        kube_jobs = _by_job(self.cluster.find_all(api.JOBS, labels=JOBSET_NAME))
        sets = {item["metadata"]["name"]: item for item in self.cluster.find_all(api.JOBSETS)}
        events: dict[tuple[str, str], list[Manifest]] = {}
        for event in self.cluster.find_all(api.EVENTS):
            target = event.get("involvedObject") or {}
            if target.get("kind") in EVENT_KINDS:
                events.setdefault((str(target["kind"]), str(target.get("name"))), []).append(event)
        workloads = self._workloads() if any(map(_waits, jobs)) else {}
        found = []
        for job in jobs:
            name = job["metadata"]["name"]
            own_jobs, own_pods = kube_jobs.get(name, []), pods.get(name, [])
            about = [("TrainJob", name), ("JobSet", name)]
            about += [(item["kind"], item["metadata"]["name"]) for item in [*own_jobs, *own_pods]]
            told = [event for key in about for event in events.get(key, [])]
            workload = workloads.get(str(job["metadata"].get("uid")))
            found.append(Objects(job, None, sets.get(name), own_jobs, own_pods, told, workload))
        return found

    # -- progress and results

    def progress(self, status: JobStatus) -> dict[str, ProgressState]:
        """Where the training is: as the trainer posted it, else as its log says."""
        step = next((s for s in status.steps if s.index == 0 and s.replicated_job in ("launcher", "node")), None)
        launcher = next((s for s in status.steps if s.replicated_job == "launcher"), step)
        if launcher is None or launcher.status != "Running":
            return {}
        when, report = self._progress.get(status.name, (0.0, None))
        if time.monotonic() - when >= PROGRESS_SECONDS or not when:
            report = truth.progress_of(self.manifest(status.name)) or self._from_log(status.name, launcher)
            self._progress[status.name] = (time.monotonic(), report)
        return {launcher.name: report} if report else {}

    def _from_log(self, name: str, step: StepStatus) -> ProgressState | None:
        pods = self._pods(name, step)
        if not pods:
            return None
        try:
            lines = list(self.cluster.log(pods[-1]["metadata"]["name"], main_container(pods[-1]), tail=200))
        except ApiError:
            return None  # the Pod has not begun to print, or has gone
        found = (_report(text_of(line)) for line in reversed(lines))
        return next((report for report in found if report is not None), None)

    def run(self, name: str) -> Run | None:
        """None: the record of a run lies on the job's claim, where this machine cannot read it."""
        del name
        return None

    def files(self, name: str) -> None:
        """None: they are in the cluster."""
        del name

    def result_place(self, name: str) -> str:
        """Where what was trained lies."""
        return f"claim initializer-{name} in namespace {self.cluster.namespace}, below output/"

    # -- waiting

    def watch(self, name: str) -> JobWatch:
        """Keep a job in view.

        Raises:
            UsageError: there is no such job.
        """
        last: dict[str, tuple[float, Objects]] = {}

        def explain(seen: Objects) -> Objects:
            """Read again only now and then, and whenever there is a JobSet at last."""
            when, before = last.get("seen", (0.0, None))
            fresh = before is not None and time.monotonic() - when < EXPLAIN_SECONDS
            if not fresh or before is None or (before.runtime is None and seen.job_set is None):
                before = self._explained(seen)
                last["seen"] = (time.monotonic(), before)
            return replace(seen, runtime=before.runtime, workload=before.workload)

        return JobWatch(self.cluster, self.manifest(name), explain, lambda: self.get(name))

    def follow(self, name: str, stop: threading.Event | None = None) -> Iterator[JobStatus]:
        """The job's status whenever something of it changes, until it has ended or `stop` is set.

        The objects are watched; where the connection, the server or a version is lost, the watch goes on and no state
        is told twice.

        Raises:
            UsageError: there is no such job, or it was deleted.
        """
        watch = self.watch(name)
        last: dict[str, Any] | None = None
        try:
            while stop is None or not stop.is_set():
                status = watch.status()
                if status.as_dict() != last:
                    last = status.as_dict()
                    yield status
                if status.finished:
                    return
                watch.next(1.0)
        finally:
            watch.close()

    def wait(self, name: str, *, timeout: float | None = None, states: Collection[str] = ()) -> JobStatus:
        """Wait until a job has ended, or has reached one of `states`.

        Raises:
            TimeoutError: it has not after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        watch = self.watch(name)
        try:
            while True:
                status = watch.status()
                if status.finished or status.state in states:
                    return status
                left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if left <= 0:
                    why = f": {status.message}" if status.message else ""
                    raise TimeoutError(f"job {name!r} is still {status.state} after {timeout:g} s{why}")
                watch.next(left)
        finally:
            watch.close()

    # -- logs

    def logs(self, name: str, steps: Collection[str] = (), *, follow: bool = False) -> Iterator[tuple[str, str]]:
        """Lines that the steps printed, with the step's name: step by step, or as they come with `follow`, over
        restarts of Pods.

        Raises:
            UsageError: there is no such job or step.
        """
        watch = self.watch(name) if follow else None
        status = watch.status() if watch is not None else self.get(name)
        known = [step.name for step in status.steps]
        for step in steps:
            if step not in known:
                todo = f"its steps are {', '.join(known)}" if known else "it has no steps yet"
                raise UsageError(f"job {name!r} has no step {step!r}", where="--step", todo=todo)
        chosen = [step for step in status.steps if not steps or step.name in steps]
        if watch is not None:
            return Follower(self.cluster, watch, chosen).lines()
        return ((step.name, line) for step in chosen for line in printed(self.cluster, self._pods(name, step)))

    def _pods(self, name: str, step: StepStatus) -> list[Manifest]:
        labels = f"{JOBSET_NAME}={name},{REPLICATED_JOB}={step.replicated_job}"
        return pods_at(self.cluster.find_all(api.PODS, labels=labels), step.replicated_job, step.index)

    # -- changing

    def suspend(self, name: str) -> None:
        """Stop a job's Pods (they save a checkpoint); what the initializers have done stays done.

        Raises:
            UsageError: it has ended, or a queue decides.
        """
        self._set_suspend(name, True)

    def resume(self, name: str) -> None:
        """Let a suspended job go on from its last checkpoint.

        Raises:
            UsageError: it has ended, or a queue decides.
        """
        self._set_suspend(name, False)

    def _set_suspend(self, name: str, value: bool) -> None:
        job = self.manifest(name)
        condition = truth.ended(job)
        if condition is not None:
            raise UsageError(f"job {name!r} is {condition['type']}: it has ended", where="NAME")
        queue = (job["metadata"].get("labels") or {}).get(QUEUE)
        if queue:
            problem = f"job {name!r} is in Kueue's queue {queue}, which decides when it runs"
            todo = "set `spec.active` of its Workload instead: `kubectl get workloads`"
            raise UsageError(problem, where="NAME", todo=todo)
        if bool((job.get("spec") or {}).get("suspend")) != value:
            self.cluster.patch(api.TRAINJOBS, name, {"spec": {"suspend": value}})

    def stop(self, name: str, *, kill: bool = False) -> None:
        """Suspend a job; with `kill`, delete it."""
        if kill:
            self.delete(name, force=True)
        else:
            self.suspend(name)

    def delete(self, name: str, *, force: bool = False, claims: bool = False) -> None:
        """Remove a TrainJob with all that belongs to it, in the background; a claim that the runtime retains stays.

        Args:
            force: also if it has not ended.
            claims: also remove the retained claims, with what was trained.

        Raises:
            UsageError: it has not ended, and `force` is not given.
        """
        job = self.manifest(name)
        if not force and truth.ended(job) is None and not self.get(name).finished:
            todo = f"stop it and remove it with `blueprints delete {name} --backend kubernetes --force`"
            raise UsageError(f"job {name!r} has not ended", where="NAME", todo=todo)
        kept = self.claims(job) if claims else []
        self.cluster.delete(api.TRAINJOBS, name, uid=job["metadata"].get("uid"))
        for claim in kept:
            self.cluster.delete(api.CLAIMS, claim["metadata"]["name"], uid=claim["metadata"].get("uid"))

    def claims(self, job: Manifest) -> list[Manifest]:
        """The job's volume claims."""
        name = job["metadata"]["name"]
        seen = Objects(job, runtime=self._runtime_of(job), job_set=self._allowed(api.JOBSETS, name))
        found = [self._allowed(api.CLAIMS, claim) for claim in seen.claims]
        return [item for item in found if item and (item["metadata"].get("labels") or {}).get(JOBSET_NAME) == name]


def _waits(job: Manifest) -> bool:
    """Whether a job is in one of Kueue's queues and not admitted."""
    return QUEUE in (job["metadata"].get("labels") or {}) and bool((job.get("spec") or {}).get("suspend"))


def _ships(name: str) -> bool:
    try:
        get_runtime(name)
    except UsageError:
        return False
    return True


def _retained_claims(runtime: Manifest) -> list[Manifest]:
    spec = ((runtime.get("spec") or {}).get("template") or {}).get("spec") or {}
    return [
        claim
        for policy in spec.get("volumeClaimPolicies") or []
        if (policy.get("retentionPolicy") or {}).get("whenDeleted") == "Retain"
        for claim in policy.get("templates") or []
    ]


def _by_job(items: list[Manifest]) -> dict[str, list[Manifest]]:
    found: dict[str, list[Manifest]] = {}
    for item in items:
        found.setdefault((item["metadata"].get("labels") or {}).get(JOBSET_NAME, ""), []).append(item)
    return found


def _report(line: str) -> ProgressState | None:
    """What the trainer's line of a step says; None for another line."""
    found = STEP_LINE.search(line)
    if found is None:
        return None
    metrics = {"loss": float(found["loss"])}
    if pace := _PACE.search(line):
        metrics["tokens_per_second"] = float(pace["pace"].replace(",", ""))
    words = _ETA.search(line)
    parts = words["eta"].split() if words else []
    eta = sum(float(number) * _UNITS.get(unit, 0) for number, unit in zip(parts[::2], parts[1::2], strict=False))
    return {
        "phase": "train", "completed": float(found["step"]), "total": float(found["steps"]), "unit": "steps",
        "metrics": metrics, "eta_seconds": eta if parts else None, "message": "", "updated": time.time(),
    }  # fmt: skip
