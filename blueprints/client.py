"""The Python client: method and argument names of the Kubeflow SDK's `TrainerClient`."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from types import NoneType
from typing import Any

from blueprints.backends.base import open_backend
from blueprints.backends.state import FAILED, JobStatus, StepStatus
from blueprints.custom_trainer import (
    DEFAULT_RUNTIME,
    CustomTrainer,
    CustomTrainerContainer,
    custom_job,
    custom_name,
    for_this_machine,
    set_words,
)
from blueprints.errors import JobFailedError, UsageError
from blueprints.recipe import LoadedRecipe, load_recipe
from blueprints.runtimes import (
    FRAMEWORK,
    Manifest,
    find_runtime,
    recipe_of,
    trainer_container,
)
from blueprints.trainjob import default_name, runtime_name, train_job
from blueprints.types import (
    ActiveDeadlineSeconds,
    Annotations,
    BuiltinTrainer,
    Callback,
    DatasetInitializer,
    Event,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    Labels,
    ModelInitializer,
    Name,
    Option,
    Runtime,
    RuntimeTrainer,
    Step,
    TrainerArgs,
    TrainerCommand,
    TrainJob,
    require_type,
)

__all__ = [
    "ActiveDeadlineSeconds",
    "Annotations",
    "BuiltinTrainer",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DatasetInitializer",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "Initializer",
    "Labels",
    "ModelInitializer",
    "Name",
    "TrainerClient",
    "WaitFailedError",
]

STATES = ("Created", "Suspended", "Queued", "Initializing", "Running", "Complete", "Failed")
"""Suspended, Queued and Initializing are only of a cluster."""


class WaitFailedError(JobFailedError, RuntimeError):
    """The job that was waited for has failed. A `RuntimeError` too, as the SDK raises."""


class TrainerClient:
    """Starts and watches training jobs.

    Args:
        backend: `local`: this machine; `kubernetes`: a cluster with Kubeflow Trainer.
        kubeconfig: of the cluster. Default: `$KUBECONFIG`, `~/.kube/config`, else the Pod's own account.
        context: of the kubeconfig. Default: its current one.
        namespace: of the jobs. Default: the context's.

    Raises:
        UsageError: there is no such backend, or no cluster is configured.
    """

    def __init__(
        self,
        backend: str = "local",
        *,
        kubeconfig: str | None = None,
        context: str | None = None,
        namespace: str | None = None,
    ) -> None:
        self.backend = open_backend(backend, kubeconfig=kubeconfig, context=context, namespace=namespace)
        self._seen: dict[str, Runtime] = {}

    def list_runtimes(self) -> list[Runtime]:
        """The runtimes a job can name; in a cluster those that are installed."""
        return [_runtime(manifest) for manifest in self.backend.runtimes()]

    def get_runtime(self, name: str) -> Runtime:
        """One runtime.

        Raises:
            UsageError: there is none of that name.
        """
        return _runtime(self.backend.runtime(name))

    def get_runtime_packages(self, runtime: str | Runtime) -> None:
        """Print the Python packages that a runtime's trainer has: on this machine, those of this Python.

        Raises:
            UsageError: the runtime is in a cluster, where only its image knows.
        """
        found = runtime if isinstance(runtime, Runtime) else self.get_runtime(runtime)
        if self.backend.name != "local":
            raise UsageError(
                "a job that only lists packages would fetch its model and rows first",
                where="get_runtime_packages",
                todo=f"kubectl run packages --rm -it --restart=Never --image {found.trainer.image} -- pip list",
            )
        packages = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
        print(f"Python {platform.python_version()}")
        for name in sorted(packages, key=str.lower):
            print(f"{name}=={packages[name]}")

    def train(
        self,
        runtime: str | Runtime | None = None,
        initializer: Initializer | None = None,
        trainer: BuiltinTrainer | CustomTrainer | CustomTrainerContainer | None = None,
        options: Sequence[Option] | None = None,
    ) -> str:
        """Start a job and return at once.

        Args:
            runtime: the runtime or its name. Default: the method's own, `llm-<method>`; `torch-distributed` for a
                `CustomTrainer`.
            initializer: data set and model, instead of the configuration's.
            trainer: what to train: a configuration, or a function of your own. Default: the runtime's own recipe.
            options: `Name(...)`, `Labels(...)`, `Annotations(...)`, `ActiveDeadlineSeconds(...)`; for an image also
                `TrainerCommand([...])` and `TrainerArgs([...])`.

        Returns:
            the job's name. The name of a stopped or failed job with the same recipe makes that job go on.

        Raises:
            UsageError: an argument is of another type than it should be.
            RecipeError: the configuration is invalid; all faults at once.
            ManifestError: the job's name or another option is invalid.
            EnvironmentFault: libraries are missing, or the disk cannot be written.
        """
        _check_arguments(runtime, initializer, trainer, options)
        name = runtime.name if isinstance(runtime, Runtime) else runtime
        if isinstance(trainer, CustomTrainer | CustomTrainerContainer):
            return self._train_custom(name, initializer, trainer, options or ())
        loaded = self._load(name, initializer, trainer)
        manifest = self.backend.runtime(runtime_name(loaded.recipe))
        wanted = [option for option in options or () if isinstance(option, Name)]
        job_name = wanted[-1].name if wanted else default_name(loaded, manifest, unique=True)
        job = train_job(loaded, manifest, name=job_name)
        for option in options or ():
            _apply(option, job)
        self.backend.start(job, manifest, resume=f"TrainerClient().train(..., options=[Name({job_name!r})])")
        return job_name

    def _train_custom(
        self,
        runtime: str | None,
        initializer: Initializer | None,
        trainer: CustomTrainer | CustomTrainerContainer,
        options: Sequence[Option],
    ) -> str:
        if initializer is not None:
            todo = "let the function fetch what it needs, or use BuiltinTrainer with CustomConfig"
            raise UsageError(
                "a function of your own runs without initializers", where="train(initializer=...)", todo=todo
            )
        manifest = self.backend.runtime(runtime or DEFAULT_RUNTIME)
        wanted = [option.name for option in options if isinstance(option, Name)]
        name = wanted[-1] if wanted else custom_name(trainer, manifest)
        job = custom_job(trainer, manifest, name=name)
        for option in options:
            _apply(option, job)
        if self.backend.name == "local":
            job, manifest = for_this_machine(job, manifest)
        self.backend.start(job, manifest, resume=f"TrainerClient().train(..., options=[Name({name!r})])")
        return name

    def list_jobs(self, runtime: str | Runtime | None = None) -> list[TrainJob]:
        """All jobs, the newest first; with `runtime` those on it."""
        name = runtime.name if isinstance(runtime, Runtime) else runtime
        found = find_runtime(name, self.backend.runtimes()) if name is not None else None
        wanted = {name, found["metadata"]["name"]} if found else {name}
        return [self._job(status) for status in self.backend.jobs() if name is None or status.runtime in wanted]

    def get_job(self, name: str) -> TrainJob:
        """A job with its steps.

        Raises:
            UsageError: there is none of that name.
        """
        return self._job(self.backend.get(name))

    def get_job_logs(self, name: str, step: str = "node-0", follow: bool = False) -> Iterator[str]:
        """Lines that a step printed.

        Args:
            name: the job.
            step: `model-initializer`, `dataset-initializer`, `node-0`, ...
            follow: wait for more until the job has ended.
        """
        return (line for _, line in self.backend.logs(name, [step], follow=follow))

    def get_job_events(self, name: str) -> list[Event]:
        """What happened to a job and its steps, oldest first."""
        return self.backend.events(name)

    def wait_for_job_status(
        self,
        name: str,
        status: Collection[str] = frozenset({"Complete"}),
        timeout: float = 600,
        polling_interval: float = 2,
        callbacks: Sequence[Callback] | None = None,
    ) -> TrainJob:
        """Wait until a job has one of the statuses.

        Args:
            name: the job.
            status: of `Created`, `Running`, `Complete`, `Failed`; in a cluster also `Suspended`, `Queued`, `Initializing`.
            timeout: seconds to wait at most.
            polling_interval: seconds between two looks.
            callbacks: called with the job at each look.

        Raises:
            WaitFailedError: the job has failed and `Failed` is not among `status`; a `RuntimeError`.
            TimeoutError: none was reached in time.
            UsageError: an argument is invalid.
        """
        _check_wait(status, timeout, polling_interval)
        deadline = time.monotonic() + timeout
        while True:
            job = self.get_job(name)
            for callback in callbacks or ():
                callback(job)
            if job.status in status:
                return job
            if job.status == FAILED:
                state = self.backend.get(name)
                raise WaitFailedError(f"job {name!r} failed: {state.message}", todo=state.todo)
            if job.status == "Complete":
                raise UsageError(f"job {name!r} is Complete and will not reach {', '.join(status)}", where="status")
            if time.monotonic() >= deadline:
                why = f": {job.message}" if job.message else ""
                raise TimeoutError(f"job {name!r} is {job.status} after {timeout:g} s{why}")
            time.sleep(max(0.0, min(polling_interval, deadline - time.monotonic())))

    def delete_job(self, name: str) -> None:
        """Stop a job if it runs, and remove it: on this machine with all its files; in a cluster what was trained stays on
        the claim that its runtime retains.
        """
        self.backend.delete(name, force=True)

    def suspend_job(self, name: str) -> None:
        """Stop a job, saving its state, so that it can go on later.

        Raises:
            UsageError: it does not run, or a queue decides when it does.
        """
        self.backend.suspend(name)

    def resume_job(self, name: str) -> None:
        """Let a suspended job go on from its last checkpoint.

        Raises:
            UsageError: it has ended (on this machine: is complete), or a queue decides when it runs.
        """
        self.backend.resume(name)

    def _load(
        self, runtime: str | None, initializer: Initializer | None, trainer: BuiltinTrainer | None
    ) -> LoadedRecipe:
        """The configuration with the initializer's sources and the runtime's name laid over it."""
        layer: dict[str, Any] = {}
        if trainer is not None:
            layer = trainer.config.as_layer()
        else:
            base = recipe_of(self.backend.runtime(runtime)) if runtime else None
            if base is None:
                raise UsageError(
                    "neither a trainer nor a runtime is given", where="train()", todo="give trainer= or runtime="
                )
            layer = load_recipe(base, environ={}).recipe.model_dump(mode="json", exclude_unset=True)
        if runtime is not None:
            self.backend.runtime(runtime)
            layer["runtime"] = {**_block(layer.get("runtime"), "name"), "name": runtime}
        if initializer is not None:
            for role, source in (("dataset", initializer.dataset), ("model", initializer.model)):
                if source is not None:
                    layer[role] = {**_other_keys(layer.get(role)), **_source(role, source)}
        return load_recipe(None, base=layer)

    def _job(self, status: JobStatus) -> TrainJob:
        directory = self.backend.files(status.name)
        run = self.backend.run(status.name)
        return TrainJob(
            name=status.name,
            runtime=self._runtime_named(status.runtime),
            steps=[_step(status.name, step) for step in status.steps],
            num_nodes=status.num_nodes,
            creation_timestamp=datetime.fromisoformat(status.created),
            status=status.state,
            reason=status.reason,
            message=status.message,
            output=str(directory.output) if directory is not None and directory.output.is_dir() else None,
            metrics=run.metrics if run else {},
        )

    def _runtime_named(self, name: str) -> Runtime:
        """A job's runtime, which may not be there any more; each is looked up once."""
        if name not in self._seen:
            try:
                self._seen[name] = self.get_runtime(name)
            except UsageError:
                self._seen[name] = Runtime(name, RuntimeTrainer("BuiltinTrainer", "Unknown", "Unknown"))
        return self._seen[name]


def _step(job: str, step: StepStatus) -> Step:
    device = step.device or ("gpu" if step.gpus else "cpu")
    count = step.device_count or step.gpus
    return Step(
        name=step.name,
        status=step.status,
        pod_name=step.pod or f"{job}-{step.replicated_job}-0-{step.index}",
        device=device,
        device_count=str(count) if count else "Unknown",
        exit_code=step.exit_code,
    )


def _check_arguments(runtime: object, initializer: object, trainer: object, options: object) -> None:
    require_type(runtime, (str, Runtime, NoneType), "train(runtime=...)", "a runtime's name")
    require_type(initializer, (Initializer, NoneType), "train(initializer=...)", "Initializer(dataset=..., model=...)")
    trainers = (BuiltinTrainer, CustomTrainer, CustomTrainerContainer, NoneType)
    wanted = "BuiltinTrainer(config=...) or CustomTrainer(func=...)"
    require_type(trainer, trainers, "train(trainer=...)", wanted)
    require_type(options, (list, tuple, NoneType), "train(options=...)", "a list such as [Name('my-job')]")
    if isinstance(initializer, Initializer):
        for role, kind in (("dataset", DatasetInitializer), ("model", ModelInitializer)):
            source = initializer.dataset if role == "dataset" else initializer.model
            require_type(source, (str, kind, NoneType), f"Initializer({role}=...)", f"a URI or {kind.__name__}(...)")


def _block(value: Any, short: str) -> dict[str, Any]:
    return {short: value} if isinstance(value, str) else dict(value or {})


def _other_keys(value: Any) -> dict[str, Any]:
    """A source's block without what belongs to the source it named before."""
    return {key: item for key, item in _block(value, "uri").items() if key not in ("uri", "revision")}


def _source(role: str, source: DatasetInitializer | ModelInitializer | str) -> dict[str, Any]:
    if isinstance(source, str):
        return {"uri": source}
    if source.access_token is not None:
        raise UsageError(
            "a token would be readable in the job's manifest",
            where=f"Initializer({role}=...access_token)",
            todo="set HF_TOKEN in the environment, or name a Secret: RuntimeConfig(secret_ref=...)",
        )
    block: dict[str, Any] = {"uri": source.storage_uri}
    if source.ignore_patterns is not None:
        block["ignore_patterns"] = list(source.ignore_patterns)
    if source.revision is not None:
        block["revision"] = source.revision
    return block


def _apply(option: Option, job: Manifest) -> None:
    match option:
        case Name():
            pass  # the job was made with it
        case Labels(labels):
            job["metadata"]["labels"] |= labels
        case Annotations(annotations):
            job["metadata"]["annotations"] |= annotations
        case ActiveDeadlineSeconds(seconds):
            job["spec"]["activeDeadlineSeconds"] = seconds
        case TrainerCommand() | TrainerArgs():
            set_words(option, job)
        case _:
            raise UsageError(
                f"{option!r} is not an option",
                where="train(options=...)",
                todo="use Name, Labels, Annotations, ActiveDeadlineSeconds, TrainerCommand, TrainerArgs of blueprints.types",
            )


def _check_wait(status: Collection[str], timeout: float, polling_interval: float) -> None:
    unknown = [value for value in status if value not in STATES]
    if unknown or isinstance(status, str) or not status:
        problem = f"{status!r} is not a set of statuses"
        raise UsageError(problem, where="status", todo=f"use some of {', '.join(STATES)}")
    if timeout <= 0 or polling_interval <= 0:
        raise UsageError("must be positive", where="timeout and polling_interval")


def _runtime(manifest: Manifest) -> Runtime:
    container = trainer_container(manifest) or {}
    reads_recipes = "trainers" in (container.get("command") or [])
    trainer = RuntimeTrainer(
        trainer_type="BuiltinTrainer" if reads_recipes else "CustomTrainer",
        framework=str((manifest["metadata"].get("labels") or {}).get(FRAMEWORK, "Unknown")),
        image=str(container.get("image", "Unknown")),
        num_nodes=int((manifest["spec"].get("mlPolicy") or {}).get("numNodes", 1)),
        command=tuple(container.get("command") or ()),
        recipe=recipe_of(manifest),
    )
    return Runtime(manifest["metadata"]["name"], trainer, str(manifest["kind"]))
