"""What is wrong with a TrainJob or a runtime, before the cluster sees it.

The rules are those of the custom resources (structural schema and CEL), of Trainer's admission webhooks and of
JobSet's, and those a cluster enforces only after it has accepted the object: too long names, patches that name nothing,
counts below one, fractions of a GPU. `render`, `train` and the tests all ask here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from blueprints.admission import job_faults, policy_of, runtime_faults
from blueprints.errors import Fault, ManifestError
from blueprints.jobset import RESERVED_ENV
from blueprints.quantity import parse_quantity
from blueprints.runtimes import (
    FRAMEWORK,
    INITIALIZERS,
    TRAINER_CONTAINER,
    Manifest,
    ancestor_of,
    pod_spec,
    replicated_jobs,
    trainer_container,
)
from blueprints.secret_text import has_secret, is_secret

API_VERSION = "trainer.kubeflow.org/v1alpha1"
API_GROUP = "trainer.kubeflow.org"
RUNTIME_KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")
SECRET_ENV = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "ACCESS_TOKEN", "SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "WANDB_API_KEY",
)  # fmt: skip
"""Variables whose value is a secret: anyone who may read TrainJobs would read it."""

_NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_STORAGE_URI = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://.+$", re.DOTALL)
_ENV_NAME = re.compile(r"^[A-Za-z_.-][A-Za-z0-9_.-]*$")
_LABEL_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$")
_LABEL_PREFIX = re.compile(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")
_MANAGER = re.compile(r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9/\-._~%!$&'()*+,;=:]+$")
_SPEC_KEYS = (
    "runtimeRef", "initializer", "trainer", "runtimePatches", "suspend", "activeDeadlineSeconds", "managedBy",
)  # fmt: skip
_TRAINER_KEYS = ("image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode")
_INITIALIZER_KEYS = ("storageUri", "env", "secretRef")
_MAX_ITEMS = 128
_MAX_ARGUMENT = 1_048_576
_MAX_POD_NAME = 63


def require_valid(job: Manifest, runtime: Manifest) -> None:
    """Refuse a TrainJob or a runtime that cannot work.

    Raises:
        ManifestError: with every fault.
    """
    faults = [*check_runtime(runtime), *check_train_job(job, runtime)]
    if faults:
        raise ManifestError(faults, subject=_subject(job))


def name_limit(runtime: Manifest, num_nodes: int = 1) -> int:
    """Longest TrainJob name in characters: the longest name of a Pod derived from it must fit into 63."""
    limit = _MAX_POD_NAME
    for job in replicated_jobs(runtime):
        pods = num_nodes if ancestor_of(job) == "trainer" else 1
        replicas = int(job.get("replicas") or 1)
        # Pod: <name>-<replicatedJob>-<replica>-<index>-<5 random characters>
        derived = f"-{job.get('name', '')}-{replicas - 1}-{max(pods, 1) - 1}-xxxxx"
        limit = min(limit, _MAX_POD_NAME - len(derived))
    return limit


def name_fault(name: object, runtime: Manifest | None, num_nodes: int = 1) -> Fault | None:
    """What is wrong with a TrainJob's name; None if nothing is."""
    limit = _MAX_POD_NAME if runtime is None else name_limit(runtime, num_nodes)
    rule = f"lower-case letters, digits and '-', a letter first, no '-' at the end, at most {limit} characters"
    if not isinstance(name, str) or not _NAME.match(name):
        return Fault(f"TrainJob {name}", "metadata.name", f"{name!r} is not a valid name", rule)
    if len(name) > limit:
        hint = "The names of its Pods, derived from it, would exceed 63 characters"
        return Fault(f"TrainJob {name}", "metadata.name", f"{name!r} has {len(name)} characters", rule, hint)
    return None


def check_train_job(job: Manifest, runtime: Manifest | None) -> list[Fault]:
    """Everything wrong with a TrainJob.

    Args:
        job: the TrainJob as plain data.
        runtime: the runtime it refers to; None checks only what needs none.
    """
    return list(_train_job_faults(job, runtime, _subject(job)))


def _train_job_faults(job: Manifest, runtime: Manifest | None, where: str) -> Iterator[Fault]:
    if job.get("apiVersion") != API_VERSION or job.get("kind") != "TrainJob":
        found = f"{job.get('apiVersion')} {job.get('kind')}"
        yield Fault(where, "kind", f"{found} is not a TrainJob", f"{API_VERSION} TrainJob")
        return
    spec = job.get("spec")
    if not isinstance(spec, dict):
        yield Fault(where, "spec", "is missing", "runtimeRef and trainer")
        return
    trainer = spec.get("trainer")
    nodes = trainer.get("numNodes", 1) if isinstance(trainer, dict) else 1
    metadata = job.get("metadata") or {}
    if fault := name_fault(metadata.get("name"), runtime, nodes if _is_int(nodes) else 1):
        yield fault
    yield from _metadata(metadata, where)
    yield from _unknown_keys(spec, _SPEC_KEYS, "spec", where)
    yield from _runtime_ref(spec.get("runtimeRef"), runtime, where)
    yield from _trainer(trainer, runtime, where)
    yield from _initializers(spec.get("initializer"), runtime, where)
    yield from _patches(spec.get("runtimePatches") or [], runtime, where)
    yield from _spec_scalars(spec, where)
    if runtime is not None:
        yield from job_faults(job, runtime, where)


def _metadata(metadata: Manifest, where: str) -> Iterator[Fault]:
    for key, value in (metadata.get("labels") or {}).items():
        valid = isinstance(value, str) and len(value) <= 63 and (not value or _LABEL_NAME.match(value))
        if not _qualified_name(key):
            yield Fault(where, "metadata.labels", f"{key!r} is not a valid label name", "[prefix/]name, name <= 63")
        elif not valid:
            rule = "a string of at most 63 letters, digits, '-', '_' and '.'"
            yield Fault(where, f"metadata.labels.{key}", f"{value!r} is not a valid label value", rule)
    for key, value in (metadata.get("annotations") or {}).items():
        if not _qualified_name(key.lower()) or not isinstance(value, str):
            yield Fault(where, f"metadata.annotations.{key}", f"{value!r} under this name is not valid", "a string")


def _qualified_name(key: object) -> bool:
    if not isinstance(key, str):
        return False
    prefix, slash, name = key.rpartition("/")
    valid_prefix = not slash or bool(_LABEL_PREFIX.match(prefix) and len(prefix) <= 253)
    return valid_prefix and len(name) <= 63 and bool(_LABEL_NAME.match(name))


def _runtime_ref(reference: Any, runtime: Manifest | None, where: str) -> Iterator[Fault]:
    key = "spec.runtimeRef"
    if not isinstance(reference, dict) or not reference.get("name"):
        yield Fault(where, f"{key}.name", "is missing", "the name of a runtime")
        return
    kind = reference.get("kind", "ClusterTrainingRuntime")
    if reference.get("apiGroup", API_GROUP) != API_GROUP or kind not in RUNTIME_KINDS:
        found = f"{reference.get('apiGroup')} {kind}"
        yield Fault(where, key, f"{found} is not a runtime", f"{API_GROUP} with kind {' or '.join(RUNTIME_KINDS)}")
    if runtime is not None:
        actual = (runtime.get("metadata") or {}).get("name")
        if reference["name"] != actual or kind != runtime.get("kind", kind):
            problem = f"names {kind} {reference['name']!r}, but was given {runtime.get('kind')} {actual!r}"
            yield Fault(where, key, problem)


def _trainer(trainer: Any, runtime: Manifest | None, where: str) -> Iterator[Fault]:
    key = "spec.trainer"
    if trainer is None and runtime is not None and policy_of(runtime) in (None, "mpi"):
        return  # the runtime's own command runs, and no variable of a policy would be missing
    if not isinstance(trainer, dict):
        hint = "Without it no PET_* variable is set and every node trains alone"
        yield Fault(where, key, "is missing", "at least numNodes", hint)
        return
    yield from _unknown_keys(trainer, _TRAINER_KEYS, key, where)
    for name in ("numNodes", "numProcPerNode"):
        value = trainer.get(name)
        if value is not None and (not _is_int(value) or not 1 <= value < 2**31):
            yield Fault(where, f"{key}.{name}", f"{value!r} is not valid", "a whole number of at least 1")
    for name in ("command", "args"):
        yield from _argument_list(trainer.get(name), f"{key}.{name}", where)
    image = trainer.get("image")
    if image is not None and (not isinstance(image, str) or not image or len(image) > 500):
        yield Fault(where, f"{key}.image", f"{image!r} is not valid", "an image reference of at most 500 characters")
    reserved = RESERVED_ENV["torch"] if runtime is None or policy_of(runtime) == "torch" else ()
    yield from _env(trainer.get("env"), f"{key}.env", where, reserved=reserved)
    base = (trainer_container(runtime) or {}).get("resources") if runtime else None
    yield from _resources(trainer.get("resourcesPerNode"), base or {}, f"{key}.resourcesPerNode", where)


def _argument_list(values: Any, key: str, where: str) -> Iterator[Fault]:
    if values is None:
        return
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        yield Fault(where, key, "holds something else than strings", "a list of strings; quote numbers and true/false")
        return
    if len(values) > _MAX_ITEMS:
        hint = "Put the settings into a recipe file instead of many overrides" if key.endswith("args") else ""
        yield Fault(where, key, f"has {len(values)} items", f"at most {_MAX_ITEMS}", hint)
    for place, value in enumerate(values):
        if has_secret(value):
            yield Fault(where, f"{key}[{place}]", "holds a secret in plain text", "a reference to a Secret in env")
        if len(value) > _MAX_ARGUMENT:
            yield Fault(where, f"{key}[{place}]", f"has {len(value)} characters", f"at most {_MAX_ARGUMENT}")
        if "\0" in value:
            yield Fault(where, f"{key}[{place}]", "contains a NUL character", "text")


def _env(entries: Any, key: str, where: str, reserved: Sequence[str] = ()) -> Iterator[Fault]:
    if entries is None:
        return
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        yield Fault(where, key, "is not a list of name and value", "[{name: NAME, value: VALUE}]")
        return
    if len(entries) > _MAX_ITEMS:
        yield Fault(where, key, f"has {len(entries)} entries", f"at most {_MAX_ITEMS}")
    seen: set[str] = set()
    for entry in entries:
        name, value = entry.get("name"), entry.get("value")
        if not isinstance(name, str) or not _ENV_NAME.match(name):
            yield Fault(where, key, f"{name!r} is not a variable's name", "letters, digits and '_', no digit first")
            continue
        if name in seen:
            yield Fault(where, f"{key}.{name}", "is given twice", "every name once")
        seen.add(name)
        if name in reserved:
            yield Fault(where, f"{key}.{name}", "is set by the control plane and may not be given", "another name")
        if value is not None and not isinstance(value, str):
            yield Fault(where, f"{key}.{name}", f"{value!r} is not a string", f"a string: {str(value).lower()!r}")
        if isinstance(value, str) and value and (name in SECRET_ENV or is_secret(name, value)):
            hint = (
                "Put it into a Secret and name that in runtime.secret_ref or runtime.env_from; here export the variable"
            )
            yield Fault(where, f"{key}.{name}", "is a secret in plain text", "a reference to a Secret", hint)
        if value is not None and entry.get("valueFrom"):
            yield Fault(where, f"{key}.{name}", "has both value and valueFrom", "one of them")


def _resources(resources: Any, base: Manifest, key: str, where: str) -> Iterator[Fault]:
    if resources is None:
        return
    if not isinstance(resources, dict):
        yield Fault(where, key, f"{resources!r} is not valid", "limits and requests")
        return
    yield from _unknown_keys(resources, ("limits", "requests", "claims"), key, where)
    for kind in ("limits", "requests"):
        for name, amount in (resources.get(kind) or {}).items():
            yield from _quantity(amount, name, f"{key}.{kind}.{name}", where)
    limits = {**(base.get("limits") or {}), **(resources.get("limits") or {})}
    requests = {**(base.get("requests") or {}), **(resources.get("requests") or {})}
    yield from _requests_within_limits(requests, limits, key, where)


def _requests_within_limits(requests: Manifest, limits: Manifest, key: str, where: str) -> Iterator[Fault]:
    for name, amount in requests.items():
        limit = limits.get(name)
        if limit is None:
            if "/" in name:
                hint = "Kubernetes does not overcommit devices"
                yield Fault(where, f"{key}.requests.{name}", "has no limit", f"the same amount in {key}.limits", hint)
            continue
        try:
            requested, allowed = parse_quantity(amount), parse_quantity(limit)
        except ValueError:
            continue  # reported above
        if requested > allowed or ("/" in name and requested != allowed):
            relation = "equal to" if "/" in name else "at most"
            problem = f"requests {amount} with a limit of {limit}"
            yield Fault(where, f"{key}.requests.{name}", problem, f"{relation} the limit")


def _quantity(amount: Any, name: str, key: str, where: str) -> Iterator[Fault]:
    expected = 'a whole number or a string such as "500m" or "16Gi"'
    if isinstance(amount, float) and not amount.is_integer():
        yield Fault(where, key, f"{amount!r} is a fraction as a number", expected, f'Write "{amount}"')
        return
    try:
        value = parse_quantity(amount)
    except ValueError:
        yield Fault(where, key, f"{amount!r} is not a quantity", expected)
        return
    if value < 0 or ("/" in name and not value.is_integer()):
        rule = "a whole number, 0 or more" if "/" in name else "0 or more"
        yield Fault(where, key, f"{amount!r} is not possible", rule)


def _initializers(initializer: Any, runtime: Manifest | None, where: str) -> Iterator[Fault]:
    if initializer is None:
        return
    if not isinstance(initializer, dict):
        yield Fault(where, "spec.initializer", f"{initializer!r} is not valid", "dataset and model")
        return
    yield from _unknown_keys(initializer, ("dataset", "model"), "spec.initializer", where)
    for role in ("dataset", "model"):
        if initializer.get(role) is not None:
            yield from _initializer(role, initializer[role], runtime, where)


def _initializer(role: str, config: Any, runtime: Manifest | None, where: str) -> Iterator[Fault]:
    key, name = f"spec.initializer.{role}", f"{role}-initializer"
    if not isinstance(config, dict):
        yield Fault(where, key, f"{config!r} is not valid", "storageUri, env, secretRef")
        return
    yield from _unknown_keys(config, _INITIALIZER_KEYS, key, where)
    uri = config.get("storageUri")
    if uri and (not isinstance(uri, str) or len(uri) > 2048 or not _STORAGE_URI.match(uri)):
        yield Fault(where, f"{key}.storageUri", f"{uri!r} is not valid", "scheme://..., at most 2048 characters")
    yield from _env(config.get("env"), f"{key}.env", where)
    reference = config.get("secretRef")
    if reference is not None and not (isinstance(reference, dict) and reference.get("name")):
        yield Fault(where, f"{key}.secretRef", f"{reference!r} is not valid", "{name: SECRET}")
    if runtime is None:
        return
    job = next((job for job in replicated_jobs(runtime) if job.get("name") == name), None)
    if job is None:
        hint = "Use a runtime with initializers, or leave it out"
        yield Fault(where, key, f"the runtime has no replicatedJob {name!r}", "", hint)
    elif not _has_initializer_mount(job, name):
        yield Fault(where, key, f"container {name!r} of the runtime has no volumeMount named 'initializer'")


def _has_initializer_mount(job: Manifest, container: str) -> bool:
    return any(
        mount.get("name") == "initializer"
        for entry in pod_spec(job).get("containers") or []
        if entry.get("name") == container
        for mount in entry.get("volumeMounts") or []
    )


def _patches(patches: Any, runtime: Manifest | None, where: str) -> Iterator[Fault]:
    key = "spec.runtimePatches"
    if not isinstance(patches, list) or len(patches) > 16:
        yield Fault(where, key, "is not a list of at most 16 patches")
        return
    managers: set[str] = set()
    for place, patch in enumerate(patches):
        manager = patch.get("manager")
        if not isinstance(manager, str) or not _MANAGER.match(manager) or len(manager) > 253:
            yield Fault(where, f"{key}[{place}].manager", f"{manager!r} is not valid", "a path such as example.com/me")
        elif manager in managers:
            yield Fault(where, f"{key}[{place}].manager", f"{manager!r} is given twice", "one patch per manager")
        managers.add(str(manager))
        template = ((patch.get("trainingRuntimeSpec") or {}).get("template") or {}).get("spec") or {}
        for entry in template.get("replicatedJobs") or []:
            yield from _patched_job(entry, runtime, f"{key}[{place}]", where)


def _patched_job(entry: Manifest, runtime: Manifest | None, key: str, where: str) -> Iterator[Fault]:
    pod = pod_spec(entry)
    for kind in ("containers", "initContainers"):
        for container in pod.get(kind) or []:
            if container.get("env") and container.get("name") in (TRAINER_CONTAINER, *INITIALIZERS):
                hint = "Use spec.trainer.env or spec.initializer.*.env"
                yield Fault(where, key, f"sets env of the container {container['name']!r}", "no env there", hint)
    if runtime is None:
        return
    known = {job.get("name"): job for job in replicated_jobs(runtime)}
    if entry.get("name") not in known:
        yield Fault(where, key, f"the runtime has no replicatedJob {entry.get('name')!r}", f"one of {_names(known)}")
        return
    target = pod_spec(known[entry["name"]])
    for kind in ("containers", "initContainers"):
        present = [container.get("name") for container in target.get(kind) or []]
        for container in pod.get(kind) or []:
            if container.get("name") not in present:
                problem = f"replicatedJob {entry['name']!r} has no container {container.get('name')!r} in {kind}"
                yield Fault(where, key, problem, f"one of {_names(present)}" if present else "")


def _spec_scalars(spec: Manifest, where: str) -> Iterator[Fault]:
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and (not _is_int(deadline) or deadline < 1):
        yield Fault(where, "spec.activeDeadlineSeconds", f"{deadline!r} is not valid", "a whole number of at least 1")
    if not isinstance(spec.get("suspend", False), bool):
        yield Fault(where, "spec.suspend", f"{spec['suspend']!r} is not valid", "true or false")
    allowed = ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")
    if spec.get("managedBy", allowed[0]) not in allowed:
        yield Fault(where, "spec.managedBy", f"{spec['managedBy']!r} is not valid", f"one of {_names(allowed)}")


def check_runtime(runtime: Manifest) -> list[Fault]:
    """Everything wrong with a ClusterTrainingRuntime or TrainingRuntime for the jobs this product writes."""
    name = (runtime.get("metadata") or {}).get("name")
    return list(_runtime_faults(runtime, f"{runtime.get('kind')} {name}"))


def _runtime_faults(runtime: Manifest, where: str) -> Iterator[Fault]:
    if runtime.get("apiVersion") != API_VERSION or runtime.get("kind") not in RUNTIME_KINDS:
        yield Fault(where, "kind", f"{runtime.get('kind')} is not a runtime", f"{API_VERSION} {RUNTIME_KINDS[0]}")
        return
    if not ((runtime.get("metadata") or {}).get("labels") or {}).get(FRAMEWORK):
        hint = "Kubeflow's SDK does not find a runtime without it"
        yield Fault(where, f"metadata.labels.{FRAMEWORK}", "is missing", "the name of a framework", hint)
    spec = runtime.get("spec") or {}
    policy = spec.get("mlPolicy")
    if not isinstance(policy, dict):
        yield Fault(where, "spec.mlPolicy", "is missing", "numNodes and torch")
    else:
        kinds = [kind for kind in ("torch", "mpi", "jax", "xgboost", "flux") if policy.get(kind) is not None]
        if len(kinds) > 1:
            yield Fault(where, "spec.mlPolicy", f"has {_names(kinds)}", "at most one of them")
        if not _is_int(policy.get("numNodes", 1)) or policy.get("numNodes", 1) < 1:
            yield Fault(where, "spec.mlPolicy.numNodes", f"{policy['numNodes']!r} is not valid", "at least 1")
    jobs = replicated_jobs(runtime)
    if not jobs:
        yield Fault(where, "spec.template.spec.replicatedJobs", "is empty", "a replicatedJob 'node'")
        return
    yield from _job_set(spec["template"]["spec"], jobs, where)
    yield from runtime_faults(runtime, where)
    yield from _gang(spec.get("podGroupPolicy"), jobs, where)
    trainer = "launcher" if isinstance(policy, dict) and policy.get("mpi") is not None else TRAINER_CONTAINER
    for job in jobs:
        yield from _replicated_job(job, trainer, where)
    if trainer_container(runtime) is None:
        problem = "has no replicatedJob labelled 'trainer' with a container 'node'"
        yield Fault(where, "spec.template.spec.replicatedJobs", problem)


def _job_set(spec: Manifest, jobs: list[Manifest], where: str) -> Iterator[Fault]:
    key = "spec.template.spec"
    names = [str(job.get("name")) for job in jobs]
    if len(set(names)) < len(names):
        yield Fault(where, f"{key}.replicatedJobs", f"names are given twice: {_names(names)}", "every name once")
    if spec.get("ttlSecondsAfterFinished") is not None:
        hint = "Trainer 2.3.0 runs a failed job again each time its JobSet has expired"
        yield Fault(where, f"{key}.ttlSecondsAfterFinished", "is set", "no TTL", hint)
    if (spec.get("network") or {}).get("subdomain"):
        hint = "PET_MASTER_ADDR is made of the job's name"
        yield Fault(where, f"{key}.network.subdomain", "is set", "no subdomain", hint)
    for target in (spec.get("successPolicy") or {}).get("targetReplicatedJobs") or []:
        if target not in names:
            yield Fault(where, f"{key}.successPolicy", f"names an unknown replicatedJob {target!r}", _names(names))
    in_order = (spec.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder"
    for place, job in enumerate(jobs):
        for entry in job.get("dependsOn") or []:
            field = f"{key}.replicatedJobs[{names[place]}].dependsOn"
            if in_order:
                yield Fault(where, field, "cannot be combined with startupPolicy InOrder")
            if entry.get("name") not in names[:place]:
                yield Fault(where, field, f"{entry.get('name')!r} does not come before", "an earlier replicatedJob")
            if entry.get("status") not in ("Ready", "Complete"):
                yield Fault(where, field, f"status {entry.get('status')!r} is not valid", "Ready or Complete")
    yield from _claims(spec.get("volumeClaimPolicies") or [], jobs, where)


def _claims(policies: list[Manifest], jobs: list[Manifest], where: str) -> Iterator[Fault]:
    key = "spec.template.spec.volumeClaimPolicies"
    claims = [template["metadata"]["name"] for policy in policies for template in policy.get("templates") or []]
    mounted: set[str] = set()
    for job in jobs:
        pod = pod_spec(job)
        volumes = {volume.get("name") for volume in pod.get("volumes") or []}
        for container in pod.get("containers") or []:
            mounts = {mount.get("name") for mount in container.get("volumeMounts") or []}
            mounted |= mounts
            for name in sorted(mounts - volumes - set(claims), key=str):
                yield Fault(where, f"replicatedJobs[{job.get('name')}]", f"mounts {name!r}, which no volume provides")
        for name in sorted(volumes & set(claims)):
            yield Fault(where, f"replicatedJobs[{job.get('name')}]", f"has a volume {name!r} like a volume claim's")
    for name in claims:
        if name not in mounted:
            yield Fault(where, key, f"no container mounts {name!r}", "a volumeMount of that name")


def _gang(policy: Any, jobs: list[Manifest], where: str) -> Iterator[Fault]:
    """A PodGroup counts the Pods of every replicatedJob; one that waits for another has none while the gang forms."""
    if not policy:
        return
    for job in jobs:
        if job.get("dependsOn"):
            others = _names(entry.get("name") for entry in job["dependsOn"])
            problem = f"is set, but replicatedJob {job.get('name')!r} starts only after {others}"
            hint = "The gang would wait for Pods that do not exist yet: use a runtime without initializers, or Kueue"
            yield Fault(where, "spec.podGroupPolicy", problem, "no dependsOn, or no gang scheduling", hint)


def _replicated_job(job: Manifest, trainer: str, where: str) -> Iterator[Fault]:
    name, ancestor = job.get("name"), ancestor_of(job)
    key = f"spec.template.spec.replicatedJobs[{name}]"
    expected = TRAINER_CONTAINER if ancestor == "trainer" else ancestor
    pod = pod_spec(job)
    containers = {container.get("name"): container for container in pod.get("containers") or []}
    if ancestor in ("trainer", *INITIALIZERS):
        if name != (wanted := trainer if ancestor == "trainer" else ancestor):
            yield Fault(where, key, f"is labelled {ancestor!r}", f"the name {wanted!r}")
        if job.get("replicas", 1) != 1:
            yield Fault(where, f"{key}.replicas", f"{job['replicas']!r} is not valid", "1")
        if expected not in containers:
            yield Fault(where, key, f"has no container {expected!r}", f"a container {expected!r}")
    elif name in INITIALIZERS:
        yield Fault(where, key, "lacks the label of its step", f"trainjob-ancestor-step: {name}")
    for container in containers.values():
        if not container.get("image"):
            yield Fault(where, f"{key}.containers[{container.get('name')}].image", "is missing", "an image")
    if ((job.get("template") or {}).get("spec") or {}).get("podFailurePolicy") and pod.get("restartPolicy") != "Never":
        yield Fault(where, f"{key}.podFailurePolicy", "needs restartPolicy: Never", "restartPolicy: Never")


def _unknown_keys(data: Manifest, known: Sequence[str], key: str, where: str) -> Iterator[Fault]:
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else ""
            yield Fault(where, f"{key}.{name}", "is not a field of a TrainJob", f"one of {_names(known)}", hint)


def _names(values: Any) -> str:
    return ", ".join(map(str, values))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _subject(job: Manifest) -> str:
    return f"TrainJob {(job.get('metadata') or {}).get('name')}"
