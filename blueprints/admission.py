"""What Trainer's and JobSet's webhooks refuse of a TrainJob on its runtime, by ML policy and scheduler; and what they let
pass and then run wrongly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from blueprints import torchtune
from blueprints.errors import Fault
from blueprints.jobset import LAUNCHER, POLICIES, QUEUE_ANNOTATION, RESERVED_ENV, gpus_of
from blueprints.runtimes import TRAINER_CONTAINER, Manifest, ancestor_of, pod_spec, replicated_jobs, trainer_container

_LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_LONGEST = 63


def policy_of(runtime: Manifest) -> str | None:
    """The ML policy of a runtime (`torch`, `mpi`, ...), None for plain nodes."""
    policy = (runtime.get("spec") or {}).get("mlPolicy") or {}
    return next((kind for kind in POLICIES if policy.get(kind) is not None), None)


def job_faults(job: Manifest, runtime: Manifest, where: str) -> Iterator[Fault]:
    """Faults of a TrainJob that its runtime's policies decide."""
    spec = job.get("spec") or {}
    given = spec.get("trainer")
    trainer: Manifest = given if isinstance(given, dict) else {}
    kind = policy_of(runtime)
    yield from _reserved(trainer, kind, where)
    if kind == "mpi":
        yield from _mpi(trainer, runtime, where)
    if kind in ("torch", "xgboost", "mpi"):
        yield from _hidden_devices(trainer, runtime, kind, where)
    if kind == "torch" and torchtune.applies(trainer):
        yield from _torchtune(spec, trainer, runtime, where)
    yield from _queue(spec, runtime, where)
    yield from _claim_names(job, runtime, where)


def _reserved(trainer: Manifest, kind: str | None, where: str) -> Iterator[Fault]:
    # The caller refuses torch's, which a job without its runtime may not set either.
    for entry in trainer.get("env") or []:
        if kind != "torch" and isinstance(entry, dict) and entry.get("name") in RESERVED_ENV.get(kind or "", ()):
            problem = "is set by the control plane and may not be given"
            yield Fault(where, f"spec.trainer.env.{entry['name']}", problem, "another name")


def _mpi(trainer: Manifest, runtime: Manifest, where: str) -> Iterator[Fault]:
    names = {job.get("name") for job in replicated_jobs(runtime)}
    as_node = runtime["spec"]["mlPolicy"]["mpi"].get("runLauncherAsNode")
    nodes = trainer.get("numNodes")
    if as_node and isinstance(nodes, int) and nodes >= 2 and not {LAUNCHER, TRAINER_CONTAINER} <= names:
        problem = f"{nodes} nodes, but the runtime's launcher trains too and it lacks a replicatedJob launcher or node"
        yield Fault(where, "spec.trainer.numNodes", problem, "1, or a runtime with both")


def _hidden_devices(trainer: Manifest, runtime: Manifest, kind: str, where: str) -> Iterator[Fault]:
    """The number of processes is read from the job's own resources alone: those of the runtime do not count then."""
    own = trainer.get("resourcesPerNode")
    told = any(str(word).replace("_", "-").startswith("--nproc-per-node") for word in trainer.get("command") or [])
    if not isinstance(own, dict) or trainer.get("numProcPerNode") is not None or told:
        return
    key = "spec.trainer.resourcesPerNode"
    try:
        theirs = gpus_of((trainer_container(runtime) or {}).get("resources") or {})
        mine = gpus_of(own)
    except ValueError:
        return  # a quantity that is none is told elsewhere
    listed = {name for part in ("limits", "requests") for name in own.get(part) or {}}
    if theirs and not any("gpu" in name.lower() for name in listed):
        problem = f"hides the runtime's {theirs} GPUs from the number of processes: each node would start one per CPU"
        yield Fault(where, key, problem, "the GPUs here too, or spec.trainer.numProcPerNode")
    devices = sorted(name for name in listed if "/" in name and "gpu" not in name.lower())
    if devices and not mine and kind in ("torch", "mpi"):
        problem = f"{devices[0]} does not count as a GPU: each node would start one process per CPU"
        yield Fault(where, "spec.trainer.numProcPerNode", problem, "the number of processes per node")


def _torchtune(spec: Manifest, trainer: Manifest, runtime: Manifest, where: str) -> Iterator[Fault]:
    name = str((spec.get("runtimeRef") or {}).get("name"))
    model, args = torchtune.model_of(name), [str(word) for word in trainer.get("args") or []]
    nodes = trainer.get("numNodes") or 1
    if model not in torchtune.MODELS:
        problem = f"{name!r} stands for no model that `tune run` is set up for"
        hint = "Any other command than exactly `tune run` is run as it is"
        yield Fault(where, "spec.runtimeRef.name", problem, "torchtune-<model>-<size>", hint)
    if nodes > 1 and model != "llama3_3/70B":
        yield Fault(where, "spec.trainer.numNodes", f"{nodes} nodes with `tune run` and {model}", "1")
    if nodes > 1 and (torchtune.uses_lora(args) or torchtune.uses_qlora(args)):
        yield Fault(where, "spec.trainer.numNodes", f"{nodes} nodes with LoRA: `tune run` would train all weights", "1")
    own = trainer.get("resourcesPerNode") or (trainer_container(runtime) or {}).get("resources") or {}
    processes = trainer.get("numProcPerNode")
    _, config = torchtune.recipe_and_config(args, name, nodes=nodes, processes=processes, gpus=gpus_of(own))
    if "_qlora" in config and model == "qwen2_5/1.5B":
        yield Fault(where, "spec.runtimeRef.name", f"QLoRA with `tune run` and {model}", "another model")
    if "_qlora" in config and "single_device" not in config and model in ("llama3_2/1B", "llama3_2/3B"):
        yield Fault(where, "spec.trainer.numProcPerNode", "QLoRA with `tune run` on several devices", "one GPU")
    for place, word in enumerate(args):
        if word.partition("=")[0] in torchtune.MANAGED:
            yield Fault(where, f"spec.trainer.args[{place}]", f"{word!r} comes from the runtime", "no such argument")


def _queue(spec: Manifest, runtime: Manifest, where: str) -> Iterator[Fault]:
    if ((runtime.get("spec") or {}).get("podGroupPolicy") or {}).get("volcano") is None:
        return
    template = runtime["spec"].get("template") or {}
    annotations = dict((template.get("metadata") or {}).get("annotations") or {})
    for patch in spec.get("runtimePatches") or []:
        change = ((patch.get("trainingRuntimeSpec") or {}).get("template") or {}).get("metadata") or {}
        annotations |= change.get("annotations") or {}
    if annotations.get(QUEUE_ANNOTATION) == "":
        yield Fault(where, f"annotations.{QUEUE_ANNOTATION}", "is empty", "the name of a Volcano queue, or none")


def _claim_names(job: Manifest, runtime: Manifest, where: str) -> Iterator[Fault]:
    name = str((job.get("metadata") or {}).get("name") or "")
    spec = ((runtime.get("spec") or {}).get("template") or {}).get("spec") or {}
    for policy in spec.get("volumeClaimPolicies") or []:
        for template in policy.get("templates") or []:
            claim = f"{(template.get('metadata') or {}).get('name')}-{name}"
            if len(claim) > _LONGEST:
                problem = f"the volume claim's name {claim!r} would have {len(claim)} characters"
                yield Fault(where, "metadata.name", problem, f"at most {_LONGEST}")


def runtime_faults(runtime: Manifest, where: str) -> Iterator[Fault]:
    """Faults of a runtime that JobSet's webhook or the policies' address scheme decide."""
    spec = runtime.get("spec") or {}
    template = (spec.get("template") or {}).get("spec") or {}
    jobs = replicated_jobs(runtime)
    key = "spec.template.spec"
    for job in jobs:
        name = job.get("name")
        if not isinstance(name, str) or not _LABEL.match(name) or len(name) > _LONGEST:
            rule = "lower-case letters, digits and '-', a letter first"
            yield Fault(where, f"{key}.replicatedJobs[{name}].name", f"{name!r} is not a valid name", rule)
    yield from _targets(template, [str(job.get("name")) for job in jobs], key, where)
    policy = spec.get("mlPolicy") or {}
    if policy_of(runtime) == "mpi":
        yield from _mpi_runtime(policy, jobs, where)
    torch = policy.get("torch")
    if isinstance(torch, dict):
        yield from _injected(torch, jobs, where)
    groups = spec.get("podGroupPolicy") or {}
    if groups.get("coscheduling") is not None and groups.get("volcano") is not None:
        yield Fault(where, "spec.podGroupPolicy", "has coscheduling and volcano", "one of them")


def _targets(template: Manifest, names: list[str], key: str, where: str) -> Iterator[Fault]:
    for place, rule in enumerate((template.get("failurePolicy") or {}).get("rules") or []):
        for target in rule.get("targetReplicatedJobs") or []:
            if target not in names:
                field = f"{key}.failurePolicy.rules[{place}]"
                yield Fault(where, field, f"names an unknown replicatedJob {target!r}", ", ".join(names))
    coordinator = template.get("coordinator")
    if isinstance(coordinator, dict) and coordinator.get("replicatedJob") not in names:
        problem = f"names an unknown replicatedJob {coordinator.get('replicatedJob')!r}"
        yield Fault(where, f"{key}.coordinator", problem, ", ".join(names))


def _mpi_runtime(policy: Manifest, jobs: list[Manifest], where: str) -> Iterator[Fault]:
    names = [job.get("name") for job in jobs]
    if LAUNCHER not in names:
        hint = "The hostfile and the SSH key are put into replicatedJobs of the names launcher and node"
        yield Fault(where, "spec.template.spec.replicatedJobs", "lacks a replicatedJob 'launcher'", "one", hint)
    nodes = policy.get("numNodes", 1)
    if isinstance(nodes, int) and nodes > 1 and any(ancestor_of(job) == "trainer" for job in jobs):
        problem = f"{nodes} would start {nodes} launchers: the number of nodes belongs into the TrainJob"
        yield Fault(where, "spec.mlPolicy.numNodes", problem, "1 with the policy mpi")


def _injected(torch: Manifest, jobs: list[Manifest], where: str) -> Iterator[Fault]:
    key = "spec.mlPolicy.torch.envInjection"
    for target in (torch.get("envInjection") or {}).get("targets") or []:
        job = next((entry for entry in jobs if entry.get("name") == target.get("jobName")), None)
        pod: dict[str, Any] = {} if job is None else pod_spec(job)
        present = [entry.get("name") for part in ("containers", "initContainers") for entry in pod.get(part) or []]
        for name in target.get("containerNames") or []:
            if name == TRAINER_CONTAINER:
                yield Fault(where, key, "names the container node, which gets the variables anyway", "other containers")
            elif name not in present:
                yield Fault(where, key, f"there is no container {name!r} in {target.get('jobName')!r}", str(present))
