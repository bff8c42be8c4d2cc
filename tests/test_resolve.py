"""From TrainJob and runtime to steps, by the rules Kubeflow Trainer 2.3 follows."""

from __future__ import annotations

from typing import Any

import pytest
from jobs_kit import Manifest, tiny_job, tiny_runtime

from blueprints.errors import UsageError
from blueprints.jobset import build_job_set, strategic_merge
from blueprints.quantity import parse_quantity
from blueprints.recipe import load_recipe
from blueprints.resolve import Step, resolve
from blueprints.runtimes import get_runtime
from blueprints.trainjob import train_job


def steps(job: Manifest, runtime: Manifest) -> dict[str, Step]:
    """The steps by name."""
    return {step.name: step for step in resolve(job, runtime).steps}


def env(step: Step) -> dict[str, str | None]:
    """Literal variables of a step."""
    return {variable.name: variable.value for variable in step.env}


def container(runtime: Manifest, place: int = 0) -> dict[str, Any]:
    """The container of a replicatedJob."""
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][place]["template"]["spec"]["template"]["spec"]
    found: dict[str, Any] = pod["containers"][0]
    return found


def test_shipped_runtime_gives_three_steps_in_order() -> None:
    runtime = get_runtime("llm-sft")
    resolved = resolve(train_job(load_recipe("quickstart", environ={}), runtime, name="demo"), runtime)
    assert [step.name for step in resolved.steps] == ["model-initializer", "dataset-initializer", "node-0"]
    model, dataset, node = resolved.steps
    assert model.argv == ["python", "-m", "initializers", "model"]
    assert dataset.argv == ["python", "-m", "initializers", "dataset"]
    assert [dependency.replicated_job for dependency in dataset.depends_on] == ["model-initializer"]
    assert node.argv == ["python", "-m", "trainers.launch", "torchrun", "-m", "trainers", "--recipe", "quickstart"]
    assert [dependency.replicated_job for dependency in node.depends_on] == ["model-initializer", "dataset-initializer"]
    assert env(model)["STORAGE_URI"] == "builtin://tiny-llama"
    assert env(dataset)["STORAGE_URI"] == "builtin://orders"
    assert env(node)["PET_MASTER_ADDR"] == "demo-node-0-0.demo"
    assert env(node)["PET_MASTER_PORT"] == "29500"
    assert (node.failure.backoff_limit, node.failure.fail_on) == (3, frozenset({2, 3, 4}))
    assert node.grace_seconds == 600
    assert resolved.success == {"node"}


def test_initializer_environment_wins_in_the_order_of_the_builder() -> None:
    runtime = tiny_runtime(["true"], dataset=["true"])
    container(runtime)["env"] = [{"name": "STORAGE_URI", "value": "a://1"}, {"name": "KEEP", "value": "yes"}]
    dataset: Manifest = {"storageUri": "b://2", "secretRef": {"name": "hub"}}
    step = steps(tiny_job(initializer={"dataset": dataset}), runtime)["dataset-initializer"]
    assert env(step) == {"STORAGE_URI": "b://2", "KEEP": "yes"}
    assert step.secrets == ("hub",)
    dataset["env"] = [{"name": "STORAGE_URI", "value": "c://3"}]
    assert (
        env(steps(tiny_job(initializer={"dataset": dataset}), runtime)["dataset-initializer"])["STORAGE_URI"] == "c://3"
    )


def test_initializer_of_the_runtime_always_runs() -> None:
    step = steps(tiny_job(), tiny_runtime(["true"], dataset=["fetch"]))["dataset-initializer"]
    assert step.argv == ["fetch"]
    assert "STORAGE_URI" not in env(step)


def test_trainer_replaces_only_what_it_sets() -> None:
    runtime = tiny_runtime(["run", "it"])
    container(runtime)["args"] = ["--recipe", "sft"]
    container(runtime)["env"] = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    node = steps(tiny_job(), runtime)["node-0"]
    assert (node.command, node.args, node.image) == (("run", "it"), ("--recipe", "sft"), "example.com/tiny:1")
    changed = {"image": "x:2", "args": ["--recipe", "other"], "env": [{"name": "B", "value": "3"}]}
    node = steps(tiny_job(trainer=changed), runtime)["node-0"]
    assert (node.command, node.args, node.image) == (("run", "it"), ("--recipe", "other"), "x:2")
    assert (env(node)["A"], env(node)["B"]) == ("1", "3")


def test_without_a_trainer_nothing_is_injected() -> None:
    job = tiny_job()
    del job["spec"]["trainer"]
    assert env(steps(job, tiny_runtime(["true"]))["node-0"]) == {}


@pytest.mark.parametrize(
    ("template", "trainer", "expected"),
    [
        ({}, {}, "1"),
        ({"limits": {"nvidia.com/gpu": 2}}, {}, "auto"),
        ({"limits": {"nvidia.com/gpu": 2}}, {"resourcesPerNode": {"limits": {"memory": "1Gi"}}}, "1"),
        ({"limits": {"nvidia.com/gpu": 2}}, {"resourcesPerNode": {"requests": {"cpu": "3500m"}}}, "4"),
        ({"limits": {"nvidia.com/gpu": 2}}, {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}}}, "auto"),
        ({"limits": {"nvidia.com/gpu": 2}}, {"numProcPerNode": 5}, "5"),
        ({}, {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 0}}}, "1"),
        ({}, {"resourcesPerNode": {"limits": {"nvidia.com/mig-1g.10gb": 2}}}, "1"),
        ({}, {"resourcesPerNode": {"limits": {"nvidia.com/mig-1g.10gb": 2, "cpu": 8}}}, "8"),
        ({}, {"numProcPerNode": 2, "resourcesPerNode": {"limits": {"nvidia.com/mig-1g.10gb": 2}}}, "2"),
        ({"requests": {"cpu": "2.5"}}, {}, "3"),
    ],
)
def test_processes_per_node_follow_the_torch_policy(
    template: dict[str, Any], trainer: dict[str, Any], expected: str
) -> None:
    runtime = tiny_runtime(["true"])
    container(runtime)["resources"] = template
    job = tiny_job()
    job["spec"]["trainer"] = {"numNodes": 1, **trainer}
    assert env(steps(job, runtime)["node-0"])["PET_NPROC_PER_NODE"] == expected


def test_resources_merge_by_name() -> None:
    runtime = tiny_runtime(["true"])
    container(runtime)["resources"] = {"limits": {"nvidia.com/gpu": 2, "memory": "1Gi"}, "requests": {"cpu": 1}}
    job = tiny_job(trainer={"resourcesPerNode": {"limits": {"memory": "8Gi"}}})
    node = steps(job, runtime)["node-0"]
    assert node.resources == {"limits": {"nvidia.com/gpu": 2, "memory": "8Gi"}, "requests": {"cpu": 1}}


def test_nodes_of_the_job_go_before_those_of_the_runtime() -> None:
    runtime = tiny_runtime(["true"])
    runtime["spec"]["mlPolicy"]["numNodes"] = 3
    job = tiny_job(nodes=2)
    assert list(steps(job, runtime)) == ["node-0", "node-1"]
    assert [step.index for step in resolve(job, runtime).steps] == [0, 1]
    del job["spec"]["trainer"]["numNodes"]
    assert len(steps(job, runtime)) == 3
    assert env(steps(job, runtime)["node-2"])["PET_NNODES"] == "3"


def test_patches_are_merged_as_kubernetes_does() -> None:
    runtime = tiny_runtime(["true"])
    pod = {
        "terminationGracePeriodSeconds": 7,
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "volumes": [{"name": "cache", "emptyDir": {}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"replicatedJobs": [replicated]}}
    patches = [{"manager": "example.com/me", "trainingRuntimeSpec": {"template": template}}]
    job = tiny_job(runtimePatches=patches)
    node = steps(job, runtime)["node-0"]
    assert node.grace_seconds == 7
    assert [mount.path for mount in node.mounts] == ["/workspace", "/cache"]
    assert node.command == ("true",)
    job_set = build_job_set(job, runtime)
    assert job_set["metadata"] == {"name": "tiny", "labels": {"team": "a"}}
    merged = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert merged["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert container(runtime)["volumeMounts"] == [{"name": "initializer", "mountPath": "/workspace"}]  # unchanged


def test_strategic_merge_removes_with_null_and_replaces_plain_lists() -> None:
    base = {"a": {"x": 1, "y": 2}, "args": ["1", "2"], "env": [{"name": "A", "value": "1"}]}
    change = {"a": {"x": None}, "args": ["3"], "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}
    assert strategic_merge(base, change) == {
        "a": {"y": 2},
        "args": ["3"],
        "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}],
    }


def test_counts_are_written_into_the_job_set() -> None:
    job_set = build_job_set(tiny_job(nodes=4), tiny_runtime(["true"], dataset=["true"]))
    counts = {job["name"]: job["template"]["spec"]["parallelism"] for job in job_set["spec"]["replicatedJobs"]}
    assert counts == {"dataset-initializer": 1, "node": 4}
    assert job_set["spec"]["suspend"] is False


def test_several_containers_are_refused() -> None:
    runtime = tiny_runtime(["true"])
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["initContainers"] = [{"name": "prepare", "image": "x"}]
    with pytest.raises(UsageError, match="prepare, node"):
        resolve(tiny_job(), runtime)


@pytest.mark.parametrize(
    ("text", "number"),
    [("2", 2), (3, 3), ("500m", 0.5), ("1.5Gi", 1.5 * 2**30), ("1e3", 1000), ("2k", 2000), (".5", 0.5), ("1E", 1e18)],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: object, number: float) -> None:
    assert parse_quantity(text) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "16GB", "-", "1.5.2", True, None, "ten"])
def test_other_texts_are_no_quantities(text: object) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        parse_quantity(text)
