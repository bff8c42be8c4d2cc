"""`key=value` texts: read as a layer, and written as the difference of two recipes."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from blueprints.errors import Fault
from blueprints.recipe.describe import map_field
from blueprints.recipe.document import DocumentError, Node, Origin, read_value
from blueprints.recipe.schema import Recipe, field_of_block
from blueprints.secret_text import masked


def read_override(text: str) -> tuple[Node | None, list[Fault]]:
    """The layer a `key=value` text makes and the faults of the text; None where nothing could be read."""
    shown = masked(text if text.isprintable() else repr(text)[1:-1])
    shown = shown if len(shown) <= 120 else shown[:116] + " ..."
    where = f"override '{shown}'"
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        return None, [Fault(where, "", "no `=` in it", "key=value, such as lora.r=8")]
    if not key or not all(key.split(".")):
        return None, [Fault(where, key, "found no key" if not key else "an empty part in the key", "a key as lora.r")]
    if not value.strip():
        hint = f"Write `{key}=null` to unset it, or `{key}='\"\"'` for the empty text."
        return None, [Fault(where, key, "found no value", "a value after `=`", hint)]
    origin = Origin("override", where)
    try:
        node, faults = read_value(value, origin)
    except DocumentError as error:
        return None, [Fault(where, key, error.fault.problem, error.fault.expected, error.fault.hint)]
    keyed = [
        Fault(where, f"{key}.{fault.key}".rstrip("."), fault.problem, fault.expected, fault.hint) for fault in faults
    ]
    for part in reversed(key_parts(key)):
        node = Node({part: node}, origin)
    return node, keyed


def key_parts(key: str) -> list[str]:
    """A dotted key in parts; below a free map (`runtime.labels`) the rest is one name, dots and all."""
    parts = key.split(".")
    if len(parts) > 2:
        found = field_of_block(parts[0], parts[1])
        if found is not None and map_field(found.annotation):
            return [parts[0], parts[1], ".".join(parts[2:])]
    return parts


def overrides_between(base: Recipe, target: Recipe) -> list[str]:
    """The smallest list of `key=value` texts that turns `base` into `target`.

    Args:
        base: a recipe as `load_recipe` returns it, so that it knows which of its values were set and which derived.
        target: the recipe wanted.

    Returns:
        sorted texts: `load_recipe` of the base with them gives a recipe with the target's hash.
    """
    changes = _changes(base.resolve(), target.resolve(), set(target.derived()) | set(base.derived()) | DERIVED)
    candidate = _applied(base, changes).resolve()
    changes |= _changes(candidate, target.resolve(), set())
    return sorted(f"{key}={write_value(value)}" for key, value in changes.items())


DERIVED = {
    "training.learning_rate",
    "training.data_seed",
    "lora.lora_alpha",
    "grpo.epsilon_high",
    "resources.num_proc_per_node",
    "runtime.name",
}
"""Keys whose default depends on other values: they are compared after everything else is in place."""


def _changes(base: Recipe, target: Recipe, later: set[str]) -> dict[str, Any]:
    """Plain values by dotted key where the recipes differ; None removes. Keys in `later` are left out."""
    changes: dict[str, Any] = {}
    old_values, new_values = dict(base), dict(target)
    for name in Recipe.model_fields:
        old, new = old_values[name], new_values[name]
        if not isinstance(new, BaseModel):
            if new != old:
                changes[name] = _replacing(old, new)
            continue
        old_fields = dict(old) if isinstance(old, BaseModel) else dict(_fresh(type(new)))
        different = {}
        for key, value in dict(new).items():
            if f"{name}.{key}" not in later and _data(value) != _data(old_fields[key]):
                different[f"{name}.{key}"] = _replacing(_data(old_fields[key]), _data(value))
        if old is None and not different:
            different[name] = {}
        changes |= different
    return changes


def _replacing(old: Any, new: Any) -> Any:
    """What turns `old` into `new` when it is laid over it: maps merge by key, so keys that go are unset."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {key: None for key in old if key not in new} | new


def _laid_over(old: Any, new: Any) -> Any:
    """The reverse of `_replacing`."""
    if not isinstance(new, dict):
        return new
    merged = (old if isinstance(old, dict) else {}) | new
    return {key: value for key, value in merged.items() if value is not None}


def _fresh(block: type[BaseModel]) -> BaseModel:
    return block.model_construct()


def _data(value: Any) -> Any:
    """A field's value as JSON data; 1 and 1.0 and true stay apart."""
    if isinstance(value, list):
        return [_data(item) for item in value]
    if isinstance(value, dict):
        return {key: _data(item) for key, item in value.items()}
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value


def _applied(base: Recipe, changes: dict[str, Any]) -> Recipe:
    data: dict[str, Any] = base.as_layer()
    for dotted_key, value in changes.items():
        name, _, key = dotted_key.partition(".")
        if not key:
            data[name] = _laid_over(data.get(name), value)
        elif value is None:
            data.setdefault(name, {}).pop(key, None)
        else:
            block = data.get(name) or {}
            data[name] = block | {key: _laid_over(block.get(key), value)}
    return Recipe.model_validate({key: value for key, value in data.items() if value is not None})


def write_value(value: Any) -> str:
    """A value as `read_value` reads it back: as bare as can be."""
    if isinstance(value, str):
        return value if _bare(value) else json.dumps(value, ensure_ascii=not value.isprintable())
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    return text if text.isprintable() else json.dumps(value)


def _bare(text: str) -> bool:
    if not text or not text.isprintable() or text != text.strip() or text[0] in "{[\"'":
        return False
    try:
        node, faults = read_value(text, Origin("override"))
    except DocumentError:
        return False
    return not faults and node.content == text and isinstance(node.content, str)
