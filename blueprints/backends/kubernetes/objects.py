"""The objects that belong to one TrainJob, and how to read them: whose a Pod, a condition or an event is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from blueprints.jobset import build_job_set
from blueprints.runtimes import INITIALIZERS, Manifest, ancestor_of

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"
EVENT_KINDS = ("TrainJob", "JobSet", "Job", "Pod", "PodGroup", "Workload", "PersistentVolumeClaim")
"""Kinds of objects whose events tell something of a job."""
MAIN_CONTAINERS = ("node", *INITIALIZERS)
_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True)
class Objects:
    """Everything that belongs to one TrainJob, as the cluster has it now.

    Attributes:
        runtime: needed only as long as there is no JobSet; None if it cannot be read.
        events: of the namespace or a part of it, in any order; `own_events` are those of these objects.
    """

    job: Manifest
    runtime: Manifest | None = None
    job_set: Manifest | None = None
    jobs: Sequence[Manifest] = ()
    pods: Sequence[Manifest] = ()
    events: Sequence[Manifest] = ()
    workload: Manifest | None = None

    @property
    def name(self) -> str:
        """Of the TrainJob."""
        return str(self.job["metadata"]["name"])

    @property
    def spec(self) -> Manifest:
        """Of the TrainJob."""
        return dict(self.job.get("spec") or {})

    @cached_property
    def replicated_jobs(self) -> list[Manifest]:
        """The JobSet's replicatedJobs, or those it will have; empty where neither it nor the runtime can be read."""
        template = self.job_set
        if template is None and self.runtime is not None:
            template = build_job_set(self.job, self.runtime)
        return list(((template or {}).get("spec") or {}).get("replicatedJobs") or [])

    @cached_property
    def claims(self) -> list[str]:
        """Names of the volume claims that the JobSet makes."""
        template = self.job_set or ((self.runtime or {}).get("spec") or {}).get("template") or {}
        policies = (template.get("spec") or {}).get("volumeClaimPolicies") or []
        names = [claim["metadata"]["name"] for policy in policies for claim in policy.get("templates") or []]
        return [f"{name}-{self.name}" for name in names]

    @cached_property
    def own_events(self) -> list[Manifest]:
        """The events of these objects and of those that are gone already, in the order of time.

        An event counts by the uid of what it is about: one of an earlier job of the same name does not. What is gone has
        no uid to compare; there the name and the time decide.
        """
        there = [self.job, self.job_set, self.workload, *self.jobs, *self.pods]
        uids = {item["metadata"].get("uid") for item in there if item}
        present = {(item.get("kind"), item["metadata"]["name"]) for item in [*self.jobs, *self.pods]}
        present |= {("TrainJob", self.name)} | ({("JobSet", self.name)} if self.job_set else set())
        born = parse_time(self.job["metadata"].get("creationTimestamp"))
        found = []
        for event in self.events:
            target = event.get("involvedObject") or {}
            kind, name, uid = target.get("kind"), str(target.get("name")), target.get("uid")
            if uid is None or uid not in uids:
                pattern = self._names.get(str(kind))
                replaced = uid is not None and (kind, name) in present
                if pattern is None or replaced or not pattern.fullmatch(name) or parse_time(event_time(event)) < born:
                    continue
            found.append(event)
        return sorted(found, key=lambda event: parse_time(event_time(event)))

    @cached_property
    def _names(self) -> dict[str, re.Pattern[str]]:
        """By kind, the names that objects of this job have."""
        name = re.escape(self.name)
        steps = "|".join(re.escape(item["name"]) for item in self.replicated_jobs) or "[a-z0-9-]+"
        patterns = {
            "TrainJob": name,
            "JobSet": name,
            "PodGroup": name,
            "Job": rf"{name}-({steps})-\d+",
            "Pod": rf"{name}-({steps})-\d+-\d+(-[a-z0-9]+)?",
            "Workload": rf"trainjob-{name}-[a-z0-9]+",
            "PersistentVolumeClaim": "|".join(map(re.escape, self.claims)) or rf"initializer-{name}",
        }
        return {kind: re.compile(pattern) for kind, pattern in patterns.items()}


def mentions(event: Manifest, name: str) -> bool:
    """Whether an event may be one of the job's; `Objects.own_events` decides."""
    target = event.get("involvedObject") or {}
    about = str(target.get("name"))
    return target.get("kind") in EVENT_KINDS and (
        about.startswith(name) or about.endswith(f"-{name}") or about.startswith(f"trainjob-{name}-")
    )


# --- times ------------------------------------------------------------------------------------------------------------


def parse_time(text: str | None) -> datetime:
    """An API server's time; the epoch where there is none."""
    return datetime.fromisoformat(text) if text else _EPOCH


def event_time(event: Manifest) -> str:
    """When an event happened last; new-style events have other fields than old ones."""
    series = event.get("series") or {}
    fields = (series.get("lastObservedTime"), event.get("lastTimestamp"), *_first_times(event))
    return next((str(value) for value in fields if value), "")


def event_start(event: Manifest) -> str:
    """When an event happened first."""
    return next((str(value) for value in _first_times(event) if value), "")


def _first_times(event: Manifest) -> tuple[Any, ...]:
    metadata = event.get("metadata") or {}
    return event.get("firstTimestamp"), event.get("eventTime"), metadata.get("creationTimestamp")


# --- labels and conditions --------------------------------------------------------------------------------------------


def label(item: Manifest, key: str) -> str:
    """A label's value, empty if it has none."""
    return str((item["metadata"].get("labels") or {}).get(key, ""))


def condition_of(item: Manifest | None, kind: str) -> Manifest:
    """The condition of that type, whatever its status; {} if there is none."""
    for condition in ((item or {}).get("status") or {}).get("conditions") or []:
        if condition.get("type") == kind:
            found: Manifest = condition
            return found
    return {}


def has(item: Manifest | None, kind: str) -> bool:
    """Whether the condition of that type is true."""
    return condition_of(item, kind).get("status") == "True"


def is_initializer(replicated: Manifest) -> bool:
    """Whether a replicatedJob prepares the model or the rows."""
    return ancestor_of(replicated) in INITIALIZERS or replicated.get("name") in INITIALIZERS


# --- Pods -------------------------------------------------------------------------------------------------------------


def phase(pod: Manifest) -> str:
    """The Pod's phase."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def pod_index(pod: Manifest) -> int:
    """The completion index: the node's number."""
    annotations = pod["metadata"].get("annotations") or {}
    value = str(annotations.get(COMPLETION_INDEX) or label(pod, COMPLETION_INDEX) or "0")
    return int(value) if value.isdigit() else 0


def pods_at(pods: Iterable[Manifest], replicated: str, index: int) -> list[Manifest]:
    """The Pods of one place, the oldest first; one that still lives is newer than one that has ended."""
    found = [pod for pod in pods if label(pod, REPLICATED_JOB) == replicated and pod_index(pod) == index]
    return sorted(
        found,
        key=lambda pod: (
            str(pod["metadata"].get("creationTimestamp") or ""),
            phase(pod) not in ("Succeeded", "Failed") and not pod["metadata"].get("deletionTimestamp"),
        ),
    )


def step_name(pod: Manifest) -> str:
    """The step a Pod is."""
    name = label(pod, REPLICATED_JOB) or str(pod["metadata"]["name"])
    return name if name in INITIALIZERS else f"{name}-{pod_index(pod)}"


def main_container(pod: Manifest) -> str:
    """Name of the container that is the step; the first one where names do not tell."""
    names = [item["name"] for item in (pod.get("spec") or {}).get("containers") or []]
    return next((name for name in MAIN_CONTAINERS if name in names), names[0] if names else "node")


def main_status(pod: Manifest) -> Manifest:
    """Status of the container that is the step."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return next((item for item in statuses if item.get("name") in MAIN_CONTAINERS), statuses[0] if statuses else {})


def terminated_of(pod: Manifest) -> Manifest | None:
    """How a Pod's main container ended, now or, where it was started again, the last time; None if it never did."""
    container = main_status(pod)
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        if state.get("terminated"):
            found: Manifest = state["terminated"]
            return found
    return None


def restarts(pod: Manifest) -> int:
    """Times the main container was started again in the same Pod."""
    return int(main_status(pod).get("restartCount") or 0)
