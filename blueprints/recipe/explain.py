"""What a key means: its documentation, type, default and range, from the grammar itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from blueprints.errors import UsageError
from blueprints.recipe.describe import accepts, default_of, item_model, map_field, model_of, one_line
from blueprints.recipe.document import Origin
from blueprints.recipe.faults import nearest_key
from blueprints.recipe.load import LoadedRecipe, load_recipe
from blueprints.recipe.overrides import key_parts
from blueprints.recipe.schema import BUILTIN_DATASETS, BUILTIN_MODELS, METHODS, Recipe
from blueprints.recipe.shipped import shipped_path


@dataclass(frozen=True)
class Explanation:
    """Everything to be said about one key.

    Attributes:
        key: the dotted key.
        meaning: its documentation.
        type: what it accepts, in plain words.
        default: its default, or the rule it is derived by.
        keys: for a block, its own keys.
        value: its value in a recipe; None also if no recipe was given.
        origin: what set that value; None if no recipe was given.
    """

    key: str
    meaning: str
    type: str
    default: str
    keys: tuple[Explanation, ...] = ()
    value: Any = None
    origin: Origin | None = None

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain JSON data."""
        data: dict[str, Any] = {
            "key": self.key, "meaning": self.meaning, "type": self.type, "default": self.default,
        }  # fmt: skip
        if self.keys:
            data["keys"] = [inner.as_dict() for inner in self.keys]
        if self.origin is not None and not self.keys:
            data |= {"value": self.value, "layer": self.origin.layer, "where": self.origin.where}
        return data


_INDEX = re.compile(r"\[\d+\]")


def explain(key: str, loaded: LoadedRecipe | None = None) -> Explanation:
    """What `key` means, and with a recipe its value there.

    Args:
        key: a dotted key (`lora.r`) or a block (`lora`).
        loaded: the recipe to look the value up in.

    Raises:
        UsageError: no such key; names the nearest.
    """
    key = _INDEX.sub("", key)  # faults name items of lists: `grpo.reward_funcs[0].name`
    found, owner = _find(key)
    block = model_of(found.annotation) or item_model(found.annotation)
    keys = (
        tuple(_explain(f"{key}.{name}", field, loaded) for name, field in block.model_fields.items()) if block else ()
    )
    explanation = _explain(key, found, loaded)
    meaning = explanation.meaning
    if block is not None and owner is Recipe and block.__doc__:
        meaning = one_line(block.__doc__)
    return Explanation(key, meaning, explanation.type, explanation.default, keys, explanation.value, explanation.origin)


def _explain(key: str, found: FieldInfo, loaded: LoadedRecipe | None) -> Explanation:
    value, origin = (None, None) if loaded is None else _value(key, loaded)
    return Explanation(
        key, one_line(found.description or ""), accepts(key, found), default_of(found), (), value, origin
    )


def _find(key: str) -> tuple[FieldInfo, type[BaseModel]]:
    """The field of a key and the block it belongs to."""
    owner: type[BaseModel] | None = Recipe
    found: FieldInfo | None = None
    prefix = ""
    for part in key_parts(key):
        if found is not None and map_field(found.annotation):
            break  # an entry of a free map is explained by the map
        if owner is None or part not in owner.model_fields:
            if owner is None:
                raise UsageError(f"`{prefix}` has no keys", where=f"key {key!r}", todo=f"`blueprints explain {prefix}`")
            raise UsageError("unknown key", where=f"key {key!r}", todo=_todo(key, owner, prefix, part))
        holder, found = owner, owner.model_fields[part]
        owner = model_of(found.annotation) or item_model(found.annotation)
        prefix = f"{prefix}.{part}".lstrip(".")
    if found is None:
        raise UsageError("no key", where=f"key {key!r}", todo="such as lora.r")
    return found, holder


def _todo(key: str, owner: type[BaseModel], prefix: str, part: str) -> str:
    if shipped_path(key) is not None or key.endswith((".yaml", ".yml")):
        return f"That is a recipe; name a key after it: `blueprints explain {key} lora.r`."
    return nearest_key(owner, prefix, part)


def _value(key: str, loaded: LoadedRecipe) -> tuple[Any, Origin]:
    value: Any = loaded.recipe.model_dump(mode="json")
    for part in key_parts(key):
        value = value.get(part) if isinstance(value, dict) else None
    origin = loaded.origins.get(key)
    if origin is None:
        above = key.rpartition(".")[0]
        origin = loaded.origins.get(above, Origin("default"))
        if above in Recipe.model_fields and dict(loaded.recipe)[above] is None:
            origin = Origin(origin.layer, origin.where or f"as the recipe has no `{above}`")
    return value, origin


def explain_in(
    key: str, source: str | None, overlays: Sequence[str], overrides: Sequence[str], environ: Mapping[str, str]
) -> Explanation:
    """What `key` means, with its value under some layers; without a recipe, over the bare defaults.

    Raises:
        UsageError: no such key.
        RecipeError: the layers have faults.
    """
    plain = explain(key)  # an unknown key is told before a recipe's faults
    if source is not None:
        return explain(key, load_recipe(source, overlays=overlays, overrides=overrides, environ=environ))
    if not overlays and not overrides and not environ.get("LORA_CONFIG", "").strip():
        return plain
    block = key.split(".")[0]
    stand_in = {
        "method": "module:function" if block == "custom" else block if block in METHODS else "sft",
        "model": f"builtin://{BUILTIN_MODELS[0]}",
        "dataset": f"builtin://{BUILTIN_DATASETS[0]}",
    }
    loaded = load_recipe(None, base=stand_in, overlays=overlays, overrides=overrides, environ=environ)
    origins = {
        name: Origin("default", "no recipe given") if origin.layer == "python" else origin
        for name, origin in loaded.origins.items()
    }
    return explain(key, LoadedRecipe(loaded.recipe, loaded.source, None, origins))
