"""The structural schema of TrainJobs and runtimes: unknown fields, wrong types, missing required fields.

The fields of Trainer's and JobSet's own types are the tables below, in the notation of the `kubernetes` package; below
them (Pods, Jobs, volumes, environment) that package's own models say what there is.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blueprints.errors import EnvironmentFault, Fault

TYPES: dict[str, dict[str, str]] = {
    "TrainJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "TrainJobSpec", "status": "object"},
    "TrainJobSpec": {
        "runtimeRef": "RuntimeRef", "initializer": "Initializer", "trainer": "Trainer",
        "runtimePatches": "list[RuntimePatch]", "suspend": "bool", "activeDeadlineSeconds": "int", "managedBy": "str",
    },
    "RuntimeRef": {"name": "str", "apiGroup": "str", "kind": "str"},
    "Initializer": {"dataset": "InitializerSource", "model": "InitializerSource"},
    "InitializerSource": {"storageUri": "str", "env": "list[V1EnvVar]", "secretRef": "V1LocalObjectReference"},
    "Trainer": {
        "image": "str", "command": "list[str]", "args": "list[str]", "env": "list[V1EnvVar]", "numNodes": "int",
        "resourcesPerNode": "V1ResourceRequirements", "numProcPerNode": "int",
    },
    "RuntimePatch": {"manager": "str", "time": "str", "trainingRuntimeSpec": "RuntimeSpecPatch"},
    "RuntimeSpecPatch": {"template": "JobSetTemplatePatch"},
    "JobSetTemplatePatch": {"metadata": "V1ObjectMeta", "spec": "JobSetSpecPatch"},
    "JobSetSpecPatch": {"replicatedJobs": "list[ReplicatedJobPatch]"},
    "ReplicatedJobPatch": {"name": "str", "template": "JobTemplatePatch"},
    "JobTemplatePatch": {"metadata": "V1ObjectMeta", "spec": "JobSpecPatch"},
    "JobSpecPatch": {"template": "PodTemplatePatch"},
    "PodTemplatePatch": {"metadata": "V1ObjectMeta", "spec": "PodSpecPatch"},
    "PodSpecPatch": {
        "serviceAccountName": "str", "volumes": "list[V1Volume]", "initContainers": "list[ContainerPatch]",
        "containers": "list[ContainerPatch]", "imagePullSecrets": "list[V1LocalObjectReference]",
        "securityContext": "V1PodSecurityContext", "nodeSelector": "dict(str, str)", "affinity": "V1Affinity",
        "tolerations": "list[V1Toleration]", "schedulingGates": "list[V1PodSchedulingGate]",
        "terminationGracePeriodSeconds": "int",
    },
    "ContainerPatch": {
        "name": "str", "env": "list[V1EnvVar]", "volumeMounts": "list[V1VolumeMount]",
        "securityContext": "V1SecurityContext",
    },
    "Runtime": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "RuntimeSpec"},
    "RuntimeSpec": {"mlPolicy": "MLPolicy", "podGroupPolicy": "PodGroupPolicy", "template": "JobSetTemplate"},
    "MLPolicy": {
        "numNodes": "int", "torch": "TorchPolicy", "mpi": "MPIPolicy", "jax": "Empty", "xgboost": "Empty",
        "flux": "FluxPolicy",
    },
    "Empty": {},
    "TorchPolicy": {"envInjection": "EnvInjection"},
    "EnvInjection": {"targets": "list[EnvInjectionTarget]"},
    "EnvInjectionTarget": {"jobName": "str", "containerNames": "list[str]"},
    "MPIPolicy": {
        "numProcPerNode": "int", "mpiImplementation": "str", "sshAuthMountPath": "str", "runLauncherAsNode": "bool",
    },
    "FluxPolicy": {"numProcPerNode": "int"},
    "PodGroupPolicy": {"coscheduling": "Coscheduling", "volcano": "Volcano"},
    "Coscheduling": {"scheduleTimeoutSeconds": "int"},
    "Volcano": {"networkTopology": "NetworkTopology"},
    "NetworkTopology": {"mode": "str", "highestTierAllowed": "int", "highestTierName": "str"},
    "JobSetTemplate": {"metadata": "V1ObjectMeta", "spec": "JobSetSpec"},
    "JobSetSpec": {
        "replicatedJobs": "list[ReplicatedJob]", "network": "Network", "successPolicy": "SuccessPolicy",
        "failurePolicy": "FailurePolicy", "startupPolicy": "StartupPolicy", "suspend": "bool",
        "coordinator": "Coordinator", "managedBy": "str", "ttlSecondsAfterFinished": "int",
        "volumeClaimPolicies": "list[VolumeClaimPolicy]",
    },
    "ReplicatedJob": {
        "name": "str", "groupName": "str", "template": "V1JobTemplateSpec", "replicas": "int",
        "dependsOn": "list[DependsOn]",
    },
    "DependsOn": {"name": "str", "status": "str"},
    "Network": {"enableDNSHostnames": "bool", "subdomain": "str", "publishNotReadyAddresses": "bool"},
    "SuccessPolicy": {"operator": "str", "targetReplicatedJobs": "list[str]"},
    "FailurePolicy": {"maxRestarts": "int", "restartStrategy": "str", "rules": "list[FailurePolicyRule]"},
    "FailurePolicyRule": {
        "name": "str", "action": "str", "onJobFailureReasons": "list[str]",
        "onJobFailureMessagePatterns": "list[str]", "targetReplicatedJobs": "list[str]",
    },
    "StartupPolicy": {"startupPolicyOrder": "str"},
    "Coordinator": {"replicatedJob": "str", "jobIndex": "int", "podIndex": "int"},
    "VolumeClaimPolicy": {"templates": "list[V1PersistentVolumeClaim]", "retentionPolicy": "RetentionPolicy"},
    "RetentionPolicy": {"whenDeleted": "str"},
    "PyTorchJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "PyTorchJobSpec", "status": "object"},
    "PyTorchJobSpec": {
        "runPolicy": "RunPolicy", "elasticPolicy": "ElasticPolicy", "nprocPerNode": "object",
        "pytorchReplicaSpecs": "dict(str, ReplicaSpec)",
    },
    "ReplicaSpec": {"replicas": "int", "template": "V1PodTemplateSpec", "restartPolicy": "str"},
    "RunPolicy": {
        "cleanPodPolicy": "str", "ttlSecondsAfterFinished": "int", "activeDeadlineSeconds": "int", "backoffLimit": "int",
        "schedulingPolicy": "SchedulingPolicy", "suspend": "bool", "managedBy": "str",
    },
    "SchedulingPolicy": {
        "minAvailable": "int", "queue": "str", "minResources": "object", "priorityClass": "str",
        "scheduleTimeoutSeconds": "int",
    },
    "ElasticPolicy": {
        "minReplicas": "int", "maxReplicas": "int", "rdzvBackend": "str", "rdzvPort": "int", "rdzvHost": "str",
        "rdzvId": "str", "rdzvConf": "list[object]", "standalone": "bool", "nProcPerNode": "int", "maxRestarts": "int",
        "metrics": "list[object]",
    },
    "MPIJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "MPIJobSpec", "status": "object"},
    "MPIJobSpec": {
        "slotsPerWorker": "int", "cleanPodPolicy": "str", "mainContainer": "str", "runPolicy": "RunPolicy",
        "mpiReplicaSpecs": "dict(str, ReplicaSpec)", "sshAuthMountPath": "str", "launcherCreationPolicy": "str",
        "mpiImplementation": "str", "runLauncherAsWorker": "bool",
    },
}  # fmt: skip
"""Fields of the custom resources of Trainer 2.3 and JobSet 0.12, of the jobs of Training Operator v1 and of MPI Operator,
and their types."""

REQUIRED: dict[str, tuple[str, ...]] = {
    "TrainJob": ("metadata", "spec"),
    "TrainJobSpec": ("runtimeRef",),
    "RuntimeRef": ("name",),
    "RuntimePatch": ("manager",),
    "ReplicatedJobPatch": ("name",),
    "ContainerPatch": ("name",),
    "Runtime": ("metadata", "spec"),
    "RuntimeSpec": ("template",),
    "JobSetTemplate": ("spec",),
    "EnvInjectionTarget": ("jobName", "containerNames"),
    "ReplicatedJob": ("name", "template"),
    "DependsOn": ("name", "status"),
    "FailurePolicyRule": ("name", "action"),
    "StartupPolicy": ("startupPolicyOrder",),
    "Coordinator": ("replicatedJob",),
    "VolumeClaimPolicy": ("templates",),
    "V1JobTemplateSpec": ("spec",),
    "V1JobSpec": ("template",),
    "PyTorchJob": ("metadata", "spec"),
    "PyTorchJobSpec": ("pytorchReplicaSpecs",),
    "MPIJob": ("metadata", "spec"),
    "MPIJobSpec": ("mpiReplicaSpecs",),
    "ReplicaSpec": ("template",),
    "V1PodTemplateSpec": ("spec",),
    "V1PodSpec": ("containers",),
    "V1Container": ("name",),
    "V1EnvVar": ("name",),
    "V1VolumeMount": ("name", "mountPath"),
    "V1Volume": ("name",),
    "V1ContainerPort": ("containerPort",),
    "V1SecretKeySelector": ("key",),
    "V1ConfigMapKeySelector": ("key",),
    "V1ObjectFieldSelector": ("fieldPath",),
    "V1KeyToPath": ("key", "path"),
    "V1PersistentVolumeClaimVolumeSource": ("claimName",),
    "V1HostPathVolumeSource": ("path",),
    "V1PodFailurePolicy": ("rules",),
    "V1PodFailurePolicyRule": ("action",),
    "V1PodFailurePolicyOnExitCodesRequirement": ("operator", "values"),
    "V1PodFailurePolicyOnPodConditionsPattern": ("type",),
}
"""Fields that must be there, by type."""

ENUMS: dict[tuple[str, str], tuple[str, ...]] = {
    ("MPIPolicy", "mpiImplementation"): ("OpenMPI", ""),
    ("SuccessPolicy", "operator"): ("All", "Any"),
    ("StartupPolicy", "startupPolicyOrder"): ("AnyOrder", "InOrder"),
    ("DependsOn", "status"): ("Ready", "Complete"),
    ("RetentionPolicy", "whenDeleted"): ("Delete", "Retain"),
    ("FailurePolicy", "restartStrategy"): ("Recreate", "BlockingRecreate", "InPlaceRestart"),
    ("FailurePolicyRule", "action"): (
        "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ),
    ("NetworkTopology", "mode"): ("hard", "soft"),
    ("ReplicaSpec", "restartPolicy"): ("Always", "OnFailure", "Never", "ExitCode", ""),
    ("RunPolicy", "cleanPodPolicy"): ("None", "Running", "All", ""),
    ("MPIJobSpec", "cleanPodPolicy"): ("None", "Running", "All", ""),
    ("V1PodSpec", "restartPolicy"): ("Always", "OnFailure", "Never"),
    ("V1Container", "imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    ("V1Container", "terminationMessagePolicy"): ("File", "FallbackToLogsOnError"),
    ("V1PodFailurePolicyRule", "action"): ("FailJob", "FailIndex", "Ignore", "Count"),
    ("V1PodFailurePolicyOnExitCodesRequirement", "operator"): ("In", "NotIn"),
}  # fmt: skip
"""Values a field may have, where there are few."""

LIMITS: dict[tuple[str, str], int] = {
    ("TrainJobSpec", "runtimePatches"): 16,
    ("JobSetSpecPatch", "replicatedJobs"): 100,
    ("PodSpecPatch", "volumes"): 128,
    ("PodSpecPatch", "initContainers"): 64,
    ("PodSpecPatch", "containers"): 64,
    ("PodSpecPatch", "imagePullSecrets"): 64,
    ("PodSpecPatch", "tolerations"): 128,
    ("PodSpecPatch", "schedulingGates"): 16,
    ("ContainerPatch", "env"): 128,
    ("ContainerPatch", "volumeMounts"): 128,
    ("EnvInjection", "targets"): 16,
    ("EnvInjectionTarget", "containerNames"): 8,
    ("ReplicatedJob", "dependsOn"): 5,
    ("JobSetSpec", "volumeClaimPolicies"): 50,
}
"""Most items of a list."""

QUANTITIES = ("limits", "requests", "overhead", "capacity", "allocatedResources")
_NOTATION = re.compile(r"^(list|dict)[\[(](?:str, )?(.+)[\])]$")
_SIMPLE: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}
_WORDS = {"str": "a string", "int": "a whole number", "bool": "true or false", "float": "a number"}


@dataclass(frozen=True)
class Misfit:
    """One place where a manifest does not have the structure of its kind.

    Attributes:
        fault: for people.
        mistyped: the value is of another type than rules about it would expect.
    """

    fault: Fault
    mistyped: bool = False


def misfits(manifest: Mapping[str, Any], kind: str, where: str) -> Iterator[Misfit]:
    """What in a manifest is not a field of its kind, or of another type.

    Args:
        manifest: a TrainJob or a runtime as plain data.
        kind: `TrainJob` or `Runtime`.
        where: for the faults.

    Raises:
        EnvironmentFault: the `kubernetes` package is not installed.
    """
    yield from _object(manifest, kind, "", where)


def _object(value: Any, kind: str, key: str, where: str) -> Iterator[Misfit]:
    if not isinstance(value, Mapping):
        yield Misfit(Fault(where, key, f"{_shown(value)} is not a map", f"the fields of {_title(kind)}"), mistyped=True)
        return
    fields = _fields(kind)
    for name in REQUIRED.get(kind, ()):
        if value.get(name) is None:
            yield Misfit(Fault(where, _below(key, name), "is missing", "a value: it is required"), mistyped=True)
    for name, item in value.items():
        place = _below(key, str(name))
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            hint = f"Did you mean {near[0]!r}?" if near else _why_not(kind, str(name))
            yield Misfit(
                Fault(where, place, f"is not a field of {_title(kind)}", f"one of {', '.join(fields) or 'none'}", hint)
            )
        elif item is not None:
            yield from _value(item, fields[name], kind, str(name), place, where)


def _value(item: Any, notation: str, kind: str, name: str, key: str, where: str) -> Iterator[Misfit]:
    allowed = ENUMS.get((kind, name))
    if allowed is not None and item not in allowed:
        yield Misfit(
            Fault(
                where,
                key,
                f"{_shown(item)} is not valid",
                f"one of {', '.join(word or repr(word) for word in allowed)}",
            )
        )
        return
    match = _NOTATION.match(notation)
    if match is None:
        yield from _single(item, notation, key, where)
    elif match[1] == "list":
        yield from _items(item, match[2], LIMITS.get((kind, name)), key, where)
    elif not isinstance(item, Mapping):
        yield Misfit(Fault(where, key, f"{_shown(item)} is not a map", "a map from names to values"), mistyped=True)
    elif name not in QUANTITIES:  # whether a quantity is one is asked elsewhere, with its number
        for inner, entry in item.items():
            yield from _single(entry, match[2], f"{key}.{inner}", where)


def _items(item: Any, notation: str, limit: int | None, key: str, where: str) -> Iterator[Misfit]:
    if not isinstance(item, list):
        yield Misfit(Fault(where, key, f"{_shown(item)} is not a list", "a list"), mistyped=True)
        return
    if limit is not None and len(item) > limit:
        yield Misfit(Fault(where, key, f"has {len(item)} items", f"at most {limit}"))
    for place, entry in enumerate(item):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        yield from _single(entry, notation, f"{key}[{name if isinstance(name, str) else place}]", where)


def _single(item: Any, notation: str, key: str, where: str) -> Iterator[Misfit]:
    if notation in ("object", "datetime"):
        return
    if notation not in _SIMPLE:
        yield from _object(item, notation, key, where)
    elif not isinstance(item, _SIMPLE[notation]) or (isinstance(item, bool) and notation != "bool"):
        hint = f'Write "{str(item).lower() if isinstance(item, bool) else item}"' if notation == "str" else ""
        yield Misfit(
            Fault(where, key, f"{_shown(item)} is not {_WORDS[notation]}", _WORDS[notation], hint), mistyped=True
        )


@functools.cache
def _fields(kind: str) -> dict[str, str]:
    """The fields of a type by the name they have in a manifest."""
    if kind in TYPES:
        return TYPES[kind]
    try:
        from kubernetes.client import models
    except ImportError:
        raise EnvironmentFault(
            "checking hand-written manifests needs the package kubernetes, which is not installed",
            todo="pip install kubernetes",
        ) from None
    model = vars(models)[kind]
    return {model.attribute_map[name]: notation for name, notation in model.openapi_types.items()}


def _why_not(kind: str, name: str) -> str:
    """Where a field belongs that people look for here."""
    if kind == "PodSpecPatch" or (kind == "ContainerPatch" and name in ("image", "command", "args", "resources")):
        return "A runtimePatch cannot change it: put it into the runtime, or for the trainer into spec.trainer"
    gone = {
        "podTemplateOverrides": "It became spec.runtimePatches in Trainer 2.2",
        "podSpecOverrides": "It became spec.runtimePatches in Trainer 2.2",
        "ttlSecondsAfterFinished": "A TrainJob has none; delete the job when you are done with it",
        "labels": "Labels of the TrainJob belong into its metadata, those of Pods into spec.runtimePatches",
        "annotations": "Annotations of the TrainJob belong into its metadata",
        "elasticPolicy": "It was removed in Trainer 2.2",
    }
    return gone.get(name, "") if kind in ("TrainJobSpec", "TorchPolicy") else ""


def _title(kind: str) -> str:
    return {"V1ObjectMeta": "metadata"}.get(kind, f"a {kind.removeprefix('V1')}")


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
