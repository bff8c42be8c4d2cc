"""The validator: what a cluster refuses, or accepts and then breaks on, is named before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs_kit import Manifest, tiny_job, tiny_runtime

from blueprints.errors import ManifestError
from blueprints.manifests import check_runtime, check_train_job, name_limit, require_valid
from blueprints.recipe import load_recipe
from blueprints.runtimes import get_runtime, shipped_runtimes
from blueprints.trainjob import train_job


def job() -> Manifest:
    """A valid TrainJob on the shipped runtime."""
    return train_job(load_recipe("quickstart", environ={}), get_runtime("llm-sft"), name="demo")


def keys(manifest: Manifest) -> list[str]:
    """Where the faults of a TrainJob are."""
    return [fault.key for fault in check_train_job(manifest, get_runtime("llm-sft"))]


def set_in(*path: str | int, to: Any) -> Callable[[Manifest], None]:
    """A change of one value."""

    def change(manifest: Manifest) -> None:
        target: Any = manifest
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = to

    return change


def patch(**entry: Any) -> list[Manifest]:
    """runtimePatches with one patched replicatedJob."""
    pod = {"template": {"spec": {"template": {"spec": entry.pop("pod", {})}}}}
    spec = {"template": {"spec": {"replicatedJobs": [{**entry, **pod}]}}}
    return [{"manager": "example.com/me", "trainingRuntimeSpec": spec}]


TRAINER = ("spec", "trainer")
RESOURCES = (*TRAINER, "resourcesPerNode")
FAULTY: list[tuple[str, Callable[[Manifest], None], str]] = [
    ("upper case name", set_in("metadata", "name", to="Demo"), "metadata.name"),
    ("name with a digit first", set_in("metadata", "name", to="1abc"), "metadata.name"),
    ("name with a dot", set_in("metadata", "name", to="ab.c"), "metadata.name"),
    ("name ends in -", set_in("metadata", "name", to="abc-"), "metadata.name"),
    ("34 characters", set_in("metadata", "name", to="a" * 34), "metadata.name"),
    ("no trainer", lambda m: m["spec"].pop("trainer"), "spec.trainer"),
    ("no nodes", set_in(*TRAINER, "numNodes", to=0), "spec.trainer.numNodes"),
    ("minus one node", set_in(*TRAINER, "numNodes", to=-1), "spec.trainer.numNodes"),
    ("half a node", set_in(*TRAINER, "numNodes", to=1.5), "spec.trainer.numNodes"),
    ("processes by name", set_in(*TRAINER, "numProcPerNode", to="auto"), "spec.trainer.numProcPerNode"),
    ("no processes", set_in(*TRAINER, "numProcPerNode", to=0), "spec.trainer.numProcPerNode"),
    ("true nodes", set_in(*TRAINER, "numNodes", to=True), "spec.trainer.numNodes"),
    ("129 arguments", set_in(*TRAINER, "args", to=["x"] * 129), "spec.trainer.args"),
    ("number as argument", set_in(*TRAINER, "args", to=["--n", 3]), "spec.trainer.args"),
    ("huge argument", set_in(*TRAINER, "args", to=["x" * 1_048_577]), "spec.trainer.args[0]"),
    (
        "reserved variable",
        set_in(*TRAINER, "env", to=[{"name": "PET_NNODES", "value": "2"}]),
        "spec.trainer.env.PET_NNODES",
    ),
    ("number as variable", set_in(*TRAINER, "env", to=[{"name": "A", "value": 1}]), "spec.trainer.env.A"),
    (
        "variable twice",
        set_in(*TRAINER, "env", to=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "spec.trainer.env.A",
    ),
    (
        "129 variables",
        set_in(*TRAINER, "env", to=[{"name": f"A{n}", "value": ""} for n in range(129)]),
        "spec.trainer.env",
    ),
    (
        "secret in plain text",
        set_in(*TRAINER, "env", to=[{"name": "HF_TOKEN", "value": "hf_x"}]),
        "spec.trainer.env.HF_TOKEN",
    ),
    (
        "fraction as number",
        set_in(*RESOURCES, to={"limits": {"cpu": 1.5}}),
        "spec.trainer.resourcesPerNode.limits.cpu",
    ),
    (
        "half a GPU",
        set_in(*RESOURCES, to={"limits": {"nvidia.com/gpu": "0.5"}}),
        "spec.trainer.resourcesPerNode.limits.nvidia.com/gpu",
    ),
    (
        "GPU without limit",
        set_in(*RESOURCES, to={"requests": {"nvidia.com/gpu": 1}}),
        "spec.trainer.resourcesPerNode.requests.nvidia.com/gpu",
    ),
    (
        "GPU request unlike limit",
        set_in(*RESOURCES, to={"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 2}}),
        "spec.trainer.resourcesPerNode.requests.nvidia.com/gpu",
    ),
    (
        "unknown unit",
        set_in(*RESOURCES, to={"limits": {"memory": "16GB"}}),
        "spec.trainer.resourcesPerNode.limits.memory",
    ),
    (
        "address without scheme",
        set_in("spec", "initializer", "dataset", "storageUri", to="rows.jsonl"),
        "spec.initializer.dataset.storageUri",
    ),
    (
        "long address",
        set_in("spec", "initializer", "model", "storageUri", to="hf://" + "a" * 2048),
        "spec.initializer.model.storageUri",
    ),
    ("removed field", set_in("spec", "podTemplateOverrides", to=[]), "spec.podTemplateOverrides"),
    ("other runtime", set_in("spec", "runtimeRef", "name", to="other"), "spec.runtimeRef"),
    ("no deadline at all", set_in("spec", "activeDeadlineSeconds", to=0), "spec.activeDeadlineSeconds"),
    ("unknown manager", set_in("spec", "managedBy", to="me"), "spec.managedBy"),
    ("label of 64 characters", set_in("metadata", "labels", to={"a": "x" * 64}), "metadata.labels.a"),
    ("patch of an unknown job", set_in("spec", "runtimePatches", to=patch(name="nodes")), "spec.runtimePatches[0]"),
    (
        "patch of an unknown container",
        set_in("spec", "runtimePatches", to=patch(name="node", pod={"containers": [{"name": "trainer"}]})),
        "spec.runtimePatches[0]",
    ),
    (
        "env in a patch",
        set_in(
            "spec",
            "runtimePatches",
            to=patch(name="node", pod={"containers": [{"name": "node", "env": [{"name": "A", "value": "1"}]}]}),
        ),
        "spec.runtimePatches[0]",
    ),
    (
        "manager without a domain",
        set_in("spec", "runtimePatches", to=[{"manager": "me", "trainingRuntimeSpec": {}}]),
        "spec.runtimePatches[0].manager",
    ),
]


def test_shipped_manifests_are_valid() -> None:
    for runtime in shipped_runtimes().values():
        assert check_runtime(runtime) == []
    assert keys(job()) == []


@pytest.mark.parametrize(("what", "change", "key"), FAULTY, ids=[case[0] for case in FAULTY])
def test_fault_is_named(what: str, change: Callable[[Manifest], None], key: str) -> None:
    manifest = job()
    change(manifest)
    assert keys(manifest) == [key], what


def test_all_faults_come_at_once() -> None:
    manifest = job()
    for change in (FAULTY[0][1], FAULTY[6][1], FAULTY[9][1]):
        change(manifest)
    with pytest.raises(ManifestError) as error:
        require_valid(manifest, get_runtime("llm-sft"))
    assert len(error.value.faults) == 3
    assert error.value.exit_code == 2


def test_name_limits_are_those_a_cluster_showed() -> None:
    assert name_limit(get_runtime("llm-sft")) == 33
    assert name_limit(tiny_runtime(["true"], model=["true"])) == 35
    assert name_limit(tiny_runtime(["true"])) == 48
    assert name_limit(tiny_runtime(["true"]), 11) == 47
    assert keys({**job(), "metadata": {"name": "a" * 33}}) == []


def test_good_quantities_pass() -> None:
    manifest = job()
    manifest["spec"]["trainer"]["resourcesPerNode"] = {
        "limits": {"cpu": "500m", "memory": "1.5Gi", "nvidia.com/gpu": 2, "amd.com/gpu": "1", "ephemeral-storage": 10},
        "requests": {"cpu": "0.25", "nvidia.com/gpu": 2},
    }
    assert keys(manifest) == []


def test_initializer_needs_its_place_in_the_runtime() -> None:
    initializer = {"dataset": {"storageUri": "builtin://x"}}
    faults = check_train_job(tiny_job(initializer=initializer), tiny_runtime(["true"]))
    assert "no replicatedJob 'dataset-initializer'" in faults[0].problem
    runtime = tiny_runtime(["true"], dataset=["true"])
    assert check_train_job(tiny_job(initializer=initializer), runtime) == []
    first = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    first["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"] = []
    faults = check_train_job(tiny_job(initializer=initializer), runtime)
    assert "no volumeMount named 'initializer'" in faults[0].problem


JOB_SET = ("spec", "template", "spec")
FAULTY_RUNTIMES: list[tuple[str, Callable[[Manifest], None], str]] = [
    ("no label", lambda m: m["metadata"].pop("labels"), "trainer.kubeflow.org/framework"),
    ("no policy", lambda m: m["spec"].pop("mlPolicy"), "mlPolicy"),
    ("two policies", set_in("spec", "mlPolicy", to={"torch": {}, "mpi": {}}), "at most one"),
    ("TTL", set_in(*JOB_SET, "ttlSecondsAfterFinished", to=60), "no TTL"),
    ("subdomain", set_in(*JOB_SET, "network", to={"subdomain": "x"}), "subdomain"),
    ("two replicas", set_in(*JOB_SET, "replicatedJobs", 2, "replicas", to=2), "replicas"),
    (
        "first waits",
        set_in(*JOB_SET, "replicatedJobs", 0, "dependsOn", to=[{"name": "node", "status": "Complete"}]),
        "does not come before",
    ),
    ("unknown target", set_in(*JOB_SET, "successPolicy", to={"targetReplicatedJobs": ["x"]}), "unknown replicatedJob"),
    ("trainer by another name", set_in(*JOB_SET, "replicatedJobs", 2, "name", to="trainer"), "the name 'node'"),
    ("claim nobody gives", lambda m: m["spec"]["template"]["spec"].pop("volumeClaimPolicies"), "no volume provides"),
]


@pytest.mark.parametrize(("what", "change", "text"), FAULTY_RUNTIMES, ids=[case[0] for case in FAULTY_RUNTIMES])
def test_fault_of_a_runtime_is_named(what: str, change: Callable[[Manifest], None], text: str) -> None:
    runtime = get_runtime("llm-sft")
    change(runtime)
    faults = [str(fault) for fault in check_runtime(runtime)]
    assert any(text in fault for fault in faults), (what, faults)


def test_shipped_runtime_keeps_what_a_live_cluster_taught() -> None:
    spec = get_runtime("llm-sft")["spec"]["template"]["spec"]
    assert spec["volumeClaimPolicies"][0]["retentionPolicy"] == {"whenDeleted": "Retain"}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    for replicated in spec["replicatedJobs"]:
        job_spec = replicated["template"]["spec"]
        pod = job_spec["template"]["spec"]
        container = pod["containers"][0]
        rules = job_spec["podFailurePolicy"]["rules"]
        values = [2, 3, 4] if container["name"] == "node" else [2, 3]
        assert rules[0]["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": values}
        assert (rules[1]["action"], rules[1]["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert pod["restartPolicy"] == "Never"
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"name": "initializer", "mountPath": "/workspace"} in container["volumeMounts"]
        assert not any("gpu" in name for kind in container.get("resources", {}).values() for name in kind)
