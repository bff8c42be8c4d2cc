"""A recipe as text: YAML that reads back to the same recipe, each value with what set it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from blueprints.recipe.document import Origin, read_text
from blueprints.recipe.schema import BLOCK_ORDER, IDLE, METHODS, Recipe


@dataclass(frozen=True)
class Line:
    """One line of a written recipe.

    Attributes:
        text: the YAML.
        key: dotted key of the value on it, empty on the head of a block.
        idle: why the value means nothing in this recipe, empty if it does; the line is a comment then.
    """

    text: str
    key: str = ""
    idle: str = ""


def recipe_lines(recipe: Recipe) -> list[Line]:
    """The resolved recipe, one value per line. Blocks of other methods are left out."""
    idle = {item.key: item.reason for item in IDLE if item.when(recipe)}
    values = dict(recipe.resolve())
    lines: list[Line] = []
    for name in BLOCK_ORDER:
        value = values[name]
        if isinstance(value, BaseModel):
            lines.append(Line(f"{name}:"))
            for key, item in value.model_dump(mode="json").items():
                lines += _entry(f"{name}.{key}", key, item, idle)
        elif isinstance(value, dict):
            lines.append(Line(f"{name}:{'' if value else ' {}'}"))
            lines += [Line(f"  {yaml_value(key)}: {yaml_value(item)}", f"{name}.{key}") for key, item in value.items()]
        elif value is not None or name not in (*METHODS, "custom"):
            lines.append(Line(f"{name}: {yaml_value(value)}", name))
    return lines


def _entry(dotted: str, key: str, value: Any, idle: Mapping[str, str]) -> list[Line]:
    if isinstance(value, dict) and value:
        entries = [
            Line(f"    {yaml_value(name)}: {yaml_value(item)}", f"{dotted}.{name}") for name, item in value.items()
        ]
        return [Line(f"  {key}:"), *entries]
    if dotted in idle:
        return [Line(f"  # {key}: {yaml_value(value)}", dotted, idle[dotted])]
    return [Line(f"  {key}: {yaml_value(value)}", dotted)]


def recipe_text(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` of it gives the same hash."""
    return "".join(f"{line.text}\n" for line in recipe_lines(recipe))


def annotated(recipe: Recipe, origins: Mapping[str, Origin]) -> list[tuple[str, str]]:
    """The resolved recipe as lines of YAML, each with its origin as a comment (empty on the head of a block)."""
    result: list[tuple[str, str]] = []
    for line in recipe_lines(recipe):
        origin = origins.get(line.key, Origin("default"))
        comment = f"idle: {line.idle}" if line.idle else str(origin)
        result.append((line.text, f"# {comment}" if line.key else ""))
    return result


def yaml_value(value: Any) -> str:
    """A JSON value as YAML on one line: bare where that reads back as the same, quoted elsewhere."""
    if isinstance(value, str):
        return value if _bare(value) else quoted(value)
    if isinstance(value, list):
        return "[" + ", ".join(_in_flow(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_in_flow(key)}: {_in_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        # Readers of YAML 1.1 need the point to see a number.
        return mantissa + (".0" if exponent and "." not in mantissa else "") + exponent + power
    return json.dumps(value)


def _in_flow(value: Any) -> str:
    # Inside brackets a comma or a bracket would end a bare text.
    if isinstance(value, str) and set(value) & set(",[]{}:"):
        return quoted(value)
    return yaml_value(value)


def quoted(text: str) -> str:
    """The text in double quotes, as YAML and (but for characters beyond the basic plane) JSON read it."""
    body = json.dumps(text, ensure_ascii=False)[1:-1]
    return '"' + "".join(character if character.isprintable() else _escape(character) for character in body) + '"'


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_OTHERS = yaml.SafeLoader("")
"""A YAML 1.1 reader: what it takes for something else (`no`, `1:20`, `<<`) is quoted, so that every tool reads it."""


def _bare(text: str) -> bool:
    if not text or len(text) > 200 or not text.isprintable():
        return False
    tag: str = _OTHERS.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]  # as types-PyYAML has it
    if tag != "tag:yaml.org,2002:str":
        return False
    node, faults = read_text(f"k: {text}", "recipe", "")
    value = node.at(("k",)) if node is not None else None
    return not faults and value is not None and value.content == text
