"""The JobSet and its companions for every ML policy, patch and PodGroup: the cases that Kubeflow Trainer's own tests
document, in our words."""

from __future__ import annotations

from typing import Any

import pytest
from jobs_kit import ANCESTOR, Manifest

from blueprints import torchtune
from blueprints.errors import UsageError
from blueprints.jobset import build_job_set, build_objects, gpus_of, pod_requests
from blueprints.quantity import total

ENV = {"name": "A", "value": "1"}


def replicated(name: str, *, ancestor: str | None = None, container: str | None = None, **extra: Any) -> Manifest:
    """One replicatedJob with one container."""
    metadata = {"labels": {ANCESTOR: ancestor}} if ancestor else {}
    first = {"name": container or name, "image": "image:1", **extra.pop("with_", {})}
    pod = {"containers": [first], **extra.pop("pod", {})}
    job_spec = {"template": {"spec": pod}, **extra.pop("job", {})}
    return {"name": name, "template": {"metadata": metadata, "spec": job_spec}, **extra}


def runtime(*jobs: Manifest, policy: Manifest | None = None, **spec: Any) -> Manifest:
    """A runtime of these replicatedJobs."""
    template: Manifest = {"spec": {"replicatedJobs": list(jobs), **spec.pop("job_set", {})}}
    if "metadata" in spec:
        template["metadata"] = spec.pop("metadata")
    body = {"template": template, **({} if policy is None else {"mlPolicy": policy}), **spec}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": "torchtune-llama3.2-1b"},
        "spec": body,
    }


def job(trainer: Manifest | None = None, **spec: Any) -> Manifest:
    """The TrainJob `tj`."""
    ref = {"name": "torchtune-llama3.2-1b", "kind": "ClusterTrainingRuntime", "apiGroup": "trainer.kubeflow.org"}
    body = {"runtimeRef": ref, **spec} | ({} if trainer is None else {"trainer": trainer})
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob",
        "metadata": {"name": "tj", "namespace": "ns"}, "spec": body,
    }  # fmt: skip


NODE = replicated("node", ancestor="trainer")
LAUNCHER = replicated("launcher", ancestor="trainer", container="node", dependsOn=[{"name": "node", "status": "Ready"}])
WORKERS = replicated("node")


def jobs(built: Manifest) -> dict[str, Manifest]:
    """The replicatedJobs by name."""
    return {entry["name"]: entry for entry in built["spec"]["replicatedJobs"]}


def pods(built: Manifest) -> dict[str, int]:
    """Pods of each replicatedJob; parallelism and completions are always the same."""
    found = {name: entry["template"]["spec"]["parallelism"] for name, entry in jobs(built).items()}
    assert found == {name: entry["template"]["spec"]["completions"] for name, entry in jobs(built).items()}
    return found


def container(built: Manifest, name: str = "node", place: int = 0) -> Manifest:
    """A container of a replicatedJob."""
    found: Manifest = jobs(built)[name]["template"]["spec"]["template"]["spec"]["containers"][place]
    return found


def env(built: Manifest, name: str = "node") -> dict[str, Any]:
    """Variables of a replicatedJob's container; `index` where the completion index is the source."""
    entries = container(built, name).get("env") or []
    return {entry["name"]: entry.get("value", "index" if "valueFrom" in entry else None) for entry in entries}


# --- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "trainer", "parallelism", "expected"),
    [
        ({"numNodes": 3, "torch": {}}, {"numNodes": 5}, None, 5),
        ({"numNodes": 3, "torch": {}}, {}, None, 3),
        ({"numNodes": 3, "torch": {}}, None, None, 3),
        ({"torch": {}}, {}, 7, 1),
        ({"numNodes": 3}, {"numNodes": 2}, None, 2),
        ({"numNodes": 4, "jax": {}}, None, None, 4),
        ({"numNodes": 4, "xgboost": {}}, {"numNodes": 2}, None, 2),
        (None, None, 6, 6),
        (None, {}, None, 1),
        ({"numNodes": 0, "torch": {}}, {}, None, 1),
    ],
)
def test_how_many_nodes(
    policy: Manifest | None, trainer: Manifest | None, parallelism: int | None, expected: int
) -> None:
    spec = {} if parallelism is None else {"parallelism": parallelism}
    source = runtime(
        replicated("node", ancestor="trainer", job=spec), replicated("side", job={"parallelism": 2}), policy=policy
    )
    assert pods(build_job_set(job(trainer), source)) == {"node": expected, "side": 2}


def test_what_is_in_the_jobset_and_what_is_not() -> None:
    source = runtime(NODE, policy={"torch": {}}, metadata={"labels": {"a": "1"}, "annotations": {"b": "2"}},
                     job_set={"failurePolicy": {"maxRestarts": 3}, "network": {"publishNotReadyAddresses": True}})  # fmt: skip
    train_job = job({}, suspend=True)
    train_job["metadata"]["labels"] = {"mine": "stays here"}
    built = build_job_set(train_job, source)
    assert built["metadata"] == {"name": "tj", "namespace": "ns", "labels": {"a": "1"}, "annotations": {"b": "2"}}
    assert built["spec"]["suspend"] is True
    assert built["spec"]["failurePolicy"] == {"maxRestarts": 3}
    assert jobs(built)["node"]["replicas"] == 1
    assert "suspend" not in source["spec"]["template"]["spec"]


# --- patches ----------------------------------------------------------------------------------------------------------


def patched(*changes: Manifest, metadata: Manifest | None = None) -> list[Manifest]:
    """One runtimePatch per change, each by its own manager."""
    return [
        {
            "manager": f"example.com/{place}",
            "trainingRuntimeSpec": {"template": {"spec": change, **({"metadata": metadata} if metadata else {})}},
        }
        for place, change in enumerate(changes)
    ]


def on_pod(name: str, pod: Manifest, **template: Any) -> Manifest:
    """A change of a replicatedJob's Pod."""
    return {"replicatedJobs": [{"name": name, "template": {**template, "spec": {"template": {"spec": pod}}}}]}


def test_patches_merge_lists_by_their_keys_and_keep_the_order_of_jobs() -> None:
    volumes = {"volumes": [{"name": "v", "emptyDir": {}}], "tolerations": [{"key": "old"}], "nodeSelector": {"a": "1"}}
    mounted = {"env": [ENV, {"name": "B", "value": "2"}], "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    source = runtime(
        replicated("dataset-initializer", ancestor="dataset-initializer"),
        replicated("node", ancestor="trainer", pod=volumes, with_=mounted),
        policy={"torch": {}},
    )
    change = {
        "volumes": [{"name": "w", "hostPath": {"path": "/w"}}],
        "tolerations": [{"key": "new"}],
        "nodeSelector": {"b": "2"},
        "imagePullSecrets": [{"name": "s"}],
        "containers": [
            {"name": "node", "volumeMounts": [{"name": "w", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}]}
        ],
    }
    built = build_job_set(job({}, runtimePatches=patched(on_pod("node", change))), source)
    assert list(jobs(built)) == ["dataset-initializer", "node"]
    pod = jobs(built)["node"]["template"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["v", "w"]
    assert pod["tolerations"] == [{"key": "new"}]
    assert pod["nodeSelector"] == {"a": "1", "b": "2"}
    assert pod["containers"][0]["volumeMounts"] == [{"name": "w", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}]
    assert pod["containers"][0]["image"] == "image:1"


def test_later_patches_win_and_labels_go_where_they_are_put() -> None:
    first = on_pod(
        "node", {"serviceAccountName": "one", "terminationGracePeriodSeconds": 5}, metadata={"labels": {"j": "1"}}
    )
    second = on_pod("node", {"serviceAccountName": "two", "affinity": {"nodeAffinity": {}}})
    second["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"] = {"annotations": {"p": "2"}}
    patches = patched(first, second, metadata={"labels": {"x": "1"}, "annotations": {"y": "2"}})
    built = build_job_set(
        job({}, runtimePatches=patches), runtime(NODE, policy={"torch": {}}, metadata={"labels": {"x": "0"}})
    )
    assert built["metadata"]["labels"] == {"x": "1"}
    assert built["metadata"]["annotations"] == {"y": "2"}
    template = jobs(built)["node"]["template"]
    assert template["metadata"]["labels"] == {ANCESTOR: "trainer", "j": "1"}
    assert template["spec"]["template"]["metadata"] == {"annotations": {"p": "2"}}
    pod = template["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["terminationGracePeriodSeconds"]) == ("two", 5)
    assert pod["affinity"] == {"nodeAffinity": {}}


# --- resources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ({}, {"limits": {"cpu": "1"}}, {"limits": {"cpu": "1"}}),
        ({"limits": {"cpu": "1"}}, {"requests": {"cpu": "1"}}, {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}),
        (
            {"limits": {"cpu": "1", "memory": "1Gi"}},
            {"limits": {"cpu": "2"}},
            {"limits": {"cpu": "2", "memory": "1Gi"}},
        ),
        ({"limits": {"cpu": "1"}}, {}, {"limits": {"cpu": "1"}}),
        ({"claims": [{"name": "a"}], "limits": {"cpu": "1"}}, {"limits": {"cpu": "3"}}, {"limits": {"cpu": "3"}}),
    ],
)
def test_resources_of_the_job_are_laid_over_the_runtimes(base: Manifest, own: Manifest, expected: Manifest) -> None:
    source = runtime(replicated("node", ancestor="trainer", with_={"resources": base}), policy={"torch": {}})
    assert container(build_job_set(job({"resourcesPerNode": own}), source))["resources"] == expected


def test_without_an_ml_policy_resources_of_the_job_are_not_used() -> None:
    built = build_job_set(job({"resourcesPerNode": {"limits": {"cpu": "1"}}, "env": [ENV]}), runtime(NODE))
    assert "resources" not in container(built)
    assert env(built) == {"A": "1"}


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "trainer", "processes"),
    [
        ({}, {}, "1"),
        ({"requests": {"cpu": "6"}}, {}, "6"),
        ({"limits": {"cpu": "5"}}, {}, "5"),
        ({"requests": {"cpu": "0"}, "limits": {"cpu": "5"}}, {}, "5"),
        ({"requests": {"cpu": "2500m"}, "limits": {"cpu": "9"}}, {}, "3"),
        ({"requests": {"cpu": "100m"}}, {}, "1"),
        ({"limits": {"example.com/gpu": "4", "cpu": "8"}}, {}, "auto"),
        ({"limits": {"amd.com/gpu": "1"}}, {}, "auto"),
        ({"limits": {"gpu.intel.com/i915": "2"}}, {}, "auto"),
        ({"requests": {"nvidia.com/GPU": "2"}}, {}, "auto"),
        ({"limits": {"nvidia.com/gpu": "0"}}, {}, "1"),
        ({"limits": {"google.com/tpu": "4"}}, {}, "1"),
        ({"limits": {"nvidia.com/gpu": "4"}}, {"numProcPerNode": 2}, "2"),
        ({"limits": {"nvidia.com/gpu": "4"}}, {"resourcesPerNode": {"requests": {"cpu": "3"}}}, "3"),
        ({"limits": {"nvidia.com/gpu": "4"}}, {"resourcesPerNode": {}}, "1"),
        ({"limits": {"cpu": "4"}}, {"resourcesPerNode": {"limits": {"nvidia.com/gpu": "2"}}}, "auto"),
    ],
)
def test_processes_per_node(base: Manifest, trainer: Manifest, processes: str) -> None:
    source = runtime(
        replicated("node", ancestor="trainer", with_={"resources": base}), policy={"torch": {}, "numNodes": 2}
    )
    built = build_job_set(job(trainer), source)
    assert env(built) == {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": processes, "PET_NODE_RANK": "index",
        "PET_MASTER_ADDR": "tj-node-0-0.tj", "PET_MASTER_PORT": "29500",
    }  # fmt: skip
    assert container(built)["ports"] == [{"containerPort": 29500}]


def test_sidecars_get_the_variables_where_the_policy_names_them() -> None:
    pod = {"initContainers": [{"name": "check", "image": "c"}]}
    node = replicated("node", ancestor="trainer", pod=pod)
    node["template"]["spec"]["template"]["spec"]["containers"] += [{"name": "side", "image": "s", "env": [ENV]}]
    targets = [{"jobName": "node", "containerNames": ["check", "side"]}]
    source = runtime(node, policy={"torch": {"envInjection": {"targets": targets}}})
    found = jobs(build_job_set(job({"numProcPerNode": 4}), source))["node"]["template"]["spec"]["template"]["spec"]
    for entry in (found["initContainers"][0], found["containers"][1]):
        names = {variable["name"]: variable.get("value") for variable in entry["env"]}
        assert names["PET_NPROC_PER_NODE"] == "4"
        assert names["PET_MASTER_ADDR"] == "tj-node-0-0.tj"
        assert "ports" not in entry


# --- jax, xgboost -----------------------------------------------------------------------------------------------------


def test_jax() -> None:
    source = runtime(NODE, policy={"jax": {}, "numNodes": 3})
    assert env(build_job_set(job({"env": [ENV]}), source)) == {
        "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "index", "JAX_COORDINATOR_ADDRESS": "tj-node-0-0.tj:29500", "A": "1",
    }  # fmt: skip
    assert env(build_job_set(job(), source)) == {}
    own = {"name": "JAX_NUM_PROCESSES", "value": "9"}  # not reserved, so the job's own wins
    assert env(build_job_set(job({"env": [own]}), source))["JAX_NUM_PROCESSES"] == "9"


@pytest.mark.parametrize(("resources", "workers"), [({}, "2"), ({"limits": {"nvidia.com/gpu": 4}}, "8")])
def test_xgboost(resources: Manifest, workers: str) -> None:
    source = runtime(NODE, policy={"xgboost": {}})
    built = build_job_set(job({"numNodes": 2, "resourcesPerNode": resources}), source)
    assert env(built) == {
        "DMLC_TRACKER_URI": "tj-node-0-0.tj", "DMLC_TRACKER_PORT": "29500", "DMLC_TASK_ID": "index",
        "DMLC_NUM_WORKER": workers,
    }  # fmt: skip
    assert container(built)["ports"] == [{"containerPort": 29500}]


# --- MPI --------------------------------------------------------------------------------------------------------------


def mpi(**policy: Any) -> Manifest:
    """An MPI runtime with launcher and nodes."""
    return runtime(WORKERS, LAUNCHER, policy={"mpi": policy}, job_set={"network": {"publishNotReadyAddresses": True}})


@pytest.mark.parametrize(
    ("as_node", "nodes", "expected", "hosts"),
    [
        (True, 1, {"node": 1, "launcher": 1}, ["tj-node-0-0.tj", "tj-launcher-0-0.tj"]),
        (True, 2, {"node": 1, "launcher": 1}, ["tj-node-0-0.tj", "tj-launcher-0-0.tj"]),
        (True, 3, {"node": 2, "launcher": 1}, ["tj-node-0-0.tj", "tj-node-0-1.tj", "tj-launcher-0-0.tj"]),
        (False, 2, {"node": 2, "launcher": 1}, ["tj-node-0-0.tj", "tj-node-0-1.tj"]),
    ],
)
def test_mpi_counts_and_hosts(as_node: bool, nodes: int, expected: dict[str, int], hosts: list[str]) -> None:
    built, hostfile = build_objects(job({"numNodes": nodes}), mpi(runLauncherAsNode=as_node))
    assert pods(built) == expected
    assert hostfile["kind"] == "ConfigMap"
    assert hostfile["metadata"] == {"name": "tj-mpi-hostfile", "namespace": "ns"}
    assert hostfile["data"]["hostfile"] == "".join(f"{host} slots=1\n" for host in hosts)


def test_mpi_volumes_and_variables() -> None:
    source = mpi(runLauncherAsNode=True, sshAuthMountPath="/home/mpiuser/.ssh")
    own = {"env": [ENV], "command": ["mpirun"], "resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}}}
    built, hostfile = build_objects(job(own), source)
    assert container(built, "launcher")["command"] == ["mpirun"]
    assert "command" not in container(built, "node")
    assert env(built, "launcher") == {
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": "2", "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", "A": "1",
    }  # fmt: skip
    assert env(built, "node") == {"A": "1"}
    assert "slots=2\n" in hostfile["data"]["hostfile"]
    for name in ("launcher", "node"):
        assert container(built, name)["resources"] == {"limits": {"nvidia.com/gpu": 2}}
        mounts = {mount["name"]: mount["mountPath"] for mount in container(built, name)["volumeMounts"]}
        assert mounts["mpi-ssh-auth"] == "/home/mpiuser/.ssh"
        assert ("mpi-hostfile" in mounts) == (name == "launcher")
    volumes = jobs(built)["launcher"]["template"]["spec"]["template"]["spec"]["volumes"]
    secret = next(volume["secret"] for volume in volumes if volume["name"] == "mpi-ssh-auth")
    assert secret["secretName"] == "tj-mpi-ssh-auth"
    assert secret["defaultMode"] == 0o400
    assert [(item["path"], item["mode"]) for item in secret["items"]] == [
        ("id_rsa", 0o640), ("id_rsa.pub", 0o644), ("authorized_keys", 0o644),
    ]  # fmt: skip


def test_mpi_without_launcher_as_node_gives_the_nodes_neither_variables_nor_resources() -> None:
    own = {"env": [ENV], "numProcPerNode": 8, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 2}}}
    built, hostfile = build_objects(job(own), mpi())
    assert env(built, "node") == {}
    assert "resources" not in container(built, "node")
    assert env(built, "launcher")["OMPI_MCA_orte_set_default_slots"] == "8"
    assert hostfile["data"]["hostfile"] == "tj-node-0-0.tj slots=8\n"


def test_flux_is_refused() -> None:
    with pytest.raises(UsageError, match="flux"):
        build_job_set(job({}), runtime(NODE, policy={"flux": {}}))


# --- gangs ------------------------------------------------------------------------------------------------------------


def test_coscheduling_counts_every_pod() -> None:
    requests = {"resources": {"requests": {"cpu": "100m"}}}
    source = runtime(
        replicated("dataset-initializer", ancestor="dataset-initializer", with_=requests),
        replicated("model-initializer", ancestor="model-initializer", with_=requests),
        replicated("node", ancestor="trainer"),
        policy={"torch": {}},
        podGroupPolicy={"coscheduling": {"scheduleTimeoutSeconds": 120}},
    )
    trainer = {"numNodes": 100, "resourcesPerNode": {"requests": {"cpu": "1", "memory": "2Gi"}}}
    built, group = build_objects(job(trainer), source)
    assert group["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
    assert group["metadata"] == {"name": "tj", "namespace": "ns"}
    assert group["spec"] == {
        "minMember": 102, "minResources": {"cpu": "100200m", "memory": "200Gi"}, "scheduleTimeoutSeconds": 120,
    }  # fmt: skip
    for entry in jobs(built).values():
        assert entry["template"]["spec"]["template"]["metadata"]["labels"] == {"scheduling.x-k8s.io/pod-group": "tj"}


def test_volcano() -> None:
    source = runtime(
        replicated("node", ancestor="trainer", pod={"priorityClassName": "high"}),
        policy={"numNodes": 2},
        metadata={"annotations": {"scheduling.volcano.sh/queue-name": "q1"}},
        podGroupPolicy={"volcano": {"networkTopology": {"mode": "soft", "highestTierAllowed": 2}}},
    )
    built, group = build_objects(job({}), source)
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {
        "minMember": 2, "minResources": {}, "queue": "q1", "priorityClassName": "high",
        "networkTopology": {"mode": "soft", "highestTierAllowed": 2},
    }  # fmt: skip
    metadata = jobs(built)["node"]["template"]["spec"]["template"]["metadata"]
    assert metadata["annotations"] == {"scheduling.k8s.io/group-name": "tj"}


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ([], "0"), (["1", 1], "2"), (["100m", "900m"], "1"), (["500m", 1], "1500m"), (["1Gi", "1Gi"], "2Gi"),
        (["512Mi", "512Mi"], "1Gi"), (["1Gi", "1Mi"], "1025Mi"), ([500, 500], "1k"), (["1.5"], "1500m"), (["1e3"], "1k"),
    ],
)  # fmt: skip
def test_sums_of_quantities_are_canonical(amounts: list[Any], expected: str) -> None:
    assert total(amounts) == expected


def test_what_a_pod_asks_for() -> None:
    def needs(**requests: Any) -> Manifest:
        return {"resources": {"requests": requests, "limits": {"cpu": "64"}}}

    pod = {
        "initContainers": [
            {"name": "big", **needs(memory="4Gi")},
            {"name": "side", "restartPolicy": "Always", **needs(cpu="1")},
        ],
        "containers": [{"name": "a", **needs(cpu="1", memory="1Gi")}, {"name": "b", **needs(cpu="500m")}],
        "overhead": {"cpu": "250m"},
    }
    assert pod_requests(pod) == {"cpu": "2750m", "memory": "4Gi"}
    assert gpus_of({"requests": {"cpu": 1}, "limits": {"nvidia.com/gpu": "3"}}) == 3


# --- initializers -----------------------------------------------------------------------------------------------------


def test_initializers_go_by_their_label() -> None:
    source = runtime(
        replicated("dataset-initializer", ancestor="dataset-initializer", replicas=4, with_={"env": [ENV]}),
        replicated("other", ancestor="model-initializer", container="model-initializer"),
        NODE,
        policy={"torch": {}},
    )
    initializer = {
        "dataset": {"storageUri": "hf://a/b", "env": [{"name": "A", "value": "2"}], "secretRef": {"name": "s"}},
        "model": {"storageUri": "hf://c/d"},
    }
    built = build_job_set(job({}, initializer=initializer), source)
    assert jobs(built)["dataset-initializer"]["replicas"] == 1
    assert env(built, "dataset-initializer") == {"A": "2", "STORAGE_URI": "hf://a/b"}
    assert container(built, "dataset-initializer")["envFrom"] == [{"secretRef": {"name": "s"}}]
    assert env(built, "other") == {"STORAGE_URI": "hf://c/d"}


# --- torchtune --------------------------------------------------------------------------------------------------------

LORA, QLORA, DORA = "model.lora_attn_modules=[q_proj]", "model.quantize_base=True", "model.use_dora=True"


@pytest.mark.parametrize(
    ("args", "nodes", "processes", "gpus", "recipe", "suffix"),
    [
        ([], 1, 1, 0, "full_finetune_single_device", "_full_single_device"),
        ([], 1, None, 1, "full_finetune_single_device", "_full_single_device"),
        ([LORA], 1, 1, 0, "lora_finetune_single_device", "_lora_single_device"),
        ([LORA, QLORA], 1, 1, 0, "lora_finetune_single_device", "_qlora_single_device"),
        ([LORA, QLORA, DORA], 1, 1, 0, "lora_finetune_single_device", "_lora_single_device"),
        ([LORA, "model.quantize_base=False"], 1, 1, 0, "lora_finetune_single_device", "_lora_single_device"),
        ([], 1, 2, 0, "full_finetune_distributed", "_full"),
        ([], 1, None, 2, "full_finetune_distributed", "_full"),
        ([LORA], 1, 2, 0, "lora_finetune_distributed", "_lora"),
        ([LORA, QLORA], 1, 2, 0, "lora_finetune_distributed", "_qlora"),
        ([LORA, DORA], 1, 2, 0, "lora_finetune_distributed", "_lora"),
        ([], 2, 1, 1, "full_finetune_distributed", "_full_multinode"),
        ([LORA], 2, 8, 8, "full_finetune_distributed", "_full_multinode"),
    ],
)
def test_torchtune_recipes(
    args: list[str], nodes: int, processes: int | None, gpus: int, recipe: str, suffix: str
) -> None:
    found = torchtune.recipe_and_config(args, "torchtune-llama3.2-1b", nodes=nodes, processes=processes, gpus=gpus)
    assert found == (recipe, f"llama3_2/1B{suffix}")


@pytest.mark.parametrize(
    ("runtime_name", "model"),
    [
        ("torchtune-llama3.2-1b", "llama3_2/1B"),
        ("torchtune-qwen2.5-1.5b", "qwen2_5/1.5B"),
        ("mine", ""),
        ("a-b-c-d", ""),
    ],
)
def test_torchtune_models_are_named_by_the_runtime(runtime_name: str, model: str) -> None:
    assert torchtune.model_of(runtime_name) == model


def test_torchtune_command() -> None:
    command = ["tune", "run", "full", "output_dir=/out", "dataset=alpaca", "tokenizer.path=/tok"]
    limits = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    source = runtime(replicated("node", ancestor="trainer", with_={"command": command, **limits}), policy={"torch": {}})
    built = build_job_set(job({"command": ["tune", "run"], "args": [LORA]}), source)
    assert container(built)["command"] == [
        "tune", "run", "--rdzv_endpoint=tj-node-0-0.tj:29500", "lora_finetune_distributed", "--config",
        "llama3_2/1B_lora", "output_dir=/out", "tokenizer.path=/tok",
    ]  # fmt: skip
    assert container(built)["args"] == [LORA]
    assert env(built) == {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "index"}
    plain = build_job_set(job({"command": ["tune", "run", "--nnodes=1"]}), source)
    assert container(plain)["command"] == ["tune", "run", "--nnodes=1"]
    assert "PET_MASTER_ADDR" in env(plain)
