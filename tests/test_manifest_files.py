"""`blueprints validate -f`: manifests that people wrote, every fault with its file and line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_kit import Manifest, tiny_job, tiny_runtime

from blueprints.cli import main
from blueprints.recipe import load_recipe
from blueprints.runtimes import get_runtime, shipped_runtimes
from blueprints.structure import misfits
from blueprints.trainjob import to_yaml, train_job


def written(path: Path, *manifests: Manifest) -> str:
    """A YAML file of these objects."""
    path.write_text("---\n".join(yaml.safe_dump(item, sort_keys=False) for item in manifests))
    return str(path)


def checked(capsys: pytest.CaptureFixture[str], *files: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and faults of `blueprints validate -f FILE...`."""
    code = main(["validate", "--json", *(word for file in files for word in ("-f", file))])
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out).get("faults", [])
    return code, found


def at(manifest: Manifest, *path: str | int) -> Any:
    """What lies at a path."""
    found: Any = manifest
    for part in path:
        found = found[part]
    return found


NODE_POD = ("spec", "template", "spec", "replicatedJobs", 0, "template", "spec", "template", "spec")


def test_what_we_write_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = train_job(load_recipe("sft-lora", environ={}), get_runtime("llm-sft"))
    path = tmp_path / "job.yaml"
    path.write_text(to_yaml(job))
    assert main(["validate", str(path)]) == 0
    assert f"TrainJob {job['metadata']['name']} is valid" in capsys.readouterr().out
    assert checked(capsys, written(tmp_path / "all.yaml", *shipped_runtimes().values())) == (0, [])


def test_a_file_and_line_for_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(trainer={"numNods": 2, "env": [{"name": "A", "value": "1"}, {"name": "PET_NNODES", "value": "3"}]})
    job["spec"]["activeDeadlineSeconds"] = 0
    file = written(tmp_path / "job.yaml", tiny_runtime(["true"]), job)
    lines = Path(file).read_text().splitlines()
    code, faults = checked(capsys, file)
    assert code == 2
    assert {fault["key"] for fault in faults} == {
        "spec.trainer.numNods", "spec.trainer.env.PET_NNODES", "spec.activeDeadlineSeconds",
    }  # fmt: skip
    for fault in faults:
        name, _, line = fault["where"].rpartition(":")
        assert name == file
        assert fault["key"].rpartition(".")[2] in lines[int(line) - 1]
    assert faults[0]["hint"] == "Did you mean 'numNodes'?"


def patch(pod: Manifest) -> list[Manifest]:
    """A runtimePatch of the Pod of `node`."""
    entry = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return [{"manager": "a.b/c", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [entry]}}}}]


JOBS: list[tuple[str, dict[str, Any], str]] = [
    ("a field that became patches", {"podTemplateOverrides": []}, "spec.podTemplateOverrides"),
    ("labels in the spec", {"labels": {}}, "spec.labels"),
    ("a TTL", {"ttlSecondsAfterFinished": 5}, "spec.ttlSecondsAfterFinished"),
    ("text for a number", {"trainer": {"numNodes": "2"}}, "spec.trainer.numNodes"),
    ("a boolean variable", {"trainer": {"env": [{"name": "A", "value": True}]}}, "spec.trainer.env[A].value"),
    ("a variable's unknown source", {"trainer": {"env": [{"name": "A", "valueFrom": {"secret": {}}}]}},
     "spec.trainer.env[A].valueFrom.secret"),
    ("an image in a patch", {"runtimePatches": patch({"containers": [{"name": "node", "image": "x"}]})}, "image"),
    ("a scheduler in a patch", {"runtimePatches": patch({"schedulerName": "x"})}, "schedulerName"),
    ("tolerations as a map", {"runtimePatches": patch({"tolerations": {}})}, "tolerations"),
    ("no manager", {"runtimePatches": [{}]}, "spec.runtimePatches[0].manager"),
    ("command as text", {"trainer": {"command": "torchrun"}}, "spec.trainer.command"),
    ("managedBy of somebody", {"managedBy": "me"}, "spec.managedBy"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "key"), [case[1:] for case in JOBS], ids=[case[0] for case in JOBS])
def test_faults_of_trainjobs(
    spec: dict[str, Any], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, faults = checked(
        capsys, written(tmp_path / "j.yaml", tiny_runtime(["true"]), tiny_job(**copy.deepcopy(spec)))
    )
    assert code == 2
    assert any(fault["key"].endswith(key) for fault in faults), faults


def changed(*path: str | int, to: Any) -> Manifest:
    """The tiny runtime with one value changed."""
    runtime = tiny_runtime(["true"])
    at(runtime, *path[:-1])[path[-1]] = to
    return runtime


TEMPLATE = ("spec", "template", "spec")
RUNTIMES: list[tuple[str, Manifest, str]] = [
    ("two policies", changed("spec", "mlPolicy", to={"torch": {}, "mpi": {}}), "spec.mlPolicy"),
    ("a policy's old field", changed("spec", "mlPolicy", to={"torch": {"numProcPerNode": 2}}), "torch.numProcPerNode"),
    ("Intel's MPI", changed("spec", "mlPolicy", to={"mpi": {"mpiImplementation": "Intel"}}), "mpiImplementation"),
    ("MPI without a launcher", changed("spec", "mlPolicy", to={"mpi": {}}), "spec.template.spec.replicatedJobs"),
    ("a Pod's unknown field", changed(*NODE_POD, "restartPolcy", to="Never"), "restartPolcy"),
    ("a container without a name", changed(*NODE_POD, "containers", to=[{"image": "x"}]), "containers[0].name"),
    ("an unknown restart policy", changed(*NODE_POD, "restartPolicy", to="Sometimes"), "restartPolicy"),
    ("a mount without a path", changed(*NODE_POD, "containers", 0, "volumeMounts", to=[{"name": "a"}]), "mountPath"),
    ("a success policy", changed(*TEMPLATE, "successPolicy", to={"operator": "Some"}), "successPolicy.operator"),
    ("an unknown target", changed(*TEMPLATE, "failurePolicy", to={"rules": [
        {"name": "a", "action": "FailJobSet", "targetReplicatedJobs": ["x"]}]}), "failurePolicy.rules[0]"),
    ("an unknown action", changed(*TEMPLATE, "failurePolicy", to={"rules": [{"name": "a", "action": "Fail"}]}),
     "failurePolicy.rules[a].action"),
    ("a coordinator that is none", changed(*TEMPLATE, "coordinator", to={"replicatedJob": "x"}), "coordinator"),
    ("an upper case job", changed(*TEMPLATE, "replicatedJobs", 0, "name", to="Node"), "replicatedJobs[Node].name"),
    ("variables for node", changed("spec", "mlPolicy", to={"torch": {"envInjection": {"targets": [
        {"jobName": "node", "containerNames": ["node"]}]}}}), "envInjection"),
    ("variables for nobody", changed("spec", "mlPolicy", to={"torch": {"envInjection": {"targets": [
        {"jobName": "node", "containerNames": ["side"]}]}}}), "envInjection"),
    ("two gangs", changed("spec", "podGroupPolicy", to={"coscheduling": {}, "volcano": {}}), "spec.podGroupPolicy"),
    ("replicas as text", changed(*TEMPLATE, "replicatedJobs", 0, "replicas", to="1"), "replicas"),
]  # fmt: skip


@pytest.mark.parametrize(("runtime", "key"), [case[1:] for case in RUNTIMES], ids=[case[0] for case in RUNTIMES])
def test_faults_of_runtimes(runtime: Manifest, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, faults = checked(capsys, written(tmp_path / "r.yaml", runtime))
    assert code == 2
    assert any(fault["key"].endswith(key) for fault in faults), faults


def gpu_runtime(policy: str = "torch") -> Manifest:
    """A runtime with two GPUs per node."""
    runtime = changed(*NODE_POD, "containers", 0, "resources", to={"limits": {"nvidia.com/gpu": 2}})
    runtime["spec"]["mlPolicy"] = {policy: {}}
    return runtime


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ({"resourcesPerNode": {"limits": {"memory": "1Gi"}}}, "spec.trainer.resourcesPerNode"),
        ({"resourcesPerNode": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}, "spec.trainer.numProcPerNode"),
        ({"resourcesPerNode": {"limits": {"google.com/tpu": 4}}}, "spec.trainer.numProcPerNode"),
        ({"resourcesPerNode": {"limits": {"nvidia.com/gpu": 1}}}, None),
        ({"resourcesPerNode": {"limits": {"memory": "1Gi"}}, "numProcPerNode": 2}, None),
        ({}, None),
    ],
)
def test_devices_that_would_not_be_counted(
    trainer: Manifest, key: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny_job()
    job["spec"]["trainer"] = {"numNodes": 1, **trainer}
    code, faults = checked(capsys, written(tmp_path / "j.yaml", gpu_runtime(), job))
    assert (code, key) == (0, None) or key in [fault["key"] for fault in faults]


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"args": ["output_dir=/x"]}, "comes from the runtime"),
        ({"numNodes": 2}, "2 nodes with `tune run`"),
        ({"args": ["model.quantize_base=True"], "numProcPerNode": 2}, "QLoRA"),
    ],
)
def test_what_tune_run_cannot_do(
    trainer: Manifest, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = tiny_runtime(["tune", "run"])
    runtime["metadata"]["name"] = "torchtune-llama3.2-1b"
    job = tiny_job(trainer={"command": ["tune", "run"], **trainer})
    job["spec"]["runtimeRef"]["name"] = "torchtune-llama3.2-1b"
    _, faults = checked(capsys, written(tmp_path / "j.yaml", runtime, job))
    assert any(words in fault["problem"] for fault in faults), faults


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"), ("just text", "is not a Kubernetes object"), ("", "nothing to check"),
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n", "found Secret"),
        ("kind: TrainJob\n", "metadata: is missing"),
    ],
)  # fmt: skip
def test_files_that_hold_none(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert main(["validate", "-f", str(path)]) == 2
    assert words in capsys.readouterr().err
    assert main(["validate", "-f", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_every_type_that_is_named_exists() -> None:
    from kubernetes.client import models

    from blueprints import structure

    named = {word for fields in structure.TYPES.values() for word in fields.values()}
    inner = {structure._NOTATION.match(word) for word in named}
    types = {match[2] for match in inner if match} | {word for word in named if not structure._NOTATION.match(word)}
    known = {*structure.TYPES, *vars(models), "str", "int", "bool", "object"}
    assert types <= known
    assert set(structure.REQUIRED) <= known
    for table in (structure.ENUMS, structure.LIMITS):
        assert all(name in structure._fields(kind) for kind, name in table)
    assert not list(misfits(tiny_runtime(["true"]), "Runtime", "x"))


def test_the_jobset_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "quickstart", "--name", "demo", "--jobset"]) == 0
    built = yaml.safe_load(capsys.readouterr().out)
    assert (built["kind"], built["metadata"]["name"]) == ("JobSet", "demo")
    assert built["spec"]["replicatedJobs"][-1]["template"]["spec"]["parallelism"] == 1
