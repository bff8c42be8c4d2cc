"""The JSON schema and the reference page: generated, committed, and true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from blueprints.errors import RecipeError
from blueprints.recipe import load_recipe, shipped_recipes
from blueprints.recipe.describe import model_of
from blueprints.recipe.json_schema import json_schema
from blueprints.recipe.reference import reference
from blueprints.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json_schema()
TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def accepts(schema: dict[str, Any] | bool, value: Any) -> bool:
    """Whether a JSON schema accepts a value: the part of draft 2020-12 that our schema uses."""
    if isinstance(schema, bool):
        return schema
    known = {"$ref", "type", "enum", "const", "anyOf", "allOf", "if", "then", "properties", "required", "items",
             "additionalProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
             "maxLength", "minItems", "pattern", "description", "default", "$defs", "$schema",
             "$id", "title"}  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema and not accepts(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], value):
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(kind, value) for kind in kinds):
        return False
    if "enum" in schema and not any(value == choice and type(value) is type(choice) for choice in schema["enum"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(accepts(arm, value) for arm in schema["anyOf"]):
        return False
    for arm in schema.get("allOf", []):
        if ("if" not in arm or accepts(arm["if"], value)) and not accepts(arm.get("then", True), value):
            return False
    return _in_range(schema, value) and _members(schema, value)


def _is(kind: str, value: Any) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _in_range(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            schema.get("minimum", value) <= value <= schema.get("maximum", value)
            and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
            and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        )
    return True


def _members(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, list):
        return all(accepts(schema.get("items", True), item) for item in value)
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        return set(schema.get("required", [])) <= set(value) and all(
            accepts(properties.get(key, rest), item) for key, item in value.items()
        )
    return True


def test_the_committed_files_are_up_to_date() -> None:
    committed = json.loads((ROOT / "blueprints" / "recipe" / "schema.json").read_text(encoding="utf-8"))
    assert committed == SCHEMA, "run `make reference`"
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == reference(), "run `make reference`"


def test_the_schema_describes_every_key() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["$id"].endswith("blueprints/recipe/schema.json")
    for name, definition in (("Recipe", SCHEMA), *SCHEMA["$defs"].items()):
        assert definition["additionalProperties"] is False, name
        for key, entry in definition["properties"].items():
            assert entry["description"], f"{name}.{key}"
            assert "\n" not in entry["description"]


def test_the_schema_accepts_what_is_shipped_and_what_is_resolved() -> None:
    for shipped in shipped_recipes():
        assert accepts(SCHEMA, yaml.safe_load(shipped.path.read_text(encoding="utf-8")))
        assert accepts(SCHEMA, load_recipe(shipped.name, environ={}).recipe.model_dump(mode="json"))


BASE: dict[str, Any] = {"method": "sft", "model": "hf://a/b", "dataset": {"uri": "builtin://orders"}}


@pytest.mark.parametrize(
    ("change", "fine"),
    [
        ({}, True),
        ({"lora": {}}, True),
        ({"lora": None, "training": None, "sft": None}, True),
        ({"lora": {"r": None, "target_modules": ["q_proj"]}}, True),
        ({"runtime": "llm-sft"}, True),
        ({"resources": {"cpu": 8, "memory": "64Gi"}}, True),
        ({"training": {"bf16": True, "learning_rate": 1}}, True),
        ({"dataset": {"uri": "hf://a/b", "test_size": 5}}, True),
        ({"method": "dpo", "dpo": {"beta": 0.1}}, True),
        ({"dpo": {"beta": 0.1}}, False),
        ({"method": "foo"}, False),
        ({"model": "./here"}, False),
        ({"model": {}}, False),
        ({"lora": {"r": "4"}}, False),
        ({"lora": {"r": 0}}, False),
        ({"lora": {"rank": 4}}, False),
        ({"lora": True}, False),
        ({"trainig": {}}, False),
        ({"training": {"bf16": "yes"}}, False),
        ({"dataset": {"uri": "hf://a/b", "test_size": 1.5}}, False),
        ({"resources": {"memory": "64GB"}}, False),
    ],
)
def test_the_schema_and_the_loader_agree(tmp_path: Path, change: dict[str, Any], fine: bool) -> None:
    recipe = BASE | change
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    assert accepts(SCHEMA, recipe) is fine
    if fine:
        load_recipe(str(path), environ={})
    else:
        with pytest.raises(RecipeError):
            load_recipe(str(path), environ={})


def test_the_reference_page_names_every_key() -> None:
    page = reference()
    for name, field in Recipe.model_fields.items():
        block = model_of(field.annotation)
        for key in block.model_fields if block is not None else ():
            assert f"| `{name}.{key}` |" in page
    assert "| `grpo.reward_funcs.weight` |" in page
    assert all(line.count(" | ") >= 3 for line in page.splitlines() if line.startswith("| `"))
