"""The grammar under random recipes, random junk and random mistakes."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from blueprints.errors import Fault, RecipeError
from blueprints.recipe import load_recipe, overrides_between
from blueprints.recipe.describe import choices_of, model_of
from blueprints.recipe.schema import METHODS, Recipe
from blueprints.recipe.shipped import shipped_names
from blueprints.recipe.write import recipe_text

SETTINGS = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
SHIPPED = shipped_names()

# Every kind of text that has broken a quoting rule somewhere: numbers, nulls, booleans, indicators, line breaks.
nasty = st.sampled_from(
    [
        *"-.#%@[]{},=`\"'\\\n\t~é\x85\u2028\ufeff\x7f\U0001f600",
        *(
            "null",
            "true",
            "No",
            "123",
            "1e5",
            "0x1f",
            ".inf",
            "a: b",
            "a #b",
            "*x",
            "&x",
            "!t",
            "{{ x }}",
            "\\n",
            "a\nb",
        ),
        *(" a", "a ", "日本", "\x1b[0m", "a=b", "- a", "? a", "| a", "> a", "<<", "---", "..."),
    ]
)
text = st.one_of(
    nasty, st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
)


def compiles(pattern: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
    except (re.error, OverflowError):
        return False
    return True


pattern = text.filter(compiles)
number = st.floats(1e-7, 1e3, allow_nan=False)
count = st.integers(1, 2**31)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """A valid recipe for SFT as plain data, with any text where the grammar takes any."""

    def some(**fields: st.SearchStrategy[Any]) -> dict[str, Any]:
        return draw(st.fixed_dictionaries({}, optional=fields))

    names = st.lists(text, min_size=1, max_size=3)
    recipe: dict[str, Any] = {
        "method": "sft",
        "model": {"uri": draw(st.sampled_from(["builtin://tiny-llama", "hf://a/b", "hf://a/b@v1", "file:///a b/c"]))},
        "dataset": {"uri": "builtin://orders"},
        "training": some(
            learning_rate=number, max_steps=count, seed=st.integers(0, 2**32 - 1), data_seed=st.integers(0, 9),
            bf16=st.sampled_from([True, False, "auto"]), weight_decay=number, gradient_checkpointing=st.booleans(),
            report_to=st.lists(st.sampled_from(["trackio", "wandb"]), unique=True), optim=st.just("sgd"),
        ),
        "eval": some(metric=st.sampled_from(["none", "exact_match"]), samples=st.integers(0, 9)),
        "sft": some(packing=st.booleans(), completion_only_loss=st.booleans()),
        "resources": some(num_nodes=st.integers(1, 4), gpu=st.integers(0, 2), memory=st.sampled_from(["1Gi", "2"])),
        "runtime": some(
            name=text, image=text, env=st.dictionaries(text, text, max_size=2),
            labels=st.dictionaries(text, text, max_size=2),
        ),
    }  # fmt: skip
    recipe["model"] |= some(chat_template=text, ignore_patterns=names, trust_remote_code=st.booleans())
    if recipe["model"]["uri"] == "hf://a/b":
        recipe["model"] |= some(revision=text)
    recipe["dataset"] |= some(split=text, columns=st.dictionaries(text, text, max_size=2), max_rows=count)
    if draw(st.booleans()):
        recipe["lora"] = some(
            r=count, lora_alpha=count, lora_dropout=st.floats(0, 0.9), target_modules=st.one_of(pattern, names),
            rank_pattern=st.dictionaries(pattern, count, max_size=2), use_dora=st.booleans(),
            quantize_base=st.just(True), init_lora_weights=st.sampled_from([True, False, "gaussian"]),
        )  # fmt: skip
        if "quantize_base" in recipe["lora"]:
            recipe["lora"] |= some(bnb_4bit_quant_type=st.just("fp4"), bnb_4bit_use_double_quant=st.booleans())
    return recipe


@SETTINGS
@given(recipes(), st.sampled_from(SHIPPED))
@example(
    {"method": "sft", "model": "hf://a/b", "dataset": "builtin://orders", "lora": {"r": 4, "lora_alpha": 32}},
    "sft-lora",
)
@example({"method": "sft", "model": "hf://a/b", "dataset": "builtin://orders", "lora": {}}, "sft")
@example({"method": "sft", "model": "hf://a/b", "dataset": "builtin://orders"}, "sft-qlora")
def test_overrides_lead_from_any_shipped_recipe_to_any_recipe(plain: dict[str, Any], name: str) -> None:
    target = load_recipe(None, base=plain, environ={}).recipe
    overrides = overrides_between(load_recipe(name, environ={}).recipe, target)
    assert overrides == sorted(overrides)
    again = load_recipe(name, overrides=overrides, environ={}).recipe
    assert again.canonical_json() == target.canonical_json()
    assert again.hash() == target.hash()
    assert overrides_between(again, target) == []


OTHERS: list[dict[str, Any]] = [
    {"method": "dpo", "dpo": {"beta": 0.3}},
    {"method": "dpo", "lora": {"r": 4}},
    {"method": "ppo", "ppo": {"reward_model": "hf://a/b"}},
    {"method": "grpo", "grpo": {"reward_funcs": [{"name": "own:f", "args": {"pattern": '^"a\\d\n', "x": None}}]}},
    {"method": "grpo", "grpo": {"reward_funcs": [{"name": "length", "weight": 2, "args": {"max": 9}}], "epsilon": 0.3}},
    {"method": "distill", "distill": {"teacher": "hf://a/b", "teacher_revision": "v1"}},
    {"method": "qat", "qat": {"packing": True}},
]


@pytest.mark.parametrize("plain", OTHERS, ids=lambda plain: plain["method"])
@pytest.mark.parametrize("name", SHIPPED)
def test_overrides_lead_to_other_methods_and_back(plain: dict[str, Any], name: str, tmp_path: Path) -> None:
    target = load_recipe(None, base={"model": "hf://a/b", "dataset": "hf://a/b", **plain}, environ={}).recipe
    overrides = overrides_between(load_recipe(name, environ={}).recipe, target)
    again = load_recipe(name, overrides=overrides, environ={}).recipe
    assert again.canonical_json() == target.canonical_json()
    path = tmp_path / "written.yaml"
    path.write_text(recipe_text(target), encoding="utf-8")
    assert load_recipe(str(path), environ={}).recipe.hash() == target.hash()
    back = overrides_between(load_recipe(str(path), environ={}).recipe, load_recipe(name, environ={}).recipe)
    returned = load_recipe(str(path), overrides=back, environ={}).recipe
    assert returned.hash() == load_recipe(name, environ={}).recipe.hash()


@SETTINGS
@given(recipes())
def test_a_written_recipe_reads_back_the_same(tmp_path: Path, plain: dict[str, Any]) -> None:
    recipe = load_recipe(None, base=plain, environ={}).recipe
    path = tmp_path / "written.yaml"
    path.write_text(recipe_text(recipe), encoding="utf-8")
    assert load_recipe(str(path), environ={}).recipe.canonical_json() == recipe.canonical_json()


@settings(SETTINGS, max_examples=200)
@given(
    st.one_of(
        st.binary(max_size=200), st.text(alphabet="{}[]&*!|>'\"%@`:,-?#<~ \n\tab0.e\\", max_size=60).map(str.encode)
    )
)
def test_junk_is_a_recipe_error_and_nothing_else(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "junk.yaml"
    path.write_bytes(junk)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), environ={})
    assert caught.value.faults
    assert all(fault.where and fault.problem for fault in caught.value.faults)


@settings(SETTINGS, max_examples=200)
@given(st.one_of(text, st.text(alphabet="{}[]'\":,=.lorarn 0123", max_size=30)))
def test_a_junk_override_is_a_recipe_error_or_a_value(junk: str) -> None:
    for override in (junk, f"lora.target_modules={junk}", f"lora={junk}", f"runtime.env.X={junk}"):
        faults = faults_of(overrides=[override], environ={})
        assert all(fault.where.startswith("override") for fault in faults)


@SETTINGS
@given(
    st.one_of(
        st.text(max_size=40), st.recursive(st.none() | st.integers() | text, st.lists, max_leaves=5).map(json.dumps)
    )
)
def test_junk_in_the_environment_is_a_recipe_error_or_nothing(junk: str) -> None:
    faults = faults_of(environ={"LORA_CONFIG": junk})
    assert all(fault.where == "environment LORA_CONFIG" for fault in faults)
    assert bool(faults) == bool(junk.strip())


def faults_of(**layers: Any) -> tuple[Fault, ...]:
    try:
        load_recipe("sft-lora", **layers)
    except RecipeError as error:
        return error.faults
    return ()


def leaves() -> list[tuple[str, str]]:
    """Every key of the grammar that is not a block, with its block."""
    found = []
    for name, field in Recipe.model_fields.items():
        block = model_of(field.annotation)
        if block is not None:
            found += [(name, key) for key in block.model_fields]
    return found


@pytest.mark.parametrize(("block", "key"), leaves(), ids=str)
def test_a_letter_too_many_is_found_and_put_right(tmp_path: Path, block: str, key: str) -> None:
    method = block if block in METHODS else "sft"
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"method: {method}\nmodel: hf://a/b\ndataset: hf://a/b\n"
        + (f"{block}:\n  {key}x: 1\n" if block not in ("model", "dataset") else ""),
        encoding="utf-8",
    )
    overrides = [f"{block}.{key}x=1"] if block in ("model", "dataset") else []
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), overrides=overrides, environ={})
    fault = next(fault for fault in caught.value.faults if fault.key == f"{block}.{key}x")
    assert fault.problem == "unknown key"
    assert f"`{key}`" in fault.hint
    assert fault.where == (f"{path}:5" if not overrides else f"override '{overrides[0]}'")


@pytest.mark.parametrize(("block", "key"), leaves(), ids=str)
def test_a_wrong_type_is_told_with_value_and_expectation(block: str, key: str) -> None:
    method = block if block in METHODS else "sft"
    field = model_of(Recipe.model_fields[block].annotation).model_fields[key]
    wrong: Any = {"a": [1]} if "dict" in str(field.annotation) else {"unexpected": 1}
    with pytest.raises(RecipeError) as caught:
        load_recipe(
            None,
            base={"method": method, "model": "hf://a/b", "dataset": "hf://a/b"},
            overrides=[f"{block}.{key}={json.dumps(wrong)}"],
            environ={},
        )
    fault = next(fault for fault in caught.value.faults if fault.key.startswith(f"{block}.{key}"))
    assert fault.problem.startswith("found ")
    assert fault.expected
    for choice in choices_of(field):
        assert choice in fault.expected


@SETTINGS
@given(recipes(), st.sampled_from(["lora.r", "training.seed", "eval.samples", "resources.gpu", "output.proof_rows"]))
def test_a_number_in_quotes_is_a_fault_that_names_the_key(plain: dict[str, Any], key: str) -> None:
    assume(key != "lora.r" or "lora" in plain)
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, base=plain, overrides=[f"{key}='7'"], environ={})
    (fault,) = [fault for fault in caught.value.faults if fault.key == key]
    assert fault.problem == 'found the string "7"'
    assert "an integer" in fault.expected
    assert fault.hint == "Remove the quotes."


def test_a_map_key_that_looks_like_a_merge_key_is_quoted(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", overrides=['runtime.env={"<<": "x"}'], environ={}).recipe
    (tmp_path / "written.yaml").write_text(recipe_text(recipe), encoding="utf-8")
    assert load_recipe(str(tmp_path / "written.yaml"), environ={}).recipe.hash() == recipe.hash()
