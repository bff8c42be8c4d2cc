"""One of our configurations as arguments of the official Kubeflow SDK, 0.5.

The SDK sends what it knows: `TrainerClient().train(**sdk_arguments(config))` creates a TrainJob that resolves to the same
Pods as ours. What it has no words for is refused here rather than lost.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blueprints.errors import EnvironmentFault, UsageError
from blueprints.jobset import build_job_set
from blueprints.manifests import require_valid
from blueprints.recipe import load_recipe
from blueprints.runtimes import Manifest, trainer_container
from blueprints.trainjob import runtime_for, train_job
from blueprints.types import require_type

if TYPE_CHECKING:
    from blueprints.recipe.schema import Run

_KNOWN = ("runtimeRef", "initializer", "trainer", "runtimePatches", "activeDeadlineSeconds")
_TODO = "use TrainerClient of blueprints, or `blueprints render` and kubectl"


@dataclass(frozen=True)
class RuntimePatches:
    """Option of the SDK's `train()`: the TrainJob's runtimePatches as they are, under their own manager."""

    patches: list[Manifest]

    def __call__(self, job_spec: Manifest, trainer: Any, backend: Any) -> None:  # noqa: ARG002 - the SDK's signature
        """Add them to the job that the SDK builds."""
        job_spec.setdefault("spec", {}).setdefault("runtimePatches", []).extend(self.patches)


def sdk_arguments(config: Run, *, name: str | None = None) -> dict[str, Any]:
    """The arguments `runtime`, `initializer`, `trainer` and `options` of `kubeflow.trainer.TrainerClient.train`.

    Args:
        config: `SFTConfig(...)` or its like.
        name: of the job. Default: made of the method and the recipe's hash.

    Returns:
        keyword arguments: `kubeflow.trainer.TrainerClient().train(**sdk_arguments(config))`.

    Raises:
        RecipeError: the configuration is invalid.
        UsageError: it needs what the SDK cannot say: Secrets, suspend.
        EnvironmentFault: the package `kubeflow` is not installed.
    """
    from blueprints.recipe.schema import Run

    require_type(config, Run, "sdk_arguments(config)", "a configuration such as SFTConfig(...)")
    loaded = load_recipe(None, base=config.as_layer())
    runtime = runtime_for(loaded.recipe)
    job = train_job(loaded, runtime, name=name)
    require_valid(job, runtime)
    try:
        from kubeflow.trainer import CustomTrainerContainer, options
    except ImportError:
        todo = "pip install kubeflow"
        raise EnvironmentFault("the Kubeflow SDK is not installed", where="sdk_arguments()", todo=todo) from None
    spec = job["spec"]
    if unknown := sorted(set(spec) - set(_KNOWN)):
        raise UsageError(f"the SDK cannot say spec.{unknown[0]}", where="sdk_arguments()", todo=_TODO)
    trainer = spec["trainer"]
    chosen: list[Any] = [
        options.Name(job["metadata"]["name"]),
        options.Labels(job["metadata"]["labels"]),
        options.Annotations(job["metadata"]["annotations"]),
        options.TrainerArgs(trainer["args"]),
    ]
    if (command := _command(job, runtime)) is not None:
        chosen.append(options.TrainerCommand(command))
    if "activeDeadlineSeconds" in spec:
        chosen.append(options.ActiveDeadlineSeconds(spec["activeDeadlineSeconds"]))
    if spec.get("runtimePatches"):
        chosen.append(RuntimePatches(spec["runtimePatches"]))
    container = CustomTrainerContainer(
        image=trainer.get("image") or (trainer_container(runtime) or {})["image"],
        num_nodes=trainer["numNodes"],
        resources_per_node=_resources(trainer),
        env=_plain_env(trainer.get("env") or [], "the trainer") or None,
    )
    initializer = _initializer(spec.get("initializer") or {})
    return {"runtime": runtime["metadata"]["name"], "initializer": initializer, "trainer": container, "options": chosen}


def _resources(trainer: Manifest) -> dict[str, str] | None:
    """As text: the SDK makes `1.0` of numbers."""
    wanted = trainer.get("resourcesPerNode") or {}
    amounts = {**(wanted.get("requests") or {}), **(wanted.get("limits") or {})}
    return {key: str(amount) for key, amount in amounts.items()} or None


def _command(job: Manifest, runtime: Manifest) -> list[str] | None:
    """The runtime's command with `--nproc-per-node` where the control plane would count otherwise: the SDK has no
    numProcPerNode; None where the runtime's own will do."""
    wanted = job["spec"]["trainer"].get("numProcPerNode")
    without = {key: value for key, value in job["spec"]["trainer"].items() if key != "numProcPerNode"}
    counted = build_job_set({**job, "spec": {**job["spec"], "trainer": without}}, runtime)
    processes = _processes(counted)
    gpus = (without.get("resourcesPerNode") or {}).get("limits") or {}
    if processes == "auto":
        processes = next((str(amount) for name, amount in gpus.items() if "gpu" in name.lower()), "auto")
    others = any("/" in name and "gpu" not in name.lower() for name in gpus)  # where counting is a trap, it is said
    if wanted is None or (processes == str(wanted) and not others):
        return None
    command = list((trainer_container(runtime) or {}).get("command") or [])
    if "torchrun" not in command:
        problem = f"the SDK cannot say numProcPerNode, and {wanted} is not what the runtime would start"
        raise UsageError(problem, where="sdk_arguments()", todo=_TODO)
    place = command.index("torchrun") + 1
    return [*command[:place], f"--nproc-per-node={wanted}", *command[place:]]


def _processes(job_set: Manifest) -> str | None:
    for replicated in job_set["spec"]["replicatedJobs"]:
        for container in replicated["template"]["spec"]["template"]["spec"]["containers"]:
            for entry in container.get("env") or []:
                if entry["name"] == "PET_NPROC_PER_NODE":
                    return str(entry["value"])
    return None


def _plain_env(entries: list[Manifest], whose: str) -> dict[str, str]:
    found = {}
    for entry in entries:
        if "value" not in entry:
            problem = f"the SDK takes plain text alone, and {entry['name']} of {whose} comes from elsewhere"
            raise UsageError(problem, where="sdk_arguments()", todo=_TODO)
        found[entry["name"]] = entry["value"]
    return found


def _initializer(given: Manifest) -> Any:
    """The SDK's initializers with the variables that ours read.

    The SDK sends every field of an initializer beside `storage_uri` as a variable of that name in capitals: a subclass
    with further fields brings `BLUEPRINTS_RECIPE` and the like along.
    """
    from kubeflow.trainer import HuggingFaceDatasetInitializer, HuggingFaceModelInitializer, Initializer

    made: dict[str, Any] = {}
    for role, base in (("dataset", HuggingFaceDatasetInitializer), ("model", HuggingFaceModelInitializer)):
        source = given.get(role)
        if source is None:
            continue
        if source.get("secretRef"):
            problem = f"the SDK cannot name a Secret ({source['secretRef']['name']}) for the {role} initializer"
            raise UsageError(problem, where="runtime.secret_ref", todo=_TODO)
        env = {name.lower(): value for name, value in _plain_env(source["env"], f"the {role} initializer").items()}
        present = {field.name for field in dataclasses.fields(base)}
        more = [(name, str | None, dataclasses.field(default=None)) for name in env if name not in present]
        kind = dataclasses.make_dataclass(f"Blueprints{base.__name__}", more, bases=(base,))
        made[role] = kind(**{"storage_uri": source["storageUri"], "ignore_patterns": None, **env})
    return Initializer(**made) if made else None
