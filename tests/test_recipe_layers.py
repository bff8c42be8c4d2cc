"""Layers: what wins, what merges, what unsets, and that every value knows where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from blueprints.errors import RecipeError
from blueprints.recipe import load_recipe, shipped_recipes
from blueprints.recipe.explain import explain
from blueprints.recipe.json_schema import json_schema
from blueprints.recipe.overrides import overrides_between
from blueprints.recipe.schema import (
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    LoraConfig,
    PPOConfig,
    QATConfig,
    Recipe,
    ResourcesConfig,
    SFTConfig,
    SFTOptions,
    TrainingConfig,
)
from blueprints.recipe.write import recipe_text

SOURCES = {"model": "builtin://tiny-llama", "dataset": "builtin://orders"}


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return write(
        tmp_path / "recipe.yaml",
        "method: sft\nmodel: hf://org/base@v1\ndataset: builtin://orders\nlora:\n  r: 4\n  target_modules: [q_proj]\n"
        "runtime:\n  env: {A: a, B: b}\n",
    )


def test_later_layers_win_and_say_so(recipe: str, tmp_path: Path) -> None:
    first = write(tmp_path / "one.yaml", "lora: {r: 5, lora_dropout: 0.1}\ntraining: {seed: 1}\n")
    second = write(tmp_path / "two.yaml", "training:\n  seed: 2\n  save_steps: 9\n")
    loaded = load_recipe(
        recipe,
        overlays=[first, second],
        overrides=["training.save_steps=10", "training.save_steps=11", "lora.lora_alpha=3"],
        environ={"LORA_CONFIG": '{"lora_alpha": 7, "task_type": "CAUSAL_LM"}'},
    )
    lora, training = loaded.recipe.lora, loaded.recipe.training
    assert lora is not None
    assert (lora.r, lora.lora_dropout, lora.lora_alpha, training.seed, training.save_steps) == (5, 0.1, 7, 2, 11)
    origins = {key: (origin.layer, origin.where) for key, origin in loaded.origins.items()}
    assert origins["method"] == ("recipe", f"{recipe}:1")
    assert origins["lora.target_modules"] == ("recipe", f"{recipe}:6")
    assert origins["lora.r"] == ("overlay", f"{first}:1")
    assert origins["training.seed"] == ("overlay", f"{second}:2")
    assert origins["training.save_steps"] == ("override", "override 'training.save_steps=11'")
    assert origins["lora.lora_alpha"] == ("environment", "environment LORA_CONFIG")
    assert origins["training.data_seed"] == ("derived", "")
    assert origins["training.logging_steps"] == ("default", "")


def test_maps_merge_lists_replace_null_unsets(recipe: str, tmp_path: Path) -> None:
    overlay = write(
        tmp_path / "overlay.yaml",
        "lora: {target_modules: [k_proj]}\nruntime: {env: {B: null, C: c}}\ntraining: {seed: null}\n",
    )
    loaded = load_recipe(recipe, overlays=[overlay], overrides=["runtime.env.A=x.y=z"], environ={})
    assert loaded.recipe.lora is not None
    assert loaded.recipe.lora.target_modules == ["k_proj"]
    assert loaded.recipe.runtime.env == {"A": "x.y=z", "C": "c"}
    assert loaded.recipe.training.seed == 42
    assert loaded.origins["training.seed"].where == f"unset by {overlay}:3"
    assert loaded.origins["runtime.env.C"].layer == "overlay"
    assert load_recipe(recipe, overrides=["lora=null"], environ={}).recipe.lora is None


def test_a_bare_block_is_absent_and_an_empty_one_is_its_defaults(tmp_path: Path) -> None:
    text = "method: sft\nmodel: builtin://tiny-llama\ndataset: builtin://orders\nsft:\n"
    assert load_recipe(write(tmp_path / "a.yaml", text + "lora:\n"), environ={}).recipe.lora is None
    loaded = load_recipe(write(tmp_path / "b.yaml", text + "lora: {}\n"), environ={}).recipe
    assert loaded.lora == LoraConfig(lora_alpha=32)
    assert loaded.sft == SFTOptions()


def test_the_environment_turns_lora_on() -> None:
    loaded = load_recipe("sft", environ={"LORA_CONFIG": '{"r": 3, "peft_type": "LORA"}'})
    assert loaded.recipe.lora is not None
    assert loaded.recipe.lora.r == 3
    assert loaded.recipe.training.learning_rate == 2e-5  # the shipped recipe says so; only the adapter was asked for
    assert loaded.origins["lora.r"].where == "environment LORA_CONFIG"
    for unset in ({}, {"LORA_CONFIG": ""}, {"LORA_CONFIG": "  "}):
        assert load_recipe("sft", environ=unset).recipe.lora is None


def test_short_forms_merge_with_long_ones(recipe: str) -> None:
    loaded = load_recipe(recipe, overrides=["model.dtype=bfloat16", "runtime=mine"], environ={}).recipe
    assert (loaded.model.uri, loaded.model.dtype) == ("hf://org/base@v1", "bfloat16")
    assert (loaded.runtime.name, loaded.runtime.env) == ("mine", {"A": "a", "B": "b"})


def test_another_source_drops_the_revision_of_the_old_one(tmp_path: Path) -> None:
    path = write(
        tmp_path / "recipe.yaml",
        "method: sft\nmodel: {uri: hf://org/base, revision: v1, dtype: float32}\ndataset: builtin://orders\n",
    )
    loaded = load_recipe(path, overrides=["model=hf://org/other"], environ={}).recipe
    assert (loaded.model.uri, loaded.model.revision, loaded.model.dtype) == ("hf://org/other", None, "float32")
    pinned = load_recipe(path, overrides=["model.revision=v2", "model=hf://org/other"], environ={}).recipe
    assert pinned.model.revision == "v2"
    assert load_recipe(path, overrides=["model=hf://org/base"], environ={}).recipe.model.revision == "v1"


def test_an_overlay_may_change_the_method(tmp_path: Path) -> None:
    overlay = write(
        tmp_path / "dpo.yaml", "method: dpo\nsft: null\ndpo: {beta: 0.2}\ntraining: {learning_rate: null}\n"
    )
    loaded = load_recipe("sft-lora", overlays=[overlay], environ={}).recipe
    assert loaded.dpo is not None
    assert (loaded.method, loaded.dpo.beta, loaded.training.learning_rate) == ("dpo", 0.2, 1e-5)
    assert loaded.runtime.name == "llm-dpo"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("plain", "plain"),
        ("a: b # c", "a: b # c"),
        ("'123'", "123"),
        ('"null"', "null"),
        ('""', ""),
        ('"a\\nb\\u00e9"', "a\nbé"),
        ("*.bin", "*.bin"),
        ("!x", "!x"),
        (" spaced ", "spaced"),
        ("yes", "yes"),
    ],
)
def test_texts_in_overrides(text: str, value: str | None) -> None:
    assert load_recipe("sft", overrides=[f"model.chat_template={text}"], environ={}).recipe.model.chat_template == value


def test_lists_maps_and_dotted_names_in_overrides() -> None:
    loaded = load_recipe(
        "sft-lora",
        overrides=[
            "lora.target_modules=[q_proj, 'v_proj']",
            'lora.rank_pattern={"model.layers.0": 8}',
            "lora.rank_pattern.model.layers.1.q=2",
            "runtime.labels.kueue.x-k8s.io/queue-name=q",
            "dataset={uri: builtin://orders, max_rows: 5}",
            "resources.cpu=8",
        ],
        environ={},
    ).recipe
    assert loaded.lora is not None
    assert loaded.lora.target_modules == ["q_proj", "v_proj"]
    assert loaded.lora.rank_pattern == {"model.layers.0": 8, "model.layers.1.q": 2}
    assert loaded.runtime.labels == {"kueue.x-k8s.io/queue-name": "q"}
    assert (loaded.dataset.uri, loaded.dataset.max_rows) == ("builtin://orders", 5)
    assert loaded.resources.cpu == "8"


# Derived defaults and hashes -----------------------------------------------------------------------------------------


def test_derived_defaults_follow_their_rules() -> None:
    base = {"method": "sft", **SOURCES}
    full = load_recipe(None, base=base, environ={}).recipe
    assert (full.training.learning_rate, full.resources.num_proc_per_node, full.runtime.name) == (2e-5, 1, "llm-sft")
    lora = load_recipe(None, base=base, overrides=["lora.r=5", "resources.gpu=4", "training.seed=9"], environ={}).recipe
    assert lora.lora is not None
    assert (lora.lora.lora_alpha, lora.training.learning_rate, lora.training.data_seed) == (10, 2e-4, 9)
    assert lora.resources.num_proc_per_node == 4


def test_the_hash_is_of_the_meaning_not_of_the_spelling(tmp_path: Path) -> None:
    spellings = [
        "method: sft\nmodel: builtin://tiny-llama\ndataset: builtin://orders\nlora: {r: 8}\n",
        '{"lora": {"lora_alpha": 16, "r": 8}, "dataset": {"uri": "builtin://orders"}, "method": "sft",'
        ' "model": {"uri": "builtin://tiny-llama"}, "training": {"learning_rate": 0.0002, "num_train_epochs": 1}}',
    ]
    hashes = {load_recipe(write(tmp_path / "x.yaml", text), environ={}).recipe.hash() for text in spellings}
    assert len(hashes) == 1
    assert load_recipe(str(tmp_path / "x.yaml"), overrides=["lora.r=9"], environ={}).recipe.hash() not in hashes


def test_knobs_that_mean_nothing_do_not_change_the_hash() -> None:
    plain = load_recipe("sft-lora", overrides=["training.max_steps=5"], environ={}).recipe
    # Epochs of a lower layer give way to max_steps.
    assert plain.training.num_train_epochs == 1.0
    quantized = load_recipe("sft-qlora", overrides=["lora.bnb_4bit_quant_type=fp4"], environ={}).recipe
    assert quantized.lora is not None
    assert quantized.lora.bnb_4bit_quant_type == "fp4"


def test_resolving_twice_changes_nothing() -> None:
    for shipped in shipped_recipes():
        recipe = load_recipe(shipped.name, environ={}).recipe
        assert recipe.resolve() == recipe
        assert Recipe.model_validate(recipe.model_dump()).hash() == recipe.hash()


# Python configurations -----------------------------------------------------------------------------------------------


def test_a_python_configuration_is_a_layer_of_what_was_set() -> None:
    config = SFTConfig(
        lora=LoraConfig(r=4),
        training=TrainingConfig(num_train_epochs=2),
        sft=SFTOptions(packing=True),
        resources=ResourcesConfig(num_nodes=2),
    )
    assert config.as_layer() == {
        "method": "sft",
        "lora": {"r": 4},
        "training": {"num_train_epochs": 2.0},
        "sft": {"packing": True},
        "resources": {"num_nodes": 2},
    }
    loaded = load_recipe(None, base=config.as_layer() | SOURCES, overrides=["lora.r=5"], environ={})
    assert loaded.recipe.lora is not None
    assert (loaded.recipe.lora.r, loaded.recipe.lora.lora_alpha, loaded.shipped) == (5, 10, None)
    assert loaded.origins["training.num_train_epochs"].layer == "python"


def test_plain_dicts_and_short_forms_are_accepted_in_python() -> None:
    config = SFTConfig(model="builtin://tiny-llama", dataset="builtin://orders", lora={"r": 4}, runtime="mine")
    loaded = load_recipe(None, base=config, environ={})
    assert loaded.recipe.lora == LoraConfig(r=4, lora_alpha=8)
    assert loaded.recipe.runtime.name == "mine"
    assert loaded.origins["lora.r"].where == "python SFTConfig"


def test_every_method_has_a_configuration() -> None:
    for config, method in (
        (SFTConfig(), "sft"),
        (DPOConfig(), "dpo"),
        (PPOConfig(), "ppo"),
        (GRPOConfig(), "grpo"),
        (DistillConfig(), "distill"),
        (QATConfig(), "qat"),
    ):
        assert config.method == method


def test_faults_of_python_configurations_are_recipe_errors_with_all_faults() -> None:
    with pytest.raises(RecipeError) as caught:
        SFTConfig(lora={"r": "x", "rank": 2}, training={"lr": 1e-4}, foo=2, method="dpo")
    assert [(fault.where, fault.key) for fault in caught.value.faults] == [
        ("python SFTConfig", "method"),
        ("python SFTConfig", "lora.r"),
        ("python SFTConfig", "lora.rank"),
        ("python SFTConfig", "training.lr"),
        ("python SFTConfig", "foo"),
    ]
    with pytest.raises(RecipeError, match="python LoraConfig: r: found the integer 0; expected an integer, at least 1"):
        LoraConfig(r=0)
    with pytest.raises(RecipeError, match="python SFTConfig: dataset: required, but missing"):
        load_recipe(None, base=SFTConfig(model="builtin://tiny-llama"), environ={})
    with pytest.raises(RecipeError, match=r"resources\.strategy: `fsdp` shares the work"):
        load_recipe(None, base=SFTConfig(**SOURCES, resources=ResourcesConfig(strategy="fsdp")), environ={})


def test_strange_python_values_are_faults_too() -> None:
    for value in (object(), {1, 2}, b"x", lambda: None, 1j):
        with pytest.raises(RecipeError, match="python"):
            load_recipe(None, base={"method": "sft", **SOURCES, "training": {"seed": value}}, environ={})


# Shipped recipes -----------------------------------------------------------------------------------------------------


def test_shipped_recipes_are_described_and_valid() -> None:
    shipped = {recipe.name: recipe for recipe in shipped_recipes()}
    assert next(iter(shipped)) == "quickstart"
    assert set(shipped) >= {
        "distill",
        "distill-lora",
        "distill-offline",
        "quickstart-distill",
        "dpo",
        "dpo-lora",
        "dpo-qlora",
        "ppo",
        "ppo-lora",
        "qat",
        "qat-lora",
        "quickstart-dpo",
        "quickstart-ppo",
        "quickstart-qat",
        "sft",
        "sft-lora",
        "sft-qlora",
    }
    for recipe in shipped.values():
        assert recipe.description.endswith(".")
        loaded = load_recipe(recipe.name, environ={})
        assert (loaded.shipped, loaded.recipe.method) == (recipe.name, recipe.method)
    quickstart = load_recipe("quickstart", environ={}).recipe
    assert (quickstart.model.uri, quickstart.dataset.uri) == ("builtin://tiny-llama", "builtin://orders")
    assert quickstart.lora is not None
    assert (quickstart.resources.gpu, quickstart.eval.metric) == (0, "exact_match")


def test_every_knob_of_a_shipped_recipe_has_a_comment_and_editors_get_the_schema() -> None:
    for recipe in shipped_recipes():
        lines = recipe.path.read_text(encoding="utf-8").splitlines()
        assert "# yaml-language-server: $schema=../recipe/schema.json" in lines
        knobs = [line for line in lines if line.startswith("  ") and not line.strip().startswith("#")]
        knobs += [line for line in lines if line.startswith(("model:", "dataset:"))]
        assert knobs
        assert [line for line in knobs if " # " not in line and not line.endswith(":")] == []


def test_the_key_from_is_spelled_alike_everywhere(tmp_path: Path) -> None:
    text = "method: sft\nmodel: builtin://tiny-llama\ndataset: builtin://orders\nlora:\n  from: file:///a\n"
    loaded = load_recipe(write(tmp_path / "recipe.yaml", text))
    assert loaded.origins["lora.from"].where.endswith("recipe.yaml:5")
    by_override = load_recipe("quickstart", overrides=["lora.from=file:///a"])
    by_environment = load_recipe("quickstart", environ={"LORA_CONFIG": '{"from": "file:///a"}'})
    assert by_override.recipe.hash() == by_environment.recipe.hash() != load_recipe("quickstart").recipe.hash()
    in_python = SFTConfig(**SOURCES, lora=LoraConfig(**{"from": "file:///a"}))
    recipe = load_recipe(None, base=in_python).recipe
    assert recipe.hash() == loaded.recipe.hash()
    assert recipe.lora is not None
    assert recipe.lora.from_uri == "file:///a"
    assert overrides_between(load_recipe("quickstart").recipe, by_override.recipe) == ["lora.from=file:///a"]
    assert "  from: file:///a\n" in recipe_text(recipe)
    assert explain("lora.from", loaded).value == "file:///a"
    assert "from" in json_schema()["$defs"]["LoraConfig"]["properties"]
