"""What is true of a job: read from its TrainJob, JobSet, Jobs, Pods, events and Kueue's Workload.

The TrainJob's own status says little: nothing until it ends, and then not why. Whether it runs is seen in its Pods, why it
cannot start in events and waiting reasons, why it failed in the Job's condition and the Pod's termination message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blueprints.backends.kubernetes.causes import Cause, cause_of, refused_change
from blueprints.backends.kubernetes.objects import (
    MULTIKUEUE,
    QUEUE,
    REPLICATED_JOB,
    Objects,
    condition_of,
    has,
    is_initializer,
    label,
    main_status,
    parse_time,
    phase,
    pods_at,
    restarts,
    step_name,
    terminated_of,
)
from blueprints.backends.state import COMPLETE, CREATED, FAILED, RUNNING, JobStatus, StepStatus
from blueprints.errors import ExitCode
from blueprints.progress import ProgressState
from blueprints.quantity import whole
from blueprints.runtimes import INITIALIZERS, Manifest, ancestor_of, pod_spec

SUSPENDED, QUEUED, INITIALIZING = "Suspended", "Queued", "Initializing"
STATES = (CREATED, SUSPENDED, QUEUED, INITIALIZING, RUNNING, COMPLETE, FAILED)
_TOLD_CODES = {int(code) for code in ExitCode if code not in (ExitCode.DONE, ExitCode.BUG, ExitCode.INTERRUPTED)}


def status_of(objects: Objects) -> JobStatus:
    """The job's state, its steps and, where it is stuck or failed, the first cause."""
    job = objects.job
    steps = steps_of(objects)
    status = JobStatus(
        name=objects.name,
        runtime=str((objects.spec.get("runtimeRef") or {}).get("name", "")),
        num_nodes=_nodes(objects),
        created=str(job["metadata"].get("creationTimestamp") or ""),
        steps=steps,
    )
    status.started = min((step.started for step in steps if step.started), default=None)
    condition = ended(job)
    status.ended = (condition or {}).get("lastTransitionTime")
    cause = cause_of(objects, condition)
    status.state = _state(objects, steps, condition, cause)
    if cause is not None:
        status.reason, status.message, status.todo = cause.reason, cause.message, cause.todo
    elif status.state == INITIALIZING:
        status.message = _initializing(steps)
    if status.state == COMPLETE:
        status.exit_code = 0
    elif status.state == FAILED:
        code = cause.exit_code if cause else None
        status.exit_code = code if code in _TOLD_CODES else int(ExitCode.JOB_FAILED)
        if cause is not None:
            status.failed_step = cause.step
            _note_failure(steps, cause)
    status.notes = _notes(objects)
    return status


def ended(job: Manifest) -> Manifest | None:
    """The condition by which the TrainJob has ended; None while it has not."""
    return next((condition_of(job, kind) for kind in ("Failed", "Complete") if has(job, kind)), None)


def _state(objects: Objects, steps: list[StepStatus], condition: Manifest | None, cause: Cause | None) -> str:
    if condition is not None:
        return COMPLETE if condition["type"] == "Complete" else FAILED
    if cause is not None and cause.final:
        return FAILED
    if objects.spec.get("suspend"):
        return QUEUED if label(objects.job, QUEUE) else SUSPENDED
    initializers = [step for step in steps if step.replicated_job in INITIALIZERS]
    trainer = [step for step in steps if step.replicated_job in _trainers(objects)]
    if _runs(trainer) or _runs_elsewhere(objects):
        return RUNNING
    waits = any(step.status != "Succeeded" for step in initializers)
    return INITIALIZING if waits and any(step.pod for step in initializers) else CREATED


def _trainers(objects: Objects) -> set[str]:
    """Names of the replicatedJobs that train."""
    return {
        item["name"] for item in objects.replicated_jobs
        if ancestor_of(item) == "trainer" or item["name"] in ("node", "launcher")
    }  # fmt: skip


def _runs(trainer: list[StepStatus]) -> bool:
    """Whether the training runs: every node does, or did and is being started again."""
    # Ended ones count: what ran is not taken for new while the controllers still write how it went.
    begun = ("Running", "Succeeded", "Failed")
    return any(step.status in begun for step in trainer) and all(
        step.status in begun or step.attempts for step in trainer
    )


def _runs_elsewhere(objects: Objects) -> bool:
    """Whether the job runs in a worker cluster, whose Pods are not seen here."""
    if objects.spec.get("managedBy") != MULTIKUEUE:
        return False
    found = (objects.job.get("status") or {}).get("jobsStatus") or []
    return any(item.get("active") for item in found if item.get("name") not in INITIALIZERS)


def _nodes(objects: Objects) -> int:
    trainer = objects.spec.get("trainer") or {}
    policy = ((objects.runtime or {}).get("spec") or {}).get("mlPolicy") or {}
    if trainer.get("numNodes") is not None:
        return int(trainer["numNodes"])
    if policy.get("numNodes") is not None:
        return int(policy["numNodes"])
    counts = [_count(item) for item in objects.replicated_jobs if ancestor_of(item) == "trainer"]
    return max(counts, default=1)


def _initializing(steps: list[StepStatus]) -> str:
    step = next(step for step in steps if step.replicated_job in INITIALIZERS and step.status != "Succeeded")
    doing = {"Pending": "about to start", "Running": "running", "Failed": "being tried again"}
    return f"{step.name} is {doing.get(step.status, step.status.lower())}"


# --- steps ------------------------------------------------------------------------------------------------------------


def steps_of(objects: Objects) -> list[StepStatus]:
    """One step per Pod that there is or will be, in the runtime's order; of several Pods of one place the newest."""
    steps: list[StepStatus] = []
    for replicated in objects.replicated_jobs:
        count, ancestor = _count(replicated), ancestor_of(replicated)
        single = is_initializer(replicated) or (ancestor is None and replicated["name"] != "node" and count == 1)
        for index in range(count):
            name = replicated["name"] if single else f"{replicated['name']}-{index}"
            steps.append(_step(name, replicated, index, objects))
    return steps


def _count(replicated: Manifest) -> int:
    parallelism = ((replicated.get("template") or {}).get("spec") or {}).get("parallelism")
    return 1 if parallelism is None else int(parallelism)


def _step(name: str, replicated: Manifest, index: int, objects: Objects) -> StepStatus:
    device, count = devices_of(pod_spec(replicated))
    step = StepStatus(name, replicated["name"], index, gpus=count if device != "cpu" else 0, device=device)
    step.device_count = count
    pods = pods_at(objects.pods, replicated["name"], index)
    if pods:
        _from_pod(step, pods[-1])
        begun = [pod for pod in pods if phase(pod) != "Pending"]
        step.attempts = len(begun) + restarts(pods[-1])
        if begun and begun[-1] is not pods[-1]:  # told of until the next one runs
            step.exit_code = (terminated_of(begun[-1]) or {}).get("exitCode")
    else:
        _from_job(step, objects)
    return step


def _from_pod(step: StepStatus, pod: Manifest) -> None:
    found = phase(pod)
    waiting = (main_status(pod).get("state") or {}).get("waiting")
    step.status = {"Unknown": "Failed"}.get(found, found)
    if found == "Running" and waiting:
        step.status = "Pending"  # its container ended and has not been started again yet
    step.pod = str(pod["metadata"]["name"])
    step.started = (pod.get("status") or {}).get("startTime")
    end = terminated_of(pod)
    if end is not None and step.status != "Running":
        step.exit_code = end.get("exitCode")
        step.ended = end.get("finishedAt")


def _from_job(step: StepStatus, objects: Objects) -> None:
    """Where the Pod has been cleaned away, or is in another cluster: the Job tells, or the TrainJob's own counts."""
    for job in objects.jobs:
        if label(job, REPLICATED_JOB) == step.replicated_job and (has(job, "Complete") or has(job, "Failed")):
            step.status = "Succeeded" if has(job, "Complete") else "Failed"
            return
    for counts in (objects.job.get("status") or {}).get("jobsStatus") or []:
        if counts.get("name") == step.replicated_job:
            if counts.get("succeeded"):
                step.status = "Succeeded"
            elif counts.get("failed") and ended(objects.job):
                step.status = "Failed"
            elif counts.get("active") and objects.spec.get("managedBy") == MULTIKUEUE:
                step.status = "Running"


def devices_of(pod: Manifest) -> tuple[str, int]:
    """What a Pod computes on and how many: `gpu`, `tpu`, `mig-1g.10gb`, ..., else `cpu` (0: as many as the node has)."""
    cpus = 0
    for container in pod.get("containers") or []:
        limits = (container.get("resources") or {}).get("limits") or {}
        for name, amount in limits.items():
            short = name.rpartition("/")[2]
            if "/" in name and whole(amount):
                return next((kind for kind in ("gpu", "tpu") if kind in name and not short.startswith("mig")), short), (
                    whole(amount)
                )
            if name == "cpu":
                cpus = max(cpus, whole(amount))
    return "cpu", cpus


def _note_failure(steps: list[StepStatus], cause: Cause) -> None:
    for step in steps:
        if step.name == cause.step:
            step.failure = cause.failure or {"problem": cause.message, "todo": cause.todo}


def _notes(objects: Objects) -> list[str]:
    """What happened that did not end the job: preemptions, evictions, refused changes."""
    notes = []
    for pod in sorted(objects.pods, key=lambda pod: parse_time(pod["metadata"].get("creationTimestamp"))):
        disrupted = condition_of(pod, "DisruptionTarget")
        if disrupted.get("status") == "True":
            said = disrupted.get("message") or disrupted.get("reason")
            notes.append(f"{step_name(pod)} was disrupted ({disrupted.get('reason')}): {said}")
    if objects.spec.get("suspend") and (said := refused_change(objects)):
        notes.append(f"the cluster refuses a change of the suspended job: {said}")
    return notes


# --- progress ---------------------------------------------------------------------------------------------------------


def progress_of(job: Manifest) -> ProgressState | None:
    """The progress that the trainer posted, where the cluster's gate `TrainJobStatus` is on."""
    found = (job.get("status") or {}).get("trainerStatus")
    if not isinstance(found, dict):
        return None
    metrics: dict[str, float] = {}
    for metric in found.get("metrics") or []:
        try:
            metrics[str(metric["name"])] = float(metric["value"])
        except (KeyError, ValueError):
            continue  # text, or half a metric: not ours
    return {
        "phase": "train",
        "completed": float(found.get("progressPercentage") or 0),
        "total": 100.0,
        "unit": "%",
        "metrics": metrics,
        "eta_seconds": found.get("estimatedRemainingSeconds"),
        "message": "",
        "updated": parse_time(found.get("lastUpdatedTime")).timestamp(),
    }


def metrics_of(progress: Mapping[str, Any] | None) -> dict[str, float]:
    """The last metrics that are known of a job."""
    return dict((progress or {}).get("metrics") or {})
