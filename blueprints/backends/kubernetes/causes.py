"""Why a job does not go on, or has failed: the first cause in plain words, and what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from blueprints.backends.kubernetes.objects import (
    QUEUE,
    REPLICATED_JOB,
    Objects,
    condition_of,
    event_start,
    event_time,
    has,
    label,
    main_status,
    parse_time,
    phase,
    pod_index,
    pods_at,
    step_name,
    terminated_of,
)
from blueprints.backends.state import seconds_between
from blueprints.errors import ExitCode
from blueprints.runtimes import INITIALIZERS, Manifest

STUCK_SECONDS = 15.0
"""A refusal of the control plane that lasts so long is no passing one."""
IDLE_SECONDS = 30.0
"""Time after which a job that no controller has taken up is told of."""
UNPULLABLE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
UNSTARTABLE = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
MOUNTING = ("FailedMount", "FailedAttachVolume", "ProvisioningFailed", "FailedBinding")
EXIT_CODES = {
    int(ExitCode.BUG): "it ended with an error it does not know",
    int(ExitCode.USER_INPUT): "the recipe or the arguments are wrong",
    int(ExitCode.INVALID_DATA): "the data set or the model does not fit the recipe",
    int(ExitCode.JOB_FAILED): "the training failed",
    int(ExitCode.ENVIRONMENT): "the environment lacks something: disk, network, memory, libraries",
    137: "it was killed (SIGKILL: out of memory, or its node went away)",
    int(ExitCode.TERMINATED): "it was stopped from outside (SIGTERM)",
}
"""What an exit code says where no termination message was left."""
_DEFINITE = re.compile(
    r"too long|Invalid value|Required value|Forbidden:|no matches for kind|is immutable|must (?:be|have|not)|violates PodSecurity"
)
"""A refusal that the same object will meet for ever."""
_PASSING = re.compile(
    r"existing PVC|exceeded quota|failed calling webhook|connection refused|timed out|deadline exceeded|has been modified"
    r"|being deleted|already exists|not found|no such host|EOF|try again",
    re.IGNORECASE,
)
"""A refusal that may pass without a change of the job."""
_POLICY_POD = re.compile(r"pod (?:[^/\s]+/)?(\S+) failed with exit code (\d+)")
_POD_INDEX = re.compile(r"-\d+-(\d+)-[a-z0-9]{5}$")
_FIRST_JOB = re.compile(r"first failed job: ([^)\s]+)")


@dataclass
class Cause:
    """Why a job does not go on or has failed.

    Attributes:
        final: it will not go on by itself.
        failure: the step's termination message.
    """

    reason: str
    message: str
    todo: str = ""
    step: str | None = None
    final: bool = False
    exit_code: int | None = None
    failure: dict[str, Any] = field(default_factory=dict)


def cause_of(objects: Objects, condition: Manifest | None) -> Cause | None:
    """Why the job has failed or does not go on; None where all is well.

    Args:
        condition: by which the TrainJob has ended; None while it has not.
    """
    if condition is not None:
        return None if condition["type"] == "Complete" else _why_failed(objects, condition)
    if objects.spec.get("suspend"):
        return _held(objects)
    return _not_created(objects) or _stuck(objects) or _not_resumed(objects) or _untouched(objects)


# --- failed -----------------------------------------------------------------------------------------------------------


def _why_failed(objects: Objects, condition: Manifest) -> Cause:
    reason, said = str(condition.get("reason") or "Failed"), str(condition.get("message") or "")
    if reason == "DeadlineExceeded":
        seconds = objects.spec.get("activeDeadlineSeconds")
        return Cause(
            reason, f"it ran longer than its deadline of {seconds} s; the cluster deleted its Pods and logs",
            "raise runtime.active_deadline_seconds; what was saved on a claim that outlives the job is still there",
            final=True,
        )  # fmt: skip
    if reason == "TrainingRuntimeNotSupported":
        todo = "name a ClusterTrainingRuntime or a TrainingRuntime"
        return Cause(reason, said, todo, final=True, exit_code=int(ExitCode.USER_INPUT))
    jobs = _failed_jobs(objects, said)
    for job in jobs:
        if (cause := _failed_job(job, objects)) is not None:
            return cause
    pods = [pod for pod in objects.pods if phase(pod) == "Failed"] if not jobs else []
    if pods:
        return failed_pod(_first(pods))
    return Cause(reason, said, f"see `blueprints events {objects.name} --backend kubernetes`", final=True)


def _failed_jobs(objects: Objects, said: str) -> list[Manifest]:
    """The Jobs that failed, the one that the JobSet names as the first in front."""
    named = _FIRST_JOB.search(said)
    first = named[1] if named else ""
    failed = [job for job in objects.jobs if has(job, "Failed") or has(job, "FailureTarget")]
    return sorted(
        failed,
        key=lambda job: (
            job["metadata"]["name"] != first,
            parse_time((condition_of(job, "Failed") or condition_of(job, "FailureTarget")).get("lastTransitionTime")),
        ),
    )


def _failed_job(job: Manifest, objects: Objects) -> Cause | None:
    """Why a Job failed: the Pod that its failure policy names, else the one that failed first in the last round."""
    replicated = label(job, REPLICATED_JOB)
    condition = condition_of(job, "Failed") or condition_of(job, "FailureTarget")
    reason, said = str(condition.get("reason") or "Failed"), str(condition.get("message") or "")
    pods = [pod for pod in objects.pods if label(pod, REPLICATED_JOB) == replicated and phase(pod) == "Failed"]
    named = _POLICY_POD.search(said)
    chosen = [pod for pod in pods if named and pod["metadata"]["name"] == named[1]] or _last_round(pods, replicated)
    if chosen:
        return failed_pod(_first(chosen))
    step = _step_of(job, named[1] if named else "")
    if named:
        code = int(named[2])
        text = f"{step}: {EXIT_CODES.get(code, 'it failed')} (exit code {code}); its Pod {named[1]} is gone"
        return Cause("StepFailed", text, "run it again and follow its log", step, final=True, exit_code=code)
    events = f"see `blueprints events {objects.name} --backend kubernetes`"
    return Cause(reason, f"{step}: {said or reason}", events, step, final=True)


def _step_of(job: Manifest, pod: str) -> str:
    """The step of a Job whose Pods are gone: a node's number is in its Pod's name."""
    name = label(job, REPLICATED_JOB) or str(job["metadata"]["name"])
    if name in INITIALIZERS:
        return name
    index = _POD_INDEX.search(pod)
    return f"{name}-{index[1]}" if index else f"{name}-0" if (job.get("spec") or {}).get("parallelism") == 1 else name


def _last_round(pods: list[Manifest], replicated: str) -> list[Manifest]:
    """Of every node its last failed Pod; those that were stopped because another had failed only if there is no other."""
    places = {pod_index(pod) for pod in pods}
    last = [pods_at(pods, replicated, index)[-1] for index in sorted(places)]
    own = [pod for pod in last if not has(pod, "DisruptionTarget")]
    culprits = [pod for pod in own if (terminated_of(pod) or {}).get("exitCode") not in (0, int(ExitCode.TERMINATED))]
    return culprits or own or last


def _first(pods: Iterable[Manifest]) -> Manifest:
    """The Pod that ended first: those after it often end because of it."""
    return min(
        pods, key=lambda pod: (str((terminated_of(pod) or {}).get("finishedAt") or "~"), pod["metadata"]["name"])
    )


def failed_pod(pod: Manifest) -> Cause:
    """Why a Pod failed."""
    step, end, found = step_name(pod), terminated_of(pod), pod.get("status") or {}
    disrupted = condition_of(pod, "DisruptionTarget")
    if end is None:
        reason = str(disrupted.get("reason") or found.get("reason") or "PodFailed")
        said = str(disrupted.get("message") or found.get("message") or "its Pod failed before it started")
        return Cause(reason, f"{step}: {said}", "run it again", step, final=True)
    code = int(end.get("exitCode") or 0)
    failure = _termination(str(end.get("message") or ""))
    if end.get("reason") == "OOMKilled":
        return Cause(
            "OOMKilled", f"{step} needed more memory than its limit and was killed (OOMKilled, exit code {code})",
            "raise resources.memory, or lower training.per_device_train_batch_size or the sequence length", step,
            final=True, exit_code=int(ExitCode.JOB_FAILED), failure=failure,
        )  # fmt: skip
    if disrupted.get("status") == "True" and not failure.get("problem"):
        reason, said = str(disrupted.get("reason")), str(disrupted.get("message") or disrupted.get("reason"))
        return Cause(reason, f"{step} was disrupted: {said}", "run it again", step, final=True, exit_code=code)
    problem = str(failure.get("problem") or EXIT_CODES.get(code) or "it ended without saying why")
    todo = str(failure.get("todo") or f"see its log: `blueprints logs JOB --step {step} --backend kubernetes`")
    todo = todo.replace("logs JOB ", f"logs {label(pod, 'jobset.sigs.k8s.io/jobset-name') or 'JOB'} ")
    text = f"{step}: {problem} (exit code {code})"
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


# --- not created ------------------------------------------------------------------------------------------------------


def _not_created(objects: Objects) -> Cause | None:
    """The control plane cannot make what the TrainJob asks for; its status says nothing of it."""
    told = [event for event in objects.own_events if _refuses(event) and not _resolved(event, objects)]
    if not told:
        return None
    newest = max(told, key=lambda event: parse_time(event_time(event)))
    kind = newest["involvedObject"]["kind"]
    message = " ".join(str(newest.get("message") or newest.get("note") or "").split())
    since = max(seconds_between(event_start(event) or None, None) or 0.0 for event in told)
    definite = bool(_DEFINITE.search(message)) and not _PASSING.search(message)
    final = definite or (since >= STUCK_SECONDS and kind != "Job" and not _PASSING.search(message))
    if kind == "TrainJob" and objects.job_set is not None:
        text = f"the cluster refuses a change made while it was suspended, so its Pods stay suspended: {message}"
        todo = "undo the change of runtimePatches (only nodeSelector and tolerations can change), or create it again"
        return Cause(str(newest["reason"]), text, todo, final=final or since >= STUCK_SECONDS)
    what = {"TrainJob": "the job's parts", "JobSet": "the job's parts", "Job": "the job's Pods"}[kind]
    return Cause(
        str(newest["reason"]), f"the cluster cannot create {what}: {message}", _creation_todo(message, objects),
        final=final, exit_code=int(ExitCode.ENVIRONMENT if "no matches for kind" in message else ExitCode.USER_INPUT),
    )  # fmt: skip


def _refuses(event: Manifest) -> bool:
    reason, kind = str(event.get("reason")), (event.get("involvedObject") or {}).get("kind")
    if kind not in ("TrainJob", "JobSet", "Job"):
        return False
    return reason.endswith(("CreationFailed", "CreateFailed")) or reason == "FailedCreate"


def _resolved(event: Manifest, objects: Objects) -> bool:
    """Whether what was refused is there by now."""
    target = event["involvedObject"]
    if target["kind"] == "TrainJob":
        return objects.job_set is not None and not _still_suspended(objects)
    if target["kind"] == "JobSet":
        return _all_jobs_exist(objects)
    job = next((job for job in objects.jobs if job["metadata"]["name"] == target.get("name")), None)
    if job is None:
        return True  # the Job is gone, and with it what it could not do
    wanted = int((job.get("spec") or {}).get("parallelism") or 1)
    pods = [pod for pod in objects.pods if label(pod, REPLICATED_JOB) == label(job, REPLICATED_JOB)]
    alive = {pod_index(pod) for pod in pods if phase(pod) != "Failed"}
    return len(alive) >= wanted or has(job, "Complete") or has(job, "Failed")


def refused_change(objects: Objects) -> str | None:
    """What the control plane said to a change of a suspended job that it cannot make; None if nothing."""
    made = parse_time(((objects.job_set or {}).get("metadata") or {}).get("creationTimestamp"))
    for event in reversed(objects.own_events):
        about_job = (event.get("involvedObject") or {}).get("kind") == "TrainJob"
        if about_job and _refuses(event) and objects.job_set and parse_time(event_time(event)) > made:
            return " ".join(str(event.get("message")).split())
    return None


def _still_suspended(objects: Objects) -> bool:
    """Whether the JobSet is suspended although the TrainJob is not."""
    return bool(((objects.job_set or {}).get("spec") or {}).get("suspend")) and not objects.spec.get("suspend")


def _all_jobs_exist(objects: Objects) -> bool:
    """Whether every replicatedJob whose dependencies are met has its Job."""
    there = {label(job, REPLICATED_JOB) for job in objects.jobs}
    complete = {label(job, REPLICATED_JOB) for job in objects.jobs if has(job, "Complete")}
    for replicated in ((objects.job_set or {}).get("spec") or {}).get("replicatedJobs") or []:
        waits = any(entry.get("name") not in complete for entry in replicated.get("dependsOn") or [])
        if replicated["name"] not in there and not waits:
            return False
    return bool(objects.job_set)


def _creation_todo(message: str, objects: Objects) -> str:
    if "too long" in message:
        return "give the job a shorter name"
    if "no matches for kind" in message:
        return "the runtime asks for a scheduler that is not installed here: use another runtime or overlay"
    if "existing PVC" in message:
        claims = " ".join(objects.claims) or f"initializer-{objects.name}"
        return f"an earlier job of that name left its claim: choose another name, or `kubectl delete pvc {claims}`"
    if "exceeded quota" in message:
        return "ask for less (resources), or for more quota in this namespace; it goes on by itself when there is room"
    if "serviceaccount" in message.lower() or "service account" in message:
        return "create that service account, or correct runtime.service_account_name"
    if "PodSecurity" in message or "forbidden" in message.lower():
        return "ask the cluster's administrator"
    return "correct what it names, and create the job again"


# --- held, not resumed, not taken up ----------------------------------------------------------------------------------


def _held(objects: Objects) -> Cause:
    """Suspended: by a person, or by Kueue until there is quota."""
    queue = label(objects.job, QUEUE)
    if not queue:
        return Cause("Suspended", "it is suspended", f"`blueprints resume {objects.name} --backend kubernetes`")
    for kind, holds in (("Evicted", "True"), ("QuotaReserved", "False"), ("Admitted", "False")):
        condition = condition_of(objects.workload, kind)
        if condition.get("status") == holds and condition.get("message"):
            reason = str(condition.get("reason") or kind)
            return Cause(reason, f"it waits in queue {queue}: {condition['message']}")
    if objects.workload is None and (refused := _queue_refusal(objects)):
        return Cause("Queued", f"it waits in queue {queue}: {refused}")
    return Cause("Queued", f"it waits in queue {queue}")


def _queue_refusal(objects: Objects) -> str | None:
    """What Kueue says of a job for which it has made no Workload."""
    told = [event for event in objects.own_events if event.get("type") == "Warning" and event.get("message")]
    return " ".join(str(told[-1]["message"]).split()) if told else None


def _not_resumed(objects: Objects) -> Cause | None:
    """The TrainJob says it is resumed, but its JobSet is not."""
    since = condition_of(objects.job, "Suspended").get("lastTransitionTime")
    if not _still_suspended(objects) or (seconds_between(since, None) or 0.0) < STUCK_SECONDS:
        return None
    text = "it is resumed, but its Pods stay suspended: the cluster does not take up a change made meanwhile"
    return Cause("NotResumed", text, "undo the change of runtimePatches, or delete the job and create it again")


def _untouched(objects: Objects) -> Cause | None:
    """Nothing has happened to a job for a while: is there a controller?"""
    age = seconds_between(objects.job["metadata"].get("creationTimestamp"), None) or 0.0
    if age < IDLE_SECONDS or objects.job.get("status") or objects.jobs or objects.pods or objects.own_events:
        return None
    if objects.spec.get("managedBy", "trainer.kubeflow.org/trainjob-controller").startswith("kueue"):
        return Cause("NotTakenUp", "no worker cluster has taken it up yet", "is MultiKueue set up here?")
    if objects.job_set is None:
        return Cause("NotTakenUp", "no controller has taken it up yet", "is Kubeflow Trainer's controller running?")
    return Cause("NotTakenUp", "its JobSet has no Jobs yet", "is the JobSet controller running?")


# --- Pods that do not start -------------------------------------------------------------------------------------------


def _stuck(objects: Objects) -> Cause | None:
    """The first step that should run and cannot."""
    for replicated in objects.replicated_jobs:
        name = replicated["name"]
        places = {pod_index(pod) for pod in objects.pods if label(pod, REPLICATED_JOB) == name}
        for index in sorted(places):
            newest = pods_at(objects.pods, name, index)[-1]
            if (cause := waiting_pod(newest, objects.own_events)) is not None:
                cause.step = step_name(newest)
                return cause
    return None


def waiting_pod(pod: Manifest, events: Iterable[Manifest]) -> Cause | None:
    """Why a Pod does not start; None if it runs, has ended or is only young."""
    if phase(pod) not in ("Pending", "Running"):
        return None
    step, found = step_name(pod), pod.get("status") or {}
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _unscheduled(step, str(scheduled.get("reason")), str(scheduled.get("message") or "no node fits"))
    for container in [*(found.get("initContainerStatuses") or []), *(found.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, said = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
        if reason in UNPULLABLE:
            text = f"{step}: the image {container.get('image') or ''} cannot be pulled: {said or reason}"
            todo = "is its name right, and may this cluster pull it (imagePullSecrets of the service account)?"
            return Cause(reason, text, todo, final=reason == "InvalidImageName")
        if reason in UNSTARTABLE:
            return Cause(reason, f"{step} cannot start: {said or reason}", _config_todo(said))
        if reason == "CrashLoopBackOff":
            cause = failed_pod(pod)
            text = f"{cause.message}; it is started again and again"
            return Cause(reason, text, cause.todo, failure=cause.failure)
    mine = [
        event for event in events
        if event.get("reason") in MOUNTING
        and (event.get("involvedObject") or {}).get("name") == pod["metadata"]["name"]
    ]  # fmt: skip
    if mine and phase(pod) == "Pending" and not main_status(pod).get("started"):
        newest = mine[-1]
        return Cause(
            str(newest["reason"]), f"{step}: {newest.get('message')}", "does that volume, claim or Secret exist?"
        )
    return None


def _unscheduled(step: str, reason: str, said: str) -> Cause:
    if reason == "SchedulingGated":
        return Cause(reason, f"{step} waits for its scheduling gates to be lifted: {said}")
    if "PersistentVolumeClaim" in said or "persistentvolumeclaim" in said:
        todo = "see the claim (`kubectl get pvc`): is there a storage class that offers its access mode?"
    elif "taint" in said and "Insufficient" not in said:
        todo = "tolerate the nodes' taints with runtime.tolerations, or wait until a node is free"
    elif "selector" in said and "Insufficient" not in said:
        todo = "correct runtime.node_selector: no node has these labels"
    else:
        todo = "ask for less (resources.gpu, resources.memory), or wait until a node is free"
    return Cause("Unschedulable", f"{step} fits on no node: {said}", todo)


def _config_todo(message: str) -> str:
    if "secret" in message.lower():
        return "create that Secret (it goes on by itself then), or correct runtime.secret_ref or runtime.env_from"
    if "configmap" in message.lower():
        return "create that ConfigMap (it goes on by itself then), or correct runtime.env_from"
    return "see `blueprints events`"
