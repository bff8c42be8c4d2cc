"""Splits that a data set states itself, in the YAML block at the top of its README.md (the Hub's `configs`)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from blueprints.errors import UsageError

Files = Mapping[str, Path]
_LIMIT = 1 << 20


def card_splits(readme: Path, files: Files) -> dict[str, dict[str, Path]] | None:
    """The files of each split as the README states them; None if it states nothing about files that are there.

    Args:
        readme: the data set's README.md.
        files: the files that hold rows, by relative path.

    Raises:
        UsageError: it describes several subsets and none is the default.
    """
    found: dict[str, dict[str, dict[str, Path]]] = {}
    default = ""
    for config in _configs(readme):
        name = str(config.get("config_name", "default"))
        splits = _splits(config.get("data_files"), files)
        if splits:
            found[name] = splits
            if config.get("default") is True or name == "default":
                default = name
    if not found:
        return None
    if len(found) > 1 and not default:
        raise UsageError(
            f"the data set has several subsets: {', '.join(found)}",
            where="README.md",
            todo="leave out the files of the others with dataset.ignore_patterns, such as "
            f"dataset.ignore_patterns=[{_pattern(found, list(found)[-1])!r}]",
        )
    return found[default or next(iter(found))]


def _pattern(found: Mapping[str, Mapping[str, Files]], name: str) -> str:
    file = next(iter(next(iter(found[name].values()))))
    return f"{file.rsplit('/', 1)[0]}/*" if "/" in file else file


def _configs(readme: Path) -> list[dict[str, Any]]:
    with readme.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_LIMIT)
    if not text.startswith("---"):
        return []
    try:
        front = yaml.safe_load(text[3:].partition("\n---")[0])
    except yaml.YAMLError:
        return []  # a card is for people: a broken one says nothing, and names of files decide
    configs = front.get("configs") if isinstance(front, dict) else None
    return [item for item in configs if isinstance(item, dict)] if isinstance(configs, list) else []


def _splits(data_files: Any, files: Files) -> dict[str, dict[str, Path]]:
    entries = data_files if isinstance(data_files, list) else [data_files]
    splits: dict[str, dict[str, Path]] = {}
    for item in entries:
        split, paths = (item.get("split", "train"), item.get("path")) if isinstance(item, dict) else ("train", item)
        for pattern in paths if isinstance(paths, list) else [paths]:
            matched = {name: path for name, path in files.items() if fnmatch.fnmatchcase(name, str(pattern))}
            if matched:
                splits.setdefault(str(split), {}).update(matched)
    return splits
