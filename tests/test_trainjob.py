"""The TrainJob of a recipe: golden manifests, what its arguments carry, and how it is written as YAML."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from blueprints.errors import UsageError
from blueprints.manifests import check_train_job
from blueprints.recipe import load_recipe
from blueprints.runtimes import get_runtime, short_name
from blueprints.trainjob import RECIPE_HASH, default_name, runtime_for, to_yaml, train_job

GOLDEN = Path(__file__).parent / "golden"
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "distill-offline": ("distill-offline", ("distill.teacher_top_k=32", "runtime.env={HF_HOME: /tmp}")),
    "quickstart": ("quickstart", ()),
    "sft-defaults": ("sft", ()),
    "sft-lora-everything": (
        "sft-lora",
        (
            "model=hf://meta-llama/Llama-3.2-1B-Instruct",
            "model.revision=0123abc",
            "dataset=hf://tatsu-lab/alpaca@main",
            "dataset.ignore_patterns=['*.md', 'raw/*']",
            "lora.r=4",
            "training.learning_rate=1e-4",
            'resources={num_nodes: 2, gpu: 4, cpu: "8", memory: 64Gi}',
            "runtime.image=registry.example.com/trainer:2",
            "runtime.secret_ref=hub",
            'runtime.env={NCCL_DEBUG: INFO, COST: "$(NOT_A_REFERENCE) $$5"}',
            "runtime.labels={kueue.x-k8s.io/queue-name: gpus}",
            "runtime.active_deadline_seconds=3600",
        ),
    ),
    "sft-placed": (
        "sft",
        (
            "runtime.env_from={WANDB_API_KEY: {secret_key_ref: {name: trackers, key: wandb}}, "
            "A_LEVEL: {config_map_key_ref: {name: levels, key: a, optional: true}}}",
            "runtime.env={B_LEVEL: '2'}",
            "runtime.node_selector={pool: gpu, accelerator: h200}",
            "runtime.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}, {operator: Exists}]",
            "runtime.volumes=[{name: rows, mount_path: /data, persistent_volume_claim: shared-rows, read_only: true}, "
            "{name: ca, mount_path: /etc/ca, config_map: ca}, {name: keys, mount_path: /keys, secret: keys}]",
            "runtime.service_account_name=trainer",
            "runtime.image_pull_secrets=[registry]",
            "runtime.suspend=true",
            "runtime.managed_by=kueue.x-k8s.io/multikueue",
            "runtime.annotations={example.com/owner: me}",
            "dataset=file:///data/rows.jsonl",
        ),
    ),
    "dpo": ("dpo", ("resources={num_nodes: 2, gpu: 8}",)),
    "ppo-tpu": ("ppo", ("resources.gpu=4", "resources.gpu_resource=google.com/tpu")),
    "distill-full": ("distill", ("lora=null",)),
    "distill-offline-placed": (
        "distill-offline",
        ("runtime.node_selector={pool: gpu}", "runtime.service_account_name=me"),
    ),
    "grpo-lora": ("grpo-lora", ("resources.num_nodes=3",)),
    "qat": ("qat", ("resources.gpu=1",)),
    "sft-mig": ("sft-qlora", ("resources.gpu=2", "resources.gpu_resource=nvidia.com/mig-1g.10gb")),
}


def rendered(recipe: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """The TrainJob of a recipe."""
    loaded = load_recipe(recipe, overrides=overrides, environ={})
    return train_job(loaded, runtime_for(loaded.recipe))


@pytest.mark.parametrize("case", CASES)
def test_manifest_is_the_golden_one(case: str) -> None:
    job = rendered(*CASES[case])
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(to_yaml(job), encoding="utf-8")
    assert to_yaml(job) == path.read_text(encoding="utf-8"), "if the change is meant, run again with UPDATE_GOLDEN=1"
    assert check_train_job(job, get_runtime(job["spec"]["runtimeRef"]["name"])) == []


def test_arguments_carry_only_what_differs() -> None:
    assert rendered("sft-lora")["spec"]["trainer"]["args"] == ["--recipe", "sft-lora"]
    same = load_recipe("sft-lora", environ={}).recipe.lora
    assert same is not None
    job = rendered("sft-lora", (f"lora.r={same.r}", "training.seed=7"))
    assert job["spec"]["trainer"]["args"] == ["--recipe", "sft-lora", "training.seed=7"]


def test_file_of_the_user_is_told_as_difference_from_the_runtimes_recipe(tmp_path: Path) -> None:
    path = tmp_path / "My Chats.v2.yaml"
    path.write_text("method: sft\nmodel: builtin://tiny-llama\ndataset: file:///data/chats.jsonl\nlora: {r: 4}\n")
    loaded = load_recipe(str(path), environ={})
    job = train_job(loaded, runtime_for(loaded.recipe))
    assert job["spec"]["trainer"]["args"][:2] == ["--recipe", "sft"]
    assert job["metadata"]["name"].startswith("my-chats-v2-")
    seen = load_recipe("sft", overrides=job["spec"]["trainer"]["args"][2:], environ={}).recipe
    assert seen.hash() == loaded.recipe.hash() == job["metadata"]["annotations"][RECIPE_HASH]


def test_every_step_reads_the_same_recipe() -> None:
    job = rendered("sft-lora", ("lora.r=4", "dataset=file:///a b/ä.jsonl"))
    name, *overrides = job["spec"]["trainer"]["args"][1:]
    for role in ("dataset", "model"):
        env = {entry["name"]: entry["value"] for entry in job["spec"]["initializer"][role]["env"]}
        assert env["BLUEPRINTS_RECIPE"] == name
        assert json.loads(env["BLUEPRINTS_OVERRIDES"]) == overrides


def test_lora_config_of_the_environment_is_folded_into_the_arguments() -> None:
    loaded = load_recipe("sft-lora", environ={"LORA_CONFIG": '{"r": 3}'})
    assert "lora.r=3" in train_job(loaded, runtime_for(loaded.recipe))["spec"]["trainer"]["args"]


def test_yaml_means_the_same_to_every_parser() -> None:
    values = ["1e3", "yes", "NO", "on", "y", "0o7", "0x1F", "1_000", "12:30:45", "null", "~", ".inf", "", " x ", "é\n"]
    text = to_yaml({"args": values, "number": 3, "flag": True, "text": 'say "hi"'})
    assert yaml.safe_load(text) == {"args": values, "number": 3, "flag": True, "text": 'say "hi"'}
    for value in ("1e3", "yes", "NO", "on", "y", "0o7", "1_000", "~"):
        assert f'"{value}"' in text  # quoted, so that no version of YAML takes it for anything but text


def test_names_fit_the_runtime_and_are_new_for_every_run(tmp_path: Path) -> None:
    path = tmp_path / f"{'9' * 3}{'long-name-' * 6}.yaml"
    path.write_text("method: sft\nmodel: builtin://tiny-llama\ndataset: builtin://orders\n")
    loaded = load_recipe(str(path), environ={})
    runtime = runtime_for(loaded.recipe)
    names = {default_name(loaded, runtime, unique=True) for _ in range(5)}
    assert len(names) == 5
    for name in names:
        job = train_job(loaded, runtime, name=name)
        assert check_train_job(job, runtime) == []
    assert default_name(loaded, runtime) == default_name(loaded, runtime)


def test_every_method_has_its_runtime(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("method: dpo\nmodel: builtin://tiny-llama\ndataset: builtin://orders\n")
    recipe = load_recipe(str(path), environ={})
    runtime = runtime_for(recipe.recipe)
    assert short_name(runtime) == "llm-dpo"
    assert train_job(recipe, runtime)["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    path.write_text("method: sft\nmodel: hf://a/b\ndataset: builtin://orders\nruntime: llm-stf\n")
    with pytest.raises(UsageError, match="did you mean 'llm-sft'"):
        runtime_for(load_recipe(str(path), environ={}).recipe)
