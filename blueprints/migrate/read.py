"""A file with v1 jobs, read, checked, and turned into TrainJobs and runtimes that are valid."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blueprints.errors import Fault, ManifestError, UsageError
from blueprints.manifest_files import Document, read_documents
from blueprints.manifests import API_GROUP, API_VERSION, check_runtime, check_train_job, name_limit
from blueprints.migrate.mpi import from_mpi_job
from blueprints.migrate.parts import Parts
from blueprints.migrate.pods import plain_metadata, unknown_metadata
from blueprints.migrate.pytorch import from_pytorch_job
from blueprints.runtimes import FRAMEWORK, MANAGED_BY, Manifest
from blueprints.structure import misfits
from blueprints.trainjob import MANAGED_BY as MANAGED_LABELS
from blueprints.trainjob import to_yaml

Converter = Callable[[Manifest, Callable[[str, str], None]], Parts]
READABLE: dict[tuple[str, str], Converter] = {
    ("kubeflow.org/v1", "PyTorchJob"): from_pytorch_job,
    ("kubeflow.org/v1", "MPIJob"): from_mpi_job,
    ("kubeflow.org/v2beta1", "MPIJob"): from_mpi_job,
}
"""The kinds that are turned into TrainJobs."""
_MANAGERS = {
    "kubeflow.org/training-operator": None,
    "kubeflow.org/mpi-operator": None,
    "kueue.x-k8s.io/multikueue": "kueue.x-k8s.io/multikueue",
}


@dataclass(frozen=True)
class Remark:
    """Something of a v1 job that is not as it was.

    Attributes:
        where: file and line.
        key: dotted key in the v1 job.
        text: what became of it.
    """

    where: str
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.text}"


@dataclass(frozen=True)
class Migration:
    """One migrated job.

    Attributes:
        kind, name: of the v1 job.
        job: the TrainJob.
        runtime: its TrainingRuntime or ClusterTrainingRuntime.
        remarks: what could not be carried over, and what changed.
    """

    kind: str
    name: str
    job: Manifest
    runtime: Manifest
    remarks: tuple[Remark, ...] = field(default=())

    def to_yaml(self) -> str:
        """The runtime and the TrainJob as two YAML documents, the remarks as comments above them."""
        head = [f"# {self.kind} {self.name} as a TrainJob, by `blueprints migrate`."]
        if self.remarks:
            head += [
                "# Not as it was:",
                *(f"#   {line}" for remark in self.remarks for line in str(remark).splitlines()),
            ]
        return "\n".join(head) + "\n" + "---\n".join(map(to_yaml, (self.runtime, self.job)))


def migrate_file(source: str, *, cluster: bool = False) -> list[Migration]:
    """The TrainJobs of the v1 jobs in a YAML file.

    Args:
        source: path of the file; `-` reads standard input.
        cluster: make ClusterTrainingRuntimes instead of TrainingRuntimes of the job's namespace.

    Raises:
        UsageError: the file cannot be read, or holds no such job, or jobs of another kind.
        ManifestError: a job is invalid; every fault with file and line.
    """
    return migrate(read_documents(source), source, cluster=cluster)


def migrate(documents: Sequence[Document], source: str, *, cluster: bool = False) -> list[Migration]:
    """The same of objects that were read already."""
    jobs = [item for item in documents if _is_job(item)]
    if not jobs:
        kinds = ", ".join(sorted({item.kind for item in documents})) or "nothing"
        todo = "name a file with a PyTorchJob (kubeflow.org/v1) or an MPIJob (kubeflow.org/v1, v2beta1)"
        raise UsageError(f"there is no job to migrate: found {kinds}", where=source, todo=todo)
    for item in jobs:
        _require_readable(item)
    if faults := [fault for item in jobs for fault in _structure(item)]:
        raise ManifestError(faults, subject=source)
    return [_migrate(item, cluster) for item in jobs]


def left_alone(documents: Sequence[Document]) -> list[Remark]:
    """The objects that are no jobs and are not in the result."""
    text = "is no job and is not in the result: apply it as it is"
    return [Remark(item.where("kind"), f"{item.kind} {item.name}", text) for item in documents if not _is_job(item)]


def _is_job(item: Document) -> bool:
    return str(item.data.get("apiVersion")).startswith("kubeflow.org/")


def _require_readable(item: Document) -> None:
    version = str(item.data.get("apiVersion"))
    if (version, item.kind) in READABLE:
        return
    known = ", ".join(f"{kind} ({version})" for version, kind in READABLE)
    hints = {
        "JAXJob": "write a TrainJob on the runtime jax-distributed",
        "XGBoostJob": "write a TrainJob on the runtime xgboost-distributed",
        "TFJob": "Trainer has no policy for TF_CONFIG; a TrainJob would start its Pods without it",
        "PaddleJob": "Trainer has no policy for PaddlePaddle",
    }
    todo = f"{hints.get(item.kind, '')}. What can be migrated: {known}".lstrip(". ")
    raise UsageError(f"{item.kind} of {version} cannot be migrated", where=item.where("kind"), todo=todo)


def _structure(item: Document) -> list[Fault]:
    if not isinstance(item.data.get("metadata"), dict):
        return [Fault(item.where("metadata"), "metadata", "is missing", "a map with a name")]
    found = misfits(item.data, item.kind, item.file)
    return [dataclasses.replace(misfit.fault, where=item.where(misfit.fault.key)) for misfit in found]


def _migrate(item: Document, cluster: bool) -> Migration:
    remarks: list[Remark] = []

    def tell(key: str, text: str) -> None:
        remarks.append(Remark(item.where(key), key, text))

    try:
        parts = READABLE[str(item.data["apiVersion"]), item.kind](item.data, tell)
    except UsageError as error:  # raised with a key, which becomes file and line
        raise UsageError(error.problem, where=f"{item.where(error.where)}: {error.where}", todo=error.todo) from None
    runtime = _runtime(item.data, parts, cluster)
    name = _name(item.data, runtime, parts.nodes, tell)
    runtime["metadata"]["name"] = f"{name}-runtime"
    job = _train_job(item.data, parts, runtime, name, tell)
    faults = [*check_runtime(runtime), *check_train_job(job, runtime)]
    if faults:
        placed = [_in_source(fault, item, parts) for fault in faults]
        raise ManifestError(list(dict.fromkeys(placed)), subject=f"{item.kind} {item.name}")
    return Migration(item.kind, item.name, job, runtime, tuple(dict.fromkeys(remarks)))


def _in_source(fault: Fault, item: Document, parts: Parts) -> Fault:
    """A fault of what was made, with the place in the v1 job that it stems from."""
    prefix = next((prefix for prefix in parts.origins if fault.key.startswith(prefix)), None)
    key = fault.key if prefix is None else parts.origins[prefix] + fault.key.removeprefix(prefix)
    return dataclasses.replace(fault, where=item.where(key), key=key)


def _runtime(old: Manifest, parts: Parts, cluster: bool) -> Manifest:
    metadata: Manifest = {"name": "", "labels": {FRAMEWORK: parts.framework, MANAGED_BY: "llm-blueprints-migrate"}}
    namespace = old["metadata"].get("namespace")
    if namespace and not cluster:
        metadata["namespace"] = namespace
    spec: Manifest = {"mlPolicy": parts.policy}
    if parts.pod_groups:
        spec["podGroupPolicy"] = parts.pod_groups
    template: Manifest = {"spec": parts.job_set}
    if parts.annotations:
        template = {"metadata": {"annotations": parts.annotations}, **template}
    spec["template"] = template
    kind = "ClusterTrainingRuntime" if cluster else "TrainingRuntime"
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def _name(old: Manifest, runtime: Manifest, nodes: int, tell: Callable[[str, str], None]) -> str:
    metadata = old["metadata"]
    given = str(metadata.get("name") or metadata.get("generateName") or "job")
    limit = name_limit(runtime, nodes)
    name = re.sub(r"[^a-z0-9]+", "-", given.lower()).strip("-")
    name = (name if name[:1].isalpha() else f"job-{name}")[:limit].strip("-")
    if not metadata.get("name"):
        tell(
            "metadata.generateName",
            f"the TrainJob is called {name!r}: its runtime and its addresses are made of the name",
        )
    elif name != given:
        why = f"letters, digits and '-', at most {limit} characters, because its Pods' names are made of it"
        tell("metadata.name", f"{given!r} became {name!r}: {why}")
    return name


def _train_job(old: Manifest, parts: Parts, runtime: Manifest, name: str, tell: Callable[[str, str], None]) -> Manifest:
    metadata: Manifest = {"name": name}
    if namespace := old["metadata"].get("namespace"):
        metadata["namespace"] = namespace
    kept = plain_metadata(old["metadata"])
    metadata["labels"] = {**kept.get("labels", {}), **MANAGED_LABELS}
    if kept.get("annotations"):
        metadata["annotations"] = kept["annotations"]
    for key in unknown_metadata(old["metadata"]):
        tell(f"metadata.{key}", "was not carried over")
    reference = {"apiGroup": API_GROUP, "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    spec: Manifest = {"runtimeRef": reference, "trainer": parts.trainer(name)}
    _run_policy(spec, parts.run_policy, tell)
    return {"apiVersion": API_VERSION, "kind": "TrainJob", "metadata": metadata, "spec": spec}


def _run_policy(spec: Manifest, policy: Manifest, tell: Callable[[str, str], None]) -> None:
    key = "spec.runPolicy"
    if policy.get("suspend") is not None:
        spec["suspend"] = policy["suspend"]
    if policy.get("activeDeadlineSeconds") is not None:
        spec["activeDeadlineSeconds"] = policy["activeDeadlineSeconds"]
    if (manager := policy.get("managedBy")) is not None:
        if _MANAGERS.get(manager):
            spec["managedBy"] = _MANAGERS[manager]
        elif manager not in _MANAGERS:
            tell(f"{key}.managedBy", f"{manager!r} was dropped: a TrainJob knows Trainer's controller and MultiKueue")
    if policy.get("ttlSecondsAfterFinished") is not None:
        why = "Trainer 2.3 would run a failed job again each time it expires; delete it with `blueprints delete`"
        tell(f"{key}.ttlSecondsAfterFinished", f"was dropped: {why}")
    if policy.get("cleanPodPolicy") == "All":
        tell(
            f"{key}.cleanPodPolicy",
            "All was dropped: finished Pods stay, with their logs, until the TrainJob is deleted",
        )
