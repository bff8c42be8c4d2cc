"""What every source hands back, and the file selection they share."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from initializers.workspace import FileEntry


@dataclass(frozen=True)
class Resolved:
    """What a fetch brought.

    Attributes:
        revision: the exact revision (commit) fetched; None where the source has none.
        files: every file, with size and sha256.
        notes: lines worth a place in the log.
    """

    revision: str | None
    files: tuple[FileEntry, ...]
    notes: tuple[str, ...] = ()


def hidden(relative: str) -> bool:
    """Whether a path has a hidden part (`.git/config`, `.gitattributes`)."""
    return any(part.startswith(".") for part in relative.split("/"))


def ignored(relative: str, patterns: Iterable[str]) -> bool:
    """Whether `relative` matches one of the globs, as a whole path or by its name."""
    name = relative.rsplit("/", 1)[-1]
    return any(
        fnmatch.fnmatchcase(relative, pattern)
        or fnmatch.fnmatchcase(name, pattern)
        or (pattern.endswith("/") and relative.startswith(pattern))
        for pattern in patterns
    )
