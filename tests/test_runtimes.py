"""The shipped runtimes: read without kustomize as kustomize reads them, found by name, with what they promise."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from blueprints import kustomize
from blueprints.cli import main
from blueprints.errors import UsageError
from blueprints.manifests import check_runtime, check_train_job
from blueprints.recipe import load_recipe
from blueprints.recipe.schema import METHODS
from blueprints.recipe.shipped import shipped_names, shipped_recipes
from blueprints.resolve import build_job_set, steps_of
from blueprints.runtimes import (
    ancestor_of,
    find_runtime,
    get_runtime,
    pod_spec,
    recipe_of,
    replicated_jobs,
    runtimes_directory,
    shipped_runtimes,
    short_name,
)
from blueprints.trainjob import train_job

Manifest = dict[str, Any]
ROOT = runtimes_directory()
KUSTOMIZATIONS = sorted(path.parent.relative_to(ROOT) for path in ROOT.rglob("kustomization.yaml"))
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
INITIALIZERS = ("model-initializer", "dataset-initializer")


def identity(manifest: Manifest) -> tuple[str, str]:
    """What tells objects apart."""
    return manifest["kind"], manifest["metadata"]["name"]


def everything() -> Iterator[Any]:
    """Every runtime of every set, with an id."""
    for folder in [".", "generic", *(f"overlays/{name}" for name in OVERLAYS)]:
        for manifest in kustomize.build(ROOT / folder):
            yield pytest.param(manifest, id=f"{folder}:{manifest['metadata']['name']}")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=str)
def test_yaml_is_read_as_kustomize_reads_it(folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", ROOT / folder], text=True, capture_output=True, check=True)
    expected = sorted(yaml.load_all(done.stdout, yaml.CSafeLoader), key=identity)
    assert sorted(kustomize.build(ROOT / folder), key=identity) == expected


def test_the_teachers_step_gets_the_recipe_and_leaves_the_others_as_they_are() -> None:
    plain, offline = get_runtime("llm-distill"), get_runtime("llm-distill-offline")
    teacher = {job["name"]: job for job in replicated_jobs(offline)}["teacher"]
    assert ancestor_of(teacher) is None
    loaded = load_recipe("distill-offline", overrides=["distill.teacher_top_k=8", "resources.gpu=0"], environ={})
    assert loaded.recipe.runtime.name == "llm-distill-offline"
    job = train_job(loaded, offline, name="demo")
    assert [str(fault) for fault in check_train_job(job, offline)] == []
    steps = {step.name: step for step in steps_of(build_job_set(job, offline))}
    assert steps["teacher"].argv == ["python", "-m", "trainers.teacher"]
    given = {entry.name: entry.value for entry in steps["teacher"].env}
    assert given == {
        entry.name: entry.value for entry in steps["dataset-initializer"].env if "BLUEPRINTS" in entry.name
    }
    assert "distill.teacher_top_k=8" in given["BLUEPRINTS_OVERRIDES"]
    assert not any(name.startswith("PET_") for name in given)
    on_gpu = load_recipe("distill-offline", environ={})
    assert on_gpu.recipe.runtime.name == "llm-distill-offline-gpu"
    with pytest.raises(UsageError, match="has no step 'teacher'"):
        train_job(loaded, plain, name="demo")


@pytest.mark.parametrize("name", [f"llm-{method}" for method in METHODS] + ["llm-custom"])
def test_every_method_has_a_runtime_under_both_names(name: str) -> None:
    runtime = get_runtime(name)
    assert short_name(runtime) == name
    assert runtime["metadata"]["name"].startswith(f"{name}-v")
    assert get_runtime(runtime["metadata"]["name"]) == runtime
    assert recipe_of(runtime) in (None, *shipped_names())


def test_runtime_of_a_method_trains_a_shipped_recipe_of_it() -> None:
    methods = {recipe.name: recipe.method for recipe in shipped_recipes()}
    for method in METHODS:
        recipe = recipe_of(get_runtime(f"llm-{method}"))
        if recipe is not None or method in methods.values():
            assert methods.get(recipe or "") == method, f"name a recipe in runtimes/llm/{method}, as ../sft does"


def test_newest_version_is_found() -> None:
    old, new = get_runtime("llm-sft"), get_runtime("llm-sft")
    for runtime, version in ((old, "v0-9"), (new, "v0-10")):
        runtime["metadata"]["name"] = f"llm-sft-{version}"
        runtime["metadata"]["labels"]["app.kubernetes.io/version"] = version
    assert find_runtime("llm-sft", [new, old]) is new
    assert find_runtime("llm-sft-v0-9", [new, old]) is old
    assert find_runtime("llm-dpo", [new, old]) is None


def test_names_end_in_the_version_of_their_label() -> None:
    for runtime in shipped_runtimes().values():
        metadata = runtime["metadata"]
        assert metadata["name"] == f"{short_name(runtime)}-{metadata['labels']['app.kubernetes.io/version']}"


@pytest.mark.parametrize("runtime", list(everything()))
def test_every_runtime_keeps_what_all_promise(runtime: Manifest) -> None:
    assert [str(fault) for fault in check_runtime(runtime)] == []
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"]
    spec = runtime["spec"]["template"]["spec"]
    trainer = next(job["name"] for job in replicated_jobs(runtime) if ancestor_of(job) == "trainer")
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [trainer]}
    assert spec["failurePolicy"]["rules"] == [{"name": "first-failure", "action": "FailJobSet"}]
    assert "ttlSecondsAfterFinished" not in spec
    for job in replicated_jobs(runtime):
        keeps_what_all_promise(job)
        gpus = [name for kind in pod_spec(job)["containers"][0].get("resources", {}).values() for name in kind]
        teacher = (short_name(runtime), job["name"]) == ("llm-distill-offline-gpu", "teacher")
        assert [name for name in gpus if "gpu" in name] == (["nvidia.com/gpu"] if teacher else [])


@pytest.mark.parametrize("runtime", list(everything()))
def test_every_runtime_becomes_a_job_set(runtime: Manifest) -> None:
    spec = {"runtimeRef": {"name": runtime["metadata"]["name"]}, "trainer": {"numNodes": 3, "numProcPerNode": 2}}
    job = {"apiVersion": runtime["apiVersion"], "kind": "TrainJob", "metadata": {"name": "demo"}, "spec": spec}
    assert [str(fault) for fault in check_train_job(job, runtime)] == []
    counts = {
        replicated["name"]: replicated["template"]["spec"]["parallelism"]
        for replicated in build_job_set(job, runtime)["spec"]["replicatedJobs"]
    }
    # With MPI the launcher is one of the nodes.
    assert counts["node"] == (2 if "launcher" in counts else 3)
    assert set(counts.values()) <= {1, counts["node"]}


def keeps_what_all_promise(job: Manifest) -> None:
    """Retries, security and termination of one replicatedJob."""
    job_spec, pod = job["template"]["spec"], pod_spec(job)
    (container,) = pod["containers"]
    assert job_spec.get("backoffLimitPerIndex", job_spec.get("backoffLimit")) == 3
    fail, ignore = job_spec["podFailurePolicy"]["rules"]
    assert fail["action"] == "FailJob"
    assert fail["onExitCodes"]["containerName"] == container["name"]
    assert fail["onExitCodes"]["values"] == ([2, 3] if job["name"] in INITIALIZERS else [2, 3, 4])
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    # Upstream's MPI images write into their home directory.
    assert security["readOnlyRootFilesystem"] is not container["image"].startswith(
        ("ghcr.io/kubeflow/trainer/deepspeed", "ghcr.io/kubeflow/trainer/mlx")
    )
    assert ":" in container["image"]
    assert not container["image"].endswith(":latest")
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    if job["name"] in INITIALIZERS:
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    else:
        assert pod["terminationGracePeriodSeconds"] >= 600
    if container.get("command", [""])[0].endswith("sshd") or "sshd -D" in str(container.get("command")):
        assert container["readinessProbe"]["tcpSocket"] == {"port": 2222}


@pytest.mark.parametrize("name", sorted(short_name(runtime) for runtime in shipped_runtimes().values()))
def test_every_runtime_takes_a_recipe(name: str) -> None:
    runtime = get_runtime(name)
    overrides = [f"runtime={name}", "resources.num_nodes=2"]
    job = train_job(load_recipe("sft-lora", overrides=overrides, environ={}), runtime, name="demo")
    assert [str(fault) for fault in check_train_job(job, runtime)] == []
    steps = [replicated["name"] for replicated in replicated_jobs(runtime)]
    given = [f"{role}-initializer" for role in job["spec"].get("initializer", {})]
    assert sorted(given) == sorted(step for step in steps if step in INITIALIZERS)
    job_set = build_job_set(job, runtime)
    assert [replicated["name"] for replicated in job_set["spec"]["replicatedJobs"]] == steps
    claims = job_set["spec"]["volumeClaimPolicies"]
    assert [claim["retentionPolicy"] for claim in claims] == [{"whenDeleted": "Retain"}]
    many = name.startswith(("llm-multinode", "llm-deepspeed"))
    modes = claims[0]["templates"][0]["spec"]["accessModes"]
    assert modes == (["ReadWriteMany"] if many else ["ReadWriteOnce"])


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("llm-sft", {"model-initializer": [], "dataset-initializer": ["model-initializer"], "node": [*INITIALIZERS]}),
        (
            "llm-distill-offline",
            {
                "model-initializer": [],
                "dataset-initializer": ["model-initializer"],
                "teacher": [*INITIALIZERS],
                "node": [*INITIALIZERS, "teacher"],
            },
        ),
        ("llm-no-dataset", {"model-initializer": [], "node": ["model-initializer"]}),
        ("llm-no-model", {"dataset-initializer": [], "node": ["dataset-initializer"]}),
        ("llm-no-initializers", {"node": []}),
        ("llm-multinode-no-initializers", {"node": []}),
        (
            "llm-deepspeed-mpi",
            {
                "model-initializer": [],
                "dataset-initializer": ["model-initializer"],
                "node": [*INITIALIZERS],
                "launcher": ["node"],
            },
        ),
        ("torch-distributed", {"node": []}),
        ("mlx-distributed", {"node": [], "launcher": ["node"]}),
    ],
)
def test_steps_wait_for_one_another(name: str, order: dict[str, list[str]]) -> None:
    jobs = replicated_jobs(get_runtime(name))
    assert {job["name"]: [entry["name"] for entry in job.get("dependsOn", [])] for job in jobs} == order


def test_mpi_reaches_its_nodes_as_another_user_than_root() -> None:
    runtime = get_runtime("llm-deepspeed-mpi")
    policy = runtime["spec"]["mlPolicy"]["mpi"]
    jobs = {job["name"]: job for job in replicated_jobs(runtime)}
    assert ancestor_of(jobs["launcher"]) == "trainer"
    assert ancestor_of(jobs["node"]) is None
    node, launcher = (pod_spec(jobs[name])["containers"][0] for name in ("node", "launcher"))
    assert f"{policy['sshAuthMountPath']}/authorized_keys" in node["command"][2]
    agent = next(entry["value"] for entry in launcher["env"] if entry["name"] == "OMPI_MCA_plm_rsh_agent")
    assert f"-i {policy['sshAuthMountPath']}/id_rsa" in agent
    assert "-p 2222" in agent
    assert "-p 2222" in node["command"][2]
    for script in (node["command"][2], launcher["command"][2]):
        subprocess.run(["sh", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(("overlay", "policy"), [("coscheduling", "coscheduling"), ("volcano", "volcano")])
def test_gangs_are_made_where_they_can_form(overlay: str, policy: str) -> None:
    for runtime in kustomize.build(ROOT / "overlays" / overlay):
        gang = runtime["spec"].get("podGroupPolicy")
        if "no-initializers" in short_name(runtime):
            assert list(gang) == [policy]
            assert pod_spec(replicated_jobs(runtime)[0])["schedulerName"]
        else:
            assert gang is None


def test_gang_whose_steps_wait_for_one_another_is_refused() -> None:
    runtime = get_runtime("llm-sft")
    runtime["spec"]["podGroupPolicy"] = {"coscheduling": {}}
    faults = [str(fault) for fault in check_runtime(runtime)]
    assert len(faults) == 2
    assert "'dataset-initializer' starts only after model-initializer" in faults[0]
    assert "would wait for Pods that do not exist yet" in faults[1]


@pytest.mark.parametrize("overlay", ["kai", "yunikorn", "volcano"])
def test_scheduler_gets_every_pod(overlay: str) -> None:
    names = {"kai": "kai-scheduler"}.get(overlay, overlay)
    for runtime, job in pods_of(overlay):
        assert pod_spec(job)["schedulerName"] == names, (identity(runtime), job["name"])


def test_kueue_keeps_the_nodes_of_a_job_together() -> None:
    key = "kueue.x-k8s.io/podset-preferred-topology"
    found = {
        (short_name(runtime), job["name"])
        for runtime, job in pods_of("kueue")
        if key in ((job["template"]["spec"]["template"].get("metadata") or {}).get("annotations") or {})
    }
    assert found == {
        ("llm-multinode", "node"),
        ("llm-multinode-no-initializers", "node"),
        ("llm-deepspeed-mpi", "node"),
        ("llm-deepspeed-mpi", "launcher"),
    }


def pods_of(overlay: str) -> Iterator[tuple[Manifest, Manifest]]:
    """Every runtime of an overlay with each of its replicatedJobs."""
    for runtime in kustomize.build(ROOT / "overlays" / overlay):
        for job in replicated_jobs(runtime):
            yield runtime, job


@pytest.mark.parametrize("file", sorted(ROOT.glob("overlays/*/recipe.yaml")), ids=lambda file: file.parent.name)
def test_recipe_of_an_overlay_is_laid_over_any_recipe(file: Path) -> None:
    loaded = load_recipe("sft-lora", overlays=[file], environ={})
    job = train_job(loaded, get_runtime("llm-sft"))
    assert check_train_job(job, get_runtime("llm-sft")) == []
    assert len(job["metadata"]["labels"]) > 1


def test_overlays_keep_the_names() -> None:
    for overlay in OVERLAYS:
        assert {m["metadata"]["name"] for m in kustomize.build(ROOT / "overlays" / overlay)} == set(shipped_runtimes())


def test_client_may_not_read_secrets() -> None:
    rules = [rule for role in kustomize.build(ROOT / "rbac") for rule in role["rules"]]
    for rule in rules:
        assert not set(itertools.chain(rule["resources"], rule["verbs"], rule["apiGroups"])) & {"*"}
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) == {"create"}


def test_images_are_pinned_by_a_kustomization_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT, tmp_path / "runtimes")
    (tmp_path / "mine").mkdir()
    digest = f"sha256:{'0' * 64}"
    images = [
        {"name": "ghcr.io/llm-blueprints/trainer", "newName": "registry.local/trainer", "digest": digest},
        {"name": "ghcr.io/llm-blueprints/initializer", "newTag": "0.2.0"},
    ]
    plan = {"resources": ["../runtimes"], "images": images}
    (tmp_path / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(plan))
    assert main(["runtimes", "render", "llm-sft", "--overlay", str(tmp_path / "mine")]) == 0
    (runtime,) = yaml.safe_load_all(capsys.readouterr().out)
    assert [container["image"] for container in kustomize.containers(runtime)] == [
        "ghcr.io/llm-blueprints/initializer:0.2.0",
        "ghcr.io/llm-blueprints/initializer:0.2.0",
        f"registry.local/trainer@{digest}",
    ]
    if shutil.which("kubectl"):
        done = subprocess.run(["kubectl", "kustomize", tmp_path / "mine"], text=True, capture_output=True, check=True)
        expected = sorted(yaml.load_all(done.stdout, yaml.CSafeLoader), key=identity)
        assert sorted(kustomize.build(tmp_path / "mine"), key=identity) == expected


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("resources: []\nnamePrefix: x-\n", "namePrefix is not supported"),
        ("resources: [none.yaml]\n", "cannot read"),
        ("labels: [{pairs: {a: b}, includeSelectors: true}]\n", "labels is not supported"),
        ("patches: [{patch: '{kind: X}'}]\n", "a strategic merge patch is not supported"),
        ("resources: [a.yaml]\npatches: [{patch: '[{op: move, path: /a}]'}]\n", "cannot move '/a'"),
        ("resources: [a.yaml]\npatches: [{patch: '[{op: remove, path: /a/b}]'}]\n", "cannot remove '/a/b'"),
        ("resources: [a.yaml]\npatches: [{patch: '[]', target: {group: x}}]\n", "target.group is not supported"),
        ("resources: [a.yaml]\npatches: [{patch: '[]', target: {labelSelector: a in (b)}}]\n", "labelSelector"),
    ],
)
def test_what_this_reader_does_not_know_is_refused(tmp_path: Path, plan: str, message: str) -> None:
    (tmp_path / "kustomization.yaml").write_text(plan)
    (tmp_path / "a.yaml").write_text("kind: A\nmetadata: {name: a}\n")
    with pytest.raises(UsageError, match=message):
        kustomize.build(tmp_path)


# -- the command line


def test_list_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtimes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "IN", "A", "CLUSTER", "RECIPE", "STEPS"]
    assert any(line.startswith("llm-sft ") and "sft-v" in line for line in lines)
    assert main(["runtimes", "list", "--generic", "--json"]) == 0
    assert '"torch-distributed"' in capsys.readouterr().out


def test_rendering_is_the_same_every_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for overlay in (["llm-sft"], ["--generic"], ["llm-deepspeed-mpi", "--overlay", "kueue"]):
        assert main(["runtimes", "render", *overlay]) == 0
        text = capsys.readouterr().out
        assert main(["runtimes", "render", *overlay, "-o", str(tmp_path / "x.yaml")]) == 0
        assert (tmp_path / "x.yaml").read_text() == text
        assert all(check_runtime(manifest) == [] for manifest in yaml.load_all(text, yaml.CSafeLoader))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["render", "llm-nope"], "no runtime 'llm-nope'"),
        (["render", "--overlay", "slurm"], "no overlay 'slurm'"),
        (["list", "--context", "x"], "--context means nothing to list"),
        (["diff", "--dry-run"], "--dry-run means nothing to diff"),
        (["render", "-o", "/nowhere/x.yaml"], "cannot write"),
        (["aply"], "invalid choice: 'aply'"),
        (["render", "--generic", "--overlay", "kai"], "not allowed with"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtimes", *words]) == 2
    assert message in capsys.readouterr().err


def test_several_nodes_on_a_claim_of_one_machine_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "sft-lora", "resources.num_nodes=2"]) == 0
    assert "note: 2 nodes share a ReadWriteOnce claim" in capsys.readouterr().err
    assert main(["render", "sft-lora", "resources.num_nodes=2", "runtime=llm-multinode"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "quickstart", "runtime=llm-deepspeed-mpi", "resources.num_nodes=2", "--dry-run"],
            "mpirun and the nodes it reaches over ssh",
        ),
        (["render", "quickstart", "runtime=llm-deepspeed-mpi"], "starts two nodes at least"),
        (["render", "quickstart", "runtime=torch-distributed"], "brings no trainer that reads recipes"),
        (["render", "quickstart", "runtime=llm-stf"], "did you mean 'llm-sft'"),
    ],
)
def test_runtime_that_cannot_run_the_recipe_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
