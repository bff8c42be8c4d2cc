"""The grammar in plain words: what a key accepts, its default, and the field behind a path."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from blueprints.recipe.document import KeyPath
from blueprints.recipe.schema import SHORT_FORMS, URI_PATTERN, CustomMethod


def field_at(block: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """The field at `path` below `block`; for an item of a list or map, a field of the item's type."""
    current: Any = block
    found: FieldInfo | None = None
    for step in path:
        model = model_of(current)
        if model is not None:
            found = model.model_fields.get(str(step))
            if found is None:
                return None
            current = found.annotation
            continue
        item = _item_of(current, step)
        if item is None:
            return None
        found = FieldInfo.from_annotation(item)
        current = found.annotation
    return found


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The block in `annotation`, also if optional; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((arm for arm in _arms(annotation) if isinstance(arm, type) and issubclass(arm, BaseModel)), None)


def _arms(annotation: Any) -> list[Any]:
    """The alternatives of a union, None left out; the annotation itself if it is no union."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [arm for arm in get_args(annotation) if arm is not type(None)]
    return [annotation]


def _item_of(annotation: Any, step: str | int) -> Any:
    wanted = list if isinstance(step, int) else dict
    for arm in _arms(annotation):
        inner = get_args(arm)[0] if get_origin(arm) is Annotated else arm
        if get_origin(inner) is wanted:
            return get_args(inner)[-1]
    return None


def item_model(annotation: Any) -> type[BaseModel] | None:
    """The block a list in `annotation` holds, None if there is none."""
    item = _item_of(annotation, 0)
    return model_of(item) if item is not None else None


def map_field(annotation: Any) -> bool:
    """Whether the annotation is a free map, such as `dict[str, str]`."""
    return any(get_origin(arm) is dict for arm in _arms(annotation))


def choices_of(found: FieldInfo) -> list[str]:
    """The strings a field accepts by name, in order."""
    return [str(choice) for arm in _arms(found.annotation) for choice in _literals(arm)]


def _literals(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (choice for choice in get_args(annotation) if isinstance(choice, str))
    elif get_origin(annotation) is list:
        yield from _literals(get_args(annotation)[0])


def describe_field(found: FieldInfo) -> str:
    """What a field accepts, in plain words: `an integer, at least 1`."""
    arms = _arms(found.annotation)
    if isinstance(found.json_schema_extra, dict) and found.json_schema_extra.get("pattern") == URI_PATTERN:
        return "a URI"
    return ", or ".join(_describe(arm, found.metadata if len(arms) == 1 else _own(found, arm)) for arm in arms)


def _own(found: FieldInfo, arm: Any) -> list[Any]:
    # `PositiveInt | None` keeps its bounds inside the arm; bounds on the field itself hold for every arm.
    return [] if get_origin(arm) is Annotated else list(found.metadata)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    if annotation is CustomMethod:
        return "package.module:function"
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        for item in extra:
            if isinstance(item, FieldInfo) and item.json_schema_extra is not None:
                return "a URI"
            metadata = [*metadata, *(item.metadata if isinstance(item, FieldInfo) else [item])]
        return _describe(inner, metadata)
    if any(isinstance(item, WithJsonSchema) for item in metadata):
        return "a quantity such as 8, 500m or 64Gi"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {_listed(args)}" if len(args) > 1 else _listed(args)
    filled = "non-empty " if any(isinstance(item, MinLen) for item in metadata) else ""
    if origin is list:
        return f"a {filled}list of {_plural(args[0])}"
    if origin is dict:
        return "a map" if args[1] is Any else f"a map from names to {_plural(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a map with keys of {', '.join(annotation.model_fields)}"
    names = {bool: "a boolean (true or false)", int: "an integer", float: "a number", str: f"a {filled}string"}
    text = names.get(annotation, "any value")
    bounds = [bound for item in metadata if (bound := _bound(item))]
    return ", ".join([text, " and ".join(bounds)]) if bounds else text


def _listed(choices: tuple[Any, ...]) -> str:
    return ", ".join(str(choice) for choice in choices)


def _plural(annotation: Any) -> str:
    """The items of a list or map: `strings`, `integers, each at least 1`."""
    one = _describe(annotation, [])
    for singular, plural in (("a non-empty string", "strings"), ("a string", "strings"), ("an integer", "integers")):
        if one.startswith(singular):
            return plural + one.removeprefix(singular).replace(", ", ", each ", 1)
    return one.replace("one of ", "any of ").replace("a map ", "maps ", 1)


def _bound(item: Any) -> str:
    if isinstance(item, Ge):
        return f"at least {item.ge}"
    if isinstance(item, Gt):
        return f"greater than {item.gt}"
    if isinstance(item, Le):
        return f"at most {item.le}"
    if isinstance(item, Lt):
        return f"below {item.lt}"
    if isinstance(item, MaxLen):
        return f"at most {item.max_length} characters"
    return ""


def accepts(key: str, found: FieldInfo) -> str:
    """The type of a key in plain words; a block's keys are listed elsewhere."""
    block = model_of(found.annotation)
    if block is not None:
        short = SHORT_FORMS.get(key)
        return f"a block, or its `{short}` as a string" if short else "a block"
    return describe_field(found)


def default_of(found: FieldInfo) -> str:
    """The default in words: a value, `required`, or the rule of the documentation."""
    default = found.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        return "the defaults of its keys"
    if default is not None:
        return json.dumps(default) if not isinstance(default, str) else default
    rule = re.search(r"Default(?: by method)?: (.*?)(?:\.$|\.\s+[A-Z]|$)", one_line(found.description or ""))
    return rule[1] if rule else "not set"


def one_line(text: str) -> str:
    """A docstring without its line breaks."""
    return " ".join(text.split())
