"""From a TrainJob and its runtime to what runs: the control plane's own rules, in Python.

`build_job_set` follows the order in which Kubeflow Trainer 2.3 builds a JobSet: runtime patches, node count, resources,
the torch policy's `PET_*` variables, then the builder that puts the TrainJob's initializers and trainer into the
containers. `steps_of` lists the processes such a JobSet stands for, one per Pod. The local backend runs those.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blueprints.errors import UsageError
from blueprints.runtimes import TRAINER_CONTAINER, Manifest, ancestor_of

MASTER_PORT = 29500
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_QUANTITY = re.compile(r"^(\d+|\d+\.\d*|\.\d+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d+))?$")
_SUFFIX = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_MERGE_KEYS = {
    "replicatedJobs": "name",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}
"""Lists that Kubernetes' strategic merge patch merges entry by entry, and the key it finds the entry by."""


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: a literal value, or the Kubernetes source it comes from."""

    name: str
    value: str | None = None
    field_path: str | None = None
    secret: tuple[str, str] | None = None
    """Name of the Secret and its key."""


@dataclass(frozen=True)
class Mount:
    """A volume seen at a path of the container."""

    volume: str
    path: str


@dataclass(frozen=True)
class Dependency:
    """A replicatedJob to wait for, and the status (`Complete` or `Ready`) it must have."""

    replicated_job: str
    status: str


@dataclass(frozen=True)
class FailurePolicy:
    """What the Job does with a failed Pod."""

    backoff_limit: int = 6
    fail_on: frozenset[int] = frozenset()
    """Exit codes that fail the Job at once."""


@dataclass(frozen=True)
class Step:
    """One Pod's work: the process to run and when."""

    name: str
    """`model-initializer`, `dataset-initializer`, `node-0`, `node-1`, ..."""
    replicated_job: str
    index: int
    container: str
    image: str
    command: tuple[str, ...]
    args: tuple[str, ...]
    env: tuple[EnvVar, ...]
    secrets: tuple[str, ...]
    """Secrets whose keys all become environment variables (`envFrom`)."""
    mounts: tuple[Mount, ...]
    resources: Mapping[str, Mapping[str, Any]]
    """`requests` and `limits`, by resource name."""
    depends_on: tuple[Dependency, ...]
    failure: FailurePolicy
    grace_seconds: int
    """Seconds between SIGTERM and SIGKILL."""

    @property
    def argv(self) -> list[str]:
        """Command and arguments."""
        return [*self.command, *self.args]


@dataclass(frozen=True)
class ResolvedJob:
    """A TrainJob as steps, in the runtime's order."""

    name: str
    steps: tuple[Step, ...]
    success: frozenset[str]
    """replicatedJobs whose completion makes the job complete."""
    deadline_seconds: int | None
    num_nodes: int
    job_set: Manifest = field(repr=False)


def resolve(job: Manifest, runtime: Manifest) -> ResolvedJob:
    """The steps of `job` on `runtime`.

    Raises:
        UsageError: a Pod holds something that is not one process (several containers, init containers).
    """
    job_set = build_job_set(job, runtime)
    steps = steps_of(job_set)
    names = [replicated["name"] for replicated in job_set["spec"]["replicatedJobs"]]
    policy = job_set["spec"].get("successPolicy") or {}
    return ResolvedJob(
        name=job["metadata"]["name"],
        steps=tuple(steps),
        success=frozenset(policy.get("targetReplicatedJobs") or names),
        deadline_seconds=(job.get("spec") or {}).get("activeDeadlineSeconds"),
        num_nodes=node_count(job, runtime),
        job_set=job_set,
    )


def node_count(job: Manifest, runtime: Manifest) -> int:
    """Nodes of the trainer: the job's, else the runtime's, else 1."""
    trainer = (job.get("spec") or {}).get("trainer") or {}
    policy = (runtime.get("spec") or {}).get("mlPolicy") or {}
    nodes = trainer.get("numNodes")
    return int(policy.get("numNodes", 1) if nodes is None else nodes)


def build_job_set(job: Manifest, runtime: Manifest) -> Manifest:
    """The JobSet that the control plane creates for `job` on `runtime`.

    Args:
        job: a TrainJob.
        runtime: a ClusterTrainingRuntime or TrainingRuntime. Neither argument is changed.
    """
    spec = copy.deepcopy(job.get("spec") or {})
    template = copy.deepcopy(runtime["spec"]["template"])
    metadata = template.get("metadata") or {}
    job_set_spec = template["spec"]
    labels, annotations = dict(metadata.get("labels") or {}), dict(metadata.get("annotations") or {})
    for patch in spec.get("runtimePatches") or []:
        change = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
        labels |= (change.get("metadata") or {}).get("labels") or {}
        annotations |= (change.get("metadata") or {}).get("annotations") or {}
        job_set_spec = strategic_merge(job_set_spec, change.get("spec") or {})
    policy = runtime["spec"].get("mlPolicy")
    nodes = node_count(job, runtime)
    for replicated in job_set_spec["replicatedJobs"]:
        _build_replicated_job(replicated, job["metadata"]["name"], spec, policy, nodes)
    job_set_spec["suspend"] = bool(spec.get("suspend", False))
    result: Manifest = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    result["metadata"] = {"name": job["metadata"]["name"]}
    if labels:
        result["metadata"]["labels"] = labels
    if annotations:
        result["metadata"]["annotations"] = annotations
    return result | {"spec": job_set_spec}


def _build_replicated_job(replicated: Manifest, name: str, spec: Manifest, policy: Any, nodes: int) -> None:
    ancestor = ancestor_of(replicated)
    job_spec = replicated["template"].setdefault("spec", {})
    count = nodes if ancestor == "trainer" and policy is not None else int(job_spec.get("parallelism") or 1)
    job_spec["parallelism"] = job_spec["completions"] = max(1, count)
    replicated["replicas"] = 1 if ancestor else int(replicated.get("replicas") or 1)
    containers = {entry["name"]: entry for entry in _pod(replicated).get("containers") or []}
    if ancestor in ("dataset-initializer", "model-initializer") and ancestor in containers:
        _put_initializer(
            containers[ancestor], (spec.get("initializer") or {}).get(ancestor.removesuffix("-initializer"))
        )
    if ancestor == "trainer" and TRAINER_CONTAINER in containers:
        _put_trainer(containers[TRAINER_CONTAINER], name, spec.get("trainer"), policy, max(1, count))


def _put_initializer(container: Manifest, config: Manifest | None) -> None:
    if not config:
        return  # the initializer still runs, with the runtime's own environment
    env: list[Manifest] = []
    if config.get("storageUri") is not None:
        env.append({"name": "STORAGE_URI", "value": config["storageUri"]})
    upsert(container.setdefault("env", []), [*env, *(config.get("env") or [])], "name")
    if config.get("secretRef"):
        container.setdefault("envFrom", []).append({"secretRef": {"name": config["secretRef"]["name"]}})


def _put_trainer(container: Manifest, name: str, trainer: Manifest | None, policy: Any, nodes: int) -> None:
    if trainer is None:
        return  # without spec.trainer the control plane injects nothing at all, PET_* included
    if trainer.get("resourcesPerNode") and policy is not None:
        container["resources"] = _merge_resources(container.get("resources") or {}, trainer["resourcesPerNode"])
    for key in ("image", "command", "args"):
        if trainer.get(key) is not None:
            container[key] = trainer[key]
    upsert(container.setdefault("env", []), trainer.get("env") or [], "name")
    if policy and policy.get("torch") is not None:
        upsert(container["env"], _torch_env(name, trainer, container, nodes), "name")
        upsert(container.setdefault("ports", []), [{"containerPort": MASTER_PORT}], "containerPort")


def _torch_env(name: str, trainer: Manifest, container: Manifest, nodes: int) -> list[Manifest]:
    return [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": _processes_per_node(trainer, container)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(MASTER_PORT)},
    ]


def _processes_per_node(trainer: Manifest, container: Manifest) -> str:
    """`numProcPerNode`; else `auto` where there are GPUs; else one per CPU, rounded up."""
    if trainer.get("numProcPerNode") is not None:
        return str(trainer["numProcPerNode"])
    # The control plane looks at the job's own resources alone if it has any, hiding the runtime's GPUs.
    resources = trainer.get("resourcesPerNode") or container.get("resources") or {}
    for kind in ("requests", "limits"):
        gpus = [amount for resource, amount in (resources.get(kind) or {}).items() if "gpu" in resource.lower()]
        if gpus and parse_quantity(gpus[0]) > 0:
            return "auto"
    cpu = (resources.get("requests") or {}).get("cpu", (resources.get("limits") or {}).get("cpu"))
    return str(max(1, math.ceil(parse_quantity(cpu)))) if cpu is not None else "1"


def parse_quantity(value: object) -> float:
    """A Kubernetes quantity (`2`, `"500m"`, `"1.5Gi"`, `"1e3"`) as a number.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _QUANTITY.match(str(value))
    if not match or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a Kubernetes quantity")
    number, suffix, exponent = match.groups()
    if suffix and suffix.endswith("i"):
        return float(number) * 1024.0 ** ("KMGTPE".index(suffix[0]) + 1)
    if exponent:
        return float(f"{number}e{exponent}")
    return float(number) * _SUFFIX.get(suffix or "", 1.0)


def _merge_resources(base: Manifest, override: Manifest) -> Manifest:
    merged = {**base}
    for kind in ("limits", "requests"):
        if override.get(kind):
            merged[kind] = {**(base.get(kind) or {}), **override[kind]}
    return merged


def upsert(target: list[Manifest], entries: list[Manifest], key: str) -> None:
    """Replace the entries of the same key, append the new ones."""
    places = {entry.get(key): place for place, entry in enumerate(target)}
    for entry in entries:
        if entry.get(key) in places:
            target[places[entry.get(key)]] = entry
        else:
            places[entry.get(key)] = len(target)
            target.append(entry)


def strategic_merge(base: Any, patch: Any, name: str = "") -> Any:
    """Kubernetes' strategic merge patch: maps merge by key, known lists by their merge key, the rest is replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = strategic_merge(merged.get(key), value, key)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and name in _MERGE_KEYS:
        key = _MERGE_KEYS[name]
        merged_list = list(base)
        for entry in patch:
            place = next((i for i, old in enumerate(merged_list) if old.get(key) == entry.get(key)), None)
            if place is None:
                merged_list.append(copy.deepcopy(entry))
            else:
                merged_list[place] = strategic_merge(merged_list[place], entry)
        return merged_list
    return copy.deepcopy(patch)


def steps_of(job_set: Manifest) -> list[Step]:
    """One step per Pod of the JobSet, in order.

    Raises:
        UsageError: a Pod has init containers or more than one container.
    """
    steps: list[Step] = []
    for replicated in job_set["spec"]["replicatedJobs"]:
        container = _only_container(replicated)
        count = int(replicated["template"]["spec"]["parallelism"]) * int(replicated["replicas"])
        ancestor = ancestor_of(replicated)
        single = ancestor in ("dataset-initializer", "model-initializer") or (ancestor is None and count == 1)
        for index in range(count):
            name = replicated["name"] if single else f"{replicated['name']}-{index}"
            steps.append(_step(name, replicated, container, index))
    return steps


def _step(name: str, replicated: Manifest, container: Manifest, index: int) -> Step:
    pod = _pod(replicated)
    grace = pod.get("terminationGracePeriodSeconds")
    return Step(
        name=name,
        replicated_job=replicated["name"],
        index=index,
        container=container["name"],
        image=str(container.get("image") or ""),
        command=tuple(map(str, container.get("command") or ())),
        args=tuple(map(str, container.get("args") or ())),
        env=tuple(_env_var(entry) for entry in container.get("env") or ()),
        secrets=tuple(e["secretRef"]["name"] for e in container.get("envFrom") or () if e.get("secretRef")),
        mounts=tuple(Mount(m["name"], m["mountPath"]) for m in container.get("volumeMounts") or ()),
        resources=container.get("resources") or {},
        depends_on=tuple(
            Dependency(entry["name"], entry.get("status", "Complete")) for entry in replicated.get("dependsOn") or ()
        ),
        failure=_failure_policy(replicated["template"]["spec"], container["name"]),
        grace_seconds=30 if grace is None else int(grace),
    )


def _env_var(entry: Manifest) -> EnvVar:
    source = entry.get("valueFrom") or {}
    secret = source.get("secretKeyRef")
    return EnvVar(
        name=entry["name"],
        value=None if source else str(entry.get("value") or ""),
        field_path=(source.get("fieldRef") or {}).get("fieldPath"),
        secret=(secret["name"], secret["key"]) if secret else None,
    )


_OPERATORS: dict[str, Callable[[int, list[int]], bool]] = {
    "In": lambda code, values: code in values,
    "NotIn": lambda code, values: code not in values,
}


def _failure_policy(job_spec: Manifest, container: str) -> FailurePolicy:
    limit = job_spec.get("backoffLimitPerIndex", job_spec.get("backoffLimit"))
    rules = (job_spec.get("podFailurePolicy") or {}).get("rules") or []
    fail_on: set[int] = set()
    for code in range(1, 256):
        for rule in rules:  # the first rule that matches decides
            wanted = rule.get("onExitCodes")
            if not wanted or wanted.get("containerName") not in (None, container):
                continue
            if _OPERATORS[wanted["operator"]](code, list(wanted.get("values") or [])):
                if rule["action"] == "FailJob":
                    fail_on.add(code)
                break
    return FailurePolicy(backoff_limit=6 if limit is None else int(limit), fail_on=frozenset(fail_on))


def _only_container(replicated: Manifest) -> Manifest:
    pod = _pod(replicated)
    containers: list[Manifest] = list(pod.get("containers") or [])
    if pod.get("initContainers") or len(containers) != 1:
        found = ", ".join(entry["name"] for entry in [*(pod.get("initContainers") or []), *containers])
        raise UsageError(
            f"the Pod has the containers {found or '(none)'}; a step is one process: exactly one container is needed",
            where=f"replicatedJob {replicated['name']}",
            todo="use a runtime without init containers and sidecars here",
        )
    return containers[0]


def _pod(replicated: Manifest) -> Manifest:
    pod: Manifest = replicated["template"]["spec"]["template"].setdefault("spec", {})
    return pod
