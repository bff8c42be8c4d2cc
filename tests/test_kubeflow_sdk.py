"""The official Kubeflow SDK, 0.5.0, with our runtimes, jobs and arguments, against the stand-in for the API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer, serving
from cluster_kit import Scene, show
from kubeflow.common.types import KubernetesBackendConfig
from kubeflow.trainer import CustomTrainer, CustomTrainerContainer, TrainerClient, TrainerType
from kubeflow.trainer.options import Name, TrainerArgs, TrainerCommand

from blueprints.errors import UsageError
from blueprints.jobset import build_job_set
from blueprints.kustomize import build
from blueprints.manifests import check_train_job
from blueprints.recipe import load_recipe
from blueprints.recipe.schema import (
    DPOConfig,
    LoraConfig,
    ResourcesConfig,
    RuntimeConfig,
    SFTConfig,
    TrainingConfig,
)
from blueprints.resolve import steps_of
from blueprints.runtimes import get_runtime, runtimes_directory, shipped_runtimes
from blueprints.sdk import sdk_arguments
from blueprints.trainjob import runtime_for, train_job

Manifest = dict[str, Any]
GENERIC = {item["metadata"]["name"]: item for item in build(runtimes_directory() / "generic")}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with serving() as stand_in:
        for runtime in [*shipped_runtimes().values(), *GENERIC.values()]:
            stand_in.put("clustertrainingruntimes", runtime)
        yield stand_in


@pytest.fixture(scope="module")
def sdk(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> TrainerClient:
    config = server.kubeconfig(tmp_path_factory.mktemp("sdk") / "config")
    return TrainerClient(KubernetesBackendConfig(config_file=str(config), namespace=server.namespace))


def test_it_lists_our_runtimes_with_their_trainers(sdk: TrainerClient) -> None:
    listed = {runtime.name: runtime for runtime in sdk.list_runtimes()}
    assert set(listed) == {*shipped_runtimes(), *GENERIC}
    for name, runtime in listed.items():
        assert runtime.trainer.trainer_type == TrainerType.CUSTOM_TRAINER, name
        assert runtime.trainer.image, name
        assert runtime.trainer.num_nodes >= 1, name
        assert runtime.trainer.command, name
    ours = get_runtime("llm-sft")["metadata"]
    assert listed[ours["name"]].trainer.framework == ours["labels"]["trainer.kubeflow.org/framework"]


@pytest.mark.parametrize("name", sorted([*shipped_runtimes(), *GENERIC]))
def test_it_gets_each_runtime(sdk: TrainerClient, name: str) -> None:
    assert sdk.get_runtime(name).name == name


def created(server: ApiServer, name: str) -> Manifest:
    """The TrainJob that the SDK sent, as it was."""
    job = server.all("trainjobs")[name]
    return {key: value for key, value in job.items() if key != "status"}


SOURCES: dict[str, Any] = {"model": "hf://Qwen/Qwen3-0.6B", "dataset": "hf://tatsu-lab/alpaca"}


def sft(**more: Any) -> SFTConfig:
    """A configuration with a model and a data set."""
    return SFTConfig(**{**SOURCES, **more})


CONFIGS = {
    "lora": sft(lora=LoraConfig(r=4)),
    "embedded": sft(model="builtin://tiny-llama", dataset="builtin://orders"),
    "gpus": sft(resources=ResourcesConfig(num_nodes=3, gpu=4, cpu="8", memory="64Gi")),
    "one process on many CPUs": sft(resources=ResourcesConfig(cpu="4", gpu=0)),
    "two processes, no GPU": sft(resources=ResourcesConfig(gpu=0, num_proc_per_node=2)),
    "half of the GPUs": sft(resources=ResourcesConfig(gpu=4, num_proc_per_node=2)),
    "mig": sft(resources=ResourcesConfig(gpu=1, gpu_resource="nvidia.com/mig-1g.10gb")),
    "dpo": DPOConfig(**SOURCES, training=TrainingConfig(learning_rate=1e-6)),
    "revision and patterns": sft(
        model={"uri": "hf://Qwen/Qwen3-0.6B", "revision": "main", "ignore_patterns": ["*.bin", "*.pt"]}
    ),
    "image, variables, labels, deadline": sft(
        runtime=RuntimeConfig(
            image="registry.example/trainer:2", env={"NCCL_DEBUG": "WARN", "COST": "$(X) $$"},
            labels={"kueue.x-k8s.io/queue-name": "q"}, active_deadline_seconds=3600,
        )
    ),
    "without initializers": sft(runtime=RuntimeConfig(name="llm-no-initializers")),
}  # fmt: skip


def pods(job: Manifest, runtime: Manifest) -> list[Any]:
    """What each Pod runs: image, command, arguments, variables, resources."""
    found = []
    for step in steps_of(build_job_set(job, runtime)):
        env = {(entry.name, entry.value, entry.field_path) for entry in step.env}
        found.append((step.name, step.image, step.argv, env, dict(step.resources.get("limits") or {})))
    return found


@pytest.mark.parametrize("case", CONFIGS)
def test_the_sdk_creates_the_job_that_we_write(sdk: TrainerClient, server: ApiServer, case: str) -> None:
    config = CONFIGS[case]
    name = f"sdk-{list(CONFIGS).index(case)}"
    assert sdk.train(**sdk_arguments(config, name=name)) == name
    job = created(server, name)
    loaded = load_recipe(None, base=config.as_layer())
    runtime = runtime_for(loaded.recipe)
    assert check_train_job(job, runtime) == []
    ours = train_job(loaded, runtime, name=name)
    assert job["metadata"]["labels"] == ours["metadata"]["labels"]
    assert job["metadata"]["annotations"] == ours["metadata"]["annotations"]
    assert job["spec"].get("activeDeadlineSeconds") == ours["spec"].get("activeDeadlineSeconds")
    for sent, wanted in zip(pods(job, runtime), pods(ours, runtime), strict=True):
        assert sent[:2] == wanted[:2]
        flags = [word for word in sent[2] if word.startswith("--nproc-per-node")]
        assert [word for word in sent[2] if word not in flags] == wanted[2]
        assert {k: str(v) for k, v in sent[4].items()} == {k: str(v) for k, v in wanted[4].items()}
        assert without_count(sent[3]) == without_count(wanted[3])
        assert processes(sent, flags) == processes(wanted, [])


def without_count(env: set[Any]) -> set[Any]:
    return {entry for entry in env if entry[0] != "PET_NPROC_PER_NODE"}


def processes(pod: Any, flags: list[str]) -> str | None:
    """Processes that torchrun starts in a Pod: as its command line says, else its environment, `auto` being the GPUs."""
    if flags:
        return flags[0].partition("=")[2]
    counted = {value for key, value, _ in pod[3] if key == "PET_NPROC_PER_NODE"}
    value = counted.pop() if counted else None
    return str(pod[4]["nvidia.com/gpu"]) if value == "auto" else value


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (sft(runtime=RuntimeConfig(secret_ref="hf-token")), "cannot name a Secret (hf-token)"),
        (sft(runtime=RuntimeConfig(name="llm-deepspeed-mpi"), resources=ResourcesConfig(num_nodes=2, gpu=4, num_proc_per_node=2)), "cannot say numProcPerNode"),
    ],
)  # fmt: skip
def test_what_the_sdk_cannot_say_is_refused(config: SFTConfig, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        sdk_arguments(config)
    assert said in str(raised.value)
    assert "blueprints render" in raised.value.todo


def test_it_takes_a_configuration() -> None:
    with pytest.raises(UsageError, match="SFTConfig"):
        sdk_arguments("sft")  # type: ignore[arg-type] - the mistake of a user
    assert sdk_arguments(DPOConfig(**SOURCES))["runtime"] == get_runtime("llm-dpo")["metadata"]["name"]


def test_container_and_options_by_hand(sdk: TrainerClient, server: ApiServer) -> None:
    runtime = get_runtime("llm-no-initializers")
    sdk.train(
        runtime=runtime["metadata"]["name"],
        trainer=CustomTrainerContainer(image="registry.example/t:1", num_nodes=2, resources_per_node={"gpu": 2}),
        options=[Name("by-hand"), TrainerCommand(["torchrun", "-m", "mine"]), TrainerArgs(["--lr", "1"])],
    )
    job = created(server, "by-hand")
    assert check_train_job(job, runtime) == []
    nodes = steps_of(build_job_set(job, runtime))
    assert [step.argv for step in nodes] == [["torchrun", "-m", "mine", "--lr", "1"]] * 2


def own(rate: float) -> None:
    print(rate)


@pytest.mark.parametrize("name", sorted(GENERIC))
def test_functions_of_the_sdk_run_on_the_general_runtimes(sdk: TrainerClient, server: ApiServer, name: str) -> None:
    job_name = f"fn-{name}"
    trainer = CustomTrainer(func=own, func_args={"rate": 0.1}, num_nodes=2)
    sdk.train(runtime=name, trainer=trainer, options=[Name(job_name)])
    assert check_train_job(created(server, job_name), GENERIC[name]) == []


def test_it_sees_jobs_that_we_made(sdk: TrainerClient, server: ApiServer) -> None:
    config = sft(lora=LoraConfig(r=4), resources=ResourcesConfig(num_nodes=2))
    loaded = load_recipe(None, base=config.as_layer())
    runtime = runtime_for(loaded.recipe)
    scene = Scene("ours", nodes=2, runtime=runtime)
    scene.job = train_job(loaded, runtime, name="ours") | {"status": {}}
    scene.job["metadata"] |= scene._metadata("ours", 60)
    scene.with_job_set()
    scene.initialized().with_pod("node", "Running", 0).with_pod("node", "Running", 1)
    for pod in scene.pods:
        for state in pod["status"]["containerStatuses"]:
            state |= {"imageID": "", "ready": True}
    show(server, scene)
    job = sdk.get_job("ours")
    assert (job.status, job.num_nodes, job.runtime.name) == ("Running", 2, runtime["metadata"]["name"])
    assert sorted(step.name for step in job.steps) == ["dataset-initializer", "model-initializer", "node-0", "node-1"]
    for pod in scene.pods:
        step = pod["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]
        server.logs[pod["metadata"]["name"], step] = [f"line of {pod['metadata']['name']}"]
    assert next(iter(sdk.get_job_logs("ours", step="node-1"))).startswith("line of ours-node-0-1")
    assert next(iter(sdk.get_job_logs("ours", step="dataset-initializer"))).startswith(
        "line of ours-dataset-initializer"
    )
    assert "ours" in [found.name for found in sdk.list_jobs()]
    server.put("trainjobs", scene.complete().job)
    assert sdk.wait_for_job_status("ours", timeout=4, polling_interval=1).status == "Complete"
    sdk.delete_job("ours")
    assert "ours" not in server.all("trainjobs")


def test_the_example_of_the_documentation() -> None:
    """Its code runs as it stands, but for the client."""
    page = (Path(__file__).resolve().parent.parent / "docs/kubeflow-sdk.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    lines = [line for line in code.splitlines() if not line.startswith(("client", "name ="))]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    assert set(space["arguments"]) == {"runtime", "initializer", "trainer", "options"}
