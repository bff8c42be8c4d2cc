"""The Python client, with the SDK's names: what it sends, what it reports, how it waits."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs_kit import python, tiny_job, tiny_runtime

from blueprints.client import TrainerClient, WaitFailedError
from blueprints.errors import BlueprintError, ManifestError, RecipeError, UsageError
from blueprints.recipe.schema import LoraConfig, ResourcesConfig, RuntimeConfig, SFTConfig, TrainingConfig
from blueprints.types import (
    ActiveDeadlineSeconds,
    Annotations,
    BuiltinTrainer,
    DatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    Labels,
    ModelInitializer,
    Name,
    TrainJob,
)

EMBEDDED = Initializer(dataset="builtin://orders", model="builtin://tiny-llama")
SMALL = SFTConfig(lora=LoraConfig(r=4), training=TrainingConfig(max_steps=1))


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerClient]:
    """A client with a home of its own; its jobs are gone when the test has ended."""
    monkeypatch.setenv("BLUEPRINTS_HOME", str(tmp_path))
    client = TrainerClient(backend="local")
    yield client
    for job in client.list_jobs():
        client.delete_job(job.name)


def manifest(client: TrainerClient, name: str) -> dict[str, object]:
    """The TrainJob that was made."""
    path = client.backend.directory(name).path / "trainjob.yaml"
    data: dict[str, object] = yaml.safe_load(path.read_text())
    return data


def test_methods_have_the_names_and_arguments_of_the_sdk() -> None:
    expected = {
        "list_runtimes": [],
        "get_runtime": ["name"],
        "train": ["runtime", "initializer", "trainer", "options"],
        "list_jobs": ["runtime"],
        "get_job": ["name"],
        "get_job_logs": ["name", "step", "follow"],
        "get_job_events": ["name"],
        "wait_for_job_status": ["name", "status", "timeout", "polling_interval", "callbacks"],
        "delete_job": ["name"],
    }
    for method, arguments in expected.items():
        assert list(inspect.signature(vars(TrainerClient)[method]).parameters)[1:] == arguments


def test_train_writes_the_job_of_the_configuration(client: TrainerClient) -> None:
    name = client.train(
        runtime="llm-sft",
        initializer=Initializer(
            dataset=DatasetInitializer("builtin://orders"),
            model=ModelInitializer("builtin://tiny-llama", ignore_patterns=["*.bin"]),
        ),
        trainer=BuiltinTrainer(config=SMALL),
        options=[Name("mine"), Labels({"team": "a"}), Annotations({"note": "x"}), ActiveDeadlineSeconds(600)],
    )
    assert name == "mine"
    job = manifest(client, name)
    spec, metadata = job["spec"], job["metadata"]
    assert isinstance(spec, dict)
    assert isinstance(metadata, dict)
    assert metadata["labels"]["team"] == "a"
    assert metadata["annotations"]["note"] == "x"
    assert spec["activeDeadlineSeconds"] == 600
    assert spec["initializer"]["dataset"]["storageUri"] == "builtin://orders"
    assert {"name": "IGNORE_PATTERNS", "value": "*.bin"} in spec["initializer"]["model"]["env"]
    assert {"lora.r=4", "training.max_steps=1"} <= set(spec["trainer"]["args"])

    job = client.get_job(name)
    assert job.status in ("Created", "Running")
    assert job.runtime == client.get_runtime("llm-sft")
    assert [step.name for step in job.steps] == ["model-initializer", "dataset-initializer", "node-0"]
    assert isinstance(job.creation_timestamp, datetime)
    assert [found.name for found in client.list_jobs(runtime=client.get_runtime("llm-sft"))] == ["mine"]
    assert [found.name for found in client.list_jobs(runtime="llm-sft")] == ["mine"]
    assert client.list_jobs(runtime="other") == []


def test_runtime_may_come_from_the_configuration_and_names_are_made(client: TrainerClient) -> None:
    config = SFTConfig(model="builtin://tiny-llama", dataset="builtin://orders", resources=ResourcesConfig(num_nodes=2))
    first = client.train(trainer=BuiltinTrainer(config=config))
    second = client.train(trainer=BuiltinTrainer(config=config))
    assert first != second
    assert first.startswith("sft-")
    assert client.get_job(first).num_nodes == 2
    assert [step.name for step in client.get_job(first).steps][2:] == ["node-0", "node-1"]


def test_runtime_alone_trains_its_own_recipe(client: TrainerClient) -> None:
    name = client.train(runtime="llm-sft", initializer=EMBEDDED)
    spec = manifest(client, name)["spec"]
    assert isinstance(spec, dict)
    assert spec["trainer"]["args"][:2] == ["--recipe", "sft"]
    assert spec["initializer"]["model"]["storageUri"] == "builtin://tiny-llama"


def test_source_given_as_initializer_drops_the_revision_of_the_other(client: TrainerClient) -> None:
    config = SFTConfig(model={"uri": "hf://a/b", "revision": "abc"}, dataset="builtin://orders")
    name = client.train(trainer=BuiltinTrainer(config=config), initializer=Initializer(model="builtin://tiny-llama"))
    assert "REVISION" not in json.dumps(manifest(client, name))


def test_mistakes_are_named_before_anything_starts(client: TrainerClient) -> None:
    trainer = BuiltinTrainer(config=SMALL)
    with pytest.raises(ManifestError, match="at most 33 characters"):
        client.train(trainer=trainer, initializer=EMBEDDED, options=[Name("x" * 34)])
    with pytest.raises(UsageError, match="did you mean 'llm-sft'"):
        client.train(runtime="llm-stf", trainer=trainer, initializer=EMBEDDED)
    with pytest.raises(RecipeError, match="dataset"):
        client.train(trainer=trainer, initializer=Initializer(model="builtin://tiny-llama"))
    with pytest.raises(UsageError, match="HF_TOKEN"):
        client.train(
            trainer=trainer,
            initializer=Initializer("builtin://orders", HuggingFaceModelInitializer("hf://a/b", access_token="hf_x")),
        )
    config = SFTConfig(runtime=RuntimeConfig(env={"HF_TOKEN": "hf_x"}))
    with pytest.raises(ManifestError, match="secret in plain text"):
        client.train(trainer=BuiltinTrainer(config=config), initializer=EMBEDDED)
    with pytest.raises(UsageError, match="neither a trainer nor a runtime"):
        client.train()
    assert client.list_jobs() == []


def test_arguments_of_another_type_are_named(client: TrainerClient) -> None:
    wrong: Any = {"method": "sft"}
    for config in (wrong, None, SFTConfig, "sft"):
        with pytest.raises(UsageError, match="config"):
            BuiltinTrainer(config=config)
    for arguments in (
        {"trainer": SMALL}, {"runtime": 5}, {"initializer": wrong}, {"options": Name("x")},
        {"initializer": Initializer(dataset=wrong)},
    ):  # fmt: skip
        with pytest.raises(UsageError, match="give "):
            client.train(**({"trainer": BuiltinTrainer(config=SMALL)} | arguments))
    for name in (wrong, None, 5, "x" * 300):
        with pytest.raises(UsageError, match="no job"):
            client.get_job(name)
    assert client.list_jobs() == []


def test_backends_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no cluster is configured"):
        TrainerClient(backend="kubernetes")
    with pytest.raises(UsageError, match="no backend 'slurm'"):
        TrainerClient(backend="slurm")
    with pytest.raises(UsageError, match="context means nothing on this machine"):
        TrainerClient(context="gpus")


def test_runtimes_are_listed() -> None:
    runtimes = {runtime.name: runtime for runtime in TrainerClient().list_runtimes()}
    runtime = TrainerClient().get_runtime("llm-sft")
    assert runtimes[runtime.name] == runtime
    assert (runtime.trainer.framework, runtime.trainer.recipe) == ("llm-blueprints", "sft")
    assert runtime.trainer.command[-3:] == ("torchrun", "-m", "trainers")
    with pytest.raises(UsageError, match="no runtime 'x'"):
        TrainerClient().get_runtime("x")


def test_waiting_calls_back_and_returns_the_job(client: TrainerClient) -> None:
    client.backend.start(tiny_job("quick"), tiny_runtime(python("print('hello'); print('world')")))
    seen: list[str] = []
    job = client.wait_for_job_status("quick", polling_interval=0.1, callbacks=[lambda found: seen.append(found.status)])
    assert isinstance(job, TrainJob)
    assert (job.status, seen[-1]) == ("Complete", "Complete")
    assert list(client.get_job_logs("quick", follow=True)) == ["hello", "world"]
    events = client.get_job_events("quick")
    assert events[0].reason == "Created"
    assert {event.involved_object_kind for event in events} == {"TrainJob", "Pod"}


def test_waiting_for_a_failed_job_raises_what_the_sdk_raises(client: TrainerClient) -> None:
    client.backend.start(tiny_job("bad"), tiny_runtime(python("raise SystemExit(3)")))
    with pytest.raises(RuntimeError, match="job 'bad' failed") as error:
        client.wait_for_job_status("bad", polling_interval=0.1)
    assert isinstance(error.value, WaitFailedError)
    assert isinstance(error.value, BlueprintError)
    assert client.wait_for_job_status("bad", status={"Failed"}).steps[0].exit_code == 3


def test_waiting_ends_in_time_and_refuses_nonsense(client: TrainerClient) -> None:
    client.backend.start(tiny_job("slow"), tiny_runtime(python("import time; time.sleep(600)")))
    with pytest.raises(TimeoutError, match=r"is (Running|Created)"):
        client.wait_for_job_status("slow", timeout=0.5, polling_interval=0.1)
    assert client.wait_for_job_status("slow", status={"Running"}, timeout=30, polling_interval=0.1).status == "Running"
    for wrong in ({"Done"}, "Complete", set[str]()):
        with pytest.raises(UsageError, match="is not a set of statuses"):
            client.wait_for_job_status("slow", status=wrong)
    client.delete_job("slow")
    with pytest.raises(UsageError, match="no job named 'slow'"):
        client.get_job("slow")
