"""Layers become one recipe: defaults < recipe < overlays < key=value < LORA_CONFIG, and every fault of all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from blueprints.errors import Fault, RecipeError
from blueprints.recipe.describe import map_field
from blueprints.recipe.document import KeyPath, Node, Origin, dotted, from_plain, read_file, unusable
from blueprints.recipe.environment import VARIABLE, read_environment
from blueprints.recipe.faults import schema_faults
from blueprints.recipe.find import find_recipe, shown_name
from blueprints.recipe.overrides import read_override
from blueprints.recipe.rules import rule_faults
from blueprints.recipe.schema import BLOCK_ORDER, SHORT_FORMS, Recipe, Run


@dataclass(frozen=True)
class LoadedRecipe:
    """A resolved recipe and where each of its values comes from.

    Attributes:
        recipe: the recipe, derived defaults filled in.
        source: the recipe as it was named, `python` for a configuration built in Python.
        shipped: name of the shipped recipe at the bottom, None if there is none.
        origins: the layer and place of every value, by dotted key.
    """

    recipe: Recipe
    source: str
    shipped: str | None
    origins: Mapping[str, Origin]


def load_recipe(
    source: str | None,
    *,
    overlays: Sequence[str | Path] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | Run | None = None,
) -> LoadedRecipe:
    """Read a recipe and everything laid over it.

    Args:
        source: name of a shipped recipe (`sft-lora`) or path of a YAML file; None with `base`.
        overlays: recipe files laid over it, in order.
        overrides: `key=value` texts laid over those, in order.
        environ: where `LORA_CONFIG` is looked up, as the last layer. Default: this process's environment.
        base: plain data or a Python configuration (`SFTConfig(...)`) in the place of the recipe file.

    Returns:
        the resolved recipe with the origin of each value.

    Raises:
        RecipeError: with every fault of every layer.
    """
    layers: list[Node] = []
    faults: list[Fault] = []
    broken = False
    for node, found in _read_layers(source, overlays, overrides, os.environ if environ is None else environ, base):
        faults += found
        broken |= node is None
        if node is not None:
            layers.append(_long_form(node))
    subject = "python" if source is None else source
    recipe, merged = _checked(layers, faults, broken=broken)
    if faults or recipe is None:
        raise RecipeError(_in_order(faults), subject=f"recipe {shown_name(subject)}")
    shipped = find_recipe(source).shipped if source is not None else None
    return LoadedRecipe(recipe.resolve(), subject, shipped, _origins(recipe, merged))


def _read_layers(
    source: str | None,
    overlays: Sequence[str | Path],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    base: Mapping[str, Any] | Run | None,
) -> list[tuple[Node | None, list[Fault]]]:
    """Every layer from the bottom, with the faults of its text; None where it could not be read."""
    layers: list[tuple[Node | None, list[Fault]]] = []
    if source is not None:
        found = find_recipe(source)
        layers.append(read_file(found.path, "recipe", found.shown) if found.path else (None, list(found.faults)))
    elif base is not None:
        name = f"python {type(base).__name__}" if isinstance(base, Run) else "python"
        node = from_plain(base.as_layer() if isinstance(base, Run) else base, Origin("python", name))
        layers.append((node, list(unusable(node, ()))))
    layers += [read_file(Path(overlay), "overlay", shown_name(str(overlay))) for overlay in overlays]
    layers += [read_override(text) for text in overrides]
    if environ.get(VARIABLE, "").strip():
        layers.append(read_environment(environ[VARIABLE]))
    return layers


def _long_form(node: Node) -> Node:
    """The layer with `model: uri` and the like written as maps, so that layers merge key by key."""
    entries = dict(node.content) if isinstance(node.content, dict) else {}
    for name, key in SHORT_FORMS.items():
        entry = entries.get(name)
        if entry is not None and isinstance(entry.content, str):
            entries[name] = Node({key: entry}, entry.origin)
    return replace(node, content=entries)


def merge(below: Node, above: Node, path: KeyPath = ()) -> Node:
    """`above` laid over `below`: maps by key, anything else replaces; null removes.

    A layer that names another model or data set drops the revision of the layers below: it belonged to their source.
    """
    if not isinstance(below.content, dict) or not isinstance(above.content, dict):
        return above
    entries = dict(below.content)
    if path in (("model",), ("dataset",)) and _other_source(entries, above.content):
        entries.pop("revision", None)
    for key, node in above.content.items():
        entries[key] = merge(entries[key], node, (*path, key)) if key in entries else node
    return replace(below, content=entries)


def _other_source(below: dict[str, Node], above: dict[str, Node]) -> bool:
    """Whether `above` names another source than the one the revision below belongs to."""
    revision, old, new = below.get("revision"), below.get("uri"), above.get("uri")
    if revision is None or new is None or (old is not None and old.plain() == new.plain()):
        return False
    # The arguments of one command line belong together, in whatever order they stand.
    return not (revision.origin.layer == new.origin.layer == "override")


def _checked(layers: list[Node], faults: list[Fault], *, broken: bool) -> tuple[Recipe | None, Node]:
    """The merged recipe; faults of single layers, of what is missing and of combinations are added to `faults`."""
    merged = Node({}, layers[0].origin if layers else Origin("default"))
    bad: set[str] = set()
    known = {(fault.where, fault.key) for fault in faults}
    for layer in layers:
        wrong = schema_faults(layer, partial=True)
        faults += [fault for fault in wrong.values() if (fault.where, fault.key) not in known]
        bad |= {dotted(path) for path in wrong}
        clean = layer
        for path in wrong:
            clean = _without(clean, path)
        merged = merge(merged, clean)
    missing = schema_faults(merged, partial=False)
    if not broken:
        faults += [fault for path, fault in missing.items() if not _covered(path, bad)]
    candidate = _completed(merged)
    if candidate is None:
        return None, merged
    recipe = Recipe.model_validate(_pruned(candidate))
    unknown = {dotted(path) for path in missing} | bad
    faults += [fault for fault in rule_faults(recipe, merged, layers) if not _touched(fault.key, unknown)]
    return (None if broken or missing else recipe), merged


def _covered(path: KeyPath, bad: set[str]) -> bool:
    """Whether a missing value was there but wrong, and has its fault already."""
    return any(dotted(path[:length]) in bad for length in range(1, len(path) + 1))


def _touched(key: str, bad: set[str]) -> bool:
    """Whether `key`, or a part of its value, has a fault already."""
    return any(other == key or other.startswith((f"{key}.", f"{key}[")) for other in bad)


def _completed(merged: Node) -> Node | None:
    """The merged tree with stand-ins for required values that are missing or wrong, so that the rules can run."""
    origin = Origin("stand-in")
    entries = dict(merged.content) if isinstance(merged.content, dict) else {}
    for key, stand_in in (("method", "sft"), ("model", "builtin://tiny-llama"), ("dataset", "builtin://orders")):
        node = entries.get(key)
        if node is None or node.content is None or (isinstance(node.content, dict) and node.at(("uri",)) is None):
            entries[key] = Node(stand_in, origin)
    candidate = replace(merged, content=entries)
    return None if schema_faults(candidate, partial=False) else candidate


def _without(node: Node, path: KeyPath) -> Node:
    """The tree without the value at `path`; a list with a wrong item goes as a whole."""
    if not path or not isinstance(node.content, dict):
        return node
    entries = dict(node.content)
    step = str(path[0])
    child = entries.get(step)
    if child is None:
        return node
    if len(path) == 1 or not isinstance(child.content, dict):
        del entries[step]
    else:
        entries[step] = _without(child, path[1:])
    return replace(node, content=entries)


def _pruned(node: Node) -> Any:
    """Plain data; null, outside lists, is absence."""
    if isinstance(node.content, dict):
        return {key: _pruned(item) for key, item in node.content.items() if item.content is not None}
    return node.plain()


def _in_order(faults: list[Fault]) -> list[Fault]:
    """Faults without repetition, those of one file by line."""
    unique = list(dict.fromkeys(faults))
    first: dict[str, int] = {}
    for index, fault in enumerate(unique):
        first.setdefault(_file_line(fault.where)[0], index)
    return sorted(unique, key=lambda fault: (first[_file_line(fault.where)[0]], _file_line(fault.where)[1]))


def _file_line(where: str) -> tuple[str, int]:
    file, _, line = where.rpartition(":")
    return (file, int(line)) if line.isdigit() else (where, 0)


# Origins -------------------------------------------------------------------------------------------------------------


def _origins(recipe: Recipe, merged: Node) -> dict[str, Origin]:
    """The origin of every value of the resolved recipe, by dotted key."""
    derived = recipe.derived()
    origins: dict[str, Origin] = {}
    resolved = recipe.resolve()
    values = dict(resolved)
    for name in BLOCK_ORDER:
        value = values[name]
        if not isinstance(value, BaseModel):
            origins[name] = _origin(merged, (name,), derived)
            for entry in value if isinstance(value, dict) else ():
                origins[f"{name}.{entry}"] = _origin(merged, (name, entry), derived)
            continue
        for key, found in type(value).model_fields.items():
            path = (name, key)
            origins[dotted(path)] = _origin(merged, path, derived)
            if map_field(found.annotation):
                for entry in dict(value)[key]:
                    origins[f"{name}.{key}.{entry}"] = _origin(merged, (*path, entry), derived)
    return origins


def _origin(merged: Node, path: KeyPath, derived: Mapping[str, Any]) -> Origin:
    node = merged.at(path)
    if dotted(path) in derived:
        idle = node is not None and node.content is not None
        return Origin("derived", f"instead of {node.origin.where}, which means nothing here" if idle and node else "")
    if node is None:
        return Origin("default")
    if node.content is None:
        return Origin("default", f"unset by {node.origin.where}")
    return node.origin
