"""From a TrainJob and its runtime to what runs: the JobSet of `blueprints.jobset` as processes.

`steps_of` lists the processes a JobSet stands for, one per Pod. The local backend runs those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blueprints.errors import UsageError
from blueprints.jobset import build_job_set, node_count
from blueprints.runtimes import Manifest, ancestor_of


@dataclass(frozen=True)
class EnvVar:
    """One environment variable: a literal value, or the Kubernetes source it comes from."""

    name: str
    value: str | None = None
    field_path: str | None = None
    secret: tuple[str, str] | None = None
    """Name of the Secret or ConfigMap and its key."""


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
    secret = source.get("secretKeyRef") or source.get("configMapKeyRef")
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
