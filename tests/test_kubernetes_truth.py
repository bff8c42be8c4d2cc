"""From what a cluster holds to what is told of a job: every state, every cause, in plain words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from cluster_kit import Scene, ago, condition, ended, termination, waiting
from jobs_kit import tiny_runtime

from blueprints.backends.kubernetes.truth import progress_of, status_of
from blueprints.backends.state import JobStatus

KUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}
IMMUTABLE = 'TrainJob resources reconciliation failed: admission webhook "vjobset.kb.io" denied the request: spec...'
TOO_LONG = (
    'TrainJob resources reconciliation failed: admission webhook "vjobset.kb.io" denied the request: JobSet.jobset.x-k8s.io '
    '"demo" is invalid: spec.replicatedJobs[0].name: Invalid value: "demo-dataset-initializer-0": JobSet name is too long, '
    "pod names generated for this JobSet will exceed 63 characters"
)
QUOTA = 'pods "demo-node-0-0-x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=8, used: 8, limited: 8'
EVICTED = condition("DisruptionTarget", "EvictionByEvictionAPI", "Eviction API: evicting")
POLICY = "Container node for pod default/{} failed with exit code {} matching FailJob rule at index 0"


def status(scene: Scene) -> JobStatus:
    return status_of(scene.objects())


def unscheduled(message: str, reason: str = "Unschedulable") -> list[dict[str, Any]]:
    return [condition("PodScheduled", reason, message, status="False")]


def suspended_workload(kind: str, reason: str, message: str, value: str) -> dict[str, Any]:
    return {"metadata": {"name": "w", "uid": "w"}, "status": {"conditions": [condition(kind, reason, message, value)]}}


def policy_failed(code: int, message: str) -> Scene:
    """The node's Pod ended with a code that the runtime does not retry."""
    scene = Scene().initialized().with_pod("node", "Failed", name="demo-node-0-0-aaaaa", state=ended(code, message))
    said = POLICY.format("demo-node-0-0-aaaaa", code)
    return scene.with_job("node", condition("Failed", "PodFailurePolicy", said)).failed()


@dataclass
class Case:
    """What a cluster holds, and what is to be told of it.

    Attributes:
        says: texts that message or to-do hold.
    """

    scene: Callable[[], Scene]
    state: str
    reason: str = ""
    says: tuple[str, ...] = ()
    exit_code: int | None = None
    step: str | None = None


CASES: dict[str, Case] = {
    "just created": Case(lambda: Scene(age=1), "Created"),
    "no controller": Case(lambda: Scene(age=300), "Created", "NotTakenUp", ("controller running",)),
    "no JobSet controller": Case(lambda: Scene(age=300).with_job_set(), "Created", "NotTakenUp", ("JobSet controller",)),
    "no worker cluster": Case(
        lambda: Scene(age=300, spec={"managedBy": "kueue.x-k8s.io/multikueue"}), "Created", "NotTakenUp", ("MultiKueue",)
    ),
    "runs in a worker cluster": Case(
        lambda: Scene(spec={"managedBy": "kueue.x-k8s.io/multikueue"}).status(
            jobsStatus=[{"name": "node", "active": 1, "ready": 1, "succeeded": 0, "failed": 0, "suspended": 0}]
        ),
        "Running",
    ),
    "suspended by hand": Case(
        lambda: Scene(spec={"suspend": True}).with_job_set().status(condition("Suspended", "Suspended")),
        "Suspended", "Suspended", ("blueprints resume demo",),
    ),
    "in a queue, not seen by Kueue yet": Case(
        lambda: Scene(spec={"suspend": True}, labels=KUEUE), "Queued", "Queued", ("queue gpus",)
    ),
    "in a queue without quota": Case(
        lambda: Scene(
            spec={"suspend": True}, labels=KUEUE, workload=suspended_workload(
                "QuotaReserved", "Pending", "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu", "False"
            ),
        ),
        "Queued", "Pending", ("queue gpus", "insufficient unused quota for nvidia.com/gpu"),
    ),
    "the queue does not exist": Case(
        lambda: Scene(
            spec={"suspend": True}, labels=KUEUE, workload=suspended_workload(
                "QuotaReserved", "Inadmissible", "LocalQueue gpus doesn't exist", "False"
            ),
        ),
        "Queued", "Inadmissible", ("LocalQueue gpus doesn't exist",),
    ),
    "preempted by Kueue": Case(
        lambda: Scene(
            spec={"suspend": True}, labels=KUEUE,
            workload=suspended_workload("Evicted", "Preempted", "Preempted to accommodate a workload", "True"),
        ).with_job("node"),
        "Queued", "Preempted", ("accommodate a workload",),
    ),
    "fetching the model": Case(
        lambda: Scene().with_pod("model-initializer", "Running"), "Initializing", "", ("model-initializer is running",)
    ),
    "between the initializers": Case(
        lambda: Scene().with_job("model-initializer", condition("Complete")).with_pod("model-initializer", "Succeeded"),
        "Initializing", "", ("dataset-initializer is about to start",),
    ),
    "the model cannot be fetched and is tried again": Case(
        lambda: Scene().with_pod("model-initializer", "Failed", state=ended(5)), "Initializing", "",
        ("model-initializer is being tried again",),
    ),
    "initialized, the node waits": Case(lambda: Scene().initialized().with_pod("node", "Pending"), "Created"),
    "running": Case(lambda: Scene().initialized().with_pod("node", "Running"), "Running"),
    "running after it was resumed": Case(
        lambda: Scene().initialized().with_pod("node", "Running").status(
            condition("Suspended", "Resumed", "TrainJob is resumed", status="False")
        ),
        "Running",
    ),
    "one of two nodes": Case(
        lambda: Scene(nodes=2).initialized().with_pod("node", "Running").with_pod("node", "Pending", 1), "Created"
    ),
    "both nodes": Case(
        lambda: Scene(nodes=2).initialized().with_pod("node", "Running").with_pod("node", "Running", 1), "Running"
    ),
    "evicted, running again": Case(
        lambda: Scene().initialized()
        .with_pod("node", "Failed", age=90, state=ended(143), conditions=[EVICTED]).with_pod("node", "Running", age=10),
        "Running",
    ),
    "one of two nodes is started again": Case(
        lambda: Scene(nodes=2).initialized().with_pod("node", "Running")
        .with_pod("node", "Failed", 1, age=90, state=ended(137)).with_pod("node", "Pending", 1, age=5),
        "Running",
    ),
    "complete": Case(
        lambda: Scene().initialized().with_job("node", condition("Complete")).with_pod("node", "Succeeded", state=ended(0))
        .complete(),
        "Complete", exit_code=0,
    ),
    "complete, everything cleaned away": Case(
        lambda: Scene().complete(), "Complete", exit_code=0
    ),
    "no nodes at all": Case(lambda: Scene(nodes=0).with_job_set().complete(), "Complete", exit_code=0),
    # Failed: exit codes and termination messages
    "a wrong recipe": Case(
        lambda: policy_failed(2, termination(2, "lora.r is -1", todo="give a positive lora.r")),
        "Failed", "StepFailed", ("node-0: lora.r is -1 (exit code 2)", "give a positive lora.r"), 2, "node-0",
    ),
    "wrong data": Case(
        lambda: Scene().with_pod(
            "model-initializer", "Succeeded"
        ).with_job("model-initializer", condition("Complete")).with_pod(
            "dataset-initializer", "Failed", state=ended(3, termination(3, "2 rows are invalid", faults=[]))
        ).with_job("dataset-initializer", condition("Failed", "PodFailurePolicy", "...")).failed("dataset-initializer"),
        "Failed", "StepFailed", ("dataset-initializer: 2 rows are invalid (exit code 3)",), 3, "dataset-initializer",
    ),
    "the training failed": Case(
        lambda: policy_failed(4, termination(4, "the loss is not a number")), "Failed", "StepFailed",
        ("the loss is not a number (exit code 4)",), 4, "node-0",
    ),
    "no message, exit code 5": Case(
        lambda: policy_failed(5, ""), "Failed", "StepFailed", ("environment lacks something", "logs demo --step node-0"), 5,
        "node-0",
    ),
    "the end of the log stands in": Case(
        lambda: policy_failed(7, "Traceback\nValueError: odd"), "Failed", "StepFailed", ("exit code 7",), 4, "node-0"
    ),
    "killed": Case(lambda: policy_failed(137, ""), "Failed", "StepFailed", ("SIGKILL",), 4, "node-0"),
    "stopped from outside": Case(lambda: policy_failed(143, ""), "Failed", "StepFailed", ("SIGTERM",), 143, "node-0"),
    "out of memory": Case(
        lambda: Scene().initialized().with_pod("node", "Failed", state=ended(137, reason="OOMKilled"))
        .with_job("node", condition("Failed", "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number"))
        .failed(),
        "Failed", "OOMKilled", ("more memory than its limit", "resources.memory"), 4, "node-0",
    ),
    "the decisive Pod, not an earlier one that was retried": Case(
        lambda: Scene().initialized()
        .with_pod("node", "Failed", age=90, state=ended(137, age=80), conditions=[EVICTED])
        .with_pod("node", "Failed", age=50, state=ended(5, termination(5, "the network is down"), age=40))
        .with_pod("node", "Failed", age=30, name="demo-node-0-0-last", state=ended(4, termination(4, "no proof"), age=20))
        .with_job("node", condition("Failed", "PodFailurePolicy", POLICY.format("demo-node-0-0-last", 4))).failed(),
        "Failed", "StepFailed", ("no proof (exit code 4)",), 4, "node-0",
    ),
    "of two nodes the first to fail, not the one it took along": Case(
        lambda: Scene(nodes=2).initialized()
        .with_pod("node", "Failed", 0, state=ended(143, age=8))
        .with_pod("node", "Failed", 1, state=ended(5, termination(5, "no space left"), age=9))
        .with_job("node", condition("Failed", "FailedIndexes", "Job has failed indexes")).failed(
            reason="FailJobSetFailurePolicyAction"
        ),
        "Failed", "StepFailed", ("node-1: no space left (exit code 5)",), 5, "node-1",
    ),
    "disrupted until no retry was left": Case(
        lambda: Scene().initialized().with_pod("node", "Failed", state=ended(137), conditions=[EVICTED])
        .with_job("node", condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit"))
        .failed(),
        "Failed", "EvictionByEvictionAPI", ("node-0 was disrupted: Eviction API: evicting", "run it again"), 4, "node-0",
    ),
    "preempted before it started": Case(
        lambda: Scene().initialized().with_pod(
            "node", "Failed", conditions=[condition("DisruptionTarget", "PreemptionByScheduler", "for a higher priority")]
        ).with_job("node", condition("Failed", "BackoffLimitExceeded", "limit")).failed(),
        "Failed", "PreemptionByScheduler", ("node-0: for a higher priority",), 4, "node-0",
    ),
    "the failed Pod is gone": Case(
        lambda: Scene().initialized().with_job("node", condition("Failed", "PodFailurePolicy", POLICY.format("demo-node-0-1-abcde", 3)))
        .failed(),
        "Failed", "StepFailed", ("node-1: the data set or the model", "exit code 3", "is gone"), 3, "node-1",
    ),
    "Pods and reasons gone": Case(
        lambda: Scene().initialized().with_job("node", condition("Failed", "BackoffLimitExceeded", "reached the limit"))
        .failed(),
        "Failed", "BackoffLimitExceeded", ("node-0: reached the limit", "blueprints events demo"), 4, "node-0",
    ),
    "everything gone": Case(lambda: Scene().failed(), "Failed", "FailedJobs", ("first failed job: demo-node-0",), 4),
    "deadline": Case(
        lambda: Scene(spec={"activeDeadlineSeconds": 8}).status(
            condition("Failed", "DeadlineExceeded", "TrainJob exceeded its active deadline")
        ),
        "Failed", "DeadlineExceeded", ("longer than its deadline of 8 s", "active_deadline_seconds"), 4,
    ),
    "unknown kind of runtime": Case(
        lambda: Scene().status(condition("Failed", "TrainingRuntimeNotSupported", "unsupported runtime: x")),
        "Failed", "TrainingRuntimeNotSupported", ("unsupported runtime: x",), 2,
    ),
    # Stuck
    "image": Case(
        lambda: Scene().initialized().with_pod("node", "Pending", state=waiting("ImagePullBackOff", "Back-off pulling")),
        "Created", "ImagePullBackOff", ("node-0: the image example.com/tiny:1 cannot be pulled: Back-off pulling",),
    ),
    "image of an initializer": Case(
        lambda: Scene().with_pod("model-initializer", "Pending", state=waiting("ErrImagePull", "unauthorized")),
        "Initializing", "ErrImagePull", ("model-initializer: the image", "unauthorized"),
    ),
    "image name": Case(
        lambda: Scene().initialized().with_pod("node", "Pending", state=waiting("InvalidImageName", "couldn't parse")),
        "Failed", "InvalidImageName", ("couldn't parse",), 4, "node-0",
    ),
    "no GPU free": Case(
        lambda: Scene().initialized().with_pod(
            "node", "Pending", conditions=unscheduled("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
        ),
        "Created", "Unschedulable", ("node-0 fits on no node: 0/4", "Insufficient nvidia.com/gpu", "resources.gpu"),
    ),
    "tainted nodes": Case(
        lambda: Scene().initialized().with_pod(
            "node", "Pending", conditions=unscheduled("0/4 nodes are available: 4 node(s) had untolerated taint {a: b}")
        ),
        "Created", "Unschedulable", ("untolerated taint", "runtime.tolerations"),
    ),
    "no such label on a node": Case(
        lambda: Scene().initialized().with_pod(
            "node", "Pending", conditions=unscheduled("0/4 nodes: 4 node(s) didn't match Pod's node affinity/selector")
        ),
        "Created", "Unschedulable", ("runtime.node_selector",),
    ),
    "the claim is not bound": Case(
        lambda: Scene().with_pod(
            "model-initializer", "Pending", conditions=unscheduled("pod has unbound immediate PersistentVolumeClaims")
        ),
        "Initializing", "Unschedulable", ("kubectl get pvc", "storage class"),
    ),
    "gated": Case(
        lambda: Scene().initialized().with_pod(
            "node", "Pending", conditions=unscheduled("Scheduling is blocked due to non-empty gates", "SchedulingGated")
        ),
        "Created", "SchedulingGated", ("scheduling gates",),
    ),
    "a Secret is missing": Case(
        lambda: Scene().with_pod(
            "model-initializer", "Pending", state=waiting("CreateContainerConfigError", 'secret "hub" not found')
        ),
        "Initializing", "CreateContainerConfigError", ('secret "hub" not found', "create that Secret"),
    ),
    "started again and again in place": Case(
        lambda: Scene().initialized().with_pod(
            "node", "Running", restarts=3, state=waiting("CrashLoopBackOff", "back-off 40s"), last=ended(7)
        ),
        "Created", "CrashLoopBackOff", ("exit code 7", "started again and again"),
    ),
    "a volume cannot be mounted": Case(
        lambda: Scene().initialized().with_pod("node", "Pending", state=waiting("ContainerCreating")).event(
            "Pod", "FailedMount", 'MountVolume.SetUp failed for volume "data": configmap "x" not found', old_style=True
        ),
        "Created", "FailedMount", ('configmap "x" not found',),
    ),
    # Not created
    "too long a name": Case(
        lambda: Scene().event("TrainJob", "TrainJobResourcesCreationFailed", TOO_LONG),
        "Failed", "TrainJobResourcesCreationFailed", ("JobSet name is too long", "give the job a shorter name"), 2,
    ),
    "no PodGroup here": Case(
        lambda: Scene().event(
            "TrainJob", "TrainJobResourcesCreationFailed",
            'no matches for kind "PodGroup" in version "scheduling.x-k8s.io/v1alpha1"', first=1,
        ),
        "Failed", "TrainJobResourcesCreationFailed", ("scheduler that is not installed",), 5,
    ),
    "the claim of an earlier job": Case(
        lambda: Scene().event(
            "TrainJob", "TrainJobResourcesCreationFailed",
            "Invalid value: {}: spec does not match existing PVC initializer-demo in namespace default",
        ),
        "Created", "TrainJobResourcesCreationFailed", ("kubectl delete pvc initializer-demo",),
    ),
    "a webhook is down for a moment": Case(
        lambda: Scene().event(
            "TrainJob", "TrainJobResourcesCreationFailed", 'failed calling webhook "vjobset.kb.io": connection refused'
        ),
        "Created", "TrainJobResourcesCreationFailed", ("failed calling webhook",),
    ),
    "refused at first, made since": Case(
        lambda: Scene().event("TrainJob", "TrainJobResourcesCreationFailed", "connection refused").initialized()
        .with_pod("node", "Running"),
        "Running",
    ),
    "a Job cannot be made": Case(
        lambda: Scene().with_job_set().event(
            "JobSet", "JobCreationFailed",
            'job "demo-node-0" creation failed with error: spec.template.spec.containers[0].image: Required value',
        ),
        "Failed", "JobCreationFailed", ("image: Required value",), 2,
    ),
    "no Pod for want of quota": Case(
        lambda: Scene().initialized().with_job("node").event("Job", "FailedCreate", QUOTA, old_style=True),
        "Created", "FailedCreate", ("exceeded quota", "more quota in this namespace"),
    ),
    "quota free again": Case(
        lambda: Scene().initialized().with_pod("node", "Running").event("Job", "FailedCreate", QUOTA, old_style=True),
        "Running",
    ),
    "the service account is missing": Case(
        lambda: Scene().initialized().with_job("node").event(
            "Job", "FailedCreate", 'error looking up service account team/me: serviceaccount "me" not found'
        ),
        "Created", "FailedCreate", ("runtime.service_account_name",),
    ),
    "Pods against the namespace's security": Case(
        lambda: Scene().initialized().with_job("node").event(
            "Job", "FailedCreate", 'pods "x" is forbidden: violates PodSecurity "restricted:latest": allowPrivilege...'
        ),
        "Failed", "FailedCreate", ("PodSecurity", "administrator"), 2,
    ),
    # Suspended and resumed
    "a change that JobSet refuses, still suspended": Case(
        lambda: Scene(spec={"suspend": True}).with_job_set(age=100).event(
            "TrainJob", "TrainJobResourcesCreationFailed", IMMUTABLE
        ),
        "Suspended", "Suspended",
    ),
    "resumed with a change that JobSet refuses": Case(
        lambda: Scene.resumed_in_vain().event("TrainJob", "TrainJobResourcesCreationFailed", IMMUTABLE),
        "Failed", "TrainJobResourcesCreationFailed", ("its Pods stay suspended", "nodeSelector and tolerations"), 4,
    ),
    "resumed, its events gone": Case(
        Scene.resumed_in_vain, "Created", "NotResumed", ("its Pods stay suspended",)
    ),
    # Events of others
    "an earlier job of that name": Case(
        lambda: Scene(age=1).event("TrainJob", "TrainJobResourcesCreationFailed", TOO_LONG, uid="earlier"), "Created"
    ),
    "a Job of an earlier job of that name": Case(
        lambda: Scene(age=1).event("Job", "FailedCreate", QUOTA, first=400, last=300), "Created"
    ),
    "another job whose name begins alike": Case(
        lambda: Scene(age=5).with_job_set().event(
            "JobSet", "JobCreationFailed", "image: Required value", name="demo-2", uid="x"
        ),
        "Created",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_told(name: str) -> None:
    case = CASES[name]
    found = status(case.scene())
    told = f"{found.message} -> {found.todo}"
    assert (found.state, found.reason) == (case.state, case.reason), told
    for text in case.says:
        assert text in told
    assert found.exit_code == case.exit_code
    assert found.failed_step == case.step


def test_what_did_not_end_the_job_is_noted() -> None:
    found = status(CASES["evicted, running again"].scene())
    assert found.notes == ["node-0 was disrupted (EvictionByEvictionAPI): Eviction API: evicting"]
    assert found.steps[-1].attempts == 2
    refused = status(CASES["a change that JobSet refuses, still suspended"].scene())
    assert "refuses a change of the suspended job" in refused.notes[0]


def test_faults_of_a_step_are_handed_on() -> None:
    faults = [{"where": "rows.jsonl:3", "key": "messages", "problem": "is missing"}]
    found = status(policy_failed(3, termination(3, "1 row is invalid", faults=faults)))
    assert found.steps[-1].failure is not None
    assert found.steps[-1].failure["faults"] == faults
    logged = status(policy_failed(7, "Traceback\nValueError: odd"))
    assert logged.steps[-1].failure == {"log": "Traceback\nValueError: odd"}


def test_steps_with_devices_and_counts() -> None:
    scene = Scene(nodes=2, spec={"trainer": {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 4, "cpu": "8"}}}})
    steps = status(scene.initialized().with_pod("node", "Running")).steps
    assert [(step.name, step.status) for step in steps] == [
        ("model-initializer", "Succeeded"), ("dataset-initializer", "Succeeded"), ("node-0", "Running"),
        ("node-1", "Pending"),
    ]  # fmt: skip
    assert [(step.device, step.device_count) for step in steps[1:3]] == [("cpu", 0), ("gpu", 4)]
    for resource, device in (
        ("nvidia.com/mig-1g.10gb", "mig-1g.10gb"),
        ("google.com/tpu", "tpu"),
        ("amd.com/gpu", "gpu"),
    ):
        scene = Scene(spec={"trainer": {"resourcesPerNode": {"limits": {resource: 2}}}})
        assert (status(scene).steps[-1].device, status(scene).steps[-1].device_count) == (device, 2)


def test_steps_of_pods_that_are_gone() -> None:
    """After a suspension the initializers stay done; after a clean-up the TrainJob's counts tell."""
    scene = Scene(spec={"suspend": True}).initialized().with_job("node", condition("Suspended"))
    assert [step.status for step in status(scene).steps] == ["Succeeded", "Succeeded", "Pending"]
    gone = Scene().complete()
    gone.job["status"]["jobsStatus"] = [
        {"name": name, "succeeded": 1, "failed": 0, "active": 0} for name in ("model-initializer", "node")
    ]
    assert [step.status for step in status(gone).steps] == ["Succeeded", "Pending", "Succeeded"]


def test_launcher_and_nodes_of_mpi() -> None:
    runtime = tiny_runtime(["mpirun"])
    runtime["spec"]["mlPolicy"] = {"numNodes": 1, "mpi": {"runLauncherAsNode": True}}
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    launcher = {**node, "name": "launcher", "dependsOn": [{"name": "node", "status": "Ready"}]}
    bare = {key: value for key, value in node["template"].items() if key != "metadata"}
    runtime["spec"]["template"]["spec"]["replicatedJobs"] = [{**node, "template": bare}, launcher]
    scene = Scene(runtime=runtime, nodes=2).with_pod("node", "Running")
    found = status(scene)
    assert [step.name for step in found.steps] == ["node-0", "launcher-0"]
    assert (found.state, found.num_nodes) == ("Created", 2)
    assert status(scene.with_pod("launcher", "Running")).state == "Running"


def test_events_come_in_the_order_of_time() -> None:
    scene = Scene(age=500).initialized().with_pod("node", "Running")
    scene.event("TrainJob", "B", "second", first=50, last=50)
    scene.event("Pod", "C", "third", old_style=True, first=400, last=10)
    scene.event("JobSet", "A", "first", first=70, last=70)
    scene.event("Pod", "D", "of a Pod that is gone", name="demo-node-0-0-zzzzz", first=5, last=5)
    scene.event("Pod", "X", "of another job", name="demo-other-node-0-0-zzzzz", first=5, last=5)
    assert [event["reason"] for event in scene.objects().own_events] == ["A", "B", "C", "D"]


def test_progress_that_the_trainer_posted() -> None:
    job = Scene().job
    assert progress_of(job) is None
    metrics = [{"name": "loss", "value": "0.25"}, {"name": "note", "value": "text"}]
    job["status"] = {"trainerStatus": {
        "progressPercentage": 77, "estimatedRemainingSeconds": 5, "metrics": metrics, "lastUpdatedTime": ago(3),
    }}  # fmt: skip
    found = progress_of(job)
    assert found is not None
    assert (found["completed"], found["total"], found["eta_seconds"]) == (77.0, 100.0, 5)
    assert found["metrics"] == {"loss": 0.25}
