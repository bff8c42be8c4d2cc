"""The types of the Python client, with the names and fields of the Kubeflow SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from blueprints.errors import UsageError

if TYPE_CHECKING:
    from blueprints.recipe.schema import Run


def require_type(value: object, types: type | tuple[type, ...], where: str, wanted: str) -> None:
    """See that an argument is of the type it should be.

    Raises:
        UsageError: it is not; `where` names the argument, `wanted` what it should be.
    """
    if not isinstance(value, types):
        found = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}"
        raise UsageError(f"found {found[:200]}", where=where, todo=f"give {wanted}")


@dataclass(frozen=True)
class DatasetInitializer:
    """Where the rows come from, instead of the configuration's `dataset`.

    Attributes:
        storage_uri: `hf://org/name[@revision]`, `file:///path` or `builtin://name`.
        ignore_patterns: files not to fetch, as glob patterns.
        revision: branch, tag or commit of a `hf://` data set.
        access_token: not accepted: set `HF_TOKEN` in the environment, or name a Secret in `RuntimeConfig.secret_ref`.
    """

    storage_uri: str
    ignore_patterns: list[str] | None = None
    revision: str | None = None
    access_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class ModelInitializer:
    """Where the base model comes from, instead of the configuration's `model`.

    Attributes:
        storage_uri: `hf://org/name`, `file:///dir` or `builtin://name`.
        ignore_patterns: files not to fetch, as glob patterns.
        revision: branch, tag or commit of a `hf://` model.
        access_token: not accepted: set `HF_TOKEN` in the environment, or name a Secret in `RuntimeConfig.secret_ref`.
    """

    storage_uri: str
    ignore_patterns: list[str] | None = None
    revision: str | None = None
    access_token: str | None = field(default=None, repr=False)


HuggingFaceDatasetInitializer = DatasetInitializer
"""The SDK's name."""
HuggingFaceModelInitializer = ModelInitializer
"""The SDK's name."""


@dataclass(frozen=True)
class Initializer:
    """Data set and model of a run; a plain string is a URI."""

    dataset: DatasetInitializer | str | None = None
    model: ModelInitializer | str | None = None


@dataclass(frozen=True)
class BuiltinTrainer:
    """Training by one of the product's own methods.

    Attributes:
        config: `SFTConfig(...)` and its like.

    Raises:
        UsageError: `config` is something else.
    """

    config: Run

    def __post_init__(self) -> None:
        from blueprints.recipe.schema import Run  # the configuration at hand has imported it already

        require_type(self.config, Run, "BuiltinTrainer(config=...)", "a configuration such as SFTConfig(...)")


@dataclass(frozen=True)
class RuntimeTrainer:
    """The trainer of a runtime.

    Attributes:
        trainer_type: `BuiltinTrainer` where the runtime brings a trainer that reads recipes, else `CustomTrainer`.
        framework: the runtime's framework label.
        image: image of the trainer.
        num_nodes: nodes when the job says nothing.
        command: what the trainer's container starts.
        recipe: the recipe it trains with when the job says nothing.
    """

    trainer_type: str
    framework: str
    image: str
    num_nodes: int = 1
    command: tuple[str, ...] = ()
    recipe: str | None = None


@dataclass(frozen=True)
class Runtime:
    """A ClusterTrainingRuntime."""

    name: str
    trainer: RuntimeTrainer
    kind: str = "ClusterTrainingRuntime"


@dataclass(frozen=True)
class Step:
    """One step of a job.

    Attributes:
        name: `model-initializer`, `dataset-initializer`, `node-0`, ...
        status: `Pending`, `Running`, `Succeeded` or `Failed`.
        pod_name: name of its Pod; on this machine of its process's log file.
        device: `cpu` or `gpu`.
        device_count: how many, as text.
        exit_code: of its last attempt; None while it runs.
    """

    name: str
    status: str
    pod_name: str
    device: str = "Unknown"
    device_count: str = "Unknown"
    exit_code: int | None = None


@dataclass(frozen=True)
class TrainJob:
    """A job.

    Attributes:
        name: of the job.
        runtime: what it runs on.
        steps: its steps, in order.
        num_nodes: nodes of the trainer.
        creation_timestamp: when it was made.
        status: `Created`, `Running`, `Complete` or `Failed`.
        reason: why it failed, in one word.
        message: why it failed, in a sentence.
        output: directory of its results, where the client can see it.
        metrics: of the trained model, from the run's record.
    """

    name: str
    runtime: Runtime
    steps: list[Step]
    num_nodes: int
    creation_timestamp: datetime
    status: str
    reason: str = ""
    message: str = ""
    output: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Something that happened to a job or a step.

    Attributes:
        involved_object_kind: `TrainJob`, `JobSet`, `Job`, `Pod`, ...
        involved_object_name: which one.
        message: what happened.
        reason: the same in one word.
        event_time: when, the last time.
        type: `Normal` or `Warning`.
    """

    involved_object_kind: str
    involved_object_name: str
    message: str
    reason: str
    event_time: datetime
    type: str = "Normal"


@dataclass(frozen=True)
class Name:
    """Option of `TrainerClient.train`: the job's name."""

    name: str


@dataclass(frozen=True)
class Labels:
    """Option of `TrainerClient.train`: labels of the TrainJob."""

    labels: dict[str, str]


@dataclass(frozen=True)
class Annotations:
    """Option of `TrainerClient.train`: annotations of the TrainJob."""

    annotations: dict[str, str]


@dataclass(frozen=True)
class ActiveDeadlineSeconds:
    """Option of `TrainerClient.train`: stop and fail the job after so many seconds."""

    seconds: int


@dataclass(frozen=True)
class TrainerCommand:
    """Option of `TrainerClient.train` with a `CustomTrainerContainer`: what its image starts, instead of its own."""

    command: list[str]


@dataclass(frozen=True)
class TrainerArgs:
    """Option of `TrainerClient.train` with a `CustomTrainerContainer`: arguments of what its image starts."""

    args: list[str]


Option = Name | Labels | Annotations | ActiveDeadlineSeconds | TrainerCommand | TrainerArgs
Callback = Callable[[TrainJob], None]
