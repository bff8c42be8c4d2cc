"""The part of kustomize that `runtimes/` uses, so that its YAML is read the same with and without the binary.

A kustomization may use `resources` (files, folders), `patches` (JSON 6902; `target` by kind, name and labelSelector),
`nameSuffix`, `labels` (`pairs` alone: metadata.labels) and `images` (`newName`, `newTag`, `digest`), applied in that
order as kustomize does. Anything else is refused, never skipped. A test compares the result with `kubectl kustomize`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from blueprints.errors import UsageError

Manifest = dict[str, Any]

FILE = "kustomization.yaml"
_KEYS = {"apiVersion", "kind", "resources", "patches", "nameSuffix", "labels", "images"}
_OPERATIONS = {"add", "remove", "replace", "copy"}
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def build(directory: Path) -> list[Manifest]:
    """The objects of a kustomization, in the order of its resources. The caller may change what is returned.

    Raises:
        UsageError: a file is missing, or uses what this reader does not know.
    """
    directory = directory.resolve()
    where = str(directory / FILE)
    plan = _only(_documents(directory / FILE), where)
    for key in plan:
        if key not in _KEYS:
            raise _unsupported(where, key, f"use {', '.join(sorted(_KEYS))}, or kustomize itself")
    objects: list[Manifest] = []
    for resource in plan.get("resources") or []:
        path = directory / resource
        objects += build(path) if path.is_dir() else [_copy(document) for document in _documents(path)]
    for patch in plan.get("patches") or []:
        _patch(objects, patch, directory)
    for manifest in objects:
        manifest["metadata"]["name"] += plan.get("nameSuffix") or ""
    for labels in plan.get("labels") or []:
        if set(labels) != {"pairs"}:
            raise _unsupported(where, "labels", "give pairs alone")
        for manifest in objects:
            manifest["metadata"].setdefault("labels", {}).update(labels["pairs"])
    for change in plan.get("images") or []:
        for manifest in objects:
            _set_image(manifest, change)
    return objects


def apply_operations(document: Any, operations: Sequence[Manifest], where: str = "patch") -> None:
    """Change `document` by JSON 6902 operations: add, remove, replace, copy (RFC 6902).

    Raises:
        UsageError: an operation is unknown, or its path does not exist.
    """
    for operation in operations:
        try:
            _operate(document, operation)
        except (KeyError, IndexError, TypeError, ValueError):
            raise UsageError(
                f"cannot {operation.get('op')} {operation.get('path')!r}",
                where=where,
                todo=f"operations are {', '.join(sorted(_OPERATIONS))}; the parent of the path must exist",
            ) from None


def _operate(document: Any, operation: Manifest) -> None:
    kind = operation["op"]
    if kind not in _OPERATIONS:
        raise ValueError(kind)
    value = _copy(_at(document, _pointer(operation["from"]))) if kind == "copy" else _copy(operation.get("value"))
    *parents, last = _pointer(operation["path"])
    parent = _at(document, parents)
    if isinstance(parent, list):
        place = len(parent) if last == "-" else int(last)
        if kind in ("add", "copy"):
            if place > len(parent):
                raise IndexError(place)
            parent.insert(place, value)
        elif kind == "replace":
            parent[place] = value
        else:
            del parent[place]
    elif kind == "remove":
        del parent[last]
    elif kind == "replace" and last not in parent:
        raise KeyError(last)
    else:
        parent[last] = value


def _at(document: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _pointer(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _patch(objects: list[Manifest], patch: Manifest, directory: Path) -> None:
    where = f"{directory / FILE}: patches"
    text = (directory / patch["path"]).read_text(encoding="utf-8") if "path" in patch else patch["patch"]
    operations = yaml.load(text, Loader=_LOADER)
    if not isinstance(operations, list):
        raise _unsupported(where, "a strategic merge patch", "write it as JSON 6902 operations")
    for manifest in objects:
        if _matches(manifest, patch.get("target") or {}, where):
            apply_operations(manifest, operations, where)


def _matches(manifest: Manifest, target: Manifest, where: str) -> bool:
    if unknown := set(target) - {"kind", "name", "labelSelector"}:
        raise _unsupported(where, f"target.{min(unknown)}", "select by kind, name or labelSelector")
    if not re.fullmatch(target.get("kind", ".*"), manifest["kind"]):
        return False
    if not re.fullmatch(target.get("name", ".*"), manifest["metadata"]["name"]):
        return False
    labels = manifest["metadata"].get("labels") or {}
    for requirement in filter(None, (target.get("labelSelector") or "").split(",")):
        match = re.fullmatch(r"([\w./-]+)(!?=)([\w.-]*)", requirement)
        if match is None:
            raise _unsupported(where, f"labelSelector {requirement!r}", "use key=value and key!=value")
        key, operator, value = match.groups()
        if (labels.get(key) == value) != (operator == "="):
            return False
    return True


def _set_image(manifest: Manifest, change: Manifest) -> None:
    for container in containers(manifest):
        name = re.sub(r"(@[^/]*|:[^/]*)$", "", container.get("image") or "")
        if name == change["name"]:
            tag = container["image"].removeprefix(name)
            if "digest" in change:
                tag = f"@{change['digest']}"
            elif "newTag" in change:
                tag = f":{change['newTag']}"
            container["image"] = change.get("newName", name) + tag


def containers(value: Any) -> Iterator[Manifest]:
    """Every container in a manifest, at whatever depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("containers", "initContainers") and isinstance(item, list):
                yield from item
            else:
                yield from containers(item)
    elif isinstance(value, list):
        for item in value:
            yield from containers(item)


@functools.cache
def _documents(path: Path) -> tuple[Manifest, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read: {error.strerror}", where=str(path), todo="name a kustomization's folder"
        ) from None
    return tuple(document for document in yaml.load_all(text, Loader=_LOADER) if document is not None)


def _only(documents: Sequence[Manifest], where: str) -> Manifest:
    if len(documents) != 1 or documents[0].get("kind", "Kustomization") != "Kustomization":
        raise _unsupported(where, "not one Kustomization", "give one per folder")
    return documents[0]


def _unsupported(where: str, what: str, todo: str) -> UsageError:
    return UsageError(f"{what} is not supported here", where=where, todo=todo)


def _copy(value: Any) -> Any:
    """A deep copy in which shared YAML anchors become separate values."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
