"""The ClusterTrainingRuntimes that ship with the product: `runtimes/` in a checkout, packaged in a wheel."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path
from typing import Any

import yaml

from blueprints.errors import EnvironmentFault, UsageError

Manifest = dict[str, Any]

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
"""Label of a replicatedJob's Job template: `dataset-initializer`, `model-initializer` or `trainer`."""
FRAMEWORK = "trainer.kubeflow.org/framework"
TRAINER_CONTAINER = "node"
INITIALIZERS = ("model-initializer", "dataset-initializer")


def runtimes_directory() -> Path:
    """Where the shipped runtimes lie.

    Raises:
        EnvironmentFault: the installation lacks them.
    """
    package = Path(__file__).resolve().parent
    for directory in (package / "_runtimes", package.parent / "runtimes"):
        if (directory / "base").is_dir():
            return directory
    raise EnvironmentFault(
        "the shipped runtimes are missing from this installation",
        where=str(package / "_runtimes"),
        todo="install llm-blueprints again",
    )


@functools.cache
def _shipped() -> dict[str, Manifest]:
    found: dict[str, Manifest] = {}
    for path in sorted((runtimes_directory() / "base").glob("*.yaml")):
        for document in yaml.load_all(path.read_text(encoding="utf-8"), Loader=_LOADER):
            if isinstance(document, dict) and document.get("kind") == "ClusterTrainingRuntime":
                found[document["metadata"]["name"]] = document
    return found


def shipped_runtimes() -> dict[str, Manifest]:
    """The shipped ClusterTrainingRuntimes by name. The caller may change what is returned."""
    return {name: _copy(document) for name, document in _shipped().items()}


def get_runtime(name: str) -> Manifest:
    """The shipped runtime `name`.

    Raises:
        UsageError: there is none of that name.
    """
    known = _shipped()
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(
            f"there is no runtime {name!r}",
            where="runtime.name",
            todo=f"{hint}Shipped runtimes: {', '.join(known)}",
        )
    return {key: _copy(value) for key, value in known[name].items()}


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


def _copy(value: Any) -> Any:
    """A deep copy in which shared YAML anchors become separate values."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
