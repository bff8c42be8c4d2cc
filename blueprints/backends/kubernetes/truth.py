"""What is true of a job: read from its TrainJob, JobSet, Jobs, Pods, events and Kueue's Workload, told in plain words.

The TrainJob's own status says little: nothing until it ends, and then not why. Whether it runs is seen in its Pods, why it
cannot start in events and waiting reasons, why it failed in the Job's condition and the Pod's termination message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from blueprints.backends.state import COMPLETE, CREATED, FAILED, RUNNING, JobStatus, StepStatus, seconds_between
from blueprints.errors import ExitCode
from blueprints.jobset import build_job_set
from blueprints.progress import ProgressState
from blueprints.quantity import whole
from blueprints.runtimes import INITIALIZERS, Manifest, ancestor_of, pod_spec

SUSPENDED, QUEUED, INITIALIZING = "Suspended", "Queued", "Initializing"
STATES = (CREATED, SUSPENDED, QUEUED, INITIALIZING, RUNNING, COMPLETE, FAILED)
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
QUEUE = "kueue.x-k8s.io/queue-name"
STUCK_SECONDS = 15.0
"""A refusal of the control plane that lasts so long is no passing one."""
CREATION_FAILED = ("TrainJobResourcesCreationFailed", "JobCreationFailed", "FailedCreate")
UNPULLABLE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
UNSTARTABLE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff")
EXIT_CODES = {
    int(ExitCode.USER_INPUT): "the recipe or the arguments are wrong",
    int(ExitCode.INVALID_DATA): "the data is wrong",
    int(ExitCode.JOB_FAILED): "the training failed",
    int(ExitCode.ENVIRONMENT): "the environment lacks something: disk, network, memory, libraries",
    int(ExitCode.TERMINATED): "it was stopped, after saving a checkpoint",
    137: "it was killed (SIGKILL: out of memory, or the node went away)",
}
"""What an exit code says where no termination message was left."""


@dataclass(frozen=True)
class Objects:
    """Everything that belongs to one TrainJob, as the cluster has it now.

    Attributes:
        runtime: the runtime or the snapshot the controller keeps of it; None if neither can be read.
        events: of all these objects, in any order.
    """

    job: Manifest
    runtime: Manifest | None = None
    job_set: Manifest | None = None
    jobs: Sequence[Manifest] = ()
    pods: Sequence[Manifest] = ()
    events: Sequence[Manifest] = ()
    workload: Manifest | None = None


@dataclass
class Cause:
    """Why a job does not go on or has failed.

    Attributes:
        final: it will not go on by itself.
    """

    reason: str
    message: str
    todo: str = ""
    step: str | None = None
    final: bool = False
    exit_code: int | None = None
    failure: dict[str, Any] = field(default_factory=dict)


def status_of(objects: Objects) -> JobStatus:
    """The job's state, its steps and, where it is stuck or failed, the first cause."""
    job, spec = objects.job, objects.job.get("spec") or {}
    steps = steps_of(objects)
    status = JobStatus(
        name=job["metadata"]["name"],
        runtime=str((spec.get("runtimeRef") or {}).get("name", "")),
        num_nodes=_nodes(objects),
        created=str(job["metadata"].get("creationTimestamp") or ""),
        steps=steps,
    )
    status.started = min((step.started for step in steps if step.started), default=None)
    condition = _finished(job)
    if condition is not None:
        status.ended = condition.get("lastTransitionTime")
    cause = _cause(objects, steps, condition)
    status.state = _state(objects, steps, condition, cause)
    if cause is not None:
        status.reason, status.message, status.todo = cause.reason, cause.message, cause.todo
        status.failed_step = cause.step
        _note_failure(steps, cause)
    elif status.state == INITIALIZING:
        running = [step.name for step in steps if step.replicated_job in INITIALIZERS and step.status != "Succeeded"]
        status.message = f"{running[0]} is {_doing(steps, running[0])}" if running else ""
    if status.state == COMPLETE:
        status.exit_code = 0
    elif status.state == FAILED:
        code = cause.exit_code if cause else None
        status.exit_code = code if code in EXIT_CODES and code != 137 else int(ExitCode.JOB_FAILED)
    status.notes = _notes(objects)
    return status


def _state(objects: Objects, steps: list[StepStatus], condition: Manifest | None, cause: Cause | None) -> str:
    if condition is not None:
        return COMPLETE if condition["type"] == "Complete" else FAILED
    if cause is not None and cause.final:
        return FAILED
    if (objects.job.get("spec") or {}).get("suspend"):
        return QUEUED if _queue(objects.job) else SUSPENDED
    if any(step.status == "Running" and step.replicated_job not in INITIALIZERS for step in steps):
        return RUNNING
    initializers = [step for step in steps if step.replicated_job in INITIALIZERS]
    if any(step.status != "Succeeded" for step in initializers) and any(step.attempts for step in initializers):
        return INITIALIZING
    return CREATED


def _finished(job: Manifest) -> Manifest | None:
    """The condition by which the TrainJob has ended."""
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            found: Manifest = condition
            return found
    return None


def _nodes(objects: Objects) -> int:
    trainer = (objects.job.get("spec") or {}).get("trainer") or {}
    policy = ((objects.runtime or {}).get("spec") or {}).get("mlPolicy") or {}
    nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    return int(nodes or 1)


def _queue(job: Manifest) -> str | None:
    return (job["metadata"].get("labels") or {}).get(QUEUE)


# --- steps ------------------------------------------------------------------------------------------------------------


def steps_of(objects: Objects) -> list[StepStatus]:
    """One step per Pod that there is or will be, in the runtime's order; of several Pods of one place the newest."""
    template = objects.job_set
    if template is None and objects.runtime is not None:
        template = build_job_set(objects.job, objects.runtime)
    steps: list[StepStatus] = []
    for replicated in ((template or {}).get("spec") or {}).get("replicatedJobs") or []:
        count = int(((replicated.get("template") or {}).get("spec") or {}).get("parallelism") or 1)
        ancestor = ancestor_of(replicated)
        single = ancestor in INITIALIZERS or (ancestor is None and replicated["name"] != "node" and count == 1)
        for index in range(count):
            name = replicated["name"] if single else f"{replicated['name']}-{index}"
            steps.append(_step(name, replicated, index, objects))
    return steps


def _step(name: str, replicated: Manifest, index: int, objects: Objects) -> StepStatus:
    pods = pods_at(objects.pods, replicated["name"], index)
    step = StepStatus(name, replicated["name"], index, gpus=_devices(pod_spec(replicated)))
    if pods:
        _from_pod(step, pods[-1])
        step.attempts = len(pods) + max(0, _restarts(pods[-1]))
    elif _job_succeeded(objects.jobs, replicated["name"]):
        step.status = "Succeeded"  # its Pod has been cleaned away
    return step


def pods_at(pods: Iterable[Manifest], replicated: str, index: int) -> list[Manifest]:
    """The Pods of one place, the oldest first."""
    found = [
        pod for pod in pods
        if _label(pod, REPLICATED_JOB) == replicated and _index(pod) == index
    ]  # fmt: skip
    return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""))


def _label(item: Manifest, key: str) -> str:
    return str((item["metadata"].get("labels") or {}).get(key, ""))


def _index(pod: Manifest) -> int:
    annotations = pod["metadata"].get("annotations") or {}
    value = annotations.get(COMPLETION_INDEX) or _label(pod, COMPLETION_INDEX) or "0"
    return int(value) if str(value).isdigit() else 0


def _from_pod(step: StepStatus, pod: Manifest) -> None:
    found = pod.get("status") or {}
    step.status = {"Unknown": "Failed"}.get(found.get("phase", "Pending"), found.get("phase", "Pending"))
    step.started = found.get("startTime")
    ended = terminated_of(pod)
    if ended is not None:
        step.exit_code = ended.get("exitCode")
        step.ended = ended.get("finishedAt")


def _main_status(pod: Manifest) -> Manifest:
    """Status of the container that is the step; the first one where names do not tell."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    names = ("node", *INITIALIZERS)
    return next((item for item in statuses if item.get("name") in names), statuses[0] if statuses else {})


def terminated_of(pod: Manifest) -> Manifest | None:
    """How a Pod's main container ended, now or, where it was started again, the last time; None if it never did."""
    container = _main_status(pod)
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        if state.get("terminated"):
            found: Manifest = state["terminated"]
            return found
    return None


def _restarts(pod: Manifest) -> int:
    return int(_main_status(pod).get("restartCount") or 0)


def _devices(pod: Manifest) -> int:
    """Devices of a Pod: resources with a domain in their name, such as nvidia.com/gpu or google.com/tpu."""
    for container in pod.get("containers") or []:
        for name, amount in ((container.get("resources") or {}).get("limits") or {}).items():
            if "/" in name:
                return whole(amount)
    return 0


def _job_succeeded(jobs: Iterable[Manifest], replicated: str) -> bool:
    return any(_label(job, REPLICATED_JOB) == replicated and _condition(job, "Complete") is not None for job in jobs)


def _condition(item: Manifest, kind: str) -> Manifest | None:
    for condition in (item.get("status") or {}).get("conditions") or []:
        if condition.get("type") == kind and condition.get("status") == "True":
            found: Manifest = condition
            return found
    return None


def _doing(steps: list[StepStatus], name: str) -> str:
    status = next(step.status for step in steps if step.name == name)
    return {"Pending": "about to start", "Running": "running", "Failed": "being tried again"}.get(
        status, status.lower()
    )


# --- causes -----------------------------------------------------------------------------------------------------------


def _cause(objects: Objects, steps: list[StepStatus], condition: Manifest | None) -> Cause | None:
    if condition is not None and condition["type"] == "Complete":
        return None
    if condition is not None:
        return _why_failed(objects, condition)
    return _not_created(objects) or _held(objects) or _stuck(objects, steps)


def _why_failed(objects: Objects, condition: Manifest) -> Cause:
    reason, said = str(condition.get("reason") or "Failed"), str(condition.get("message") or "")
    if reason == "DeadlineExceeded":
        seconds = (objects.job.get("spec") or {}).get("activeDeadlineSeconds")
        return Cause(
            reason, f"it ran longer than its deadline of {seconds} s; the cluster deleted its Pods and logs",
            "raise runtime.active_deadline_seconds; what was saved on the claim is still there", final=True,
        )  # fmt: skip
    if reason == "TrainingRuntimeNotSupported":
        return Cause(reason, said, "name a ClusterTrainingRuntime or a TrainingRuntime", final=True)
    cause = _first_failed_pod(objects)
    if cause is not None:
        return cause
    failed = next((job for job in objects.jobs if _condition(job, "Failed") is not None), None)
    if failed is not None:
        found = _condition(failed, "Failed") or {}
        step = _label(failed, REPLICATED_JOB)
        return Cause(str(found.get("reason")), f"{step}: {found.get('message')}", "see its events", step, final=True)
    return Cause(reason, said, "see `blueprints events` and `blueprints logs`", final=True)


def _first_failed_pod(objects: Objects) -> Cause | None:
    """The Pod that failed first: those after it often fail because of it."""
    failed = [pod for pod in objects.pods if (pod.get("status") or {}).get("phase") == "Failed"]
    ended = [(str((terminated_of(pod) or {}).get("finishedAt") or "~"), pod["metadata"]["name"], pod) for pod in failed]
    for _, _, pod in sorted(ended, key=lambda item: item[:2]):
        if (cause := failed_pod(pod)) is not None:
            return cause
    return None


def failed_pod(pod: Manifest) -> Cause | None:
    """Why a Pod failed."""
    step, ended, found = step_name(pod), terminated_of(pod), pod.get("status") or {}
    disrupted = _condition(pod, "DisruptionTarget")
    if ended is None:
        reason = str((disrupted or {}).get("reason") or found.get("reason") or "PodFailed")
        said = str((disrupted or {}).get("message") or found.get("message") or "its Pod failed before it started")
        return Cause(reason, f"{step}: {said}", "see its events", step, final=True)
    code = int(ended.get("exitCode") or 0)
    failure = _termination(str(ended.get("message") or ""))
    if ended.get("reason") == "OOMKilled":
        return Cause(
            "OOMKilled", f"{step} needed more memory than its limit and was killed",
            "raise resources.memory, or lower training.per_device_train_batch_size or training.max_length", step,
            final=True, exit_code=int(ExitCode.JOB_FAILED), failure=failure,
        )  # fmt: skip
    if disrupted is not None and not failure.get("problem"):
        reason, said = str(disrupted.get("reason")), str(disrupted.get("message"))
        return Cause(reason, f"{step} was disrupted: {said}", "run it again", step, final=True, exit_code=code)
    problem = str(failure.get("problem") or EXIT_CODES.get(code) or "it ended without saying why")
    text = f"{step}: {problem} (exit code {code})"
    todo = str(failure.get("todo") or f"see `blueprints logs JOB --step {step}`")
    return Cause("StepFailed", text, todo, step, final=True, exit_code=code, failure=failure)


def _termination(message: str) -> dict[str, Any]:
    """A termination message: our JSON, else the end of the log that stands in for it."""
    try:
        data = json.loads(message)
    except ValueError:
        data = None
    if isinstance(data, dict):
        return data
    return {"log": message} if message.strip() else {}


def step_name(pod: Manifest) -> str:
    """The step a Pod is."""
    name = _label(pod, REPLICATED_JOB) or pod["metadata"]["name"]
    return name if name in INITIALIZERS else f"{name}-{_index(pod)}"


def _not_created(objects: Objects) -> Cause | None:
    """The control plane cannot make what the TrainJob asks for; its status says nothing of it."""
    told = [event for event in objects.events if event.get("reason") in CREATION_FAILED]
    told = [event for event in told if _kind(event) in ("TrainJob", "JobSet", "Job")]
    if not told:
        return None
    newest = max(told, key=event_time)
    kind = _kind(newest)
    if (kind == "TrainJob" and objects.job_set is not None) or (kind != "TrainJob" and _all_jobs_exist(objects)):
        return None  # it has worked since
    first = min(told, key=event_time)
    since = seconds_between(event_time(first) or None, None) or 0.0
    message = " ".join(str(newest.get("message") or "").split())
    return Cause(
        str(newest["reason"]), f"the cluster cannot create the job's {'Pods' if kind == 'Job' else 'parts'}: {message}",
        _creation_todo(message), final=since >= STUCK_SECONDS, exit_code=int(ExitCode.USER_INPUT),
    )  # fmt: skip


def _creation_todo(message: str) -> str:
    if "too long" in message:
        return "give the job a shorter name"
    if "no matches for kind" in message:
        return "the runtime asks for a scheduler that is not installed here: use another runtime or overlay"
    if "exceeded quota" in message:
        return "ask for less (resources), or for more quota in this namespace"
    if "forbidden" in message.lower():
        return "ask the cluster's administrator"
    return "correct what it names, and create the job again"


def _all_jobs_exist(objects: Objects) -> bool:
    """Whether every replicatedJob whose dependencies are met has its Job."""
    there = {_label(job, REPLICATED_JOB) for job in objects.jobs}
    complete = {_label(job, REPLICATED_JOB) for job in objects.jobs if _condition(job, "Complete")}
    for replicated in ((objects.job_set or {}).get("spec") or {}).get("replicatedJobs") or []:
        waits = any(entry.get("name") not in complete for entry in replicated.get("dependsOn") or [])
        if replicated["name"] not in there and not waits:
            return False
    return bool(objects.job_set)


def _held(objects: Objects) -> Cause | None:
    """Suspended: by a person, or by Kueue until there is quota."""
    if not (objects.job.get("spec") or {}).get("suspend"):
        return None
    queue = _queue(objects.job)
    if queue is None:
        return Cause("Suspended", "it is suspended", "let it go on with `blueprints resume`")
    conditions = ((objects.workload or {}).get("status") or {}).get("conditions") or []
    for kind in ("Evicted", "Preempted", "QuotaReserved", "Admitted"):
        condition = next((item for item in conditions if item.get("type") == kind), None)
        waits = condition is not None and condition.get("status") == (
            "True" if kind in ("Evicted", "Preempted") else "False"
        )
        if condition is not None and waits and condition.get("message"):
            reason = str(condition.get("reason") or kind)
            return Cause(reason, f"it waits in queue {queue}: {condition['message']}")
    return Cause("Queued", f"it waits in queue {queue}")


def _stuck(objects: Objects, steps: list[StepStatus]) -> Cause | None:
    """The first step that should run and cannot."""
    for step in steps:
        pods = pods_at(objects.pods, step.replicated_job, step.index)
        if pods and (cause := waiting_pod(pods[-1], objects.events)) is not None:
            cause.step = step.name
            return cause
    return None


def waiting_pod(pod: Manifest, events: Iterable[Manifest]) -> Cause | None:
    """Why a Pod does not start; None if it runs, has ended or is only young."""
    if (pod.get("status") or {}).get("phase") != "Pending":
        return None
    step = step_name(pod)
    scheduled: Manifest = next(
        (c for c in pod["status"].get("conditions") or [] if c.get("type") == "PodScheduled"), {}
    )
    if scheduled.get("status") == "False":
        said = str(scheduled.get("message") or "no node fits")
        return Cause(
            "Unschedulable", f"{step} fits on no node: {said}",
            "ask for less (resources.gpu, resources.memory), or wait until a node is free",
        )  # fmt: skip
    statuses = [*(pod["status"].get("initContainerStatuses") or []), *(pod["status"].get("containerStatuses") or [])]
    for container in statuses:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason in UNPULLABLE:
            image = container.get("image") or "its image"
            text = f"{step}: the image {image} cannot be pulled: {said or reason}"
            return Cause(reason, text, "is its name right, and may this cluster pull it (imagePullSecrets)?")
        if reason in UNSTARTABLE:
            return Cause(reason, f"{step} cannot start: {said or reason}", _config_todo(said))
    mount = [
        event for event in events if event.get("reason") in ("FailedMount", "FailedAttachVolume", "ProvisioningFailed")
    ]
    mine = [event for event in mount if (event.get("involvedObject") or {}).get("name") == pod["metadata"]["name"]]
    if mine:
        newest = max(mine, key=event_time)
        return Cause(str(newest["reason"]), f"{step}: {newest.get('message')}", "see the claim: `kubectl get pvc`")
    return None


def _config_todo(message: str) -> str:
    if "secret" in message.lower():
        return "create that Secret, or correct runtime.secret_ref"
    return "see `blueprints events`"


def _note_failure(steps: list[StepStatus], cause: Cause) -> None:
    for step in steps:
        if step.name == cause.step and (cause.failure or cause.final):
            step.failure = cause.failure or {"problem": cause.message, "todo": cause.todo}


def _notes(objects: Objects) -> list[str]:
    """What happened that did not end the job: preemptions and evictions."""
    notes = []
    for pod in sorted(objects.pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp"))):
        disrupted = _condition(pod, "DisruptionTarget")
        if disrupted is not None:
            said = disrupted.get("message") or disrupted.get("reason")
            notes.append(f"{step_name(pod)} was disrupted ({disrupted.get('reason')}): {said}")
    return notes


# --- events and progress ------------------------------------------------------------------------------------------------


def event_time(event: Manifest) -> str:
    """When an event happened last; new-style events have other fields than old ones."""
    series = event.get("series") or {}
    fields = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"),
              event.get("firstTimestamp"), (event.get("metadata") or {}).get("creationTimestamp"))  # fmt: skip
    return next((str(value) for value in fields if value), "")


def _kind(event: Manifest) -> str:
    return str((event.get("involvedObject") or {}).get("kind"))


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
            continue
    updated = found.get("lastUpdatedTime")
    return {
        "phase": "train",
        "completed": float(found.get("progressPercentage") or 0),
        "total": 100.0,
        "unit": "%",
        "metrics": metrics,
        "eta_seconds": found.get("estimatedRemainingSeconds"),
        "message": "",
        "updated": datetime.fromisoformat(updated).timestamp() if updated else 0.0,
    }


def metrics_of(progress: Mapping[str, Any] | None) -> dict[str, float]:
    """The last metrics that are known of a job."""
    return dict((progress or {}).get("metrics") or {})
