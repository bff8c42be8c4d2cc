"""The grammar as JSON Schema (draft 2020-12), for editors."""

from __future__ import annotations

from typing import Any

from blueprints.recipe.schema import CUSTOM_METHOD, METHODS, SHORT_FORMS, URI_PATTERN, Recipe

ADDRESS = "https://raw.githubusercontent.com/llm-blueprints/llm-blueprints/main/blueprints/recipe/schema.json"


CUSTOM_ONLY = {
    "if": {"properties": {"custom": {"type": "object"}}, "required": ["custom"]},
    "then": {"properties": {"method": {"pattern": CUSTOM_METHOD}}},
}
"""The block `custom` asks for a method of the user's own."""


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, short forms and null (which unsets) included."""
    schema = Recipe.model_json_schema(mode="validation")
    definitions = {name: _tidied(definition) for name, definition in schema["$defs"].items()}
    body = _tidied(schema)
    properties = body["properties"]
    for name, key in SHORT_FORMS.items():
        short: dict[str, Any] = {"type": "string", "description": f"Short form: the `{key}` of the block."}
        if key == "uri":
            short["pattern"] = URI_PATTERN
        entry = properties[name]
        long = entry.pop("anyOf") if "anyOf" in entry else [{"$ref": entry.pop("$ref")}]
        entry["anyOf"] = [short, *long]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": ADDRESS,
        "title": "llm-blueprints recipe",
        "description": body["description"],
        "type": "object",
        "additionalProperties": False,
        "required": body["required"],
        "properties": properties,
        "allOf": [*(_only_with(method) for method in METHODS), CUSTOM_ONLY],
        "$defs": definitions,
    }


def _only_with(method: str) -> dict[str, Any]:
    """A method's block asks for that method."""
    return {
        "if": {"properties": {method: {"type": "object"}}, "required": [method]},
        "then": {"properties": {"method": {"const": method}}},
    }


def _tidied(definition: dict[str, Any]) -> dict[str, Any]:
    """One block: descriptions on one line, no generated titles, null allowed where it unsets a key."""
    result = {key: value for key, value in definition.items() if key not in ("title", "$defs")}
    result["description"] = " ".join(result.get("description", "").split())
    required = result.get("required", [])
    result["properties"] = {
        name: _property(value, nullable=name not in required)
        for name, value in definition.get("properties", {}).items()
    }
    return result


def _property(value: dict[str, Any], *, nullable: bool) -> dict[str, Any]:
    result = {key: inner for key, inner in value.items() if key != "title"}
    if "description" in result:
        result["description"] = " ".join(result["description"].split())
    if result.get("default", ...) is None:
        del result["default"]
    if not nullable or {"type": "null"} in result.get("anyOf", []):
        return result
    if "enum" in result:
        result.pop("type", None)
        result["enum"] = [*result["enum"], None]
    elif isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    elif "anyOf" in result:
        result["anyOf"] = [*result["anyOf"], {"type": "null"}]
    elif "$ref" in result:
        result["anyOf"] = [{"$ref": result.pop("$ref")}, {"type": "null"}]
    return result
