"""The TrainJob of a function or an image of one's own."""

from __future__ import annotations

import copy
import re
import secrets
from pathlib import Path
from typing import Any

from blueprints.admission import policy_of
from blueprints.custom_trainer.source import script_of
from blueprints.custom_trainer.types import CustomTrainer, CustomTrainerContainer
from blueprints.errors import UsageError
from blueprints.manifests import API_GROUP, API_VERSION, name_limit
from blueprints.quantity import whole
from blueprints.runtimes import INITIALIZERS, Manifest, ancestor_of, pod_spec, replicated_jobs
from blueprints.trainjob import MANAGED_BY, RECIPE_HASH, literal_text
from blueprints.types import TrainerArgs, TrainerCommand

DEFAULT_RUNTIME = "torch-distributed"
START = "import sys; exec(sys.argv[1])"
"""What the container runs: the first argument, `boot.py`."""
_ALIASES = {"gpu": "nvidia.com/gpu", "storage": "ephemeral-storage"}
_STANDARD = ("cpu", "memory", "gpu", "storage", "ephemeral-storage")
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_HOME = ("HOME", "USER")


def custom_job(trainer: CustomTrainer | CustomTrainerContainer, runtime: Manifest, *, name: str) -> Manifest:
    """The TrainJob that runs a function or an image on a runtime.

    Args:
        trainer: what to run.
        runtime: a ClusterTrainingRuntime or TrainingRuntime without initializers.
        name: of the job.

    Raises:
        UsageError: the function or its arguments cannot travel, or the runtime does not fit.
    """
    _check_runtime(runtime)
    nodes = trainer.num_nodes
    if nodes is None:
        nodes = int((runtime["spec"].get("mlPolicy") or {}).get("numNodes") or 1)
    spec: Manifest = {}
    if trainer.image is not None:
        spec["image"] = trainer.image
    if isinstance(trainer, CustomTrainer):
        spec |= _function(trainer, policy_of(runtime))
    if trainer.env:
        spec["env"] = [{"name": key, "value": literal_text(value)} for key, value in sorted(trainer.env.items())]
    spec["numNodes"] = nodes
    if trainer.resources_per_node:
        resources = _resources(trainer.resources_per_node)
        processes = _processes(resources)
        if processes is not None:
            spec["numProcPerNode"] = processes
        spec["resourcesPerNode"] = {"limits": resources}
    reference = {"apiGroup": API_GROUP, "kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    return {
        "apiVersion": API_VERSION, "kind": "TrainJob",
        "metadata": {"name": name, "labels": dict(MANAGED_BY), "annotations": {}},
        "spec": {"runtimeRef": reference, "trainer": spec},
    }  # fmt: skip


def set_words(option: TrainerCommand | TrainerArgs, job: Manifest) -> None:
    """Put the command or the arguments of an option into the TrainJob of an image.

    Raises:
        UsageError: the job brings its own, a recipe's or a function's.
    """
    trainer = job["spec"]["trainer"]
    key, words = ("command", option.command) if isinstance(option, TrainerCommand) else ("args", option.args)
    where = f"{type(option).__name__}(...)"
    if RECIPE_HASH in (job["metadata"].get("annotations") or {}) or START in trainer.get("command", []):
        todo = "use it with CustomTrainerContainer(image=...)"
        raise UsageError("a recipe and a function bring their own command", where=where, todo=todo)
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"found {words!r}", where=where, todo="give a list of strings")
    trainer[key] = list(words)


def custom_name(trainer: CustomTrainer | CustomTrainerContainer, runtime: Manifest) -> str:
    """A fresh name for a job: the function's or the image's, and six hexadecimal digits."""
    if isinstance(trainer, CustomTrainer):
        stem = str(getattr(trainer.func, "__name__", "function"))  # whether it is a function at all is told later
    else:
        stem = trainer.image.rpartition("/")[2].partition(":")[0].partition("@")[0]
    limit = name_limit(runtime, trainer.num_nodes or 1) - 7
    base = re.sub(r"[^a-z0-9]+", "-", stem.lower()).lstrip("-0123456789")[:limit].strip("-")
    return f"{base or 'train'}-{secrets.token_hex(3)}"


def for_this_machine(job: Manifest, runtime: Manifest) -> tuple[Manifest, Manifest]:
    """A custom TrainJob and its runtime as they run here: paths of packages made absolute, and the user's home.

    The runtime's `HOME` is a directory of the image; here caches and credentials are in the user's own.

    Raises:
        UsageError: an image is to run, not a function.
    """
    job, runtime = copy.deepcopy(job), copy.deepcopy(runtime)
    args = job["spec"]["trainer"].get("args")
    if START not in job["spec"]["trainer"].get("command", []):
        todo = "use TrainerClient(backend='kubernetes'), or CustomTrainer(func=...)"
        raise UsageError("an image needs a cluster", where="train(trainer=CustomTrainerContainer(...))", todo=todo)
    for place, option in enumerate(args[:-1]):
        if option == "--package" and _is_local_path(args[place + 1]):
            args[place + 1] = str(Path(args[place + 1]).absolute())
    for replicated in replicated_jobs(runtime):
        for container in pod_spec(replicated).get("containers") or []:
            if container.get("env"):
                container["env"] = [entry for entry in container["env"] if entry["name"] not in _HOME]
    return job, runtime


def _check_runtime(runtime: Manifest) -> None:
    present = [step for job in replicated_jobs(runtime) if (step := ancestor_of(job)) in INITIALIZERS]
    if present:
        problem = f"it starts {' and '.join(map(str, present))}, which would prepare the runtime's own model and rows"
        todo = f"use {DEFAULT_RUNTIME}, or another runtime without initializers"
        raise UsageError(problem, where=f"{runtime['kind']} {runtime['metadata']['name']}", todo=todo)


def _function(trainer: CustomTrainer, policy: str | None) -> Manifest:
    script = script_of(trainer.func, trainer.func_args)
    boot = Path(__file__).with_name("boot.py").read_text(encoding="utf-8")
    args = [boot, script, "--file", f"function_{trainer.func.__name__}.py"]
    if policy != "torch":
        args += ["--launcher", "python"]
    for package in trainer.packages_to_install or ():
        _refuse_credentials(package, "packages_to_install")
        args += ["--package", package]
    for url in trainer.pip_index_urls or ():
        _refuse_credentials(url, "pip_index_urls")
        args += ["--index-url", url]
    python = ["python", "-c", START]
    return {
        "command": ["mpirun", *python] if policy == "mpi" else python,
        "args": [literal_text(text) for text in args],
    }


def _refuse_credentials(text: str, field: str) -> None:
    if _CREDENTIALS.search(text):
        problem = "an address with a password or token would be readable in the job's manifest"
        todo = "configure pip in the image, or set PIP_INDEX_URL from a Secret in the runtime"
        raise UsageError(problem, where=f"CustomTrainer({field}=...)", todo=todo)


def _is_local_path(package: str) -> bool:
    return (
        "://" not in package
        and "@" not in package
        and (package.startswith(".") or package.endswith((".whl", ".tar.gz")) or "/" in package)
    )


def _resources(wanted: Any) -> Manifest:
    """Kubernetes' names of resources, in the SDK's spelling too."""
    found: Manifest = {}
    for key, amount in wanted.items():
        lower = str(key).lower()
        name = lower if lower in _STANDARD or lower.startswith("mig-") else str(key)
        name = _ALIASES.get(name, f"nvidia.com/{name}" if name.startswith("mig-") else name)
        if name in found:
            where = "resources_per_node"
            raise UsageError(f"{name} is given twice", where=where, todo="give each resource once")
        found[name] = f"{amount:g}" if isinstance(amount, float) and not amount.is_integer() else amount
    return found


def _processes(resources: Manifest) -> int | None:
    """Processes per node for devices that the control plane does not count; None lets it count GPUs, else CPUs."""
    if any("gpu" in name.lower() for name in resources):
        return None
    devices = [name for name in resources if "/" in name]
    if not devices:
        return None
    try:
        return 1 if "/mig-" in devices[0] else max(1, whole(resources[devices[0]]))
    except ValueError:
        return None  # no quantity: the validator says so
