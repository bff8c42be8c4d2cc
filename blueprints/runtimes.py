"""The ClusterTrainingRuntimes that ship with the product: `runtimes/` in a checkout, packaged in a wheel.

A runtime has two names. Its *name*, such as `llm-sft`, is what recipes and people use (label `app.kubernetes.io/name`).
The object's name in a cluster, `llm-sft-v0-1`, ends in the version of the runtimes, because upstream makes parts of an
installed runtime immutable. A TrainJob refers to the latter; wherever a runtime is looked up both will do.
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blueprints.errors import EnvironmentFault, UsageError
from blueprints.kustomize import build

Manifest = dict[str, Any]

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
"""Label of a replicatedJob's Job template: `dataset-initializer`, `model-initializer` or `trainer`."""
FRAMEWORK = "trainer.kubeflow.org/framework"
NAME = "app.kubernetes.io/name"
VERSION = "app.kubernetes.io/version"
PART_OF = "app.kubernetes.io/part-of"
MANAGED_BY = "app.kubernetes.io/managed-by"
METHOD = "blueprints.llm-blueprints.dev/method"
PRODUCT = "llm-blueprints"
TRAINER_CONTAINER = "node"
INITIALIZERS = ("model-initializer", "dataset-initializer")


def runtimes_directory() -> Path:
    """Where the shipped runtimes lie.

    Raises:
        EnvironmentFault: the installation lacks them.
    """
    package = Path(__file__).resolve().parent
    for directory in (package / "_runtimes", package.parent / "runtimes"):
        if (directory / "kustomization.yaml").is_file():
            return directory
    raise EnvironmentFault(
        "the shipped runtimes are missing from this installation",
        where=str(package / "_runtimes"),
        todo="install llm-blueprints again",
    )


@functools.cache
def _shipped() -> dict[str, Manifest]:
    return {document["metadata"]["name"]: document for document in build(runtimes_directory())}


@functools.cache
def _generic() -> dict[str, Manifest]:
    """Upstream's general runtimes under upstream's names; installed only where a cluster lacks them."""
    return {document["metadata"]["name"]: document for document in build(runtimes_directory() / "generic")}


def shipped_runtimes() -> dict[str, Manifest]:
    """The shipped ClusterTrainingRuntimes by the name they have in a cluster. The caller may change what is returned."""
    return copy.deepcopy(_shipped())


def short_name(runtime: Manifest) -> str:
    """The name without its version: `llm-sft` of `llm-sft-v0-1`; of a runtime that is not ours its whole name."""
    metadata = runtime.get("metadata") or {}
    name, labels = str(metadata.get("name") or ""), metadata.get("labels") or {}
    short = labels.get(NAME)
    return str(short) if short and labels.get(PART_OF) == PRODUCT else name


def version_of(runtime: Manifest) -> tuple[int, ...]:
    """The version in a shipped runtime's label, `v0-1` as (0, 1); () where there is none. Higher is newer."""
    label = ((runtime.get("metadata") or {}).get("labels") or {}).get(VERSION) or ""
    return tuple(int(part) for part in re.findall(r"\d+", str(label)))


def find_runtime(name: str, runtimes: Iterable[Manifest]) -> Manifest | None:
    """The runtime called `name` among `runtimes`: by its whole name, else the newest of that short name."""
    known = list(runtimes)
    exact = [runtime for runtime in known if runtime["metadata"]["name"] == name]
    return exact[0] if exact else max((r for r in known if short_name(r) == name), key=version_of, default=None)


def get_runtime(name: str) -> Manifest:
    """The shipped runtime `name`, with or without its version; also the general ones, such as `torch-distributed`.

    Raises:
        UsageError: there is none of that name.
    """
    known = _shipped()
    found = find_runtime(name, known.values()) or _generic().get(name)
    if found is None:
        names = [short_name(runtime) for runtime in known.values()]
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(
            f"there is no runtime {name!r}",
            where="runtime.name",
            todo=f"{hint}Shipped runtimes: {', '.join(names)}",
        )
    return copy.deepcopy(found)


def trainer_container(runtime: Manifest) -> Manifest | None:
    """The container `node` of the replicatedJob labelled `trainer`; None if the runtime has none."""
    for job in replicated_jobs(runtime):
        if ancestor_of(job) == "trainer":
            for container in pod_spec(job).get("containers") or []:
                if container.get("name") == TRAINER_CONTAINER:
                    return dict(container)
    return None


def recipe_of(runtime: Manifest) -> str | None:
    """The recipe a runtime trains with when the job says nothing: what follows `--recipe` in the trainer's args."""
    args = list((trainer_container(runtime) or {}).get("args") or [])
    if "--recipe" in args[:-1]:
        return str(args[args.index("--recipe") + 1])
    return None


def replicated_jobs(runtime: Manifest) -> list[Manifest]:
    """The runtime's replicatedJobs, in order."""
    spec = ((runtime.get("spec") or {}).get("template") or {}).get("spec") or {}
    return list(spec.get("replicatedJobs") or [])


def ancestor_of(job: Manifest) -> str | None:
    """The ancestor label of a replicatedJob."""
    labels = ((job.get("template") or {}).get("metadata") or {}).get("labels") or {}
    value = labels.get(ANCESTOR)
    return None if value is None else str(value)


def pod_spec(job: Manifest) -> Manifest:
    """The Pod spec of a replicatedJob."""
    template = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
    return dict(template.get("spec") or {})


def shared_claim_note(runtime: Manifest, nodes: int) -> str | None:
    """A warning where several nodes share a claim that only one machine can mount; None where there is no such danger."""
    spec = ((runtime.get("spec") or {}).get("template") or {}).get("spec") or {}
    for policy in spec.get("volumeClaimPolicies") or []:
        for claim in policy.get("templates") or []:
            modes = (claim.get("spec") or {}).get("accessModes") or []
            if nodes > 1 and not set(modes) & {"ReadWriteMany", "ReadOnlyMany"}:
                return (
                    f"{nodes} nodes share a {', '.join(modes)} claim, so all their Pods must land on one machine; "
                    "runtime=llm-multinode has a ReadWriteMany claim"
                )
    return None
