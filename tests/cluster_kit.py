"""What a cluster holds of one TrainJob, made by hand: the objects that Trainer, JobSet, Job controller and kubelet write.

The shapes, reasons and messages are those a live control plane wrote (Trainer 2.3.0, JobSet 0.12, Kubernetes 1.36).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from api_server import ApiServer
from jobs_kit import tiny_job, tiny_runtime

from blueprints.backends.kubernetes.objects import Objects
from blueprints.jobset import build_job_set
from blueprints.runtimes import ancestor_of

Manifest = dict[str, Any]
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
INDEX_KEY = "batch.kubernetes.io/job-completion-index"


def ago(seconds: float) -> str:
    """An API server's time so many seconds ago."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_ago(seconds: float) -> str:
    """The same as an event's eventTime has it."""
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def condition(kind: str, reason: str = "", message: str = "", status: str = "True", age: float = 5) -> Manifest:
    """A status condition."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": ago(age)}


def termination(code: int, problem: str, **more: Any) -> str:
    """The message our steps leave."""
    return json.dumps({"code": "X", "exit_code": code, "problem": problem, **more})


@dataclass
class Scene:
    """One TrainJob in a cluster; methods play the controllers.

    Attributes:
        age: seconds since it was created.
    """

    name: str = "demo"
    nodes: int = 1
    age: float = 120
    runtime: Manifest = field(
        default_factory=lambda: tiny_runtime(["train"], model=["fetch"], dataset=["prepare"], backoff=3)
    )
    spec: Manifest = field(default_factory=dict)
    labels: Manifest = field(default_factory=dict)
    job_set: Manifest | None = None
    jobs: list[Manifest] = field(default_factory=list)
    pods: list[Manifest] = field(default_factory=list)
    events: list[Manifest] = field(default_factory=list)
    workload: Manifest | None = None

    def __post_init__(self) -> None:
        self.job = tiny_job(self.name, nodes=self.nodes, **self.spec)
        self.job["metadata"] |= self._metadata(self.name, self.age)
        self.job["metadata"]["labels"] = self.labels

    def _metadata(self, name: str, age: float, **labels: str) -> Manifest:
        return {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": ago(age), "labels": labels}

    def objects(self) -> Objects:
        """As the backend reads them."""
        return Objects(self.job, self.runtime, self.job_set, self.jobs, self.pods, self.events, self.workload)

    @classmethod
    def resumed_in_vain(cls) -> Scene:
        """Resumed a while ago, but the JobSet stays suspended."""
        scene = cls(spec={"suspend": True}).with_job_set()
        scene.job["spec"]["suspend"] = False
        return scene.status(condition("Suspended", "Resumed", "TrainJob is resumed", status="False", age=40))

    # -- controllers

    def status(self, *conditions: Manifest, **more: Any) -> Scene:
        """The Trainer controller writes the TrainJob's status."""
        self.job["status"] = {"conditions": list(conditions), **more}
        return self

    def failed(self, first_job: str = "node", reason: str = "FailedJobs") -> Scene:
        """The TrainJob has failed, as JobSet says it."""
        said = f"jobset failed due to one or more job failures (first failed job: {self.name}-{first_job}-0)"
        return self.status(condition("Failed", reason, said))

    def complete(self) -> Scene:
        """The TrainJob is complete."""
        return self.status(condition("Complete", "AllJobsCompleted", "jobset completed successfully"))

    def with_job_set(self, age: float | None = None) -> Scene:
        """The Trainer controller makes the JobSet."""
        self.job_set = build_job_set(self.job, self.runtime)
        self.job_set["metadata"] |= self._metadata(self.name, self.age if age is None else age)
        return self

    def with_job(self, replicated: str, *conditions: Manifest, parallelism: int | None = None) -> Scene:
        """The JobSet controller makes a Job, which may have ended."""
        if self.job_set is None:
            self.with_job_set()
        assert self.job_set is not None
        labels = {JOBSET_LABEL: self.name, REPLICATED_LABEL: replicated}
        entry = next(item for item in self.job_set["spec"]["replicatedJobs"] if item["name"] == replicated)
        self.jobs = [job for job in self.jobs if job["metadata"]["labels"][REPLICATED_LABEL] != replicated]
        self.jobs.append({
            "kind": "Job", "metadata": self._metadata(f"{self.name}-{replicated}-0", self.age, **labels),
            "spec": {"parallelism": parallelism or entry["template"]["spec"]["parallelism"]},
            "status": {"conditions": list(conditions)},
        })  # fmt: skip
        return self

    def initialized(self) -> Scene:
        """Both initializers are done."""
        for name in ("model-initializer", "dataset-initializer"):
            if any(ancestor_of(job) == name for job in self.runtime["spec"]["template"]["spec"]["replicatedJobs"]):
                self.with_job(name, condition("Complete")).with_pod(name, "Succeeded", state=ended(0))
        return self

    def with_pod(
        self,
        replicated: str,
        phase: str,
        index: int = 0,
        *,
        age: float = 60,
        state: Manifest | None = None,
        last: Manifest | None = None,
        conditions: Sequence[Manifest] = (),
        restarts: int = 0,
        name: str | None = None,
    ) -> Scene:
        """The Job controller makes a Pod, and the kubelet runs it."""
        if not any(job["metadata"]["labels"][REPLICATED_LABEL] == replicated for job in self.jobs):
            self.with_job(replicated)
        labels = {JOBSET_LABEL: self.name, REPLICATED_LABEL: replicated, INDEX_KEY: str(index)}
        pod_name = name or f"{self.name}-{replicated}-0-{index}-{uuid.uuid4().hex[:5]}"
        state = {"running": {"startedAt": ago(age)}} if state is None and phase == "Running" else state or {}
        container = {"name": replicated, "image": "example.com/tiny:1", "restartCount": restarts, "state": state}
        self.pods.append({
            "kind": "Pod",
            "metadata": {**self._metadata(pod_name, age, **labels), "annotations": {INDEX_KEY: str(index)}},
            "spec": {"containers": [{"name": replicated}]},
            "status": {
                "phase": phase, "startTime": ago(age), "conditions": list(conditions),
                "containerStatuses": [container | ({"lastState": last} if last else {})] if state or last else [],
            },
        })  # fmt: skip
        return self

    def event(
        self,
        kind: str,
        reason: str,
        message: str,
        *,
        name: str | None = None,
        uid: str | None = None,
        first: float = 60,
        last: float = 1,
        old_style: bool = False,
        warning: bool = True,
    ) -> Scene:
        """An event, with `eventTime` as the Trainer's, or with `firstTimestamp` as the kubelet's."""
        named = {"TrainJob": self.name, "JobSet": self.name, "Job": f"{self.name}-node-0"}
        about = name or named.get(kind) or self.pods[-1]["metadata"]["name"]
        target = {"kind": kind, "name": about, "uid": uid or self._uid(kind, about)}
        times = (
            {"firstTimestamp": ago(first), "lastTimestamp": ago(last)} if old_style else
            {"eventTime": micro_ago(first), "series": {"count": 2, "lastObservedTime": micro_ago(last)}}
        )  # fmt: skip
        self.events.append({
            "metadata": {"name": f"{about}.{uuid.uuid4().hex[:12]}", "uid": str(uuid.uuid4())},
            "involvedObject": target, "reason": reason, "message": message,
            "type": "Warning" if warning else "Normal", **times,
        })  # fmt: skip
        return self

    def _uid(self, kind: str, name: str) -> str:
        there = {"TrainJob": [self.job], "JobSet": [self.job_set], "Job": self.jobs, "Pod": self.pods}[kind]
        found = [item["metadata"]["uid"] for item in there if item and item["metadata"]["name"] == name]
        return str(found[0]) if found else str(uuid.uuid4())


def show(server: ApiServer, scene: Scene) -> Scene:
    """Put a scene into a stand-in of the API server, where what was there of it is replaced."""
    parts = [("events", scene.events), ("pods", scene.pods), ("jobs", scene.jobs),
             ("jobsets", [scene.job_set] if scene.job_set else []), ("trainjobs", [scene.job])]  # fmt: skip
    for plural, items in parts:
        there = server.all(plural)
        for item in items:
            if there.get(item["metadata"]["name"], {}).get("status", {}) != item.get("status", {}) or (
                item["metadata"]["name"] not in there
            ):
                server.put(plural, item)
    return scene


def ended(code: int, message: str = "", reason: str = "", age: float = 5) -> Manifest:
    """The state of a container that has ended."""
    found = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "finishedAt": ago(age)}
    return {"terminated": found | ({"message": message} if message else {})}


def waiting(reason: str, message: str = "") -> Manifest:
    """The state of a container that cannot start."""
    return {"waiting": {"reason": reason, "message": message}}
