"""Which files are which split, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from blueprints.errors import DataError, UsageError
from blueprints.recipe.schema import DatasetConfig
from initializers.containers import COMPRESSIONS, is_data_name

ALIASES: tuple[frozenset[str], ...] = (
    frozenset({"train", "training"}),
    frozenset({"validation", "valid", "val", "dev"}),
    frozenset({"eval", "evaluation"}),
    frozenset({"test", "testing"}),
)
"""Names that mean the same split."""
EVAL_ORDER = ("validation", "valid", "dev", "eval", "test")
_WORDS = frozenset().union(*ALIASES)
_SHARDED = re.compile(r"^(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}(?:-\w+)?$")
_SEPARATORS = re.compile(r"[-_. ]+|(?<=[a-z])(?=\d)")

Files = Mapping[str, Path]


def data_files(files: Files, *, single: bool) -> dict[str, Path]:
    """The files that hold rows, out of all files of a source.

    Args:
        files: paths on disk by relative path.
        single: the user named this one file, so it is read whatever it is called.

    Raises:
        DataError: none is readable; the message lists what was there.
    """
    if single:
        return dict(files)
    usable = {name: path for name, path in files.items() if is_data_name(name)}
    if usable:
        return usable
    seen = ", ".join(sorted(files)[:20]) + (f" and {len(files) - 20} more" if len(files) > 20 else "")
    raise DataError(
        f"no file with rows in the source; it has: {seen or 'no files'}",
        where="data set",
        todo="known: .jsonl, .json, .csv, .tsv, .parquet, .arrow, each also .gz, .bz2, .xz, .zst",
    )


def split_of(relative: str) -> str | None:
    """The split a file belongs to by its own name or else its directories' names; None if they say nothing."""
    *directories, name = relative.split("/")
    stem = _stem(name)
    sharded = _SHARDED.match(stem)
    if sharded and _words(sharded["split"]) & _WORDS:
        return sharded["split"]
    for part in (stem, *reversed(directories)):
        if part.lower() in _WORDS:
            return part.lower()
        found = _words(part) & _WORDS
        if found:
            return min(found, key=part.lower().index)
    return None


def choose(
    files: Files, config: DatasetConfig, *, single: bool, card: Mapping[str, dict[str, Path]] | None = None
) -> tuple[dict[str, Path], dict[str, Path], list[str]]:
    """The files of the training split, those of the held-out split (maybe none), and what to say about it.

    Args:
        files: the files that hold rows.
        config: the recipe's data set.
        single: the source is one file that the user named: it is the training split whatever its name.
        card: the splits as the source's own README states them; they go before names.

    Raises:
        UsageError: a split that the recipe asks for is not there; the message lists those that are.
    """
    if single and config.eval_split is None:
        return dict(files), {}, []
    named: dict[str, dict[str, Path]] = dict(card or {})
    unnamed: dict[str, Path] = {}
    for relative, path in files.items() if card is None else ():
        split = split_of(relative)
        (unnamed if split is None else named.setdefault(split, {}))[relative] = path
    train = _find(config.split, named, files)
    if train is None and unnamed and config.split == DatasetConfig.model_fields["split"].default:
        train = unnamed  # orders.jsonl beside test.jsonl
    if train is None:
        raise _no_split("dataset.split", config.split, named, files)
    notes = ["splits: as README.md states them"] if card is not None else _unused(files, train)
    return train, _held_out(config, named, files, train), notes


def _held_out(
    config: DatasetConfig, named: Mapping[str, dict[str, Path]], files: Files, train: Files
) -> dict[str, Path]:
    """The files of the held-out split, none of them trained on whatever the splits are called."""
    if config.eval_split is not None:
        found = _find(config.eval_split, named, files)
        if found is None:
            raise _no_split("dataset.eval_split", config.eval_split, named, files)
        both = sorted(found.keys() & train.keys())
        if both:
            raise UsageError(
                f"{config.eval_split!r} and the training split {config.split!r} have files in common: "
                f"{', '.join(both[:5])}; the score would be of rows the model has seen",
                where="dataset.eval_split",
                todo="name another split, or hold out a part with dataset.test_size",
            )
        return found
    if config.test_size is not None:
        return {}
    for name in EVAL_ORDER:
        found = _find(name, named, {})
        if found is not None and not found.keys() & train.keys():
            return found
    return {}


def _find(split: str, named: Mapping[str, dict[str, Path]], files: Files) -> dict[str, Path] | None:
    if split in named:
        return named[split]
    aliases = next((group for group in ALIASES if split.lower() in group), frozenset())
    same = [name for name in named if name in aliases]
    if same:
        return {relative: path for name in same for relative, path in named[name].items()}
    exact = {relative: path for relative, path in files.items() if split in _names(relative)}
    return exact or None


def _names(relative: str) -> set[str]:
    *directories, name = relative.split("/")
    stem = _stem(name)
    sharded = _SHARDED.match(stem)
    return {stem, *directories} | ({sharded["split"]} if sharded else set())


def _no_split(key: str, split: str, named: Mapping[str, object], files: Files) -> UsageError:
    there = ", ".join(sorted(named)) or "none with a known name"
    return UsageError(
        f"the source has no split {split!r}; its splits: {there}; its files: {', '.join(sorted(files)[:10])}",
        where=key,
        todo=f"set {key} to one of them",
    )


def _unused(files: Files, train: Files) -> list[str]:
    unnamed = [name for name in files if name not in train and split_of(name) is None]
    return [f"not used, as their names say no split: {', '.join(unnamed[:5])}"] if unnamed else []


def _stem(name: str) -> str:
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return name.rsplit(".", 1)[0]


def _words(text: str) -> set[str]:
    return {word for word in _SEPARATORS.split(text.lower()) if word}
