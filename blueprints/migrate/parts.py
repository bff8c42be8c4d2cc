"""What a v1 job is taken apart into, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blueprints.errors import UsageError
from blueprints.jobset import QUEUE_ANNOTATION
from blueprints.migrate.pods import Tell
from blueprints.runtimes import Manifest


@dataclass
class Parts:
    """The parts of a TrainJob and its runtime.

    Attributes:
        framework: label of the runtime.
        nodes: Pods of the trainer.
        policy: the runtime's mlPolicy.
        job_set: spec of the runtime's JobSet.
        trainer: makes `spec.trainer` of the TrainJob from its name.
        run_policy: the v1 job's runPolicy.
        pod_groups: the runtime's podGroupPolicy, empty without gang scheduling.
        annotations: of the JobSet.
        origins: keys of the result, and those of the v1 job they stem from.
    """

    framework: str
    nodes: int
    policy: Manifest
    job_set: Manifest
    trainer: Callable[[str], Manifest]
    run_policy: Manifest
    pod_groups: Manifest = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def gang(policy: Manifest, pods: list[Manifest], count: int, tell: Tell) -> tuple[Manifest, dict[str, str]]:
    """The runtime's podGroupPolicy and the JobSet's annotations for a v1 schedulingPolicy.

    The v1 job does not say which gang scheduler its operator was configured for: the Pods' schedulerName does.

    Args:
        policy: the v1 runPolicy.
        pods: Pod specifications of the replicatedJobs; get the priority class.
        count: Pods of the job.
        tell: is told what has no counterpart.
    """
    scheduling = policy.get("schedulingPolicy") or {}
    scheduler = next((str(pod["schedulerName"]) for pod in pods if pod.get("schedulerName")), "")
    key = "spec.runPolicy.schedulingPolicy"
    groups: Manifest = {}
    annotations: dict[str, str] = {}
    if scheduler == "volcano":
        groups = {"volcano": {}}
        if scheduling.get("queue"):
            annotations[QUEUE_ANNOTATION] = scheduling["queue"]
    elif "scheduler-plugins" in scheduler or "coscheduling" in scheduler:
        timeout = scheduling.get("scheduleTimeoutSeconds")
        groups = {"coscheduling": {} if timeout is None else {"scheduleTimeoutSeconds": timeout}}
    elif scheduling:
        tell(
            key,
            "was not carried over: no Pod names its scheduler (schedulerName: volcano or scheduler-plugins-scheduler), so "
            "what the old operator was configured for is unknown. Set it, or use Kueue",
        )
    if scheduling.get("queue") and not annotations:
        tell(
            f"{key}.queue",
            f"{scheduling['queue']!r} was dropped: queues are Volcano's, or Kueue's by a label of the job",
        )
    if groups and scheduling.get("minAvailable") not in (None, count):
        told = f"{scheduling['minAvailable']} became {count}: a gang is all Pods of a TrainJob"
        tell(f"{key}.minAvailable", told)
    if groups and scheduling.get("minResources"):
        tell(f"{key}.minResources", "was dropped: it is summed up from the Pods' requests")
    if "volcano" in groups and scheduling.get("scheduleTimeoutSeconds") is not None:
        tell(f"{key}.scheduleTimeoutSeconds", "was dropped: it is coscheduling's")
    if scheduling.get("priorityClass"):
        for pod in pods:
            pod.setdefault("priorityClassName", scheduling["priorityClass"])
    return groups, annotations


def replicas_of(specs: Manifest, known: tuple[str, ...]) -> dict[str, tuple[str, Manifest]]:
    """The replica specifications by their proper name, whatever the case they are written in, with the key as written."""
    by_lower = {str(key).lower(): key for key in specs}
    return {name: (by_lower[name.lower()], specs[by_lower[name.lower()]]) for name in known if name.lower() in by_lower}


def count_of(replica: Manifest, key: str) -> int:
    """Pods of a replica specification.

    Raises:
        UsageError: there are less than none.
    """
    count = 1 if replica.get("replicas") is None else int(replica["replicas"])
    if count < 0:
        raise UsageError(f"{count} is not valid", where=f"{key}.replicas", todo="a whole number, 0 or more")
    return count
