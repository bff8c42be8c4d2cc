"""The client and every verb with the kubernetes backend, against a stand-in of the API server; and that no secret stays
anywhere but in the job's own Secret."""

from __future__ import annotations

import base64
import copy
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer, Request, serving, times
from cluster_kit import Scene, ago, condition, ended, show, termination, waiting
from jobs_kit import tiny_runtime, until

from blueprints import (
    BuiltinTrainer,
    CustomTrainer,
    Initializer,
    LoraConfig,
    RuntimeConfig,
    SFTConfig,
    TrainerClient,
)
from blueprints.cli import main
from blueprints.client import WaitFailedError
from blueprints.errors import UsageError
from blueprints.runtimes import runtimes_directory, shipped_runtimes
from blueprints.types import ActiveDeadlineSeconds, Annotations, Labels, Name

ROLES = list(yaml.safe_load_all((runtimes_directory() / "rbac" / "client.yaml").read_text(encoding="utf-8")))
EMBEDDED = ["sft", "model=builtin://tiny-llama", "dataset=builtin://orders", "resources.gpu=0"]
CLUSTER = ["--backend", "kubernetes"]
TOKENS = {
    "HF_TOKEN": "hf_PlantedHubToken1234567890",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDPLANTED00",
    "AWS_SECRET_ACCESS_KEY": "PlantedStoreSecret/1234567890",
    "WANDB_API_KEY": "planted0123456789planted0123456789",
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """A cluster with the shipped runtimes, for a user with the shipped role; `KUBECONFIG` points to it."""
    for name in [*TOKENS, "ACCESS_TOKEN", "HUGGING_FACE_HUB_TOKEN", "LORA_CONFIG"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("BLUEPRINTS_HOME", str(tmp_path / "home"))
    with serving() as running:
        running.roles = ROLES
        for runtime in [*shipped_runtimes().values(), tiny_runtime(["train"], model=["fetch"], dataset=["prepare"])]:
            running.put("clustertrainingruntimes", runtime)
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(tmp_path / "config")))
        yield running


@pytest.fixture
def client(server: ApiServer) -> TrainerClient:
    del server
    return TrainerClient(backend="kubernetes")


def cluster(*words: str) -> int:
    """`blueprints words... --backend kubernetes`, in this process."""
    return main([*words, *CLUSTER])


def running_scene(server: ApiServer) -> Scene:
    scene = Scene().initialized().with_pod("node", "Running")
    name = scene.pods[-1]["metadata"]["name"]
    server.logs[name, "node"] = [f"{ago(9)} step 1/4  loss 2.5000  lr 1.00e-04  grad norm 0.1  10 tokens/s  ETA 8 s"]
    return show(server, scene)


# --- the client


def test_train_writes_what_the_options_say(client: TrainerClient, server: ApiServer) -> None:
    config = SFTConfig(
        lora=LoraConfig(r=4), runtime=RuntimeConfig(node_selector={"pool": "gpu"}, suspend=True)
    )  # fmt: skip
    name = client.train(
        initializer=Initializer(dataset="builtin://orders", model="builtin://tiny-llama"),
        trainer=BuiltinTrainer(config=config),
        options=[Name("mine"), Labels({"a": "b"}), Annotations({"c": "d"}), ActiveDeadlineSeconds(60)],
    )
    made = server.all("trainjobs")[name]
    assert (name, made["metadata"]["labels"]["a"], made["metadata"]["annotations"]["c"]) == ("mine", "b", "d")
    assert made["spec"]["activeDeadlineSeconds"] == 60
    assert made["spec"]["suspend"] is True
    assert made["spec"]["runtimeRef"]["name"] == "llm-sft-v0-1"
    (patch,) = made["spec"]["runtimePatches"]
    assert patch["manager"] == "blueprints.llm-blueprints.dev/recipe"
    job = client.get_job(name)
    assert (job.status, job.runtime.name, job.num_nodes) == ("Suspended", "llm-sft-v0-1", 1)
    assert [step.name for step in job.steps] == ["model-initializer", "dataset-initializer", "node-0"]


def test_the_methods_of_the_client(client: TrainerClient, server: ApiServer) -> None:
    names = {runtime.name for runtime in client.list_runtimes()}
    assert {"llm-sft-v0-1", "tiny"} <= names
    assert client.get_runtime("llm-sft").trainer.recipe == "sft"
    with pytest.raises(UsageError, match="kubectl run packages"):
        client.get_runtime_packages("llm-dpo")
    scene = running_scene(server)
    assert [job.name for job in client.list_jobs("tiny")] == ["demo"]
    assert client.list_jobs("llm-sft") == []
    job = client.wait_for_job_status("demo", {"Running"}, timeout=5, polling_interval=0.05)
    assert job.steps[-1].pod_name == scene.pods[-1]["metadata"]["name"]
    assert list(client.get_job_logs("demo")) == [
        "step 1/4  loss 2.5000  lr 1.00e-04  grad norm 0.1  10 tokens/s  ETA 8 s"
    ]
    scene.event("TrainJob", "Odd", "odd")
    show(server, scene)
    assert [event.reason for event in client.get_job_events("demo")] == ["Odd"]
    client.suspend_job("demo")
    assert client.get_job("demo").status == "Suspended"
    client.resume_job("demo")
    server.change("trainjobs", "demo", status={"conditions": [condition("Failed", "FailedJobs", "x")]})
    with pytest.raises(WaitFailedError, match="job 'demo' failed"):
        client.wait_for_job_status("demo", timeout=5)
    client.delete_job("demo")
    assert client.list_jobs() == []


def a_function() -> None:
    """Trains nothing."""


def test_a_function_of_ones_own(client: TrainerClient, server: ApiServer) -> None:
    runtime = tiny_runtime(["torchrun"])
    runtime["metadata"]["name"] = "torch-distributed"
    server.put("clustertrainingruntimes", runtime)
    name = client.train(trainer=CustomTrainer(func=a_function, num_nodes=2), options=[Name("own")])
    assert server.all("trainjobs")[name]["spec"]["trainer"]["numNodes"] == 2


# --- the command line


def test_train_detached_dry_run_and_followed(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster("train", *EMBEDDED, "--name", "demo", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "# the API server takes it (dry run): namespace team of http://127.0.0.1" in out
    assert server.all("trainjobs") == {}
    assert cluster("train", *EMBEDDED, "--name", "demo", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["accepted"] is True
    assert cluster("train", *EMBEDDED, "--name", "demo", "--detach") == 0
    out = capsys.readouterr().out
    assert out.startswith("demo\n")
    assert "blueprints logs demo --follow --backend kubernetes" in out
    server.change("trainjobs", "demo", status={"conditions": [condition("Complete", "AllJobsCompleted")]})
    assert cluster("train", *EMBEDDED, "--name", "demo") == 0
    out = capsys.readouterr().out
    assert "complete already" in out
    assert "claim initializer-demo in namespace team" in out


def test_following_tells_what_holds_a_job_up_and_why_it_failed(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene()

    def control() -> None:
        made = until(lambda: server.all("trainjobs").get("demo"))
        scene.job, scene.runtime = copy.deepcopy(made), server.all("clustertrainingruntimes")["llm-sft-v0-1"]
        scene.initialized().with_pod("node", "Pending", state=waiting("ImagePullBackOff", "Back-off"))
        show(server, scene)
        until(lambda: len([line for line in server.requests if "watch=true" in line]) >= 5)
        scene.pods.pop()
        faults = [{"where": "rows.jsonl:3", "key": "messages", "problem": "is missing"}]
        message = termination(3, "1 row is invalid", faults=faults, todo="correct it")
        scene.with_pod("node", "Failed", state=ended(3, message)).with_job(
            "node", condition("Failed", "PodFailurePolicy")
        )
        server.remove("pods", next(name for name in server.all("pods") if "-node-" in name))
        threading.Timer(1.0, lambda: show(server, scene.failed())).start()

    player = threading.Thread(target=control)
    player.start()
    assert cluster("train", *EMBEDDED, "--name", "demo") == 3
    player.join(20)
    printed = capsys.readouterr()
    assert "job demo started; in namespace team" in printed.out
    assert "Ctrl-C lets go of it" in printed.out
    assert "Created: node-0: the image example.com/tiny:1 cannot be pulled: Back-off\n  -> " in printed.out
    assert "error: job demo failed: node-0: 1 row is invalid (exit code 3)" in printed.err
    assert "node-0: started\n" in printed.out
    assert "rows.jsonl:3: messages: is missing" in printed.err
    assert "-> correct it" in printed.err
    assert "log: `blueprints logs demo --step node-0 --backend kubernetes`" in printed.err


def test_ctrl_c_lets_go_of_a_job_in_a_cluster(server: ApiServer) -> None:
    command = [sys.executable, "-m", "blueprints", "train", *EMBEDDED, "--name", "demo", *CLUSTER]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        until(lambda: len([line for line in server.requests if "watch=true" in line]) >= 5)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "the job goes on: `blueprints logs demo --follow --backend kubernetes`" in error
    assert "suspend" not in server.all("trainjobs")["demo"]["spec"]


def test_every_other_verb(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster("jobs") == 0
    assert "no jobs in namespace team of http://127.0.0.1" in capsys.readouterr().err
    scene = running_scene(server)
    scene.event("Pod", "Started", "Started container node", old_style=True, warning=False)
    show(server, scene)
    assert cluster("jobs") == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", "STATE"],
        ["demo", "Running"],
    ]
    assert cluster("get", "demo") == 0
    out = capsys.readouterr().out
    assert "demo: Running" in out
    assert "train 1/4 steps" in out
    assert cluster("get", "demo", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["state"], data["backend"], data["directory"]) == ("Running", "kubernetes", None)
    assert cluster("logs", "demo", "--step", "node-0") == 0
    assert capsys.readouterr().out.startswith("step 1/4")
    assert cluster("events", "demo") == 0
    assert "Pod/demo-node-0-0-" in capsys.readouterr().out
    assert cluster("events", "demo", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["reason"] == "Started"
    assert cluster("suspend", "demo") == 0
    assert server.all("trainjobs")["demo"]["spec"]["suspend"] is True
    assert cluster("resume", "demo") == 0
    assert server.all("trainjobs")["demo"]["spec"]["suspend"] is False
    assert cluster("wait", "demo", "--timeout", "0.1") == 4
    assert "still Running" in capsys.readouterr().err
    assert cluster("delete", "demo") == 2
    assert "has not ended" in capsys.readouterr().err
    show(server, scene.complete())
    assert cluster("wait", "demo") == 0
    assert "claim initializer-demo" in capsys.readouterr().out
    assert cluster("logs", "demo", "--follow", "--step", "node-0") == 0
    assert cluster("delete", "demo", "--claims") == 0
    assert cluster("get", "demo") == 2


def test_other_places(server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running_scene(server)
    assert cluster("jobs", "--namespace", "elsewhere") == 0
    assert "no jobs in namespace elsewhere" in capsys.readouterr().err
    assert cluster("jobs", "--context", "other") == 0
    assert "no jobs in context other, namespace elsewhere" in capsys.readouterr().err
    assert cluster("jobs", "--context", "none") == 2
    assert cluster("jobs", "--kubeconfig", str(tmp_path / "none")) == 2
    assert main(["jobs", "--namespace", "x"]) == 2
    assert "namespace means nothing on this machine" in capsys.readouterr().err


def test_what_this_machine_cannot_do_is_refused_or_noted(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    del server
    for override, said in (
        ("runtime.volumes=[{name: a, mount_path: /a, secret: s}]", "cannot be mounted on this machine"),
        ("runtime.suspend=true", "waits in a cluster"),
        ("runtime.managed_by=kueue.x-k8s.io/multikueue", "MultiKueue is not on this machine"),
    ):
        assert main(["train", *EMBEDDED, override, "--dry-run"]) == 2
        assert said in capsys.readouterr().err
    assert main(["train", *EMBEDDED, "runtime.node_selector={a: b}", "--dry-run"]) == 0
    assert "note: nodeSelector of the runtimePatches: of no meaning on this machine" in capsys.readouterr().err
    assert main(["delete", "x", "--claims"]) == 2


# --- secrets


def everything(server: ApiServer) -> str:
    """All that is stored in the cluster but the data of Secrets, and all that was asked of the server."""
    kept = []
    for (collection, _), item in server.objects.items():
        kept.append({key: value for key, value in item.items() if key != "data"} if "secrets" in collection else item)
    sent = [body for _, path, body in server.bodies if not path.endswith("/secrets")]
    return json.dumps([kept, sent, server.requests])


@pytest.mark.parametrize("login", [False, True])
def test_no_secret_stays_anywhere_but_in_the_jobs_own_secret(
    server: ApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    login: bool,
) -> None:
    for name, value in TOKENS.items():
        if name != "HF_TOKEN" or not login:
            monkeypatch.setenv(name, value)
    if login:  # as `hf auth login` leaves it
        (tmp_path / "hub").mkdir()
        (tmp_path / "hub" / "token").write_text(TOKENS["HF_TOKEN"] + "\n")
    recipe = ["sft", "model=hf://org/gated", "training.report_to=[wandb]", "dataset=hf://org/rows"]
    assert cluster("train", *recipe, "--name", "demo", "--dry-run") == 0
    assert cluster("train", *recipe, "--name", "demo", "--detach", "--json") == 0
    (secret,) = server.all("secrets").values()
    data = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    assert data == {name: TOKENS[name] for name in ("HF_TOKEN", "WANDB_API_KEY")}  # nothing it does not need
    made = server.all("trainjobs")["demo"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    assert made["spec"]["initializer"]["model"]["secretRef"] == {"name": secret["metadata"]["name"]}
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "WANDB_API_KEY"}}
    assert made["spec"]["trainer"]["env"] == [{"name": "WANDB_API_KEY", "valueFrom": reference}]
    for words in (["jobs", "--json"], ["get", "demo", "--json"], ["get", "demo"], ["events", "demo"]):
        assert cluster(*words) == 0
    main(["render", *recipe, "--name", "demo", "-o", str(tmp_path / "demo.yaml")])
    main(["show", *recipe])
    server.faults.append(times(9, lambda request: request.refuse(422, "invalid")))
    assert cluster("train", *recipe, "--name", "other", "--detach") == 5
    server.faults.clear()
    printed = capsys.readouterr()
    files = [path.read_text() for path in tmp_path.rglob("*.yaml")]
    left = "\n".join([printed.out, printed.err, everything(server), *files])
    for value in TOKENS.values():
        assert value not in left
        assert base64.b64encode(value.encode()).decode() not in left
    assert cluster("delete", "demo", "--force") == 0
    assert server.all("secrets") == {}


def test_no_job_and_no_secret_stay_when_the_creation_fails(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKENS["HF_TOKEN"])

    def refuse(plural: str, dry: bool) -> Any:
        def fault(request: Request) -> bool:
            asked = request.method == "POST" and request.path.endswith(plural)
            return asked and (request.query.get("dryRun") == "All") == dry and request.refuse(403, "no rights")

        return fault

    for plural, dry in (("secrets", True), ("secrets", False), ("trainjobs", False)):
        server.faults[:] = [refuse(plural, dry)]
        assert cluster("train", "sft", "--name", "demo", "--detach") == 5
        assert "no rights" in capsys.readouterr().err
        assert server.all("trainjobs") == server.all("secrets") == {}


@pytest.mark.parametrize(
    "words",
    [
        [f"runtime.env={{HF_TOKEN: {TOKENS['HF_TOKEN']}}}"], [f"runtime.env={{NOTE: {TOKENS['HF_TOKEN']}}}"],
        [f"runtime.env={{AWS_SECRET_ACCESS_KEY: {TOKENS['AWS_SECRET_ACCESS_KEY']}}}"],
        [f"runtime.labels={{a: {TOKENS['AWS_ACCESS_KEY_ID']}}}"],
    ],
)  # fmt: skip
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(
    server: ApiServer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for end in (["--json"], []):
        assert cluster("train", "sft", *words, *end) == 2
        printed = capsys.readouterr()
        assert not any(value in printed.out + printed.err for value in TOKENS.values())
    assert server.all("trainjobs") == {}


def test_a_secret_that_the_recipe_names_is_left_to_it(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKENS["HF_TOKEN"])
    assert cluster("train", "sft", "runtime.secret_ref=hub", "--name", "demo", "--detach") == 0
    assert server.all("secrets") == {}
    assert server.all("trainjobs")["demo"]["spec"]["initializer"]["model"]["secretRef"] == {"name": "hub"}
