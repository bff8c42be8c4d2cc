"""`blueprints migrate`: v1 jobs become TrainJobs that are valid, start the same Pods, and say what is not as it was."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blueprints.cli import main
from blueprints.errors import BlueprintError
from blueprints.jobset import build_job_set
from blueprints.migrate import migrate_file

Manifest = dict[str, Any]


def replica(
    container: Manifest | None = None, *, replicas: int | None = 1, restart: str | None = "OnFailure", **pod: Any
) -> Manifest:
    """A replica specification with one container."""
    main_container = {"name": "pytorch", "image": "registry.example/train:1", "command": ["torchrun", "train.py"]}
    template = {"spec": {"containers": [main_container | (container or {}), *pod.pop("beside", [])], **pod}}
    found: Manifest = {"template": template}
    if replicas is not None:
        found["replicas"] = replicas
    if restart is not None:
        found["restartPolicy"] = restart
    return found


def pytorch_job(
    master: Manifest | None = None, worker: Manifest | None = None, name: str = "bert", **spec: Any
) -> Manifest:
    """A PyTorchJob."""
    specs = {key: value for key, value in (("Master", master), ("Worker", worker)) if value is not None}
    return {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name, "namespace": "team"},
        "spec": {"pytorchReplicaSpecs": specs, **spec},
    }  # fmt: skip


def mpi_job(
    version: str = "v2beta1", *, launcher: Manifest | None = None, worker: Manifest | None = None, **spec: Any
) -> Manifest:
    """An MPIJob with two workers."""
    launcher = launcher or replica({"name": "mpi", "command": ["mpirun", "-np", "4", "python", "/t.py"]})
    worker = worker or replica(
        {"name": "mpi", "command": None, "resources": {"limits": {"nvidia.com/gpu": 2}}}, replicas=2
    )
    worker["template"]["spec"]["containers"][0].pop("command") if worker["template"]["spec"]["containers"][0].get(
        "command", 0
    ) is None else None
    return {
        "apiVersion": f"kubeflow.org/{version}", "kind": "MPIJob", "metadata": {"name": "allreduce"},
        "spec": {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, **spec},
    }  # fmt: skip


class Result:
    """What a run of the verb said and wrote."""

    def __init__(self, out: str, err: str) -> None:
        self.text, self.err = out, err
        documents = list(yaml.safe_load_all(out))
        self.runtime, self.job = documents[:2]
        self.job_set = build_job_set(self.job, self.runtime)

    def replicated(self, name: str = "node") -> Manifest:
        """A replicatedJob of the JobSet."""
        return next(entry for entry in self.job_set["spec"]["replicatedJobs"] if entry["name"] == name)

    def pod(self, name: str = "node") -> Manifest:
        """Its Pod."""
        return self.replicated(name)["template"]["spec"]["template"]["spec"]

    def count(self, name: str = "node") -> int:
        """Its number of Pods."""
        return int(self.replicated(name)["template"]["spec"]["parallelism"])

    def container(self, name: str = "node") -> Manifest:
        """Its trainer's container."""
        return next(entry for entry in self.pod(name)["containers"] if entry["name"] == "node")

    def env(self, name: str = "node") -> dict[str, Any]:
        """Variables of that container: values, or where they come from."""
        return {
            entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in self.container(name).get("env", [])
        }


@pytest.fixture
def migrate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the verb on a job; the result has passed `blueprints validate -f -`."""

    def run(*jobs: Manifest, options: tuple[str, ...] = ()) -> Result:
        path = tmp_path / "v1.yaml"
        path.write_text(yaml.safe_dump_all(jobs, sort_keys=False))
        assert main(["migrate", str(path), *options]) == 0
        said = capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO(said.out))
        assert main(["validate", "-f", "-"]) == 0, capsys.readouterr().err
        capsys.readouterr()
        return Result(said.out, said.err)

    return run


def test_the_pods_are_the_same(migrate: Any) -> None:
    container = {
        "command": ["torchrun"], "args": ["train.py", "--lr", "1e-4"],
        "env": [{"name": "MODE", "value": "fast"}, {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        "envFrom": [{"configMapRef": {"name": "settings"}}],
        "resources": {"limits": {"nvidia.com/gpu": 4, "memory": "64Gi"}, "requests": {"cpu": 8}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}], "ports": [{"name": "pytorchjob-port", "containerPort": 23456}],
        "securityContext": {"runAsUser": 1000},
    }  # fmt: skip
    pod = {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "rows"}}],
        "initContainers": [{"name": "fetch", "image": "busybox:1", "command": ["wget", "http://x"]}],
        "nodeSelector": {"gpu": "h200"}, "tolerations": [{"key": "gpu", "operator": "Exists"}], "hostNetwork": True,
        "serviceAccountName": "trainer", "priorityClassName": "high", "imagePullSecrets": [{"name": "pull"}],
        "affinity": {"nodeAffinity": {}}, "securityContext": {"fsGroup": 1000},
    }  # fmt: skip
    both = [replica(copy.deepcopy(container), replicas=count, **copy.deepcopy(pod)) for count in (1, 3)]
    for entry in both:
        entry["template"]["metadata"] = {"annotations": {"sidecar.istio.io/inject": "false"}, "labels": {"app": "bert"}}
    result = migrate(pytorch_job(*both, nprocPerNode="4"))
    got = result.container()
    assert result.count() == 4
    assert got["image"] == "registry.example/train:1"
    for key in ("command", "args", "resources", "volumeMounts", "securityContext", "envFrom"):
        assert got[key] == container[key], key
    assert result.env().items() >= {"MODE": "fast", "KEY": {"secretKeyRef": {"name": "s", "key": "k"}}}.items()
    assert {port["containerPort"] for port in got["ports"]} == {23456, 29500}
    assert {key: result.pod()[key] for key in pod} == pod
    assert result.pod()["restartPolicy"] == "OnFailure"
    assert result.env()["PET_NPROC_PER_NODE"] == "4"
    metadata = result.replicated()["template"]["spec"]["template"]["metadata"]
    assert metadata == {"annotations": {"sidecar.istio.io/inject": "false"}, "labels": {"app": "bert"}}
    assert result.job["metadata"]["namespace"] == result.runtime["metadata"]["namespace"] == "team"


LAUNCHES = {
    "python became torchrun": (["python", "train.py", "--lr", "1"], None, ["torchrun", "train.py", "--lr", "1"], None),
    "split over args": (["python3"], ["-u", "train.py"], ["torchrun"], ["train.py"]),
    "a module": (["python", "-m", "pkg.train", "x"], None, ["torchrun", "-m", "pkg.train", "x"], None),
    "an interpreter by path": (
        ["/opt/conda/bin/python", "t.py"],
        None,
        ["torchrun", "--no-python", "/opt/conda/bin/python", "t.py"],
        None,
    ),
    "options": (
        ["python", "-O", "-W", "ignore", "t.py"],
        ["a"],
        ["torchrun", "--no-python", "python", "-O", "-W", "ignore", "t.py"],
        ["a"],
    ),
    "code": (["python", "-c", "print()"], None, ["torchrun", "--no-python", "python", "-c", "print()"], None),
    "torchrun stays": (["torchrun", "--max-restarts=3", "t.py"], None, ["torchrun", "--max-restarts=3", "t.py"], None),
    "its module stays": (
        ["python", "-m", "torch.distributed.run", "t.py"],
        None,
        ["python", "-m", "torch.distributed.run", "t.py"],
        None,
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_a_plain_python_is_started_by_torchrun(migrate: Any, case: str) -> None:
    command, args, expected, expected_args = LAUNCHES[case]
    container = {"command": command} | ({"args": args} if args else {})
    result = migrate(pytorch_job(replica(dict(container)), replica(dict(container), replicas=2)))
    assert (result.container()["command"], result.container().get("args")) == (expected, expected_args)
    changed = command != expected
    assert ("RANK, WORLD_SIZE" in result.err) == changed
    if changed:
        assert result.env()["PET_NPROC_PER_NODE"] == "1"  # as before: one process per Pod
        assert "RANK" not in result.env()
    assert ("-u" in (args or [])) == ("PYTHONUNBUFFERED" in result.env())


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["bash", "-c", "python train.py --rank $RANK"]},
        {"command": None},
        {"command": ["accelerate", "launch", "t.py"]},
        {"command": ["python", "-m", "accelerate.commands.launch", "t.py"]},
        {"command": ["torchrun", "--node_rank=$(RANK)", "--nnodes=$(WORLD_SIZE)", "--master_addr=$(MASTER_ADDR)", "t.py"]},
        {"command": ["torchrun", "t.py"], "env": [{"name": "URL", "value": "tcp://$(MASTER_ADDR):$(MASTER_PORT)"}]},
    ],
)  # fmt: skip
def test_what_may_need_the_old_variables_gets_them(migrate: Any, container: Manifest) -> None:
    both = [replica(copy.deepcopy(container), replicas=count) for count in (1, 2)]
    if container["command"] is None:
        for entry in both:
            del entry["template"]["spec"]["containers"][0]["command"]
    result = migrate(pytorch_job(*both))
    env = result.env()
    assert env["WORLD_SIZE"] == "3"
    assert env["MASTER_ADDR"] == env["PET_MASTER_ADDR"] == "bert-node-0-0.bert"
    assert env["MASTER_PORT"] == "29500"
    assert "job-completion-index" in env["RANK"]["fieldRef"]["fieldPath"]
    names = [entry["name"] for entry in result.container()["env"]]
    assert names.index("RANK") < names.index("URL") if "URL" in names else True  # $(RANK) needs it before
    assert result.container().get("command") == container["command"]
    assert "as the old operator set them" in result.err


def test_a_program_that_starts_its_own_processes_keeps_python(migrate: Any) -> None:
    result = migrate(pytorch_job(replica({"command": ["python", "spawn.py"]}), nprocPerNode="8"))
    assert result.container()["command"] == ["python", "spawn.py"]
    assert result.env()["WORLD_SIZE"] == "8"


def test_hosts_of_the_old_pods_are_renamed(migrate: Any) -> None:
    container = {
        "command": ["torchrun", "--rdzv-endpoint=bert-master-0:23456", "t.py"],
        "env": [{"name": "PEER", "value": "bert-worker-1"}],
    }
    result = migrate(pytorch_job(replica(copy.deepcopy(container)), replica(copy.deepcopy(container), replicas=2)))
    assert result.container()["command"][1] == "--rdzv-endpoint=bert-node-0-0.bert:23456"
    assert result.env()["PEER"] == "bert-node-0-2.bert"
    assert "'bert-master-0' is 'bert-node-0-0.bert' now" in result.err


PROCESSES = [
    ("auto", {"limits": {"nvidia.com/gpu": 4}}, "4", ""),
    (None, {"limits": {"nvidia.com/gpu": 4}}, "4", ""),
    ("gpu", {"limits": {"nvidia.com/gpu": 2}}, "2", ""),
    ("cpu", {"limits": {"nvidia.com/gpu": 2, "cpu": 6}}, "6", ""),
    ("auto", {"limits": {"nvidia.com/mig-1g.5gb": 1}}, "1", "does not count as a GPU"),
    ("auto", {"limits": {"huawei.com/Ascend910": 8}}, "8", "does not count as a GPU"),
    ("auto", {"requests": {"cpu": "2500m"}}, "3", "one process for each CPU that the Pod asks for (3)"),
    (2, {}, "2", ""),
]


@pytest.mark.parametrize(("given", "resources", "expected", "said"), PROCESSES)
def test_processes_per_node(migrate: Any, given: Any, resources: Manifest, expected: str, said: str) -> None:
    spec = {} if given is None else {"nprocPerNode": given}
    result = migrate(pytorch_job(replica({"resources": resources} if resources else {}), **spec))
    assert result.env()["PET_NPROC_PER_NODE"] == expected
    assert said in result.err


RESTARTS = [
    ("OnFailure", {}, {"restartPolicy": "OnFailure"}, None, "gives up after 6"),
    ("Never", {}, {"restartPolicy": "Never"}, 0, ""),
    ("Always", {"backoffLimit": 4}, {"restartPolicy": "OnFailure"}, 4, "Always became OnFailure"),
    (None, {"backoffLimit": 1}, {"restartPolicy": "OnFailure"}, 1, ""),
    ("ExitCode", {"backoffLimit": 5}, {"restartPolicy": "Never"}, 5, "exit codes 1 to 127 fail the job"),
]


@pytest.mark.parametrize(("restart", "policy", "pod", "limit", "said"), RESTARTS)
def test_restart_policies(
    migrate: Any, restart: str | None, policy: Manifest, pod: Manifest, limit: int | None, said: str
) -> None:
    result = migrate(pytorch_job(replica(restart=restart), runPolicy=policy))
    assert result.pod().items() >= pod.items()
    job_spec = result.replicated()["template"]["spec"]
    assert job_spec.get("backoffLimit") == limit
    assert said in result.err
    rules = (job_spec.get("podFailurePolicy") or {}).get("rules", [])
    codes = [value for rule in rules for value in (rule.get("onExitCodes") or {}).get("values", [])]
    assert (set(codes) == set(range(1, 128))) == (restart == "ExitCode")


def test_the_run_policy(migrate: Any) -> None:
    policy = {
        "suspend": True,
        "activeDeadlineSeconds": 60,
        "ttlSecondsAfterFinished": 5,
        "cleanPodPolicy": "All",
        "managedBy": "kueue.x-k8s.io/multikueue",
    }
    spec = (result := migrate(pytorch_job(replica(), runPolicy=policy))).job["spec"]
    assert (spec["suspend"], spec["activeDeadlineSeconds"], spec["managedBy"]) == (
        True,
        60,
        "kueue.x-k8s.io/multikueue",
    )
    for key in ("ttlSecondsAfterFinished", "cleanPodPolicy"):
        assert f"spec.runPolicy.{key}" in result.err
        assert f"spec.runPolicy.{key}" in result.text.split("apiVersion")[0]  # as a comment too


GANGS = [
    ("volcano", {"queue": "research", "minAvailable": 2}, {"volcano": {}}, "minAvailable: 2 became 3"),
    (
        "scheduler-plugins-scheduler",
        {"scheduleTimeoutSeconds": 30},
        {"coscheduling": {"scheduleTimeoutSeconds": 30}},
        "",
    ),
    (None, {"minAvailable": 3}, None, "no Pod names its scheduler"),
    (None, {"queue": "research"}, None, "'research' was dropped"),
]


@pytest.mark.parametrize(("scheduler", "policy", "groups", "said"), GANGS)
def test_gang_scheduling(
    migrate: Any, scheduler: str | None, policy: Manifest, groups: Manifest | None, said: str
) -> None:
    pod = {"schedulerName": scheduler} if scheduler else {}
    policy = policy | {"priorityClass": "urgent"}
    result = migrate(pytorch_job(replica(**pod), replica(replicas=2, **pod), runPolicy={"schedulingPolicy": policy}))
    assert result.runtime["spec"].get("podGroupPolicy") == groups
    assert said in result.err
    assert result.pod()["priorityClassName"] == "urgent"
    if scheduler == "volcano":
        assert result.job_set["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "research"}


def test_workers_unlike_the_master_are_told(migrate: Any) -> None:
    worker = replica(
        {"image": "registry.example/train:2", "args": ["--worker"], "env": [{"name": "SALT", "value": "hidden"}]}, replicas=2,
        restart="Never", nodeSelector={"gpu": "a100"},
    )  # fmt: skip
    result = migrate(pytorch_job(replica({"resources": {"limits": {"cpu": "1"}}}), worker))
    base = "spec.pytorchReplicaSpecs.Worker.template.spec"
    for key in (
        "containers[pytorch].image",
        "containers[pytorch].args",
        "containers[pytorch].resources.limits.cpu",
        "nodeSelector.gpu",
        "containers[pytorch].env[SALT]",
    ):
        assert f"{base}.{key}" in result.err, key
    assert "hidden" not in result.err
    assert "Worker.restartPolicy" in result.err
    assert result.container()["image"] == "registry.example/train:1"


def test_equal_amounts_in_other_words_do_not_differ(migrate: Any) -> None:
    both = [replica({"resources": {"limits": {"cpu": cpu}}, "env": env}) for cpu, env in (("1", []), ("1000m", None))]
    del both[1]["template"]["spec"]["containers"][0]["env"]
    assert "all nodes are as the Master was" not in migrate(pytorch_job(*both)).err


def test_elastic_jobs(migrate: Any) -> None:
    policy = {"minReplicas": 1, "maxReplicas": 4, "maxRestarts": 10, "rdzvBackend": "c10d", "nProcPerNode": 2}
    result = migrate(pytorch_job(None, replica(replicas=3), elasticPolicy=policy))
    assert result.count() == 3
    assert result.env()["PET_NPROC_PER_NODE"] == "2"
    assert "Instead of between 1 and 4 nodes there are 3" in result.err
    assert "maxRestarts" in result.err


def test_a_token_in_plain_text_becomes_a_reference(migrate: Any) -> None:
    env = [
        {"name": "HF_TOKEN", "value": "hf_abcdef"},
        {"name": "PET_NNODES", "value": "2"},
        {"name": "A", "value": "1"},
        {"name": "A", "value": "2"},
    ]
    result = migrate(pytorch_job(replica({"env": env})))
    assert result.env()["HF_TOKEN"] == {"secretKeyRef": {"name": "bert-env", "key": "HF_TOKEN"}}
    assert "hf_abcdef" not in result.text + result.err
    assert "kubectl create secret generic bert-env" in result.err
    assert result.env()["A"] == "2"
    assert result.env()["PET_NNODES"] == "1"


def test_sidecars_and_a_container_called_node(migrate: Any) -> None:
    beside = [{"name": "node", "image": "exporter:1"}, {"name": "logs", "image": "fluentd:1"}]
    result = migrate(pytorch_job(replica(beside=beside)))
    assert [entry["name"] for entry in result.pod()["containers"]] == ["node", "node-1", "logs"]
    assert result.container()["image"] == "registry.example/train:1"
    assert "is called 'node-1' now" in result.err
    assert "restartPolicy: Always" in result.err


def test_long_lists_stay_in_the_runtime(migrate: Any) -> None:
    args = [f"--a{i}" for i in range(200)]
    env = [{"name": f"V{i}", "value": str(i)} for i in range(200)]
    result = migrate(pytorch_job(replica({"args": args, "env": env})))
    assert result.container()["args"] == args
    assert result.env()["V199"] == "199"
    assert "args" not in result.job["spec"]["trainer"]


def test_names(migrate: Any) -> None:
    long = migrate(pytorch_job(replica(), name="a-very-long-name-of-a-training-job-that-was-fine-before-x"))
    assert len(long.job["metadata"]["name"]) <= 48
    assert "metadata.name" in long.err
    dotted = migrate(pytorch_job(replica(), name="0.bert_x"))
    assert dotted.job["metadata"]["name"] == "job-0-bert-x"
    generated = pytorch_job(replica())
    generated["metadata"] = {"generateName": "bert-"}
    assert migrate(generated).job["metadata"]["name"] == "bert"


def test_labels_annotations_and_the_kind_of_runtime(migrate: Any) -> None:
    job = pytorch_job(replica())
    job["metadata"] |= {
        "labels": {"kueue.x-k8s.io/queue-name": "q"}, "uid": "1", "resourceVersion": "3",
        "annotations": {"note": "x", "kubectl.kubernetes.io/last-applied-configuration": "{}"},
    }  # fmt: skip
    job["status"] = {"conditions": []}
    result = migrate(job, options=("--cluster",))
    assert result.runtime["kind"] == result.job["spec"]["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    assert "namespace" not in result.runtime["metadata"]
    assert result.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert result.job["metadata"]["annotations"] == {"note": "x"}


def test_an_mpi_job(migrate: Any) -> None:
    result = migrate(mpi_job(slotsPerWorker=2, sshAuthMountPath="/home/mpi/.ssh"))
    assert (result.count("node"), result.count("launcher")) == (2, 1)
    assert result.container("launcher")["command"] == ["mpirun", "-np", "4", "python", "/t.py"]
    assert result.container("node")["command"] == ["/usr/sbin/sshd", "-De"]
    assert result.container("node")["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert "resources" not in result.container("launcher")
    assert result.env("launcher")["OMPI_MCA_orte_set_default_slots"] == "2"
    mounts = {mount["mountPath"] for mount in result.container("node")["volumeMounts"]}
    assert "/home/mpi/.ssh" in mounts
    assert result.job_set["spec"]["successPolicy"]["targetReplicatedJobs"] == ["launcher"]
    assert result.replicated("launcher")["dependsOn"] == [{"name": "node", "status": "Ready"}]
    assert result.runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "mpi"


def test_an_mpi_job_of_v1_needs_ssh_now(migrate: Any) -> None:
    worker = replica({"name": "mpi", "command": ["sleep", "365d"]}, replicas=3)
    result = migrate(mpi_job("v1", worker=worker, cleanPodPolicy="All"))
    assert result.count("node") == 3
    assert result.container("node")["command"] == ["/usr/sbin/sshd", "-De"]
    assert "MPIJob v1 did with kubectl exec" in result.err
    assert "sleep 365d" in result.err
    assert "cleanPodPolicy" in result.err


def test_a_launcher_that_works_too(migrate: Any) -> None:
    result = migrate(mpi_job(runLauncherAsWorker=True, slotsPerWorker=2))
    assert (result.count("node"), result.count("launcher")) == (2, 1)
    assert result.runtime["spec"]["mlPolicy"]["mpi"]["runLauncherAsNode"] is True


def test_an_mpi_gang(migrate: Any) -> None:
    launcher = replica({"name": "mpi", "command": ["mpirun", "x"]}, schedulerName="volcano")
    job = mpi_job(
        launcher=launcher,
        launcherCreationPolicy="WaitForWorkersReady",
        runPolicy={"schedulingPolicy": {"minAvailable": 3}},
    )
    result = migrate(job)
    assert result.runtime["spec"]["podGroupPolicy"] == {"volcano": {}}
    assert "dependsOn" not in result.replicated("launcher")
    assert "a gang starts at once" in result.err


@pytest.mark.parametrize(("version", "limit", "told"), [("v2beta1", None, False), ("v1", 0, False)])
def test_retries_of_launchers(migrate: Any, version: str, limit: int | None, told: bool) -> None:
    launcher = replica({"name": "mpi", "command": ["mpirun", "x"]}, restart="Never")
    worker = replica({"name": "mpi", "command": ["sleep", "1"]}, restart="Never")
    result = migrate(mpi_job(version, launcher=launcher, worker=worker))
    assert result.replicated("launcher")["template"]["spec"].get("backoffLimit") == limit
    assert ("restarted without end" in result.err) == told


def test_no_empty_lists_are_written(migrate: Any) -> None:
    assert "[]" not in migrate(pytorch_job(replica())).text


def test_several_jobs_and_other_objects_in_one_file(migrate: Any) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "rows"}, "spec": {}}
    result = migrate(pytorch_job(replica()), claim, mpi_job())
    assert [item["kind"] for item in yaml.safe_load_all(result.text)] == ["TrainingRuntime", "TrainJob"] * 2
    assert "PersistentVolumeClaim rows: is no job" in result.err


def test_it_writes_a_file_and_reads_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump_all([pytorch_job(replica()), service])))
    assert main(["migrate", "-", "-o", str(tmp_path / "out.yaml")]) == 0
    assert main(["validate", "-f", str(tmp_path / "out.yaml")]) == 0
    assert "Service web: is no job" in capsys.readouterr().err


def broken(path: str, value: Any) -> Manifest:
    """A PyTorchJob with one value replaced."""
    job = pytorch_job(replica({"env": [{"name": "A", "value": "1"}]}))
    target: Any = job
    *way, last = path.split("/")
    for step in way:
        target = target[int(step)] if isinstance(target, list) else target[step]
    target[last] = value
    return job


REFUSED = [
    ({"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": {"name": "x"}, "spec": {}}, "TFJob of kubeflow.org/v1 cannot be migrated"),
    ({"apiVersion": "kubeflow.org/v1alpha2", "kind": "MPIJob", "metadata": {"name": "x"}, "spec": {}}, "cannot be migrated"),
    ({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {}}, "there is no job to migrate: found Pod"),
    (pytorch_job(), "has no replicas"),
    (broken("spec/pytorchReplicaSpecs/Chief", replica()), "has replicas Chief"),
    (broken("spec/pytorchReplicaSpecs/Master/template/spec/containers/0/imagee", "x"), "v1.yaml:20: spec.pytorchReplicaSpecs.Master.template.spec.containers[pytorch].imagee"),
    (broken("spec/pytorchReplicaSpecs/Master/template/spec/containers/0/env", [{"name": "A", "value": 1}]), "is not a string"),
    (broken("spec/pytorchReplicaSpecs/Master/replicas", 0), "v1.yaml:20: spec.pytorchReplicaSpecs.Master.replicas: 0 is not valid"),
    (broken("spec/pytorchReplicaSpecs/Master/restartPolicy", "Sometimes"), "'Sometimes' is not valid"),
    (broken("spec/nprocPerNode", "many"), "'many' is not valid"),
    (broken("spec/runPolicy", {"activeDeadlineSeconds": 0}), "activeDeadlineSeconds"),
    (broken("metadata/name", {"a": 1}), "is not a string"),
    (broken("spec/pytorchReplicaSpecs/Master/template/spec/containers", []), "has no containers"),
    (mpi_job(mpiImplementation="Intel"), "Intel is not supported"),
    ({**mpi_job(), "spec": {"mpiReplicaSpecs": {"Launcher": replica({"name": "mpi"})}}}, "has no Worker"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "said"), REFUSED)
def test_what_cannot_be_migrated_is_refused(job: Manifest, said: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "v1.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    assert main(["migrate", str(path)]) == 2
    said_all = capsys.readouterr()
    assert said in said_all.err
    assert "v1.yaml" in said_all.err
    assert not said_all.out


def test_a_file_that_is_no_yaml(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "v1.yaml").write_text("a: [\n")
    assert main(["migrate", str(tmp_path / "v1.yaml")]) == 2
    assert main(["migrate", str(tmp_path / "none.yaml")]) == 2
    assert "is not YAML" in capsys.readouterr().err


WORDS = st.sampled_from(["python", "-u", "-m", "torchrun", "t.py", "--nnodes=$(WORLD_SIZE)", "bash", "-c", "$RANK", ""])
CONTAINERS = st.fixed_dictionaries(
    {"name": st.sampled_from(["pytorch", "main", "node"]), "image": st.just("i:1")},
    optional={
        "command": st.lists(WORDS, max_size=4), "args": st.lists(WORDS, max_size=4),
        "env": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["A", "RANK", "PET_X", "HF_TOKEN"]), "value": st.sampled_from(["", "1", "$(RANK)"])}),
            max_size=4,
        ),
        "resources": st.sampled_from([{}, {"limits": {"nvidia.com/gpu": 2}}, {"requests": {"cpu": 1.5}}, {"limits": {"nvidia.com/mig-1g.5gb": 1}}]),
    },
)  # fmt: skip
REPLICAS = st.builds(
    lambda first, beside, count, restart: {
        "replicas": count, "restartPolicy": restart,
        "template": {"spec": {"containers": [first, *[{"name": f"s{i}", "image": "s:1"} for i in range(beside)]]}},
    },
    CONTAINERS, st.integers(0, 2), st.integers(1, 30), st.sampled_from(["Always", "OnFailure", "Never", "ExitCode"]),
)  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    master=REPLICAS, worker=st.none() | REPLICAS, name=st.text(st.sampled_from("ab0-._Z"), min_size=1, max_size=80),
    processes=st.sampled_from([None, "auto", "cpu", "gpu", "1", "3"]),
)  # fmt: skip
def test_whatever_is_written_the_result_is_valid_or_refused(
    tmp_path: Path, master: Manifest, worker: Manifest | None, name: str, processes: str | None
) -> None:
    job = pytorch_job(master, worker, name=name, **({"nprocPerNode": processes} if processes else {}))
    path = tmp_path / "v1.yaml"
    path.write_text(yaml.safe_dump(job))
    (migrated,) = migrate_file(str(path))  # raises where the result would not be valid
    text = migrated.to_yaml()
    assert list(yaml.safe_load_all(text)) == [migrated.runtime, migrated.job]
    pods = build_job_set(migrated.job, migrated.runtime)["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert pods["parallelism"] == master["replicas"] + (worker["replicas"] if worker else 0)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 5) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["spec", "replicas", "template", "containers", "name", "env", "Master"]),
                inner,
                max_size=3,
            )
        ),
    )
)
def test_nonsense_is_told_not_stumbled_over(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "v1.yaml"
    for key in ("pytorchReplicaSpecs", "runPolicy", "elasticPolicy", "nprocPerNode"):
        job = pytorch_job(replica())
        job["spec"][key] = value
        path.write_text(yaml.safe_dump(job))
        with contextlib.suppress(BlueprintError):
            migrate_file(str(path))
