"""The kubernetes backend against a stand-in of the API server that enforces the shipped roles: start, look, follow, wait,
logs, suspend, resume, delete."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer, Request, serving, times
from cluster_kit import Scene, ago, condition, ended, show, termination, waiting
from jobs_kit import tiny_job, tiny_runtime, until

from blueprints.backends.kubernetes.api import ApiError
from blueprints.backends.kubernetes.backend import ALREADY_COMPLETE, RESUMED, STARTED, KubernetesBackend
from blueprints.errors import ManifestError, UsageError
from blueprints.runtimes import runtimes_directory
from blueprints.trainjob import RECIPE_HASH

ROLES = list(yaml.safe_load_all((runtimes_directory() / "rbac" / "client.yaml").read_text(encoding="utf-8")))
TOKENS = ("HF_TOKEN", "ACCESS_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token of the machine that runs the tests."""
    for name in TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with serving() as running:
        running.roles = ROLES
        running.groups |= {"kueue.x-k8s.io"}
        running.put("clustertrainingruntimes", tiny_runtime(["train"], model=["fetch"], dataset=["prepare"], backoff=3))
        yield running


@pytest.fixture
def backend(server: ApiServer, tmp_path: Path) -> KubernetesBackend:
    found = KubernetesBackend.connect(kubeconfig=str(server.kubeconfig(tmp_path / "config")))
    found.cluster.pause = lambda _: None
    return found


def job(name: str = "demo", digest: str = "a" * 64, **spec: Any) -> dict[str, Any]:
    made = tiny_job(name, **spec)
    made["metadata"]["annotations"] = {RECIPE_HASH: digest}
    return made


def start(backend: KubernetesBackend, manifest: dict[str, Any]) -> str:
    return backend.start(manifest, backend.runtime("tiny"))


# --- runtimes


def test_runtimes_of_the_namespace_come_before_those_of_the_cluster(
    backend: KubernetesBackend, server: ApiServer
) -> None:
    assert [item["metadata"]["name"] for item in backend.runtimes()] == ["tiny"]
    assert backend.runtime("tiny")["kind"] == "ClusterTrainingRuntime"
    own = tiny_runtime(["mine"])
    own["kind"] = "TrainingRuntime"
    server.put("trainingruntimes", own)
    assert backend.runtime("tiny")["kind"] == "TrainingRuntime"


def test_runtimes_by_their_short_name_the_newest(backend: KubernetesBackend, server: ApiServer) -> None:
    for version in ("v0-1", "v0-2"):
        runtime = tiny_runtime(["train"])
        runtime["metadata"] = {"name": f"llm-sft-{version}", "labels": {
            "app.kubernetes.io/part-of": "llm-blueprints", "app.kubernetes.io/name": "llm-sft",
            "app.kubernetes.io/version": version,
        }}  # fmt: skip
        server.put("clustertrainingruntimes", runtime)
    assert backend.runtime("llm-sft")["metadata"]["name"] == "llm-sft-v0-2"
    assert backend.runtime("llm-sft-v0-1")["metadata"]["name"] == "llm-sft-v0-1"
    with pytest.raises(UsageError, match="blueprints runtimes apply llm-dpo"):
        backend.runtime("llm-dpo")
    with pytest.raises(UsageError, match="did you mean 'tiny'"):
        backend.runtime("tinny")


# --- starting


def test_a_job_is_created_once(backend: KubernetesBackend, server: ApiServer) -> None:
    assert start(backend, job()) == STARTED
    made = server.all("trainjobs")["demo"]
    assert made["spec"]["runtimeRef"]["name"] == "tiny"
    with pytest.raises(UsageError, match="exists and is Created"):
        start(backend, job())
    with pytest.raises(UsageError, match="with another recipe exists"):
        start(backend, job(digest="b" * 64))
    server.change("trainjobs", "demo", spec={"suspend": True})
    assert start(backend, job()) == RESUMED
    assert server.all("trainjobs")["demo"]["spec"]["suspend"] is False
    server.change("trainjobs", "demo", status={"conditions": [condition("Complete")]})
    assert start(backend, job()) == ALREADY_COMPLETE
    server.change("trainjobs", "demo", status={"conditions": [condition("Failed", "FailedJobs")]})
    with pytest.raises(UsageError, match=r"(?s)is Failed.*delete demo --claims"):
        start(backend, job())


def test_an_invalid_job_is_not_sent(backend: KubernetesBackend, server: ApiServer) -> None:
    with pytest.raises(ManifestError, match="at most 33 characters"):
        start(backend, job("a" * 34))
    assert server.all("trainjobs") == {}


def test_a_runtime_that_the_webhook_has_not_seen_yet(backend: KubernetesBackend, server: ApiServer) -> None:
    said = "specified clusterTrainingRuntime must be created before the TrainJob is created"
    answers = [said, said, None]
    server.admission.append(lambda body: answers.pop(0) if body["kind"] == "TrainJob" else None)
    assert start(backend, job()) == STARTED


def test_a_creation_whose_answer_was_lost_is_not_repeated(backend: KubernetesBackend, server: ApiServer) -> None:
    def lost(request: Request) -> bool:
        if request.method != "POST":
            return False
        server.put("trainjobs", request.body or {})
        return request.cut()

    server.faults.append(times(1, lost))
    assert start(backend, job()) == STARTED


def test_a_claim_of_an_earlier_job_is_seen_before_the_job_is_created(
    backend: KubernetesBackend, server: ApiServer
) -> None:
    runtime = tiny_runtime(["train"])
    runtime["metadata"]["name"] = "keeping"
    runtime["spec"]["template"]["spec"]["volumeClaimPolicies"][0]["retentionPolicy"] = {"whenDeleted": "Retain"}
    server.put("clustertrainingruntimes", runtime)
    server.put("persistentvolumeclaims", {"metadata": {"name": "initializer-demo"}})
    made = job()
    made["spec"]["runtimeRef"]["name"] = "keeping"
    for act in (backend.start, backend.check):
        with pytest.raises(UsageError, match="kubectl delete pvc initializer-demo"):
            act(made, backend.runtime("keeping"))
    assert server.all("trainjobs") == {}


def test_check_changes_nothing_and_tells_what_the_server_says(backend: KubernetesBackend, server: ApiServer) -> None:
    backend.check(job(), backend.runtime("tiny"))
    assert server.all("trainjobs") == {}
    server.admission.append(lambda _: 'admission webhook "validator" denied the request: no')
    with pytest.raises(ApiError, match="denied the request: no"):
        backend.check(job(), backend.runtime("tiny"))


# --- looking


def test_a_job_is_seen_with_all_that_belongs_to_it(backend: KubernetesBackend, server: ApiServer) -> None:
    show(server, Scene().initialized().with_pod("node", "Pending", state=waiting("ErrImagePull", "no such image")))
    show(server, Scene("demo-2").initialized().with_pod("node", "Running"))
    found = backend.get("demo")
    assert (found.state, found.reason) == ("Created", "ErrImagePull")
    assert [step.pod.rpartition("-")[0] for step in found.steps][-1] == "demo-node-0-0"
    assert backend.get("demo-2").state == "Running"
    listed = {status.name: status.state for status in backend.jobs()}
    assert listed == {"demo": "Created", "demo-2": "Running"}
    with pytest.raises(UsageError, match="did you mean demo"):
        backend.get("demmo")


def test_a_job_that_waits_in_a_queue(backend: KubernetesBackend, server: ApiServer) -> None:
    scene = show(server, Scene(spec={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "gpus"}))
    owner = {"uid": server.all("trainjobs")["demo"]["metadata"]["uid"]}
    server.put("workloads", {
        "metadata": {"name": "trainjob-demo-1234", "ownerReferences": [owner]},
        "status": {"conditions": [condition("QuotaReserved", "Pending", "insufficient quota", "False")]},
    })  # fmt: skip
    assert scene.name == "demo"
    for status in (backend.get("demo"), backend.jobs()[0]):
        assert (status.state, status.message) == ("Queued", "it waits in queue gpus: insufficient quota")
    server.groups -= {"kueue.x-k8s.io"}
    assert backend.get("demo").message == "it waits in queue gpus"
    with pytest.raises(UsageError, match="Kueue's queue gpus, which decides"):
        backend.resume("demo")


def test_all_jobs_are_listed_in_one_sweep(backend: KubernetesBackend, server: ApiServer) -> None:
    """However many there are and whatever they wait for: a call per page of 500, none per job."""
    for number in range(60):
        kind = number % 3
        scene = Scene(
            f"job-{number}", spec={"suspend": True} if kind == 0 else {},
            labels={"kueue.x-k8s.io/queue-name": "gpus"} if kind == 0 else {},
        )  # fmt: skip
        show(server, scene if kind == 0 else scene.initialized().with_pod("node", ("Running", "Pending")[kind - 1]))
    before = len(server.requests)
    states = [status.state for status in backend.jobs()]
    assert len(server.requests) - before <= 8
    assert (states.count("Queued"), states.count("Running"), states.count("Created")) == (20, 20, 20)


def test_events_merged_in_the_order_of_time(backend: KubernetesBackend, server: ApiServer) -> None:
    scene = Scene(age=300).with_pod("node", "Running")
    scene.event("Pod", "Started", "Started container node", first=20, last=20, old_style=True, warning=False)
    scene.event("TrainJob", "Odd", "odd", first=100, last=100)
    show(server, scene)
    events = backend.events("demo")
    assert [(event.involved_object_kind, event.reason, event.type) for event in events] == [
        ("TrainJob", "Odd", "Warning"), ("Pod", "Started", "Normal"),
    ]  # fmt: skip
    assert events[0].event_time < events[1].event_time


@pytest.mark.parametrize("posted", [True, False])
def test_progress_from_the_status_or_from_the_log(backend: KubernetesBackend, server: ApiServer, posted: bool) -> None:
    scene = Scene().initialized().with_pod("node", "Running")
    if posted:
        scene.status(trainerStatus={"progressPercentage": 50, "metrics": [], "lastUpdatedTime": ago(1)})
    show(server, scene)
    line = "step 20/80  loss 2.1234  lr 1.00e-04  grad norm 0.500  12,345 tokens/s  ETA 1 min 20 s"
    server.logs[scene.pods[-1]["metadata"]["name"], "node"] = [f"{ago(2)} {line}", f"{ago(1)} other"]
    status = backend.get("demo")
    report = backend.progress(status)["node-0"]
    if posted:
        assert (report["completed"], report["unit"]) == (50.0, "%")
    else:
        assert (report["completed"], report["total"], report["eta_seconds"]) == (20.0, 80.0, 80.0)
        assert report["metrics"] == {"loss": 2.1234, "tokens_per_second": 12345.0}
    calls = len(server.requests)
    backend.progress(status)
    assert len(server.requests) == calls  # a view that asks often does not load the server


# --- following


def test_every_state_is_told_once_over_cuts_and_restarts(backend: KubernetesBackend, server: ApiServer) -> None:
    scene = show(server, Scene(age=1))
    seen: list[str] = []
    follower = threading.Thread(target=lambda: seen.extend(status.state for status in backend.follow("demo")))
    follower.start()
    until(lambda: len([line for line in server.requests if "watch=true" in line]) >= 5)
    show(server, scene.with_pod("model-initializer", "Running"))
    server.hang_up()
    scene.pods[-1]["status"]["phase"] = "Succeeded"
    show(server, scene.initialized())
    server.forget()
    server.faults.append(times(3, lambda request: request.refuse(503, "restarting")))
    server.hang_up()
    show(server, scene.with_pod("node", "Running"))
    until(lambda: "Running" in seen or not follower.is_alive())
    server.hang_up()
    show(server, scene.complete())
    follower.join(20)
    states = [state for place, state in enumerate(seen) if place == 0 or seen[place - 1] != state]
    assert states[0] == "Created"
    assert states[-2:] == ["Running", "Complete"]
    assert len(states) == len(set(states))


def test_states_that_follow_quickly_are_all_told(backend: KubernetesBackend, server: ApiServer) -> None:
    scene = show(server, Scene(age=1).initialized())
    seen: list[str] = []
    follower = threading.Thread(target=lambda: seen.extend(status.state for status in backend.follow("demo")))
    follower.start()
    until(lambda: len([line for line in server.requests if "watch=true" in line]) >= 5)
    show(server, scene.with_pod("node", "Pending"))
    pod = scene.pods[-1]["metadata"]["name"]
    for phase in ("Running", "Succeeded"):
        server.change("pods", pod, status={"phase": phase})
    scene.pods.pop()
    show(server, scene.complete())
    follower.join(20)
    assert [state for state in ("Created", "Running", "Complete") if state in seen] == [
        "Created",
        "Running",
        "Complete",
    ]


def test_wait(backend: KubernetesBackend, server: ApiServer) -> None:
    scene = show(server, Scene().initialized().with_pod("node", "Pending", state=waiting("ImagePullBackOff", "no")))
    with pytest.raises(TimeoutError, match=r"still Created after 0.2 s: node-0: the image"):
        backend.wait("demo", timeout=0.2)
    assert backend.wait("demo", timeout=5, states=["Created"]).state == "Created"
    threading.Timer(0.3, lambda: show(server, scene.failed())).start()
    assert backend.wait("demo", timeout=20).state == "Failed"


def test_a_job_that_is_deleted_while_it_is_followed(backend: KubernetesBackend, server: ApiServer) -> None:
    show(server, Scene())
    states = backend.follow("demo")
    assert next(states).state == "Created"
    server.remove("trainjobs", "demo")
    with pytest.raises(UsageError, match="was deleted"):
        list(states)


# --- logs


def stamped(*lines: str, start: float = 100) -> list[str]:
    """Lines with the times that the kubelet puts in front, two in a second."""
    return [f"{ago(start - place // 2)[:-1]}.{place % 2 * 5}Z {line}" for place, line in enumerate(lines)]


def test_logs_of_every_step_and_restart(backend: KubernetesBackend, server: ApiServer) -> None:
    scene = Scene().with_pod("model-initializer", "Succeeded", state=ended(0))
    scene.with_pod("node", "Failed", age=90, state=ended(5)).with_pod("node", "Running", restarts=1, age=40)
    show(server, scene)
    names = [pod["metadata"]["name"] for pod in scene.pods]
    server.logs = {
        (names[0], "model-initializer"): stamped("fetched"),
        (names[1], "node"): stamped("first try"),
        (names[2], "node!previous"): stamped("second try"),
        (names[2], "node"): [*stamped("third try"), "unable to retrieve more"],
    }
    assert list(backend.logs("demo")) == [
        ("model-initializer", "fetched"), ("node-0", "first try"), ("node-0", "second try"), ("node-0", "third try"),
        ("node-0", "unable to retrieve more"),
    ]  # fmt: skip
    assert list(backend.logs("demo", ["dataset-initializer"])) == []
    with pytest.raises(UsageError, match="its steps are model-initializer, dataset-initializer, node-0"):
        backend.logs("demo", ["node-1"])


def test_logs_are_followed_over_cuts_and_pods_without_missing_or_repeating(
    backend: KubernetesBackend, server: ApiServer
) -> None:
    scene = Scene().with_pod("model-initializer", "Succeeded", state=ended(0)).with_pod("node", "Running")
    show(server, scene)
    first = scene.pods[-1]["metadata"]["name"]
    server.logs[scene.pods[0]["metadata"]["name"], "model-initializer"] = stamped("fetched")
    lines = stamped(*(f"line {number // 2}" for number in range(40)))  # many lines are equal but for their time
    server.logs[first, "node"] = lines[:4]
    seen: list[tuple[str, str]] = []
    reader = threading.Thread(target=lambda: seen.extend(backend.logs("demo", follow=True)))
    reader.start()
    for end in range(5, 41, 5):
        server.logs[first, "node"] = lines[:end]
        time.sleep(0.05)
        server.hang_up()
    server.logs[first, "node"] = lines
    server.change("pods", first, status={"phase": "Failed"})
    scene.pods[-1]["status"]["phase"] = "Failed"
    scene.with_pod("node", "Running", age=1)
    second = scene.pods[-1]["metadata"]["name"]
    last = stamped("again", "done", start=5)
    server.logs[second, "node"] = last[:1]
    show(server, scene)
    until(lambda: ("node-0", "again") in seen)
    server.logs[second, "node"] = last
    server.change("pods", second, status={"phase": "Succeeded"})
    scene.pods[-1]["status"]["phase"] = "Succeeded"
    show(server, scene.complete())
    reader.join(20)
    assert not reader.is_alive()
    assert seen[0] == ("model-initializer", "fetched")
    node = [line for step, line in seen if step == "node-0"]
    assert node == [*(f"line {number // 2}" for number in range(40)), "again", "done"]


def test_following_the_logs_of_a_job_ends_when_it_is_deleted(backend: KubernetesBackend, server: ApiServer) -> None:
    show(server, Scene().with_job_set())
    reader = threading.Thread(target=lambda: list(backend.logs("demo", follow=True)))
    reader.start()
    until(lambda: len([line for line in server.requests if "watch=true" in line]) >= 5)
    server.remove("trainjobs", "demo")
    reader.join(20)
    assert not reader.is_alive()


# --- changing


def test_suspend_and_resume(backend: KubernetesBackend, server: ApiServer) -> None:
    show(server, Scene())
    backend.suspend("demo")
    assert backend.get("demo").state == "Suspended"
    backend.resume("demo")
    assert backend.get("demo").state == "Created"
    server.change("trainjobs", "demo", status={"conditions": [condition("Failed", "FailedJobs")]})
    with pytest.raises(UsageError, match="is Failed: it has ended"):
        backend.resume("demo")


def test_delete(backend: KubernetesBackend, server: ApiServer) -> None:
    show(server, Scene().with_job_set())
    server.put("persistentvolumeclaims", {
        "metadata": {"name": "initializer-demo", "labels": {"jobset.sigs.k8s.io/jobset-name": "demo"}}
    })  # fmt: skip
    server.put("persistentvolumeclaims", {"metadata": {"name": "other"}})
    with pytest.raises(UsageError, match="has not ended"):
        backend.delete("demo")
    backend.delete("demo", force=True)
    assert server.all("trainjobs") == {}
    assert [method for method, _, body in server.bodies if method == "DELETE" and body] == ["DELETE"]
    assert all(
        body["propagationPolicy"] == "Background" for method, _, body in server.bodies if method == "DELETE" and body
    )
    assert "initializer-demo" in server.all("persistentvolumeclaims")
    show(server, Scene().complete())
    backend.delete("demo", claims=True)
    assert list(server.all("persistentvolumeclaims")) == ["other"]


def test_a_job_that_the_cluster_refuses_counts_as_ended(backend: KubernetesBackend, server: ApiServer) -> None:
    show(server, Scene().event("TrainJob", "TrainJobResourcesCreationFailed", "JobSet name is too long"))
    assert backend.get("demo").state == "Failed"
    backend.delete("demo")


# --- clusters that cannot be used


def test_a_cluster_without_trainer(backend: KubernetesBackend, server: ApiServer) -> None:
    server.groups = frozenset({"", "batch"})
    for act in (backend.jobs, backend.runtimes, lambda: backend.get("demo"), lambda: backend.runtime("tiny")):
        with pytest.raises(ApiError, match=r"this cluster has no Kubeflow Trainer(?s:.*)--context"):
            act()


def test_a_user_without_rights(backend: KubernetesBackend, server: ApiServer) -> None:
    server.roles = []
    with pytest.raises(ApiError, match=r"is forbidden(?s:.*)runtimes/rbac"):
        backend.jobs()


def test_a_server_that_is_not_there(backend: KubernetesBackend, server: ApiServer) -> None:
    server.close()
    with pytest.raises(ApiError, match=r"cannot be reached: .*refused(?s:.*)kubectl cluster-info"):
        backend.jobs()


def test_the_shipped_role_is_sufficient_and_holds_no_right_that_is_not_needed(
    backend: KubernetesBackend, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in refuses, in every test here, what the role does not allow; this one uses all of it."""
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    made = job(initializer={"model": {"storageUri": "hf://org/gated"}})
    backend.check(made, backend.runtime("tiny"))
    assert start(backend, made) == STARTED
    backend.runtimes()
    backend.suspend("demo")
    server.change("trainjobs", "demo", metadata={"labels": {"kueue.x-k8s.io/queue-name": "gpus"}})
    assert backend.get("demo").state == "Queued"
    server.change("trainjobs", "demo", metadata={"labels": None}, spec={"suspend": None})
    assert next(backend.follow("demo")).state == "Created"
    scene = show(server, Scene().initialized().with_pod("node", "Running"))
    server.logs[scene.pods[-1]["metadata"]["name"], "node"] = stamped("hello")
    assert ("node-0", "hello") in backend.logs("demo")
    assert len(backend.jobs()) == 1
    backend.events("demo")
    labels = {"jobset.sigs.k8s.io/jobset-name": "demo"}
    server.put("persistentvolumeclaims", {"metadata": {"name": "initializer-demo", "labels": labels}})
    backend.delete("demo", force=True, claims=True)
    assert server.all("secrets") == server.all("persistentvolumeclaims") == {}
    rights = {
        (group, kind, verb) for role in ROLES for rule in role["rules"]
        for group in rule["apiGroups"] for kind in rule["resources"] for verb in rule["verbs"]
    }  # fmt: skip
    assert server.used == rights


def test_failure_of_a_wrong_recipe_is_told_with_its_faults(backend: KubernetesBackend, server: ApiServer) -> None:
    faults = [{"where": "rows.jsonl:3", "key": "messages", "problem": "is missing"}]
    scene = Scene().initialized().with_pod("node", "Failed", state=ended(3, termination(3, "1 row", faults=faults)))
    show(server, scene.with_job("node", condition("Failed", "PodFailurePolicy")).failed())
    status = backend.get("demo")
    assert (status.exit_code, status.failed_step) == (3, "node-0")
    assert (status.steps[-1].failure or {})["faults"] == faults
