"""What of a v1 replica's Pod template becomes a replicatedJob of the runtime."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from blueprints.errors import UsageError
from blueprints.manifests import SECRET_ENV
from blueprints.quantity import exact
from blueprints.runtimes import ANCESTOR, TRAINER_CONTAINER, Manifest

Tell = Callable[[str, str], None]
"""Takes a key of the v1 job and what became of it."""
PERMANENT = list(range(1, 128))
"""Exit codes that restartPolicy ExitCode did not retry; 128 and above, deaths by a signal, it did."""
_SERVER_METADATA = (
    "creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink", "uid", "ownerReferences", "finalizers",
    "deletionTimestamp", "deletionGracePeriodSeconds", "generateName", "namespace", "name",
)  # fmt: skip
_CLIENT_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration",)
_RESERVED_VOLUMES = ("mpi-ssh-auth", "mpi-hostfile")
_LITERAL_RESERVED = re.compile(r"^PET_")


def plain_metadata(metadata: Manifest | None) -> Manifest:
    """Labels and annotations that people wrote."""
    found: Manifest = {}
    for key in ("labels", "annotations"):
        kept = {k: v for k, v in ((metadata or {}).get(key) or {}).items() if k not in _CLIENT_ANNOTATIONS}
        if kept:
            found[key] = kept
    return found


def unknown_metadata(metadata: Manifest | None) -> list[str]:
    """Fields of metadata that are neither carried over nor the API server's own."""
    return [key for key in metadata or {} if key not in (*_SERVER_METADATA, "labels", "annotations")]


def main_container(pod: Manifest, preferred: str, key: str) -> str:
    """Name of the container that does the work: the one of the operator's name for it, else the first.

    Raises:
        UsageError: there is no container.
    """
    names = [container["name"] for container in pod["containers"]]
    if not names:
        raise UsageError("has no containers", where=f"{key}.template.spec.containers", todo=f"give it {preferred!r}")
    return preferred if preferred in names else names[0]


def replicated_job(
    name: str,
    replica: Manifest,
    *,
    main: str,
    policy: Manifest,
    secret: str,
    key: str,
    tell: Tell,
    by_job: bool = False,
) -> Manifest:
    """A replicatedJob of the Pod template of a v1 replica, its main container renamed to `node`.

    Args:
        name: `node` or `launcher`.
        replica: the v1 replica specification.
        main: name of its main container.
        policy: the job's runPolicy.
        secret: a Secret to refer to instead of tokens written in plain text.
        key: where the replica is in the v1 job.
        tell: is told what has no counterpart.
        by_job: the old operator made a Job of it, whose default of 6 retries holds then as now.
    """
    template = copy.deepcopy(replica["template"])
    pod: Manifest = template["spec"]
    _rename(pod, main, f"{key}.template.spec", tell)
    _clear_pod(pod, secret, f"{key}.template.spec", tell)
    job_spec: Manifest = {}
    _retries(job_spec, pod, replica.get("restartPolicy") or "", policy, key, tell, by_job=by_job)
    metadata = plain_metadata(template.get("metadata"))
    job_spec["template"] = {**({"metadata": metadata} if metadata else {}), "spec": pod}
    return {"name": name, "replicas": 1, "template": {"spec": job_spec}}


def label_trainer(replicated: Manifest) -> None:
    """Mark a replicatedJob as the one that the TrainJob's trainer settings go to."""
    replicated["template"] = {"metadata": {"labels": {ANCESTOR: "trainer"}}, **replicated["template"]}


def _rename(pod: Manifest, main: str, key: str, tell: Tell) -> None:
    taken = [entry["name"] for kind in ("containers", "initContainers") for entry in pod.get(kind) or []]
    for kind in ("containers", "initContainers"):
        for entry in pod.get(kind) or []:
            if entry["name"] == TRAINER_CONTAINER and main != TRAINER_CONTAINER:
                fresh = next(n for n in (f"node-{i}" for i in range(1, 100)) if n not in taken)
                tell(f"{key}.{kind}[node]", f"is called {fresh!r} now: `node` is the name of the trainer's container")
                entry["name"] = fresh
    for kind in ("containers", "initContainers"):
        for entry in pod.get(kind) or []:
            for variable in entry.get("env") or []:
                reference = (variable.get("valueFrom") or {}).get("resourceFieldRef") or {}
                if reference.get("containerName") == main:
                    reference["containerName"] = TRAINER_CONTAINER
    for entry in pod["containers"]:
        if entry["name"] == main:
            entry["name"] = TRAINER_CONTAINER
    if main != TRAINER_CONTAINER:
        tell(
            f"{key}.containers[{main}]", "is called 'node' now, which is the trainer's container (kubectl logs -c node)"
        )
    sidecars = [entry["name"] for entry in pod["containers"] if entry["name"] != TRAINER_CONTAINER]
    if sidecars:
        tell(
            f"{key}.containers[{sidecars[0]}]",
            f"runs beside the trainer ({', '.join(sidecars)}): the Pod is done only when every container has ended. One "
            "that never ends belongs into initContainers with restartPolicy: Always",
        )


def _clear_pod(pod: Manifest, secret: str, key: str, tell: Tell) -> None:
    for name in ("hostname", "subdomain"):
        if pod.pop(name, None) is not None:
            tell(f"{key}.{name}", "was dropped: JobSet names the Pods, so that the nodes find one another")
    for volume in pod.get("volumes") or []:
        if volume.get("name") in _RESERVED_VOLUMES:
            tell(f"{key}.volumes[{volume['name']}]", "has the name of a volume that the MPI policy adds: rename it")
    for kind in ("containers", "initContainers"):
        for entry in pod.get(kind) or []:
            for part in ("limits", "requests"):
                amounts = (entry.get("resources") or {}).get(part) or {}
                amounts.update({name: as_quantity(amount) for name, amount in amounts.items()})
            if entry.get("env"):
                entry["env"] = clean_env(entry["env"], secret, f"{key}.{kind}[{entry['name']}].env", tell)


def as_quantity(amount: Any) -> Any:
    """A quantity as Trainer's schema takes it: fractions are strings there."""
    return f"{amount:g}" if isinstance(amount, float) and not amount.is_integer() else amount


def clean_env(entries: list[Manifest], secret: str, key: str, tell: Tell) -> list[Manifest]:
    """Variables without what the control plane sets itself, the last of each name.

    Args:
        entries: of a container.
        secret: a Secret to refer to instead of a token written in plain text.
        key: where they are in the v1 job.
        tell: is told what was left out.
    """
    last = {entry["name"]: entry for entry in entries}
    if len(last) < len(entries):
        names = [entry["name"] for entry in entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        tell(key, f"gives {', '.join(twice)} more than once: the last one, which was in force, is kept")
    found: list[Manifest] = []
    for name, entry in last.items():
        if _LITERAL_RESERVED.match(name):
            tell(f"{key}[{name}]", "was dropped: the control plane sets PET_* and refuses a job that does")
        elif name in SECRET_ENV and entry.get("value"):
            reference = {"secretKeyRef": {"name": secret, "key": name}}
            found.append({"name": name, "valueFrom": reference})
            how = f"kubectl create secret generic {secret} --from-literal={name}=..."
            tell(
                f"{key}[{name}]",
                f"is a secret in plain text: it is read from the Secret {secret!r} now. Create it: {how}",
            )
        else:
            found.append(entry)
    return found


def _retries(
    job_spec: Manifest, pod: Manifest, restart: str, policy: Manifest, key: str, tell: Tell, *, by_job: bool
) -> None:
    limit = policy.get("backoffLimit")
    if restart == "Always":
        tell(f"{key}.restartPolicy", "Always became OnFailure: a Pod of a Job that has succeeded is not started again")
    pod["restartPolicy"] = "Never" if restart in ("Never", "ExitCode") else "OnFailure"
    if limit is not None:
        job_spec["backoffLimit"] = limit
    elif by_job:
        pass
    elif restart == "Never":
        job_spec["backoffLimit"] = 0  # the first failed Pod failed the v1 job
    else:
        tell("spec.runPolicy.backoffLimit", "is not set: v1 restarted without end, a Job gives up after 6 retries")
    if restart == "ExitCode":
        rules = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {
                "containerName": TRAINER_CONTAINER, "operator": "In", "values": list(PERMANENT),
            }},
        ]  # fmt: skip
        job_spec["podFailurePolicy"] = {"rules": rules}
        tell(
            f"{key}.restartPolicy",
            "ExitCode became a podFailurePolicy: exit codes 1 to 127 fail the job, 128 and above are retried",
        )


def differences(left: Any, right: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys at which two Pod templates differ, with both values; an absent map or list equals an empty one."""
    if isinstance(left, dict) or isinstance(right, dict):
        left, right = left or {}, right or {}
        if isinstance(left, dict) and isinstance(right, dict):
            for name in dict.fromkeys([*left, *right]):
                place = name if not key else f"{key}.{name}"
                yield from differences(left.get(name), right.get(name), place)
            return
    if isinstance(left, list) or isinstance(right, list):
        left, right = left or [], right or []
        named = [item.get("name") for item in (*left, *right) if isinstance(item, dict)]
        if (
            isinstance(left, list)
            and isinstance(right, list)
            and named
            and all(isinstance(name, str) for name in named)
        ):
            before, after = ({item["name"]: item for item in items} for items in (left, right))
            for name in dict.fromkeys(named):
                yield from differences(before.get(name), after.get(name), f"{key}[{name}]")
            return
    if not _same(left, right):
        yield key, left, right


def _same(left: Any, right: Any) -> bool:
    if left == right:
        return True
    try:
        return not isinstance(left, bool) and exact(left) == exact(right)
    except ValueError:
        return False
