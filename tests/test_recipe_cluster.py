"""What a recipe asks of a cluster: wrong combinations, and secrets, which stand in no recipe and in no message."""

from __future__ import annotations

from pathlib import Path

import pytest

from blueprints.errors import RecipeError
from blueprints.recipe import load_recipe, overrides_between
from blueprints.secret_text import is_secret, masked

TOKEN = "hf_" + "PlantedPlantedPlanted1234"


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("runtime.env_from={A: {}}", "runtime.env_from.A", "exactly one of secret_key_ref and config_map_key_ref"),
        (
            "runtime={env: {A: '1'}, env_from: {A: {secret_key_ref: {name: s, key: k}}}}",
            "runtime.env_from.A", "is in runtime.env too",
        ),
        ("runtime.volumes=[{name: a, mount_path: /a}]", "runtime.volumes[0]", "does not say what is mounted"),
        (
            "runtime.volumes=[{name: a, mount_path: /a, secret: s, config_map: c}]",
            "runtime.volumes[0]", "has secret and config_map",
        ),
        ("runtime.volumes=[{name: tmp, mount_path: /a, secret: s}]", "runtime.volumes[0].name", "volume of the runtimes"),
        (
            "runtime.volumes=[{name: a, mount_path: /workspace/x, secret: s}]",
            "runtime.volumes[0].mount_path", "covers or lies below /workspace",
        ),
        ("runtime.volumes=[{name: a, mount_path: /, secret: s}]", "runtime.volumes[0].mount_path", "covers or lies below"),
        (
            "runtime.volumes=[{name: a, mount_path: /a, secret: s}, {name: a, mount_path: /a/, secret: s}]",
            "runtime.volumes[1].name", "given twice",
        ),
        ("runtime.tolerations=[{operator: Exists, value: x}]", "runtime.tolerations[0].value", "means nothing"),
        ("runtime.tolerations=[{value: x}]", "runtime.tolerations[0].key", "is missing"),
        ("runtime.tolerations=[{key: a, toleration_seconds: 5}]", "runtime.tolerations[0].toleration_seconds", "NoExecute"),
        ("runtime.managed_by=me", "runtime.managed_by", "kueue.x-k8s.io/multikueue"),
        ("runtime.env={WANDB_API_KEY: 0123456789abcdef0123}", "runtime.env.WANDB_API_KEY", "runtime.env_from.WANDB_API_KEY"),
        (f"runtime.env={{NOTE: {TOKEN}}}", "runtime.env.NOTE", "secret in plain text"),
        (f"runtime.annotations={{a: {TOKEN}}}", "runtime.annotations.a", "looks like a secret"),
        (f"model=hf://org/{TOKEN}", "model.uri", "looks like a secret"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(override: str, key: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("sft", overrides=[override], environ={})
    found = [fault for fault in caught.value.faults if fault.key == key]
    assert found, str(caught.value)
    assert said in str(found[0])
    assert TOKEN not in str(caught.value)


def test_a_secret_in_a_file_is_named_by_its_line_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"method: sft\nmodel: hf://a/b\ndataset: hf://c/d\nruntime:\n  env:\n    HF_TOKEN: {TOKEN}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), environ={})
    assert "mine.yaml:6" in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "abcdefghijk", True), ("MY_PASSWORD", "hunter2hunter2", True), ("AWS_ACCESS_KEY_ID", "x" * 20, True),
        ("A", "AKIA" + "A" * 16, True), ("URL", "https://me:hunter2@host/x", True), ("K", "-----BEGIN PRIVATE KEY-----", True),
        ("TOKENIZERS_PARALLELISM", "false", False), ("EOS_TOKEN", "<|endoftext|>", False), ("MAX_TOKEN", "123456789", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/var/run/key.json", False), ("NCCL_DEBUG", "INFO", False),
        ("HTTPS_PROXY", "http://proxy.local:3128", False),
    ],
)  # fmt: skip
def test_what_is_a_secret(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_masking() -> None:
    assert masked(f"runtime.env={{HF_TOKEN: {TOKEN}, B: 1}}") == "runtime.env={HF_TOKEN: ***, B: 1}"
    assert masked("WANDB_API_KEY=abc lora.r=4") == "WANDB_API_KEY=*** lora.r=4"
    assert masked("model.added_tokens=[x]") == "model.added_tokens=[x]"


def test_placement_survives_being_written_as_overrides() -> None:
    texts = [
        "runtime.env_from={A: {secret_key_ref: {name: s, key: k}}}",
        "runtime.volumes=[{name: d, mount_path: /d, secret: s}]", "runtime.tolerations=[{operator: Exists}]",
    ]  # fmt: skip
    base = load_recipe("sft", environ={}).recipe
    target = load_recipe("sft", overrides=texts, environ={}).recipe
    again = load_recipe("sft", overrides=overrides_between(base, target), environ={}).recipe
    assert again.hash() == target.hash()
